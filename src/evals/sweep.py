"""``python run.py -m experiment=NAME [scale=paper] [launch=joblib|slurm] [plan=true|prefetch=true] [overrides]``.

The configuration of every cell that is not done is frozen in the sweep's folder, then Hydra's launcher runs the cells: what is in
a queue does not change when files in ``conf`` do. A cell that fails leaves its error beside its configuration and the others go on;
the same command again takes up what is left.
"""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from evals.cli import EXPECTED, one_line
from evals.experiment import CONF, Cell, Experiment, load
from evals.lookup import Record
from evals.records import in_hand, writing
from evals.runner import run

SWITCHES = {"experiment": None, "scale": "cpu", "plan": "false", "prefetch": "false"}  # ours; the rest are overrides of cells
CELLS = "cells"  # folder of frozen configurations in a sweep's folder


# -- one cell, in whatever process the launcher made ------------------------------------------------------------------------


def run_cell(config: DictConfig) -> None:
    """Run the frozen configuration that ``config.cell`` names. An error is written down; only an interrupt ends the sweep."""
    file = Path(HydraConfig.get().sweep.dir) / CELLS / f"{config.cell}.yaml"
    note = file.with_suffix(".error")
    note.unlink(missing_ok=True)
    try:
        metrics = run(OmegaConf.load(file))
    except Exception as error:  # whatever it was, the other cells are not to suffer
        with writing(note):
            note.write_text(one_line(error) + "\n")
        print(f"failed: {config.cell}: {one_line(error)}", file=sys.stderr)
    else:
        print(f"done: {config.cell}: {metrics['path']}", flush=True)


# -- what is there and what is left ------------------------------------------------------------------------------------------


@functools.cache
def _fingerprint(task: str) -> dict[str, str]:
    return instantiate(OmegaConf.create(task)).fingerprint()


@functools.cache
def _config_or_error(path: str, revision: str | None):
    from qevict.hf.loading import load_config  # late: transformers takes seconds

    try:
        return load_config(path, revision)
    except ValueError as error:
        return error


def _config(path: str, revision: str | None):
    """The model's configuration. A hub that cannot be reached is asked once, not for every cell: that takes half a minute.

    Raises:
        ValueError: it cannot be read.
    """
    config = _config_or_error(path, revision)
    if isinstance(config, ValueError):
        raise config
    return config


@functools.cache
def _model_sha(path: str, revision: str | None) -> str | None:
    from qevict.hf.loading import resolve

    _config(path, revision)
    return resolve(path, revision)[1].sha


def finished(cell: Cell, record: Record | None) -> bool:
    """Whether nothing is left to do: every sample is scored, with the data and the model that are there now.

    Raises:
        ValueError, OSError: method, data or model are not there, in one sentence.
    """
    instantiate(cell.config.method)
    prints = _fingerprint(OmegaConf.to_yaml(cell.config.task))
    sha = _model_sha(cell.config.model.path, cell.config.model.revision)
    if record is None or not record.done or record.failed:
        return False
    return prints.items() <= record.card.items() and sha in (None, (record.start.get("model") or {}).get("sha"))


def state(cell: Cell, record: Record | None, folder: Path) -> tuple[str, str]:
    """``done``, ``failed``, ``open``, ``damaged``, or what the run says of itself; and the error, or how far it has come."""
    note = folder / CELLS / f"{cell.name}.error"
    if note.is_file() and (record is None or note.stat().st_mtime >= record.changed):  # not of an attempt before the last one
        return "failed", note.read_text().strip()
    if record is None:
        return "open", ""
    if record.done:
        return "done", f"{record.failed} samples failed" if record.failed else ""
    said, far = record.status["state"], f"{len(record.rows)} of {record.status['total']} samples"
    if said == "done":
        return "damaged", f"{far} can be read, the same command makes the others again"
    if said == "running" and not in_hand(record.path):
        return "interrupted", far
    return said, record.status["error"] or far


# -- plan --------------------------------------------------------------------------------------------------------------------


