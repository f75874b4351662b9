"""Pieces of HTML. Whatever the runs wrote goes through [`table`], [`bullets`] or `html.escape`."""

import re
from html import escape

from .names import COLORS


__all__ = ["POLICY", "STYLE", "bullets", "details", "prose", "swatch", "table"]

# Nothing but what is in the file may load, whatever a name of a run contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_COLORS = ["".join(f"--{name}: {pair[dark]}; " for name, pair in COLORS.items()) for dark in (0, 1)]

STYLE = (
    f"""
:root {{ --text: #1f2328; --soft: #57606a; --line: #d0d7de; --page: #ffffff; --panel: #f6f8fa;
  --fine: #1a7f37; --watch: #9a6700; --bad: #cf222e; {_COLORS[0]} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e6edf3; --soft: #9da7b3; --line: #373e47; --page: #0d1117; --panel: #161b22;
    --fine: #3fb950; --watch: #d29922; --bad: #f85149; {_COLORS[1]} }}
}}
"""
    + """
* { box-sizing: border-box; }
html { scroll-padding-top: 3.5rem; color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 0; }
header, main { max-width: 72rem; margin: 0 auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 1.5rem 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
p, li { overflow-wrap: anywhere; }
header p, figcaption, .note, .card small { color: var(--soft); font-size: .875rem; margin: .25rem 0; }
nav { position: sticky; top: 0; z-index: 1; background: var(--page); border-bottom: 1px solid var(--line); }
nav div { max-width: 72rem; margin: 0 auto; padding: .5rem 1rem; overflow-x: auto; white-space: nowrap; }
nav a { color: var(--soft); text-decoration: none; margin-right: 1rem; font-size: .875rem; }
nav a:hover { color: var(--text); text-decoration: underline; }
.verdict { font-size: 1.05rem; }
.cards { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); margin: 1rem 0; }
.card { border: 1px solid var(--line); border-left-width: 6px; border-radius: 6px; padding: .6rem .9rem; background: var(--panel); }
.card h3 { margin: 0; } .card p { margin: .15rem 0; } .card .number { font-size: 1.1rem; font-weight: 600; }
.card.minor .number { font-size: 1rem; font-weight: 500; }
.fine { border-left-color: var(--fine); } .watch { border-left-color: var(--watch); } .bad { border-left-color: var(--bad); }
.fine .level, td.fine b { color: var(--fine); } .watch .level, td.watch b { color: var(--watch); }
.bad .level, td.bad b { color: var(--bad); }
.level { float: right; font-size: .8rem; font-weight: 600; }
.panels { display: grid; gap: 1rem 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0 0 1rem; } .panels figure { margin: 0; min-width: 0; } .panels h3 { font-weight: 500; font-size: .9rem; margin: 0 0 .25rem; }
svg { display: block; width: 100%; height: auto; } .result svg { max-width: 40rem; }
.legend { list-style: none; padding: 0; margin: .5rem 0 1rem; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; font-size: .875rem; }
.swatch { display: inline-block; width: 1.5rem; height: 0; border-top: 3px solid; vertical-align: middle; margin-right: .4rem; }
.table { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--panel); white-space: nowrap; } tbody tr:last-child td { border-bottom: 0; }
td { min-width: 4rem; max-width: 28rem; overflow-wrap: break-word; }
@media (max-width: 48rem) {
  thead { display: none; } tr { display: block; padding: .35rem 0; border-bottom: 1px solid var(--line); }
  tbody tr:last-child { border-bottom: 0; }
  td { display: flow-root; max-width: none; padding: .1rem .7rem .1rem 9.2rem; border-bottom: 0; overflow-wrap: anywhere; }
  td::before { content: attr(data-column); float: left; width: 8rem; margin-left: -8.5rem; color: var(--soft); }
}
details { margin: .75rem 0; } summary { cursor: pointer; color: var(--soft); }
code { font-size: .9em; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .6rem; overflow-x: auto; font-size: .8rem; }
mark { background: color-mix(in srgb, var(--watch) 35%, transparent); color: inherit; }
.warn { border-left: 4px solid var(--watch); padding-left: .8rem; }
"""
)


def table(header: list[str], rows: list[list[str]], levels: list[list[str]] | None = None) -> str:
    """
    Make a table of text that scrolls sideways, and on a narrow screen has its rows as lists, each cell after the name
    of its column. `levels` colour the cells of [`LEVELS`][trl_qarl.telemetry.advisor.LEVELS].
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = []
    for index, row in enumerate(rows):
        of_row = levels[index] if levels else [""] * len(row)
        cells = (
            f'<td data-column="{escape(column)}"'
            + (f' class="{level}"><b>{escape(cell)}</b></td>' if level else f">{escape(cell)}</td>")
            for column, cell, level in zip(header, row, of_row, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def prose(text: str) -> str:
    """Set names between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def bullets(lines: list[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{prose(line)}</li>" for line in lines) + "\n</ul>"


def details(summary: str, content: str) -> str:
    """Fold content until somebody asks; `content` is HTML."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def swatch(color: str, line: str) -> str:
    """Draw a piece of the line that a group is drawn with."""
    style = {"-": "solid", "--": "dashed", "-.": "dashed", ":": "dotted"}[line]
    return f'<span class="swatch" style="border-color: var(--{color}); border-top-style: {style}"></span>'
