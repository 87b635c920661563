"""Time kvpress' SnapKV beside the full caches of `task=efficiency`, in an environment of its own (it needs an older transformers).

    python -m venv kvpress-env && kvpress-env/bin/pip install kvpress==0.5.5 transformers==5.2.0 torch==2.13.0 safetensors
    OMP_NUM_THREADS=1 kvpress-env/bin/python scripts/peer_kvpress.py ~/.cache/qevict/smollm2-135m-*-v1 --budget 0.05 --context 8192

Prints a record like the ``metrics.json`` of an efficiency run, by the same clock and meter; the caches that both have (``packed``,
``dynamic_sdpa``) make the two comparable. One prompt of random tokens is prefilled, and repeated for a batch. kvpress evicts once,
at the end of the prompt, so its share of tokens is the budget then and grows (``decode: grow``).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from kvpress import SnapKVPress
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # this project is not installed where kvpress is

from evals.efficiency import METERED, Efficiency
from evals.full_caches import held, implementation, make
from evals.meters import clock, meter_name, workspace


class Peer:
    """kvpress' cache, and full ones, at the shape of a task.

    Args:
        press: what compresses the prompt of the cache called ``method``.
    """

    def __init__(self, model, press: SnapKVPress, task: Efficiency):
        self.model, self.press, self.task, self.device = model, press, task, model.device
        draw = torch.Generator().manual_seed(task.seed)
        self.ids = torch.randint(1, model.config.vocab_size, (1, task.context), generator=draw).to(self.device)
        self.token = torch.ones(task.batch, 1, dtype=torch.int64, device=self.device)
        self.steps = METERED + task.warmup + task.new_tokens

    def switch(self, name: str) -> None:
        self.model.set_attn_implementation("sdpa" if name == "method" else implementation(name))

    def prefill(self, name: str):
        """A cache of one prompt."""
        cache = make(name, self.model, self.task.context + self.steps, self.model.dtype) if name == "packed" else DynamicCache()
        with self.press(self.model) if name == "method" else nullcontext():
            self.model(input_ids=self.ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def step(self, cache, t: int) -> None:
        at = torch.full_like(self.token, self.task.context + t)
        self.model(input_ids=self.token, position_ids=at, past_key_values=cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def prefills(self) -> dict:
        """The task's row of the prefill."""
        names, space = ("method", "dynamic_sdpa"), {}
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(1 + self.task.prefills):
            for name in names if turn % 2 else reversed(names):
                self.switch(name)
                if turn:
                    times[name].append(clock(lambda name=name: self.prefill(name), self.device))
                else:
                    space[name] = workspace(self.device, lambda name=name: self.prefill(name))
        return {"ttft": times, "workspace": space}

    @torch.inference_mode()
    def decode(self) -> dict:
        """The task's row of decoding."""
        task, names = self.task, ("method", "dynamic_sdpa", "packed")
        caches, kept = {}, []
        for name in names:
            self.switch(name)
            caches[name] = self.prefill(name)
            if task.batch > 1:
                caches[name].batch_repeat_interleave(task.batch)
        space, times = ({name: [] for name in names} for _ in range(2))
        for t in range(self.steps):
            for name in names if t % 2 else reversed(names):
                self.switch(name)
                values, measure = (space, workspace) if t < METERED else (times, lambda device, call: clock(call, device))
                values[name].append(measure(self.device, lambda name=name, t=t: self.step(caches[name], t)))
            kept.append(held(caches["method"]) / task.batch)
        token = sum(2 * layer.keys[:1, :, :1].nbytes for layer in caches["dynamic_sdpa"].layers)
        share = [n / (token * (task.context + t + 1)) for t, n in enumerate(kept)]
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {
            "tpot": {name: v[task.warmup :] for name, v in times.items()},
            "attention": {},
            "event_ms": 0.0,
            "persistent": {name: held(cache) for name, cache in caches.items()},
            "workspace": space,
            "weights": self.model.get_memory_footprint(),
            "random_weights": False,
            "model_dtype": dtype,
            "cache_dtype": dtype,
            "kv_bytes_peak": max(kept),
            "kv_bytes_final": kept[-1],
            "kv_ratio_peak": max(share),
            "kv_ratio_final": share[-1],
            "new_tokens": task.new_tokens,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--budget", type=float, required=True, help="share of the prompt's tokens that is kept")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prefills", type=int, default=3)
    parser.add_argument("--window", type=int, default=64, help="SnapKV's observed queries")
    parser.add_argument("--kernel", type=int, default=5, help="SnapKV's pooling")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--out", type=Path, help="file for the record, besides printing it")
    o = parser.parse_args()
    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, o.dtype or {"cpu": "float32", "cuda": "bfloat16"}[device])
    model = AutoModelForCausalLM.from_pretrained(o.model, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    task = Efficiency(o.context, o.batch, o.new_tokens, baselines=("dynamic_sdpa", "packed"), prefills=o.prefills)
    peer = Peer(model, SnapKVPress(1 - o.budget, window_size=o.window, kernel_size=o.kernel), task)
    phases = {"decode": peer.decode, **({"prefill": peer.prefills} if o.prefills else {})}
    rows = [{"id": name, "status": "ok", "skipped": {}, **phase()} for name, phase in phases.items()]
    packages = {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")}
    record = {
        "method": "kvpress_snapkv",
        "model": Path(o.model).name,
        "task": task.name,
        "budget": o.budget,
        "budget_asked": f"{o.budget:g}",
        "decode": "grow",
        "backend": f"kvpress {packages['kvpress']}",
        "meter": meter_name(model.device),
        **task.summary(rows),
        "card": task.card() | {"packages": packages, "window": o.window, "kernel": o.kernel},
    }
    text = json.dumps(record, indent=1)
    print(text)
    if o.out:
        o.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
