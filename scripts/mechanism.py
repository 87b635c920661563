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
    from hydra.errors import HydraException  # late: --help does not wait for torch

    from evals.cli import EXPECTED, one_line
    from evals.diagnostics import figures
    from evals.diagnostics.tables import cells, grids
    from evals.experiment import load
    from evals.render import markdown, write

    status = 0
    for name in o.experiments or NAMES:
        try:
            experiment = load(name, o.scale)
            found = cells(experiment)
        except (HydraException, *EXPECTED) as error:
            print(f"error: {name}: {one_line(error)}", file=sys.stderr)
            status = 1
            continue
        if not found:
            print(f"{name}: no records yet, make them with `python run.py -m experiment={name} scale={o.scale}`", file=sys.stderr)
            continue
        for grid in grids(experiment):
            write(grid, o.out)
            print(markdown(grid))
        drawn = {
            "figure1": lambda f=found: figures.missed_and_tiers(f, o.out / "figure1.png", "R3" if "R3" in f else next(iter(f))),
            "table18": lambda f=found: figures.promotion(f, o.out / "table18.png"),
            "drift": lambda f=found: figures.drift(f, o.out / "drift.png"),
            "codec_errors": lambda f=found: figures.codec_errors(f, o.out / "codec_errors.png"),
        }
        if name in drawn and (name != "table18" or len(found) > 1):
            print(f"figure: {drawn[name]()}")
    return status


if __name__ == "__main__":
    sys.exit(main())
