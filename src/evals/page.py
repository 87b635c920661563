"""``report.html``: all tables and figures on one page that opens from disk, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.errors import HydraException

from evals.cli import EXPECTED, one_line
from evals.experiment import Experiment, load, names
from evals.render import markup
from evals.tables import Grid

STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: 1rem 0 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; } td.label, th:first-child { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: Canvas; }
thead tr { border-top: 2px solid; border-bottom: 1px solid; } tbody { border-bottom: 2px solid; }
tbody tr:hover { background: var(--soft); } td.missing { font-style: italic; opacity: .6; } small { opacity: .65; }
h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); } details { margin: .5rem 0 1.5rem; font-size: .85rem; }
details p { margin: .3rem 0; overflow-wrap: anywhere; }
img { box-sizing: border-box; max-width: 100%; background: #fff; padding: .5rem; border-radius: 4px; }
"""


def each(arguments: Sequence[str], scale: str, make: Callable[[Experiment], None]) -> int:
    """Do something with experiments; what fails is told in a line, the others go on.

    Args:
        arguments: names (none: all), and ``FIELD=VALUE`` that the experiments were run with.
    """
    status, overrides = 0, [a for a in arguments if "=" in a or a.startswith("~")]
    for name in [a for a in arguments if a not in overrides] or names():
        try:
            make(load(name, scale, overrides))
        except (HydraException, *EXPECTED) as error:
            print(f"error: {name}: {one_line(error)}", file=sys.stderr)
            status = 1
    return status


def page(parts: Sequence[tuple[Experiment, Sequence[Grid], Sequence[Path]]]) -> str:
    """The page. ``parts``: an experiment, its tables, and the PNG files of its figures (their SVG is shown)."""
    shown = [part for part in parts if part[1]]
    links = "".join(f'<a href="#{e.sweep}">{html.escape(e.sweep)}</a>' for e, _, _ in shown)
    lacking = "".join(f"<li>{_name(e)}: <code>{e.command}</code></li>" for e, grids, _ in parts if not grids)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>qevict: tables and figures</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n'
        "<h1>qevict: tables and figures</h1>\n"
        "<p>Made from the raw samples that are there by <code>python scripts/report.py</code>. Rows without samples say "
        f"<i>missing</i>.</p>\n<nav>{links}</nav>\n"
        + "\n".join(_section(*part) for part in shown)
        + (f"\n<h2>No records yet</h2>\n<ul>{lacking}</ul>" if lacking else "")
        + "\n</body>\n</html>\n"
    )


def _name(experiment: Experiment) -> str:
    return html.escape(experiment.paper or experiment.title)


def _section(experiment: Experiment, grids: Sequence[Grid], figures: Sequence[Path]) -> str:
    shown = {figure.stem: figure for figure in figures}
    out = [f'<h2 id="{experiment.sweep}">{_name(experiment)} <small>{experiment.sweep}</small></h2>']
    for grid in grids:
        out.append(markup(grid))
        if grid.name in shown:
            data = base64.b64encode(shown[grid.name].with_suffix(".svg").read_bytes()).decode()
            out.append(f'<p><img alt="{html.escape(grid.title)}" src="data:image/svg+xml;base64,{data}"></p>')
    return "\n".join(out)
