"""The programs of the originals train on two workers what they train as one process; what each is: `catalog.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.originals.catalog import FOLDER, ORIGINALS, Original, table
from tests.support.backends import BACKENDS
from tests.support.commands import ROOT
from tests.support.programs import run_python

BOUND_S = 240.0
"""Against hanging; the longest takes 20 s on two free cores."""

pytestmark = pytest.mark.timeout(600)


def _run(original: Original, folder: Path, *, workers: int) -> list[dict[str, Any]]:
    """What each process of the program reported."""
    reports = folder / "reports"
    reports.mkdir(parents=True)
    command, text = [], original.path.read_text()
    if workers > 1:
        count = f"{workers}:{workers}" if original.is_elastic else str(workers)
        command = ["-m", "phalanx", "run", "--workers", count, *original.options]
    else:
        for before, after in (original.alone or {}).items():
            assert text.count(before) == 1, f"{original.name} has no longer one {before!r}"
            text = text.replace(before, after)
    program = folder / f"{original.name}.py"
    program.write_text(text)
    code, output = run_python(
        *command,
        str(program),
        backend=original.backend,
        bound_s=BOUND_S,
        folder=folder,
        starts_others=True,
        variables={"REPORTS": str(reports)},
    )
    assert code == 0, output
    found = [json.loads(path.read_text()) for path in reports.iterdir()]
    assert len(found) == (original.reports if workers > 1 else 1), output
    return found


def _assert_same(found: Any, expected: Any, name: str) -> None:
    if isinstance(expected, list) and any(isinstance(each, list) for each in expected):
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other, name)
    else:
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(
            each, id=each.name, marks=[getattr(pytest.mark, each.backend), *([] if each.quick else [pytest.mark.slow])]
        )
        for each in ORIGINALS
        if each.backend in BACKENDS
    ],
)
def test_an_original_trains_as_one_process(original: Original, tmp_path: Path) -> None:
    first, *others = _run(original, tmp_path / "two", workers=2)
    for other in others:
        assert other.keys() == first.keys()
        for name, expected in first.items():
            _assert_same(other[name], expected, name)
    if original.alone is not None:
        (alone,) = _run(original, tmp_path / "one", workers=1)
        assert alone.keys() == first.keys()
        for name, expected in alone.items():
            _assert_same(first[name], expected, name)


def test_each_program_is_in_the_catalog_and_imports_one_thing_differently() -> None:
    programs = {path for path in FOLDER.glob("*/*.py") if path.name != "__init__.py"}
    assert programs == {original.path for original in ORIGINALS}
    assert all(original.changed_import for original in ORIGINALS)


def test_the_table_in_the_documentation_is_that_of_the_catalog() -> None:
    assert table() in (ROOT / "docs/migration/originals.md").read_text(), f"it should contain\n{table()}"
