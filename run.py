"""One run: ``python run.py method=qevict budget=0.05 task=ruler``; all runs of a table: ``python run.py -m experiment=table12``.

``python run.py --help`` lists the choices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent

if find_spec("hydra") is None and "QEVICT_BOOTSTRAPPED" not in os.environ:  # not in the environment: make it, go there
    if not (ROOT / ".venv/.stamp").exists():
        subprocess.run([str(ROOT / "setup.sh")], check=True)
    python = str(ROOT / ".venv/bin/python")
    os.execve(python, [python, *sys.argv], os.environ | {"QEVICT_BOOTSTRAPPED": "1"})


def main() -> None:
    import hydra
    from hydra.errors import HydraException

    from evals.cli import one_line, task

    arguments = sys.argv[1:]
    options = {a for a in arguments if a.startswith("-")}
    if any(a.startswith("experiment=") for a in arguments) and options <= {"-m", "--multirun"}:
        from evals.sweep import main as sweep

        sys.exit(sweep(arguments, task))
    if not options:  # a plain run: say in one line what Hydra spreads over twenty
        try:
            with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
                hydra.compose("config", overrides=arguments)
        except HydraException as error:
            sys.exit(f"error: {one_line(error)}")

    hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")(task)()


if __name__ == "__main__":
    main()
