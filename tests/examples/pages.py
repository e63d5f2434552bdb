"""What can be run of a documentation page.

The blocks of a page that begin with ```python make one program, in order. A comment before a block changes that:

    <!-- backend: torch -->     the block is a program of its own, on that backend
    <!-- not run: reason -->    the block is not run
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import ROOT

_BLOCK = re.compile(
    r"(?:<!-- (?P<word>backend|not run): (?P<value>[^>]+?) -->\n)?"
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```",
    re.S | re.M,
)


@dataclass(frozen=True)
class Program:
    """Attributes:
    name: unique among all pages; a file name.
    backend: that it needs; None if it runs on any.
    code: of it.
    """

    name: str
    backend: str | None
    code: str


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def programs(page: Path) -> list[Program]:
    common = ""
    found = []
    for match in _BLOCK.finditer(page.read_text()):
        code = textwrap.dedent(match["code"])
        if match["word"] == "backend":
            found.append(Program(f"{page.stem}-{match['value']}", match["value"], code))
        elif match["word"] is None:
            common += code + "\n"
    if common:
        found.append(Program(page.stem, None, common))
    return found


def shell_blocks(page: Path) -> list[str]:
    """The ```bash blocks of a page."""
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.S | re.M)
