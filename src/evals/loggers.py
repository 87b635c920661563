"""Where a run is mirrored while it goes on. The local records stay the truth."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf


class NoLogger:
    def log(self, row: dict) -> None: ...

    def finish(self, metrics: dict) -> None: ...


class WandbLogger:
    """Weights & Biases. Offline unless ``logger.mode=online`` is asked for; the id is the run's name, so restarts resume.

    Raises:
        ConnectionError: online without network or key, after seconds, naming the way out.
    """

    def __init__(self, config: DictConfig, name: str, folder: Path):
        import wandb  # slow to import, only paid for when asked for

        options = config.logger
        try:
            self.run = wandb.init(
                project=options.project,
                entity=options.entity,
                group=options.group,
                name=name,
                id=name.rsplit("-", 1)[-1],
                job_type=config.task._target_.rsplit(".", 1)[-1].lower(),
                resume="allow",
                mode=options.mode,
                dir=str(folder),
                config=OmegaConf.to_container(config, resolve=True),
                settings=wandb.Settings(init_timeout=options.timeout_s, silent=True),
            )
        except (wandb.errors.CommError, wandb.errors.UsageError) as error:
            wandb.teardown()
            first = str(error).split("\n")[0]
            raise ConnectionError(
                f"logger.mode={options.mode} failed ({first}): use logger.mode=offline and `wandb sync` later"
            ) from error

    def log(self, row: dict) -> None:
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        self.run.log(numbers | {f"score/{row['task']}": row["score"]})

    def finish(self, metrics: dict) -> None:
        per_task = metrics.pop("per_task", {})
        self.run.summary.update(metrics | {f"score/{t}": v["score"] for t, v in per_task.items()})
        self.run.finish()


def make_logger(config: DictConfig, name: str, folder: Path) -> NoLogger | WandbLogger:
    return WandbLogger(config, name, folder) if config.logger.name == "wandb" else NoLogger()
