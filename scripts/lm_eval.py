"""Run generation tasks of lm-evaluation-harness on a compressed cache, with the measured bytes beside the scores.

    python scripts/lm_eval.py --tasks gsm8k --limit 10 --out results/lm-eval method=qevict budget=0.2 model.path=/my/model

Arguments behind the options are overrides as for ``run.py``. The same command again goes on where the last one ended. Tasks of a
folder (``--include``) with local data need no network.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if Path(p).resolve() != HERE]  # in this folder Python would take this file for the package


def number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def show(report: dict) -> None:
    """Print a line for each score of each task, with its standard error and the bytes that were measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("task", "n", "score", "filter", "value", "stderr", "kv ratio", "KV MiB"):
        table.add_column(name, justify="left" if name in ("task", "score", "filter") else "right")
    for task, values in (report["results"] | report["groups"]).items():
        for key, value in values.items():
            score, comma, kind = key.partition(",")
            if comma and not score.endswith("_stderr"):
                error = values.get(f"{score}_stderr,{kind}")
                numbers = (value, error, values.get("kv_ratio_peak"), values.get("kv_bytes_peak", 0) / 2**20 or None)
                cells = ("-" if not isinstance(v, int | float) else f"{v:.3f}" for v in numbers)
                table.add_row(task, str(report["card"]["tasks"].get(task, {}).get("n", "-")), score, kind, *cells)
    Console(width=None if Console().is_terminal else 160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--tasks", nargs="+", required=True, help="tasks, groups or tags of lm-eval, or YAML files; also comma-separated"
    )
    parser.add_argument("--out", required=True, help="folder for the run's directory")
    parser.add_argument("--limit", type=number, help="first documents of each task; below 1 a share of them")
    parser.add_argument("--num-fewshot", type=int, help="solved examples in the prompt; none: as the task says")
    parser.add_argument("--fewshot-seed", type=int, help="draws the examples; none: as lm-eval")
    parser.add_argument("--chat", action="store_true", help="prompts are conversations in the model's chat template")
    parser.add_argument("--gen-kwargs", help="replace generation arguments of the tasks: max_gen_toks=512,until=Q:")
    parser.add_argument("--include", metavar="DIR", help="folder with tasks of one's own (YAML)")
    parser.add_argument("--unsafe-code", action="store_true", help="allow tasks that execute generated code")
    o, overrides = parser.parse_known_args()
    overrides += [word for word in o.tasks if "=" in word]  # overrides right behind --tasks
    tasks = [name for word in o.tasks if "=" not in word for name in word.split(",")]
    from hydra import compose, initialize_config_dir  # late: --help does not wait for torch
    from hydra.errors import HydraException

    from evals.cli import EXPECTED, one_line

    task = {
        "_target_": "evals.lm_eval_bridge.Harness",
        "tasks": tasks,
        "limit": o.limit,
        "num_fewshot": o.num_fewshot,
        "chat": o.chat,
        "generation": o.gen_kwargs,
        "files": o.include,
        "unsafe_code": o.unsafe_code,
    }
    if o.fewshot_seed is not None:
        task["fewshot_seed"] = o.fewshot_seed
    try:
        from evals.lm_eval_bridge import run

        if any(override.lstrip("+~").startswith("task") for override in overrides):
            raise ValueError("task= has no place here: --tasks names tasks of lm-eval, run.py has the others")
        with initialize_config_dir(str(HERE.parent / "conf"), version_base="1.3"):
            config = compose("config", overrides=overrides)
        config.task, config.results_dir = task, o.out
        report = run(config)
    except KeyboardInterrupt:
        print("interrupted: what is finished is kept, the same command goes on from there", file=sys.stderr)
        return 130
    except (HydraException, *EXPECTED) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    show(report)
    print(f"run: {report['path']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
