"""Run one experiment: ``python run.py method=qevict budget=0.05 task=ruler``. ``python run.py --help`` lists the choices."""

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

    arguments = sys.argv[1:]
    if not any(a.startswith("-") for a in arguments):  # a plain run: say in one line what Hydra spreads over twenty
        try:
            with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
                hydra.compose("config", overrides=arguments)
        except HydraException as error:
            text = " ".join(str(error).split("Config search path")[0].split())
            sys.exit(f"error: {text}")

    from evals.cli import task

    hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")(task)()


if __name__ == "__main__":
    main()
