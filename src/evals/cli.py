"""What ``run.py`` does once the configuration is composed."""

from __future__ import annotations

import re
import signal
import sys

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig

EXPECTED = (ValueError, OSError, RuntimeError, NotImplementedError, InstantiationException)


def one_line(error: Exception) -> str:
    """The sentence of an error. Hydra wraps what a constructor raised: the cause is what the user can mend."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split("Config search path")[0].split())
    if isinstance(error, HydraException) and (typo := re.search(r"Could not override '([^']+)'", text)):
        return f"there is no field {typo[1]}: python run.py --cfg job, with your method= and task=, lists all fields"
    if isinstance(error, OverrideParseException):
        return f"{text}; values with special characters are quoted twice, as in 'results_dir=\"/a=b c\"'"
    if isinstance(error, TypeError) and (
        unknown := re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", text)
    ):
        return f"{unknown[1]} has no field {unknown[2]}: leave it out, see python run.py --help"
    return text if isinstance(error, ValueError | OSError | RuntimeError) and text else f"{type(error).__name__}: {text}"


def task(config: DictConfig) -> None:
    if "cell" in config:  # one of an experiment's
        from evals.sweep import run_cell

        return run_cell(config)
    from evals.efficiency_report import show_efficiency  # late: torch and transformers take seconds, --help needs neither
    from evals.report import show
    from evals.runner import run

    asked: list[int] = []

    def interrupt(number, frame):
        asked.append(number)  # Python drops an exception raised inside a finalizer: the runner also looks here
        raise KeyboardInterrupt

    sweep = HydraConfig.get().mode == RunMode.MULTIRUN  # its launcher has handlers of its own
    for number in () if sweep else (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        metrics = run(config, stopping=lambda: bool(asked))
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept, the same command goes on from there", file=sys.stderr)
        sys.exit(130)
    except EXPECTED as error:
        if sweep:  # it goes on with its other cells
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    (show_efficiency if metrics["task"] == "efficiency" else show)([metrics])
    print(f"run: {metrics['path']}")
