"""Time and memory of decoding, against full caches, interleaved in one process.

Lengths are fixed and end tokens ignored. For decoding the caches are filled with random keys and values: its time does not depend
on them (which windows are kept does, how many does not). Time to first token is measured on real prefills. On a CPU with one
thread times are process CPU times, which other work on the machine does not change; else wall times, synchronized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import ClassVar

import torch

from evals.benchmark import Item, Session
from evals.decode import cache_keyword
from evals.full_caches import NAMES, implementation, make
from evals.meters import workspace
from qevict.accounting import full_bytes, measure
from qevict.fields import check_fields
from qevict.hf.attention import tiered_attention
from qevict.hf.cache import TierCache


@dataclass(frozen=True)
class Efficiency:
    """One method at one shape.

    Args:
        context: tokens in the cache before decoding.
        batch: sequences.
        new_tokens: timed decode steps.
        warmup: steps before them that are dropped.
        baselines: full caches: ``dynamic_sdpa``, ``dynamic_eager``, ``dynamic_flash`` (needs flash-attn), ``packed`` (preallocated,
            packed query groups), ``fullkv`` (our store at full precision).
        prefills: repetitions of the prefill that TTFT is the median of; 0: none.
        prefill_batch: sequences of those prefills.
        seed: of random keys, values and token ids.
    """

    context: int = 8192
    batch: int = 1
    new_tokens: int = 32
    warmup: int = 3
    baselines: tuple[str, ...] = ("dynamic_sdpa", "packed", "fullkv")
    prefills: int = 3
    prefill_batch: int = 1
    seed: int = 42

    name: ClassVar[str] = "efficiency"

    def __post_init__(self):
        check_fields(self)
        object.__setattr__(self, "baselines", (self.baselines,) if isinstance(self.baselines, str) else tuple(self.baselines))
        for field in ("context", "batch", "new_tokens", "prefill_batch"):
            if getattr(self, field) < 1:
                raise ValueError(f"task.{field}={getattr(self, field)}: it has to be 1 or more")
        if not self.baselines or set(self.baselines) - set(NAMES):
            raise ValueError(f"task.baselines={list(self.baselines)}: choose one or more of {', '.join(NAMES)}")

    def items(self, tokenizer, positions: int) -> list[Item]:
        total = self.context + self.warmup + self.new_tokens  # may pass the model's positions: only time is measured
        sha = f"{self.context}x{self.batch}x{self.new_tokens}"
        return [Item(phase, sha, self.context, total, None) for phase in ("decode", *(["prefill"] if self.prefills else []))]

    def meter(self, session: Session, items: Sequence[Item]) -> dict[str, int | None]:
        cache = self._filled(session, "method")
        decode = max(workspace(session.model.device, lambda: self._step(session, cache)) for _ in range(9))
        return {"prefill": None, "decode": decode}

    def rows(self, session: Session, items: Sequence[Item]) -> Iterator[dict]:
        for item in items:
            row = self._decode(session) if item.id == "decode" else self._prefill(session)
            yield {"id": item.id, "task": item.id, "prompt_sha": item.sha, "status": "ok", "error": None, "score": None, **row}

    # -- caches -----------------------------------------------------------------------------------------------------------

    def _filled(self, session: Session, name: str):
        """A cache that holds ``context`` random tokens per sequence."""
        model, config = session.model, session.model.config.get_text_config()
        method = session.new_cache(session.budget)
        g = method.geometry
        cache = method if name == "method" else make(name, model, self.context + self.warmup + self.new_tokens, g.dtype)
        draw = torch.Generator(device=model.device).manual_seed(self.seed)
        for i in range(config.num_hidden_layers):
            q, k, v = (
                torch.randn(self.batch, h, self.context, g.head_dim, generator=draw, device=model.device, dtype=model.dtype)
                for h in (g.query_heads, g.kv_heads, g.kv_heads)
            )
            if isinstance(cache, TierCache):
                cache.load(i, q, k, v, model.get_decoder().layers[i].self_attn)
            else:
                cache.update(k, v, i)
        return cache

    @torch.inference_mode()
    def _step(self, session: Session, cache) -> None:
        """One token per sequence through the model."""
        model, seen = session.model, cache.get_seq_length()
        ids = torch.ones(self.batch, 1, dtype=torch.int64, device=model.device)
        positions = torch.full((self.batch, 1), seen, device=model.device)
        model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})

    @torch.inference_mode()
    def _attention(self, session: Session, cache) -> None:
        """One token per sequence through every layer's attention alone."""
        model = session.model
        for i, layer in enumerate(model.get_decoder().layers):
            module = layer.self_attn
            dim, groups = module.head_dim, module.num_key_value_groups
            k = torch.ones(self.batch, module.k_proj.out_features // dim, 1, dim, device=model.device, dtype=model.dtype)
            held = cache.update(k, k, i)
            tiered_attention(module, k.repeat_interleave(groups, 1), *held, None, scaling=module.scaling)

    # -- phases -----------------------------------------------------------------------------------------------------------

    def _decode(self, session: Session) -> dict:
        caches = {name: self._filled(session, name) for name in ("method", *self.baselines)}
        method = caches["method"]
        spent, steps, attention = [], {n: [] for n in caches}, {n: [] for n in caches}
        method.store.end = _timed(method.store.end, spent, session.model.device)
        held, ratio, used = [], [], []
        for _ in range(self.warmup + self.new_tokens):
            for name, cache in caches.items():
                with _attention_of(session.model, implementation(name)):
                    steps[name].append(_clock(lambda cache=cache: self._step(session, cache), session.model.device))
            held.append(measure(method)["total"] / self.batch)
            ratio.append(held[-1] * self.batch / full_bytes(method))
            used.append(held[-1] / session.budget.resolve(method.geometry, self.context, method.store.seen))
        events = mean(spent[self.warmup :])
        del method.store.end
        for _ in range(5):
            for name, cache in caches.items():
                if name not in ("dynamic_eager", "dynamic_flash"):
                    attention[name].append(_clock(lambda cache=cache: self._attention(session, cache), session.model.device))
        return {
            "tpot": {n: v[self.warmup :] for n, v in steps.items()},
            "attention": {n: v[1:] for n, v in attention.items() if v},
            "event_ms": events,
            "kv_bytes_peak": max(held),
            "kv_bytes_final": held[-1],
            "kv_ratio_peak": max(ratio),
            "kv_ratio_final": ratio[-1],
            "budget_used_peak": max(used),
            "new_tokens": self.new_tokens,
        }

    @torch.inference_mode()
    def _prefill(self, session: Session) -> dict:
        model = session.model
        draw = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(1, model.config.get_text_config().vocab_size, (self.prefill_batch, self.context), generator=draw).to(
            model.device
        )

        def prefill(cache) -> None:
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})

        times: dict[str, list[float]] = {"method": [], "full": []}
        for _ in range(self.prefills):
            for name in times:
                cache = session.new_cache(session.budget) if name == "method" else make("dynamic_sdpa", model, 0, model.dtype)
                times[name].append(_clock(lambda cache=cache: prefill(cache), model.device))
        return {"ttft": times}

    # -- numbers ----------------------------------------------------------------------------------------------------------

    def summary(self, rows: Sequence[dict]) -> dict:
        by_id = {r["id"]: r for r in rows if r["status"] == "ok"}
        out = {"n": len(by_id), "n_failed": len(rows) - len(by_id), "score": None, "stderr": None, "per_task": {}}
        out |= dict.fromkeys(("ttft_ms", "tpot_ms", "budget_bytes"))
        if decode := by_id.get("decode"):
            tpot = {n: _spread(v) for n, v in decode["tpot"].items()}
            best = min((n for n in tpot if n != "method"), key=lambda n: tpot[n]["median"])
            out |= {k: v for k, v in decode.items() if k.startswith(("kv_", "budget_", "new_"))}
            out |= {
                "tpot_ms": tpot["method"]["median"],
                "tpot": tpot,
                "best_full": best,
                "tpot_vs_best_full": _ratio(decode["tpot"], best),
                "tpot_vs_dynamic_sdpa": _ratio(decode["tpot"], "dynamic_sdpa"),
                "throughput_tok_s": self.batch * 1e3 / tpot["method"]["median"],
                "attention_ms": {n: median(v) for n, v in decode["attention"].items()},
                "routing_share": decode["event_ms"] / mean(decode["tpot"]["method"]),
                "mean_tpot_ms": mean(decode["tpot"]["method"]),
            }
        if prefill := by_id.get("prefill"):
            ttft = {n: _spread(v) for n, v in prefill["ttft"].items()}
            out |= {"ttft_ms": ttft["method"]["median"], "ttft": ttft, "ttft_vs_full": _ratio(prefill["ttft"], "full")}
        return out

    def card(self) -> dict:
        return {"benchmark": self.name, "clock": clock_name(), "threads": torch.get_num_threads(), **self.fingerprint()}

    def fingerprint(self) -> dict[str, str]:
        return {}


def clock_name() -> str:
    return "process CPU time" if torch.get_num_threads() == 1 and not torch.cuda.is_available() else "wall time"


def _clock(call: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of a call."""
    now = time.process_time if clock_name() == "process CPU time" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = now()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (now() - began) * 1e3


def _timed(call: Callable[[], None], spent: list[float], device: torch.device) -> Callable[[], None]:
    return lambda: spent.append(_clock(call, device))


class _attention_of:
    """A model's attention implementation for a while."""

    def __init__(self, model, name: str):
        self.model, self.name, self.before = model, name, model.config.get_text_config()._attn_implementation

    def __enter__(self):
        if self.name != self.before:
            self.model.set_attn_implementation(self.name)

    def __exit__(self, *error):
        if self.name != self.before:
            self.model.set_attn_implementation(self.before)


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "q1": low, "q3": high}


def _ratio(times: dict[str, list[float]], other: str) -> dict[str, float] | None:
    """Ratio of medians, with the quartiles of the ratios of steps that ran next to each other."""
    if other not in times:
        return None
    pairs = [a / b for a, b in zip(times["method"], times[other], strict=True)]
    return _spread(pairs) | {"median": median(times["method"]) / median(times[other])}
