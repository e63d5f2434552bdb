"""What can be run of a documentation page.

The blocks of a page that begin with ```python make one program, in order. A comment before a block changes that:

    <!-- backend: torch -->     the block is a separate program, on that backend
    <!-- not run: reason -->    the block is not run
    <!-- command: phalanx run --workers 2 --backend torch; needs: wandb -->
                                the block is a separate program, which this command starts; it needs these modules
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import ROOT

_BLOCK = re.compile(
    r"(?:<!-- (?P<word>backend|not run|command): (?P<value>[^>]+?) -->\n)?"
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```",
    re.S | re.M,
)


@dataclass(frozen=True)
class Program:
    """Attributes:
    name: unique among all pages; a file name.
    backend: that it needs; None if it runs on any.
    code: of it.
    command: what starts it, without the file's name; None if it runs in the job that the pages share.
    needs: modules without which it cannot run.
    """

    name: str
    backend: str | None
    code: str
    command: str | None = None
    needs: tuple[str, ...] = ()


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def programs(page: Path) -> list[Program]:
    common = ""
    found = []
    for match in _BLOCK.finditer(page.read_text()):
        code = textwrap.dedent(match["code"])
        if match["word"] == "backend":
            found.append(Program(f"{page.stem}-{match['value']}", match["value"], code))
        elif match["word"] == "command":
            found.append(_with_command(f"{page.stem}-{len(found)}", match["value"], code))
        elif match["word"] is None:
            common += code + "\n"
    if common:
        found.append(Program(page.stem, None, common))
    return found


def _with_command(name: str, value: str, code: str) -> Program:
    command, _, needed = value.partition("; needs: ")
    backend = re.search(r"--backend (\w+)", command)
    needs = tuple(needed.split())
    return Program("-".join([name, *needs[:1]]), backend and backend[1], code, command, needs)


def shell_blocks(page: Path) -> list[str]:
    """The ```bash blocks of a page."""
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.S | re.M)
