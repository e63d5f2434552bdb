"""The architecture and CONTRIBUTING.md tell the truth: the functions of their walks exist, and walks are short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
WALK = re.compile(r"<!-- walk: at most (\d+) files -->\n### (.+)\n\n((?:\d+\. .+\n(?:   .+\n)*)+)")
WALKS = WALK.findall(PAGE + (ROOT / "CONTRIBUTING.md").read_text())
STEP = re.compile(r"^\d+\. `([\w/]+): ([\w.]+)`", re.M)
MAX_GLOSSARY = 40


def defines(module: str, name: str) -> bool:
    """Whether a module of the package defines a function, class or method, `Class.method`, or assigns such a name."""
    body: list[ast.stmt] = ast.parse((ROOT / "phalanx" / f"{module}.py").read_text()).body
    for part in name.split("."):
        found = [node for node in body if part in _names(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}


@pytest.mark.parametrize(("most", "title", "steps"), WALKS, ids=[title for _, title, _ in WALKS])
def test_a_walk_leads_through_few_files_and_functions_that_exist(most: str, title: str, steps: str) -> None:
    walk = STEP.findall(steps)
    assert len(walk) == len(re.findall(r"^\d+\. ", steps, re.M)), "each step begins with `module: Name`"
    assert [step for step in walk if not defines(*step)] == []
    assert len({module for module, _ in walk}) <= int(most)


def test_there_are_five_walks_and_three_ways_to_add_something() -> None:
    assert len(WALKS) == 5 + 3


def test_the_glossary_is_short() -> None:
    glossary = PAGE[PAGE.index("## Glossary") : PAGE.index("## Promises")]
    rows = re.findall(r"^\| ([^|]+) \|", glossary, re.M)[2:]
    assert len([word for row in rows for word in row.split(",")]) <= MAX_GLOSSARY


def test_every_package_has_its_row() -> None:
    layers = PAGE[PAGE.index("## Layers") : PAGE.index("## Walks")]
    packages = [path.name for path in (ROOT / "phalanx").iterdir() if (path / "__init__.py").exists()]
    assert [package for package in packages if f"`{package}/" not in layers] == []
