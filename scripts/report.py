"""All tables, all figures, and one page that shows them: report.html (report-paper.html at --scale paper), which opens from disk.
Experiments that are named get their tables and figures anew; the page shows all.

python scripts/report.py [experiment ...] [--scale paper] [--out results] [--readme README.md] [--wandb]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

OVERVIEW = {"KL (nat)": ("fidelity-cpu", "KL, nat"), "RULER (%)": ("table2-cpu-1024", "mean")}  # table and column by name
MARKS = ("<!-- by `make report` -->", "<!-- end -->")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", nargs="*", help="none: all")
    parser.add_argument("--scale", default="cpu", help="cpu (default) or paper")
    parser.add_argument("--out", type=Path, default=Path("results"), help="gets report.html, tables/ and figures/")
    parser.add_argument("--readme", type=Path, help="file whose marked block gets the table of `fidelity` and `table2`")
    parser.add_argument("--wandb", action="store_true", help="log tables and figures to the sweep's group, offline")
    o = parser.parse_args()
    from evals.experiment import names
    from evals.figures import figures  # late: --help does not wait for torch
    from evals.loggers import log_report
    from evals.page import each, page
    from evals.render import between, overview, write
    from evals.tables import grids

    parts, chosen = [], o.experiments or names()
    if unknown := [name for name in chosen if name not in names()]:
        parser.error(f"there is no experiment {unknown[0]}: choose from {', '.join(names())}")

    def make(experiment):
        made = grids(experiment)
        if experiment.name in chosen:
            for grid in made:
                write(grid, o.out / "tables")
            drawn = figures(experiment, o.out / "figures")
            if o.wandb:
                log_report(experiment.sweep, made, drawn, o.out)
        else:
            there = (o.out / "figures" / f"{grid.name}.svg" for grid in made)
            drawn = [file.with_suffix(".png") for file in there if file.is_file()]
        parts.append((experiment, made, drawn))

    status = each(names(), o.scale, make)
    o.out.mkdir(parents=True, exist_ok=True)
    target = o.out / ("report.html" if o.scale == "cpu" else f"report-{o.scale}.html")
    target.write_text(page(parts), "utf-8")
    print(f"page: {target}")
    if o.readme is not None:
        by_name = {grid.name: grid for _, made, _ in parts for grid in made}
        if not by_name.keys() >= {grid for grid, _ in OVERVIEW.values()}:
            print(f"error: {o.readme} is as it was: the tables of fidelity and table2 at scale=cpu are needed", file=sys.stderr)
            return 1
        table = overview({name: (by_name[grid], column) for name, (grid, column) in OVERVIEW.items()})
        o.readme.write_text(between(o.readme.read_text("utf-8"), *MARKS, f"\n\n{table}\n\n"), "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
