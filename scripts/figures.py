"""Redraw figures from raw samples, as SVG, PDF and PNG.

python scripts/figures.py [experiment ...] [--scale paper] [--out results/figures]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", nargs="*", help="none: all; FIELD=VALUE: what they were run with")
    parser.add_argument("--scale", default="cpu", help="cpu (default) or paper")
    parser.add_argument("--out", type=Path, default=Path("results/figures"))
    o = parser.parse_args()
    from evals.figures import figures  # late: --help does not wait for torch
    from evals.page import each

    def draw(experiment):
        drawn = figures(experiment, o.out)
        for path in drawn:
            print(f"figure: {path}")
        if not drawn and experiment.figure:
            print(f"{experiment.sweep}: no records yet, make them with `{experiment.command}`")

    return each(o.experiments, o.scale, draw)


if __name__ == "__main__":
    sys.exit(main())
