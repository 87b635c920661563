"""Fill a benchmark's data folder, from the network or from local files; afterwards runs need no network.

    python scripts/prepare.py gsm8k
    python scripts/prepare.py longbench --from /path/to/LongBench --to /path/to/data/longbench

The folder gets ``manifest.json``: SHA-256, rows, source and revision of every file. Without ``--to`` it is the folder where runs
look: ``$QEVICT_DATA/<benchmark>``, else in the user's cache. Another folder is named to a run with ``task.data=FOLDER``.
"""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("benchmark", choices=("longbench", "gsm8k", "ruler"))
    parser.add_argument(
        "--from", dest="origin", metavar="DIR", default=None, help="folder with the files; none: they are downloaded"
    )
    parser.add_argument("--to", metavar="DIR", default=None, help="data folder; none: where runs look for it")
    parser.add_argument("--revision", default=None, help="of the hub's repository, or of the files of --from; none: the newest")
    o = parser.parse_args()
    from evals.cli import EXPECTED, one_line  # late: --help does not wait for torch
    from evals.data import data_dir
    from evals.prepare import prepare

    try:
        manifest = prepare(o.benchmark, o.origin, o.to, o.revision)
    except EXPECTED as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    for name, about in manifest["files"].items():
        rows = "" if about["rows"] is None else f"{about['rows']} rows"
        if "published_rows" in about:
            rows += f" (the published file has {about['published_rows']})"
        print("  ".join(filter(None, [about["sha256"][:12], name, rows, f"{about['source']}@{about['revision'] or '?'}"])))
    if manifest["missing"]:
        print(f"partial: without {', '.join(manifest['missing'])}")
    print(data_dir(o.benchmark, o.to))
    return 0


if __name__ == "__main__":
    sys.exit(main())
