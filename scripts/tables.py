"""Rebuild tables from raw samples, as Markdown, LaTeX and CSV.

python scripts/tables.py [experiment ...] [FIELD=VALUE ...] [--scale paper] [--out results/tables]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", nargs="*", help="none: all; FIELD=VALUE: what they were run with")
    parser.add_argument("--scale", default="cpu", help="cpu (default) or paper")
    parser.add_argument("--out", type=Path, default=Path("results/tables"))
    o = parser.parse_args()
    from evals.page import each  # late: --help does not wait for torch
    from evals.render import markdown, write
    from evals.tables import grids

    def tables(experiment):
        made = grids(experiment)
        for grid in made:
            write(grid, o.out)
            print(markdown(grid) if o.experiments else f"table: {o.out / grid.name}.md")
        if not made:
            print(f"{experiment.sweep}: no records yet, make them with `{experiment.command}`")

    return each(o.experiments, o.scale, tables)


if __name__ == "__main__":
    sys.exit(main())
