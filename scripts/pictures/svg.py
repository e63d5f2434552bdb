"""Drawings: shapes and text in colors for light and dark pages.

By itself, as in the README, a drawing follows the reader's system. In the site, it is part of the page
(`scripts/docs_hooks.py`) and follows the palette: `docs/stylesheets/phalanx.css` sets the same colors.
"""

from __future__ import annotations

from html import escape

LIGHT = {
    "text": "#1f2937",
    "muted": "#5b6675",
    "line": "#94a3b8",
    "card": "#f6f8fb",
    "blue": "#2f5fd0",
    "sky": "#8fb4f5",
    "green": "#2f8f5b",
    "amber": "#b87512",
    "red": "#cf3b3b",
    "grey": "#c3ccd8",
    "ink": "#ffffff",
}
DARK = {
    "text": "#e5e9f0",
    "muted": "#a3adbd",
    "line": "#64748b",
    "card": "#262b36",
    "blue": "#6d97f5",
    "sky": "#3d5a96",
    "green": "#55b983",
    "amber": "#e0a847",
    "red": "#ef6b6b",
    "grey": "#4b5565",
    "ink": "#141821",
}
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
CLASS = "phalanx-picture"


def variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colors.items())


STYLE = (
    f".{CLASS} {{ {variables(LIGHT)} }} "
    f"@media (prefers-color-scheme: dark) {{ .{CLASS} {{ {variables(DARK)} }} }} "
    f".{CLASS} text {{ font-family: {FONT}; fill: var(--text); }}"
)


def themed(plot: str, text: str) -> str:
    """Return a Matplotlib plot, whose text has the color `text`, in the colors of the page."""
    svg = plot[plot.index("<svg") :].replace(text, "var(--text)")
    return svg.replace("<svg ", f'<svg class="{CLASS}" ', 1).replace(">", f">\n<style>{STYLE}</style>", 1)


class Drawing:
    """A drawing to which shapes are added in order; `str` returns the SVG.

    Args:
        width, height: Size in pixels.
        title: Text for screen readers.
    """

    def __init__(self, width: int, height: int, title: str):
        self.width = width
        self.height = height
        self._title = title
        self._shapes: list[str] = []

    def __str__(self) -> str:
        body = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{CLASS}" role="img" '
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}">\n'
            f"<title>{escape(self._title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "card",
        stroke: str | None = None,
        radius: float = 6,
    ) -> None:
        """Add a rectangle with its upper left corner at (x, y)."""
        border = f' stroke="var(--{stroke})"' if stroke else ""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
            f'fill="var(--{fill})"{border}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        color: str = "text",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Add one line of text with its baseline at y."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{weight} '
            f'style="fill: var(--{color})">{escape(text)}</text>'
        )

    def line(self, points: list[tuple[float, float]], color: str = "line", width: float = 1.5, dash: str = "") -> None:
        """Add straight lines from point to point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="var(--{color})" stroke-width="{width}"{dashes}/>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], color: str = "line") -> None:
        """Add a horizontal or vertical line with an arrowhead."""
        (x0, y0), (x1, y1) = start, end
        self.line([start, end], color)
        step = 7
        if x0 == x1:
            side = step if y1 < y0 else -step
            self.line([(x1 - 4, y1 + side), end, (x1 + 4, y1 + side)], color)
        else:
            side = step if x1 < x0 else -step
            self.line([(x1 + side, y1 - 4), end, (x1 + side, y1 + 4)], color)
