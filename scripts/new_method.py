"""Begin a method: src/baselines/NAME.py, conf/method/NAME.yaml and a section in docs/methods.md.

python scripts/new_method.py my_method
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CODE = '''"""{title}: what it keeps, and why that should work (source, section or equation)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baselines.snapkv import SnapKV
from qevict.policy import Candidates


@dataclass(frozen=True)
class {title}(SnapKV):
    """SnapKV's slots and observation window; scores are changed before tokens are ranked.

    Args:
        power: exponent of a token's score.
    """

    power: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.power <= 0:
            raise ValueError(f"method.power={{self.power}} must be above 0: set method.power to 1 for SnapKV's own scores")

    def refresh(self, c: Candidates) -> Candidates:
        c = super().refresh(c)
        return replace(c, score=c.score**self.power)
'''
YAML = """# @package _global_
# {title}: one line that says what it is.
method_name: {name}
method:
  _target_: baselines.{name}.{title}
  observe: 32             # w: last prompt queries that score the prefix; always kept
  kernel: 5               # k: odd pooling length
  pooling: avg            # avg or max
  interval: 32            # generated tokens between two selections
  power: 1.0              # exponent of a token's score
"""
DOCS = """
## {name}

Claim: ... (source, section). Needs: attention.
Bytes of one layer: as snapkv.
Deviations: ...
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="lower case, as in method=NAME")
    name = parser.parse_args().name
    if not name.isidentifier() or name != name.lower():
        parser.error(f"{name!r} is no name for a module: use lower-case letters, digits and _")
    about = {"name": name, "title": "".join(part.capitalize() for part in name.split("_"))}
    files = {ROOT / f"src/baselines/{name}.py": CODE, ROOT / f"conf/method/{name}.yaml": YAML}
    taken = [str(f.relative_to(ROOT)) for f in files if f.exists()]
    if taken:
        parser.error(f"{', '.join(taken)} exists already: choose another name")
    for file, text in files.items():
        file.write_text(text.format(**about))
        print(file.relative_to(ROOT))
    with open(ROOT / "docs/methods.md", "a") as docs:
        docs.write(DOCS.format(**about))
    print(f"docs/methods.md: section {name}\nnext: docs/own_method.md; python -m pytest tests/test_battery.py -k {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
