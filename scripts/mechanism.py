"""Tables and figures of the diagnostics, from records alone.

python scripts/mechanism.py [experiment ...] [--scale paper] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

NAMES = ("table14", "table15", "table16", "table18", "figure1", "rankers", "codecs", "codec_errors", "drift")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", nargs="*", help=f"none: all of {', '.join(NAMES)}")
    parser.add_argument("--scale", default="cpu", help="cpu (default) or paper")
    parser.add_argument("--out", type=Path, default=Path("results/mechanism"))
    o = parser.parse_args()
    from evals.diagnostics import figures  # late: --help does not wait for torch
    from evals.diagnostics.tables import cells, grids
    from evals.page import each
    from evals.render import markdown, write

    def make(experiment):
        name, found = experiment.name, cells(experiment)
        if not found:
            print(f"{name}: no records yet, make them with `python run.py -m experiment={name} scale={o.scale}`", file=sys.stderr)
            return
        for grid in grids(experiment):
            write(grid, o.out)
            print(markdown(grid))
        drawn = {
            "figure1": lambda: figures.missed_and_tiers(found, o.out / "figure1.png", "R3" if "R3" in found else next(iter(found))),
            "table18": lambda: figures.promotion(found, o.out / "table18.png"),
            "drift": lambda: figures.drift(found, o.out / "drift.png"),
            "codec_errors": lambda: figures.codec_errors(found, o.out / "codec_errors.png"),
        }
        if name in drawn and (name != "table18" or len(found) > 1):
            print(f"figure: {drawn[name]()}")

    return each(o.experiments or NAMES, o.scale, make)


if __name__ == "__main__":
    sys.exit(main())
