"""A table as Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping
from pathlib import Path

from evals.tables import Entry, Grid


def markdown(grid: Grid) -> str:
    return f"## {grid.title}\n\n{_lines(grid)}\n\n" + "\n\n".join(grid.notes) + "\n"


def _lines(grid: Grid) -> str:
    def cell(e: Entry) -> str:
        text = f"**{e.plain()}**" if e.best else e.plain()
        return " ".join(filter(None, [text, e.beside()])).replace("|", "\\|")

    align = ["---"] * grid.left + ["---:"] * (len(grid.header) - grid.left)
    lines = [grid.header, align, *([cell(e) for e in row] for row in grid.rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def overview(columns: Mapping[str, tuple[Grid, str]]) -> str:
    """Several tables' columns as one in Markdown, a line per method, a column per share of bytes.

    Args:
        columns: table and its column, by what to call it. Methods whose bytes are not chosen stand under ``own bytes``.
    """
    lines: dict[str, dict[tuple[str, str], Entry]] = {}
    heads, notes = {}, []  # heads: an ordered set
    for name, (grid, column) in columns.items():
        at, n = grid.header.index(column), grid.header.index("n")
        for row in grid.rows:
            method, share = (e.plain() for e in row[:2])
            head = (name, share if "%" in share else "own bytes")
            heads[head] = None
            lines.setdefault(method, {})[head] = row[at]
        notes.append(f"{name}: {grid.title}, n {', '.join(dict.fromkeys(row[n].plain() for row in grid.rows))}.")
    order = sorted(heads, key=lambda head: (list(columns).index(head[0]), head[1] == "own bytes"))
    rows = tuple((Entry(text=method), *(line.get(head, Entry(text="")) for head in order)) for method, line in lines.items())
    return f"{_lines(Grid('', '', ('method', *map(', '.join, order)), 1, rows, ()))}\n\n{' '.join(notes)}"


def between(text: str, begin: str, end: str, new: str) -> str:
    """A text with what is between two marks replaced.

    Raises:
        ValueError: a mark is missing.
    """
    before, first, rest = text.partition(begin)
    _, second, after = rest.partition(end)
    if not (first and second):
        raise ValueError(f"no {begin} followed by {end}: put the marks back")
    return before + begin + new + end + after


TEX = {"\\": r"\textbackslash{}", "%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"} | {
    "±": r"$\pm$", "^": r"\^{}", "~": r"\~{}", "Ω": r"$\Omega$"
}  # fmt: skip


def tex(text: str) -> str:
    return "".join(TEX.get(c, c) for c in text)


def latex(grid: Grid) -> str:
    """A ``table*`` for the packages booktabs and graphicx."""

    def cell(e: Entry) -> str:
        text = rf"\textbf{{{tex(e.plain())}}}" if e.best else tex(e.plain())
        return " ".join(filter(None, [text, rf"{{\scriptsize {tex(e.beside())}}}" if e.beside() else ""]))

    rows = "\n".join(" & ".join(map(cell, row)) + r" \\" for row in grid.rows)
    notes = "\n\n".join(tex(n) for n in grid.notes)
    return rf"""\begin{{table*}}[t]
\centering
\caption{{{tex(grid.title)}}}
\label{{tab:{grid.name}}}
\resizebox{{\textwidth}}{{!}}{{%
\begin{{tabular}}{{{"l" * grid.left + "r" * (len(grid.header) - grid.left)}}}
\toprule
{" & ".join(map(tex, grid.header))} \\
\midrule
{rows}
\bottomrule
\end{{tabular}}}}

\medskip
\begin{{minipage}}{{\textwidth}}\footnotesize
{notes}
\end{{minipage}}
\end{{table*}}
"""


def comma_separated(grid: Grid) -> str:
    """A line per number or text: labels, column, value, standard error, whether it leads, the paper's figure for it."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write([*grid.header[: grid.left], "column", "value", "stderr", "best", "paper"])
    for row in grid.rows:
        for head, e in zip(grid.header[grid.left :], row[grid.left :], strict=True):
            value, error, paper = ("" if x is None else f"{x:.6g}" for x in (e.value, e.error, e.paper))
            write([*(x.plain() for x in row[: grid.left]), head, e.text or value, error, int(e.best), paper])
    return out.getvalue()


def markup(grid: Grid) -> str:
    """The table as HTML."""

    def cell(e: Entry, label: bool) -> str:
        kind = "label" if label else "missing" if e.text == "missing" else "number"
        text = html.escape(e.plain())
        text = f"<b>{text}</b>" if e.best else text
        return f'<td class="{kind}">{text}' + (f" <small>{html.escape(e.beside())}</small>" if e.beside() else "") + "</td>"

    head = "".join(f"<th>{html.escape(h)}</th>" for h in grid.header)
    body = "\n".join("<tr>" + "".join(cell(e, i < grid.left) for i, e in enumerate(row)) + "</tr>" for row in grid.rows)
    notes = "".join(f"<p>{html.escape(n)}</p>" for n in grid.notes)
    return (
        f'<h3 id="{grid.name}">{html.escape(grid.title)}</h3>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n<details><summary>Notes and protocol</summary>{notes}</details>"
    )


WRITERS = {".md": markdown, ".tex": latex, ".csv": comma_separated}


def write(grid: Grid, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, form in WRITERS.items():
        (folder / f"{grid.name}{suffix}").write_text(form(grid))
