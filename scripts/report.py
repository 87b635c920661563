"""All tables, all figures, and one page that shows them: report.html, which opens from disk.

python scripts/report.py [experiment ...] [--scale paper] [--out results] [--wandb]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", nargs="*", help="none: all")
    parser.add_argument("--scale", default="cpu", help="cpu (default) or paper")
    parser.add_argument("--out", type=Path, default=Path("results"), help="gets report.html, tables/ and figures/")
    parser.add_argument("--wandb", action="store_true", help="log tables and figures to the sweep's group, offline")
    o = parser.parse_args()
    from evals.figures import figures  # late: --help does not wait for torch
    from evals.loggers import log_report
    from evals.page import each, page
    from evals.render import write
    from evals.tables import grids

    parts = []

    def make(experiment):
        made = grids(experiment)
        for grid in made:
            write(grid, o.out / "tables")
        drawn = figures(experiment, o.out / "figures") or sorted((o.out / "mechanism").glob(f"{experiment.name}.png"))
        parts.append((experiment, made, drawn))
        if o.wandb:
            log_report(experiment.sweep, made, parts[-1][2], o.out)

    status = each(o.experiments, o.scale, make)
    (o.out / "report.html").write_text(page(parts), "utf-8")
    print(f"page: {o.out / 'report.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
