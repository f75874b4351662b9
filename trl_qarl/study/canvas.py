"""Panels as inline SVG, whose colours follow the page's, and as PNG files. Loads matplotlib."""

import io
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import matplotlib


matplotlib.use("agg")
import matplotlib.pyplot as plt

from .names import COLORS
from .plots import LEVEL_COLORS


__all__ = ["to_png", "to_svg"]

_TEXT, _GRID = "#1f2328", "#d0d7de"
_VARIABLES = {
    **{light: f"var(--{name})" for name, (light, _) in COLORS.items()},
    **{color: f"var(--{level})" for level, color in LEVEL_COLORS.items()},
    _TEXT: "var(--text)",
    _GRID: "var(--line)",
}
_SETTINGS = {
    "text.color": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "grid.color": _GRID,
    "font.size": 9,
    "svg.fonttype": "none",
    # Neither a date nor random names, so that a page of the same runs is the same.
    "svg.hashsalt": "trl_qarl",
}


def to_svg(
    draw: Callable, name: str, title: str, size: tuple[float, float], margins: dict[str, float] | None = None
) -> str:
    """
    Draw one panel as an `<svg>` element, drawn with variables of the page in place of colours.

    Args:
        draw (`Callable`):
            Draws on the axes that it is given.
        name (`str`):
            Prefix of its ids, which have to be unique on the page.
        title (`str`):
            What a screen reader says.
        size (`tuple[float, float]`):
            Width and height in inches.
        margins (`dict[str, float]`, *optional*):
            Sides of the axes as shares of the figure. By default they are found by drawing twice.
    """
    with _axes(size, layout="none" if margins else "constrained") as (figure, (axes,)):
        if margins:
            figure.subplots_adjust(**margins)
        draw(axes)
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda match: _VARIABLES.get(match[0], match[0]), text)
    # Coordinates of a hundredth are enough; labels stay as they are.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    # Only the proportions are the figure's, its width is that of its place on the page.
    text = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    return text.replace("<svg", f'<svg role="img" aria-label="{_attribute(title)}"', 1)


def to_png(panels: list[tuple[str, Callable]], legend: list[tuple[str, str, str]], path: Path) -> None:
    """
    Draw panels with their titles in two columns, under a legend of `(label, colour, line style)`, for papers and
    slides.
    """
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    size = (4.6 * columns, 2.9 * rows + 0.2 * len(legend))
    with _axes(size, rows, columns) as (figure, grid):
        for axes in grid[len(panels) :]:
            axes.remove()
        for axes, (title, draw) in zip(grid, panels, strict=False):
            draw(axes)
            axes.set_title(title, fontsize="medium")
        handles = [plt.Line2D([], [], color=COLORS[color][0], ls=line, label=label) for label, color, line in legend]
        if handles:
            figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False)
        figure.savefig(path, dpi=120)


@contextmanager
def _axes(
    size: tuple[float, float], rows: int = 1, columns: int = 1, layout: Literal["constrained", "none"] = "constrained"
):
    with matplotlib.rc_context(_SETTINGS):
        figure, grid = plt.subplots(rows, columns, figsize=size, layout=layout, squeeze=False)
        try:
            yield figure, list(grid.flat)
        finally:
            plt.close(figure)


def _attribute(text: str) -> str:
    from html import escape

    return escape(" ".join(text.split()))