@functools.cache
def _tokens(task: str, path: str, revision: str | None) -> tuple[int, int, int]:
    """Samples, prompt tokens and, at most, new tokens of a task."""
    from transformers.utils import logging as transformers_logging

    from qevict.hf.loading import load_tokenizer

    transformers_logging.set_verbosity_error()  # of texts longer than the model, which tasks cut themselves
    positions = _config(path, revision).get_text_config().max_position_embeddings
    items = instantiate(OmegaConf.create(task)).items(load_tokenizer(path, revision), positions)
    return len(items), sum(i.prompt for i in items), sum(i.total - i.prompt for i in items)


def speed(found: Sequence[Record]) -> tuple[float, float] | None:
    """Seconds per prompt token and per new token: medians over the samples of these records. None: nothing was timed."""
    rows = [r for record in found for r in record.rows if r.get("ttft_ms") and r.get("tpot_ms")]
    if not rows:
        return None
    return median(r["ttft_ms"] / r["prompt_tokens"] for r in rows) / 1e3, median(r["tpot_ms"] for r in rows) / 1e3


def show_plan(experiment: Experiment, folder: Path) -> None:
    """Print the cells, how far each is, and the hours left at the speed of the records that are there: the method's own, else
    those of any method with the same model. New tokens are counted up to the limit, so hours are an upper bound."""
    found = experiment.records()
    timed = [(c.config, found[c.name]) for c in experiment.cells if c.name in found]
    table = Table(title=f"{experiment.sweep}: {experiment.title}")
    for axis in experiment.axes:
        table.add_column(axis)
    table.add_column("state", overflow="fold")
    for name in ("samples", "prompt tokens", "new tokens", "hours"):
        table.add_column(name, justify="right")
    total, unknown, done = 0.0, 0, 0
    for cell in experiment.cells:
        c, record = cell.config, found.get(cell.name)
        what, detail = state(cell, record, folder)
        counts, hours = ["-"] * 3, None
        try:
            samples, prompt, new = _tokens(OmegaConf.to_yaml(c.task), c.model.path, c.model.revision)
            counts = [str(samples), f"{prompt:,}", f"{new:,}"]
            near = [(other, r) for other, r in timed if other.model == c.model]
            rate = speed([r for other, r in near if other.method == c.method]) or speed([r for _, r in near])
            if rate is not None:
                left = 1 - len(record.rows) / samples if record is not None else 1
                hours = max(left, 0) * (prompt * rate[0] + new * rate[1]) / 3600
        except EXPECTED as error:
            detail = detail or one_line(error)
        if what == "done":
            done, hours = done + 1, 0.0
        total, unknown = total + (hours or 0), unknown + (hours is None)
        text = what + (f": {detail}" if detail else "")
        table.add_row(*cell.labels.values(), text, *counts, "-" if hours is None else f"{hours:.2f}")
    Console(width=None if Console().is_terminal else 200).print(table)
    rest = f"; {unknown} cells without an estimate (no data, or nothing timed with this model yet)" if unknown else ""
    left = f", at most {total:.1f} hours left one after the other" if done + unknown < len(experiment.cells) or not unknown else ""
    print(f"{done} of {len(experiment.cells)} cells done{left}{rest}")


# -- prefetch ----------------------------------------------------------------------------------------------------------------


