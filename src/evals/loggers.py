"""Where a run is mirrored while it goes on. The local records stay the truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

SHOWN = ("id", "task", "status", "score", "prediction", "prompt_tokens", "new_tokens", "kv_bytes_peak", "kv_ratio_peak", "tpot_ms")
ROWS = 1000  # samples that are mirrored as a table; all of them are in samples.jsonl


class NoLogger:
    def log(self, row: dict) -> None: ...

    def finish(self, metrics: dict) -> None: ...


def start(mode: str, timeout_s: float, **options):
    """``wandb.init``, in at most about ``timeout_s`` seconds.

    Raises:
        ConnectionError: online without network or key, naming the way out.
    """
    import wandb  # slow to import, only paid for when asked for

    settings = wandb.Settings(init_timeout=timeout_s, silent=True)
    try:
        # a run that an error ended before it could finish is finished here
        return wandb.init(mode=mode, resume="allow", reinit="finish_previous", settings=settings, **options)
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        wandb.teardown()  # else its service goes on trying
        first = str(error).split("\n")[0]
        raise ConnectionError(f"logger.mode={mode} failed ({first}): use logger.mode=offline and `wandb sync` later") from error


class WandbLogger:
    """Weights & Biases. Offline unless ``logger.mode=online`` is asked for; the id is the hash in the run's name: restarts resume.

    Raises:
        ConnectionError: see :func:`start`.
    """

    def __init__(self, config: DictConfig, name: str, folder: Path):
        options = config.logger
        self.rows: list[dict] = []
        self.run = start(
            options.mode,
            options.timeout_s,
            project=options.project,
            entity=options.entity,
            group=options.group,
            name=name,
            id=name.rsplit("-", 1)[-1],
            job_type=config.task._target_.rsplit(".", 1)[-1].lower(),
            dir=str(folder),
            config=OmegaConf.to_container(config, resolve=True),
        )

    def log(self, row: dict) -> None:
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        self.run.log(numbers | {f"score/{row['task']}": row["score"]})
        self.rows.append(row)

    def finish(self, metrics: dict) -> None:
        """Add the run's numbers and a table of the samples of this start, and close."""
        import wandb

        names = [n for n in SHOWN if any(n in r for r in self.rows)]
        data = [[r.get(n) for n in names] for r in self.rows[:ROWS]]
        self.run.log({"samples": wandb.Table(columns=names, data=data, allow_mixed_types=True)})
        per_task = {f"score/{t}": v["score"] for t, v in metrics.get("per_task", {}).items()}
        self.run.summary.update({k: v for k, v in metrics.items() if k != "per_task"} | per_task)
        self.run.finish()


def make_logger(config: DictConfig, name: str, folder: Path) -> NoLogger | WandbLogger:
    return WandbLogger(config, name, folder) if config.logger.name == "wandb" else NoLogger()


def log_report(group: str, grids: Sequence, figures: Sequence[Path], folder: Path, mode: str = "offline") -> None:
    """Log a sweep's tables (:class:`evals.tables.Grid`) and figures (PNG files) as one more run of its group."""
    import wandb

    run = start(
        mode, 8, project="qevict", group=group, name=f"{group}-report", id=f"{group}-report", job_type="report", dir=str(folder)
    )
    for grid in grids:
        data = [[" ".join(filter(None, [e.plain(), e.beside()])) for e in row] for row in grid.rows]
        run.log({f"table/{grid.name}": wandb.Table(columns=list(grid.header), data=data)})
    for figure in figures:
        run.log({f"figure/{figure.stem}": wandb.Image(str(figure))})
    run.finish()
