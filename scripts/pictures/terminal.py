"""Draws a terminal with the output of a job in its colors."""

from __future__ import annotations

import io

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS = 104
# Rich's own format fetches a font from a CDN, but every reader has a monospaced font.
_FONT_FACES = CONSOLE_SVG_FORMAT[
    CONSOLE_SVG_FORMAT.index("@font-face") : CONSOLE_SVG_FORMAT.index(".{unique_id}-matrix")
]
FORMAT = CONSOLE_SVG_FORMAT.replace(_FONT_FACES, "").replace("Fira Code", "Menlo, Consolas, 'DejaVu Sans Mono'")


def draw(command: str, shown: str, title: str) -> str:
    """Draw a terminal after a command.

    Args:
        command: Command as typed by the user.
        shown: Output of the command, with its colors.
        title: Title of the window.
    """
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text.from_ansi(shown.rstrip()), no_wrap=False)
    return console.export_svg(title=title, code_format=FORMAT, unique_id="phalanx-terminal")