def prefetch(experiment: Experiment) -> list[str]:
    """Get models and data, so that jobs only read. Returns what could not be had, a sentence each."""
    from huggingface_hub import snapshot_download

    from evals.prepare import prepare
    from qevict.hf.loading import load_tokenizer, resolve

    problems = []

    def attempt(what: str, call) -> None:
        try:
            call()
            print(f"ready: {what}")
        except Exception as error:  # hub and network raise kinds of their own
            problems.append(f"{what}: {one_line(error)}")

    def model(path: str, revision: str | None) -> None:
        target, source = resolve(path, revision)
        if source.kind == "hub":
            snapshot_download(target, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"])
        load_tokenizer(path, revision)

    def task(config: DictConfig) -> None:
        try:
            instantiate(config).fingerprint()
        except ValueError as error:
            if "data is missing" not in str(error) or config.data is not None:
                raise
            prepare(config._target_.rsplit(".", 1)[-1].lower(), None, None, None)
            instantiate(config).fingerprint()

    for path, revision in dict.fromkeys((c.config.model.path, c.config.model.revision) for c in experiment.cells):
        attempt(f"model {path}", lambda p=path, r=revision: model(p, r))
    for text in dict.fromkeys(OmegaConf.to_yaml(c.config.task) for c in experiment.cells):
        config = OmegaConf.create(text)
        attempt(f"data of {config._target_}", lambda c=config: task(c))
    return problems


# -- the command ---------------------------------------------------------------------------------------------------------------


def split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Our switches, Hydra's overrides (launcher, folders), and what every cell is overridden with."""
    switches, hydras, cells = dict(SWITCHES), [], []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in switches:
            switches[name] = value
        elif name == "launch" or name.lstrip("+~").startswith("hydra"):
            hydras.append(argument)
        elif name not in ("-m", "--multirun"):
            cells.append(argument)
    if "," in switches["experiment"]:
        raise ValueError(f"experiment={switches['experiment']}: name one, and give the command again for the others")
    for name in ("plan", "prefetch"):
        if switches[name] not in ("true", "false"):
            raise ValueError(f"{name}={switches[name]}: choose true or false")
    return switches, hydras, cells


def launch(cells: Sequence[Cell], folder: Path, hydras: Sequence[str], task) -> None:
    """Freeze the cells and hand them to the launcher that ``hydras`` choose; returns when all have ended."""
    (folder / CELLS).mkdir(parents=True, exist_ok=True)
    for cell in cells:
        file = folder / CELLS / f"{cell.name}.yaml"
        with writing(file):
            OmegaConf.save(cell.config, file)
    quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    before = sys.argv
    chosen = ",".join(c.name for c in cells)
    sys.argv = [before[0], "-m", *hydras, f'hydra.sweep.dir="{quoted}"', "hydra/hydra_logging=none", f"+cell={chosen}"]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except SystemExit as error:  # of Hydra, which has printed why; the records say how far every cell is
        if error.code == 130:
            raise
    finally:
        sys.argv = before


def main(arguments: Sequence[str], task) -> int:
    """Exit status: 0 if all cells are done (or plan and prefetch went well), 1 otherwise."""
    try:
        switches, hydras, overrides = split(arguments)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            base = compose("config", overrides=hydras, return_hydra_config=True)
            local = base.hydra.launcher._target_.endswith("BasicLauncher")
            root = Path(base.hydra.sweep.dir)
        if not local:
            overrides = ["progress=false", *overrides]
        experiment = load(switches["experiment"], switches["scale"], overrides)
    except (HydraException, *EXPECTED) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    folder = root / experiment.sweep
    if switches["prefetch"] == "true":
        problems = prefetch(experiment)
        for problem in problems:
            print(f"not ready: {problem}", file=sys.stderr)
        return 1 if problems else 0
    if switches["plan"] == "true":
        show_plan(experiment, folder)
        return 0
    return _sweep(experiment, folder, hydras, overrides, task)


def _sweep(experiment: Experiment, folder: Path, hydras: Sequence[str], overrides: Sequence[str], task) -> int:
    found, todo, problems = experiment.records(), [], {}
    for cell in experiment.cells:
        try:
            if not finished(cell, found.get(cell.name)):
                todo.append(cell)
        except EXPECTED as error:  # known before it is submitted
            problems[cell.name] = one_line(error)
    print(f"{experiment.sweep}: {len(experiment.cells)} cells, {len(todo)} to do", flush=True)
    if todo:
        launch(todo, folder, hydras, task)
        found = experiment.records()
        for cell in todo:
            what, detail = state(cell, found.get(cell.name), folder)
            if what != "done":
                problems[cell.name] = f"{what}: {detail}" if what != "failed" else detail
            elif detail:
                print(f"{cell.name}: {detail}, the same command tries them again", file=sys.stderr)
    for name, problem in problems.items():
        print(f"not done: {name}: {problem}", file=sys.stderr)
    scale = [] if experiment.scale == "cpu" else ["--scale", experiment.scale]
    table = shlex.join(["python", "scripts/tables.py", experiment.name, *scale, *overrides])
    print(f"{len(experiment.cells) - len(problems)} of {len(experiment.cells)} cells done; {table}")
    return 1 if problems else 0
