"""Writes the tables of docs/reference that are generated from the code. A test checks that they are up to date:

    python scripts/reference_tables.py

A table is between `<!-- table: NAME -->` and `<!-- end of table -->` in a page.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import rich_click as click

from phalanx import errors
from phalanx.cli.main import cli
from phalanx.config.environment_variables import VARIABLES
from phalanx.runtime import exit_codes

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
TABLE = re.compile(r"(?<=<!-- table: )(?P<name>[\w -]+) -->\n(?P<text>.*?)(?=<!-- end of table -->)", re.S)

SECTIONS = {
    "PHALANX_SECRET": "The job and its tasks",
    "TF_CONFIG": "The cluster",
    "PHALANX_LISTEN_FD": "Set by the launcher for its workers",
    "HOROVOD_RANK": "Set by the launcher, as `horovodrun` does",
    "PHALANX_GRACE": "The launcher",
    "PHALANX_TIMELINE": "Timeline, stalls and autotuning, with Horovod's names",
    "KERAS_BACKEND": "Keras and CUDA",
}
"""Headings in the table of variables, each with the first variable below it."""


def environment_variables() -> str:
    lines: list[str] = []
    for variable in VARIABLES.values():
        if variable.name in SECTIONS:
            lines += ["", f"## {SECTIONS[variable.name]}", "", *header("Variable", "Default", "Meaning")]
        lines.append(row(f"`{variable.name}`", variable.default, variable.meaning))
    return "\n".join(lines[1:])


def codes() -> str:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PhalanxError)]
    lines = header("Code", "Name", "What happened", "What to check")
    for code, info in sorted(exit_codes.EXIT_CODE_INFO.items()):
        names = sorted(
            (kind.__name__ for kind in kinds if kind.exit_code == code), key=lambda name: (name != info.name, name)
        )
        shown = ", ".join(f"`{name}`" for name in names) or info.name
        lines.append(row(str(code), shown, info.sentence, info.check))
    return "\n".join(lines)


def command_line() -> str:
    context = click.RichContext(cli, info_name="phalanx")
    return "\n\n".join(of_command(command, context) for command in cli.commands.values())


def of_command(command: click.Command, parent: click.Context) -> str:
    """Usage, help and options of a command, as shown by `--help`."""
    context = click.RichContext(command, info_name=command.name, parent=parent, **command.context_settings)
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [f"## phalanx {command.name}", f"```text\n{' '.join(usage.split())}\n```", prose(command.help or "")]
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1]:
            groups.setdefault(getattr(parameter, "panel", None) or "Options", []).append(record)
    for heading, records in groups.items():
        if list(groups) != ["Options"]:
            parts.append(f"**{heading}**")
        rows = [row(f"`{option}`", text) for option, text in records]
        parts.append("\n".join([*header("Option", "Meaning"), *rows]))
    return "\n\n".join(parts)


def prose(text: str) -> str:
    """Convert click's help text to Markdown. Lines after \\b are kept unchanged."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        kept = paragraph.removeprefix("\b\n")
        if kept != paragraph:
            lines = inspect.cleandoc("\n" + kept)
            paragraphs.append(f"```text\n{lines}\n```")
        else:
            paragraphs.append(escaped(" ".join(paragraph.split())))
    return "\n\n".join(paragraphs)


def versions() -> str:
    """Versions that pyproject.toml allows, and those that the Makefile installs for the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    lower = dict(re.findall(r'LOWEST(?: \?= |=")(\w+)==([\d.]+)', makefile))
    python = re.search(r"^PYTHON \?= python([\d.]+)", makefile, re.M)
    assert python is not None
    lines = header("", "Allowed", "Full test suite", "`make test-lowest`")
    lines.append(row("Python", project["requires-python"], python[1], python[1]))
    for requirement in project["dependencies"]:
        name, bound = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
        if name in ("keras", "numpy"):
            lines.append(row(name, bound, "newest", bound.removeprefix(">=")))
    for backend in ("jax", "tensorflow", "torch"):
        package = re.search(rf"^PACKAGE_{backend} := (.*)$", makefile, re.M)
        assert package is not None
        name, _, version = package[1].partition("==")
        lines.append(row(name, "any", version or "newest", lower.get(name, "")))
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "environment variables": environment_variables,
    "exit codes": codes,
    "command line": command_line,
    "versions": versions,
}


def header(*names: str) -> list[str]:
    return [row(*names), "|" + "---|" * len(names)]


def row(*cells: str) -> str:
    return "| " + " | ".join(escaped(" ".join(cell.split())).replace("|", r"\|") for cell in cells) + " |"


def escaped(text: str) -> str:
    """Escape `<text>` outside of code, so that Markdown does not treat it as HTML."""
    parts = text.split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def rewritten(page: str) -> str:
    """Return a page with up-to-date tables."""
    return TABLE.sub(lambda match: f"{match['name']} -->\n\n{TABLES[match['name']]()}\n\n", page)


def pages() -> Iterable[Path]:
    return [path for path in sorted(REFERENCE.glob("*.md")) if TABLE.search(path.read_text())]


def main() -> None:
    for path in pages():
        path.write_text(rewritten(path.read_text()))


if __name__ == "__main__":
    main()
