"""Time and memory of decoding, against full caches, interleaved in one process.

Lengths are fixed and end tokens ignored. For decoding the caches are filled with random keys and values: its time does not depend
on them (which windows are kept does, how many does not). Time to first token is measured on real prefills. The first steps and the
first prefill measure memory, which slows them down; they are no part of the times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import ClassVar

import torch

from evals.benchmark import Item, Session
from evals.decode import cache_keyword
from evals.full_caches import FULL, NAMES, QUANTIZED, attention_function, held, implementation, make, unavailable
from evals.meters import Laps, clock, clock_name, free_bytes, largest, projected, ratio, spread, workspace
from qevict.accounting import full_bytes
from qevict.fields import check_fields
from qevict.hf.cache import TierCache, geometry_of

METERED = 9  # first steps, whose workspace is measured; they cover a routing event of the default methods
ATTENTION_STEPS = 5  # of attention alone; the first is dropped
DIFFERENT = 8  # sequences that are drawn; a larger batch repeats them, since drawing needs more memory than a compressed cache
PREFILLED = ("dynamic_sdpa", "dynamic_eager", "dynamic_flash", *QUANTIZED)  # the others prefill as dynamic_sdpa does


@dataclass(frozen=True)
class Efficiency:
    """One method at one shape.

    Args:
        context: tokens in the cache before decoding.
        batch: sequences.
        new_tokens: timed decode steps.
        warmup: timed steps before them that are dropped.
        baselines: caches to compare with. Full ones: ``dynamic_sdpa``, ``dynamic_eager``, ``dynamic_flash`` (needs flash-attn and
            CUDA), ``packed`` (preallocated, packed query groups), ``fullkv`` (our store at full precision). The library's
            quantized ones: ``hf_quanto``, ``hf_hqq`` (2 bits), ``hf_fp8``. What cannot run here is skipped; the record says why.
        prefills: repetitions of the prefill that TTFT is the median of; 0: none.
        prefill_batch: sequences of those prefills, at most ``batch``.
        memory_bytes: find the largest batch whose cache and workspace fit into so many bytes, weights apart; None: do not.
        memory_steps: decode steps timed at that batch, each cache alone; 0: none (such a batch may be too much for this machine).
        seed: of random keys, values and token ids.
    """

    context: int = 8192
    batch: int = 1
    new_tokens: int = 32
    warmup: int = 3
    baselines: tuple[str, ...] = ("dynamic_sdpa", "packed", "fullkv")
    prefills: int = 3
    prefill_batch: int = 1
    memory_bytes: int | None = None
    memory_steps: int = 0
    seed: int = 42

    name: ClassVar[str] = "efficiency"

    def __post_init__(self):
        check_fields(self)
        baselines = (self.baselines,) if isinstance(self.baselines, str) else self.baselines
        object.__setattr__(self, "baselines", tuple(dict.fromkeys(baselines)))
        least = {"context": 1, "batch": 1, "new_tokens": 1, "warmup": 0, "prefills": 0, "prefill_batch": 1}
        least |= {"memory_bytes": 1, "memory_steps": 0}
        for field, low in least.items():
            value = getattr(self, field)
            if value is not None and value < low:
                raise ValueError(f"task.{field}={value}: it has to be {low} or more")
        if self.memory_steps and self.memory_bytes is None:
            raise ValueError(
                f"task.memory_steps={self.memory_steps}: steps at the batch that fits into task.memory_bytes, give that too"
            )
        if set(self.baselines) - set(NAMES):
            raise ValueError(f"task.baselines={list(self.baselines)}: choose from {', '.join(NAMES)}")

    def items(self, tokenizer, positions: int) -> list[Item]:
        sha = f"{self.context}x{self.batch}x{self.new_tokens}"
        phases = {"decode": True, "prefill": self.prefills, "capacity": self.memory_bytes}
        # the total may pass the model's positions: only time is measured
        return [Item(p, sha, self.context, self.context + self._steps, None) for p, wanted in phases.items() if wanted]

    @property
    def _steps(self) -> int:
        return METERED + self.warmup + self.new_tokens

    def meter(self, session: Session, items: Sequence[Item]) -> dict[str, int | None]:
        return {"prefill": None, "decode": None}  # measured with the rest, for every cache

    def rows(self, session: Session, items: Sequence[Item]) -> Iterator[dict]:
        session = replace(session, budget=replace(session.budget, max_new_tokens=self._steps))
        skipped = {name: why for name in self.baselines if (why := unavailable(name, session.model))}
        names = ("method", *(n for n in self.baselines if n not in skipped))
        phases = {"decode": self._decode, "prefill": self._prefill, "capacity": self._capacity}
        if any(item.id == "decode" for item in items):
            self._check_memory(session, names)
        for item in items:
            row = {"id": item.id, "task": item.id, "prompt_sha": item.sha, "status": "ok", "error": None, "score": None}
            yield row | phases[item.id](session, names) | {"skipped": skipped}

    def _check_memory(self, session: Session, names: Sequence[str]) -> None:
        """Refuse what cannot fit: all caches are there at once. What else they need only makes it more."""
        tokens, model = self.context + self._steps, session.model
        store = session.new_cache(session.budget).geometry
        full = geometry_of(model.config.get_text_config(), model.dtype).full_bytes(tokens)
        own = {"method": session.budget.resolve(store, self.context, tokens), "fullkv": store.full_bytes(tokens)}
        need, free = self.batch * sum(own.get(n, 0 if n in QUANTIZED else full) for n in names), free_bytes(model.device)
        if free is not None and need > free:
            raise ValueError(
                f"task.context={self.context} x task.batch={self.batch}: the caches of {', '.join(names)} take "
                f"{need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: lower task.context or task.batch, or leave out "
                "some of task.baselines"
            )

    # -- caches -----------------------------------------------------------------------------------------------------------

    def _filled(self, session: Session, name: str, more: int):
        """A cache that holds ``context`` random tokens per sequence, with room for so many ``more``."""
        model, config = session.model, session.model.config.get_text_config()
        method = session.new_cache(session.budget)
        g = method.geometry
        cache = method if name == "method" else make(name, model, self.context + more, g.dtype)
        # the library's quantized caches cannot repeat their sequences
        rows = self.batch if name in QUANTIZED else max(n for n in range(1, DIFFERENT + 1) if self.batch % n == 0)
        draw = torch.Generator(device=model.device).manual_seed(self.seed)
        for i in range(config.num_hidden_layers):
            q, k, v = (
                torch.randn(rows, h, self.context, g.head_dim, generator=draw, device=model.device, dtype=model.dtype)
                for h in (g.query_heads, g.kv_heads, g.kv_heads)
            )
            if isinstance(cache, TierCache):
                cache.load(i, q, k, v, model.get_decoder().layers[i].self_attn)
            else:
                cache.update(k, v, i)
        if rows < self.batch:
            cache.batch_repeat_interleave(self.batch // rows)
        return cache

    def _step(self, session: Session, cache) -> Callable[[], None]:
        """One token per sequence through the model."""
        model = session.model
        ids = torch.ones(self.batch, 1, dtype=torch.int64, device=model.device)
        keyword = {cache_keyword(model): cache}

        @torch.inference_mode()
        def step() -> None:
            positions = torch.full((self.batch, 1), cache.get_seq_length(), device=model.device)
            model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **keyword)

        return step

    def _attention(self, session: Session, name: str, cache) -> Callable[[], None]:
        """One token per sequence through every layer's attention alone, storing it included."""
        model = session.model
        modules = [layer.self_attn for layer in model.get_decoder().layers]
        function = attention_function(implementation(name), modules[0])
        dim, groups = modules[0].head_dim, modules[0].num_key_value_groups
        k = torch.ones(self.batch, modules[0].k_proj.out_features // dim, 1, dim, device=model.device, dtype=model.dtype)
        q = k.repeat_interleave(groups, 1)

        @torch.inference_mode()
        def step() -> None:
            for i, module in enumerate(modules):
                function(module, q, *cache.update(k, k, i), None, scaling=module.scaling)

        return step

    # -- phases -----------------------------------------------------------------------------------------------------------

    def _decode(self, session: Session, names: Sequence[str]) -> dict:
        model, device = session.model, session.model.device
        caches = {name: self._filled(session, name, self._steps + ATTENTION_STEPS) for name in names}
        step = {name: self._step(session, cache) for name, cache in caches.items()}
        method, laps = caches["method"], Laps(device)
        space = {}
        for name in names:
            with _attention_of(model, implementation(name)):
                space[name] = [workspace(device, step[name]) for _ in range(METERED)]
        method.store.end = laps.around(method.store.end)
        times: dict[str, list[float]] = {name: [] for name in names}
        kept, share, used = [], [], []
        for t in range(self.warmup + self.new_tokens):
            for name in names if t % 2 else reversed(names):  # who runs after whom makes a difference to memory caches
                with _attention_of(model, implementation(name)):
                    times[name].append(clock(step[name], device))
            kept.append(held(method))
            share.append(kept[-1] / full_bytes(method))
            used.append(kept[-1] / self.batch / session.budget.resolve(method.geometry, self.context, method.store.seen))
        del method.store.end
        bytes_kept = {name: held(cache) for name, cache in caches.items()} | {"method": max(kept)}
        attention: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(ATTENTION_STEPS):
            for name, cache in caches.items():
                with _attention_of(model, implementation(name)):
                    attention[name].append(clock(self._attention(session, name, cache), device))
        return {
            "tpot": {n: v[self.warmup :] for n, v in times.items()},
            "attention": {n: v[1:] for n, v in attention.items()},
            "event_ms": mean(laps.ms()[self.warmup :]),
            "persistent": bytes_kept,
            "workspace": space,
            "weights": model.get_memory_footprint(),
            "model_dtype": str(model.dtype).removeprefix("torch."),
            "cache_dtype": str(method.geometry.dtype).removeprefix("torch."),
            "random_weights": getattr(model.config, "random_weights", False),
            "budget_bytes": session.budget.resolve(method.geometry, self.context, self.context + self._steps),
            "kv_bytes_peak": max(kept) / self.batch,
            "kv_bytes_final": kept[-1] / self.batch,
            "kv_ratio_peak": max(share),
            "kv_ratio_final": share[-1],
            "budget_used_peak": max(used),
            "new_tokens": self.new_tokens,
        }

    @torch.inference_mode()
    def _prefill(self, session: Session, names: Sequence[str]) -> dict:
        model, device = session.model, session.model.device
        draw = torch.Generator().manual_seed(self.seed)
        rows = min(self.prefill_batch, self.batch)
        ids = torch.randint(1, model.config.get_text_config().vocab_size, (rows, self.context), generator=draw).to(device)

        def prefill(name: str) -> None:
            cache = session.new_cache(session.budget) if name == "method" else make(name, model, 0, model.dtype)
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})

        names = list(dict.fromkeys(("method", "dynamic_sdpa", *(n for n in names if n in PREFILLED))))
        space, times = {}, {name: [] for name in names}
        for turn in range(1 + self.prefills):
            for name in names if turn % 2 else reversed(names):
                with _attention_of(model, implementation(name)):
                    if turn:
                        times[name].append(clock(lambda name=name: prefill(name), device))
                    else:
                        space[name] = workspace(device, lambda name=name: prefill(name))
        return {"ttft": times, "workspace": space}

    def _capacity(self, session: Session, names: Sequence[str]) -> dict:
        """The largest batch of every cache: tried on a GPU, elsewhere computed from the bytes of at most eight sequences."""
        tried, most, times = session.model.device.type == "cuda", {}, {}
        for name in names:
            with _attention_of(session.model, implementation(name)):
                need = lambda batch, name=name: self._ending(batch)._need(session, name)  # noqa: E731
                most[name] = projected(need, self.memory_bytes)
                if tried:
                    most[name] = largest(lambda batch, name=name: self._fits(session, name, batch), most[name])
                if self.memory_steps and most[name]:
                    times[name] = self._ending(most[name])._alone(session, name)
        return {"batch": most, "how": "tried" if tried else "computed", "tpot": times}

    def _ending(self, batch: int) -> Efficiency:
        """The last steps of this task with another batch: caches are at their fullest then."""
        tokens, timed = self.context + self.warmup + self.new_tokens, max(1, self.memory_steps)
        return replace(self, batch=batch, context=max(1, tokens - max(METERED, self.warmup + timed)), new_tokens=timed)

    def _need(self, session: Session, name: str) -> int:
        """Bytes that a cache holds, and the most that a step needs on top."""
        cache = self._filled(session, name, max(METERED, self.warmup + self.new_tokens))
        step = self._step(session, cache)
        return max(workspace(session.model.device, step) for _ in range(METERED)) + held(cache)

    def _fits(self, session: Session, name: str, batch: int) -> bool:
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._ending(batch)._need(session, name) <= self.memory_bytes
        torch.cuda.empty_cache()  # only here is what the failed attempt held free
        return False

    def _alone(self, session: Session, name: str) -> list[float]:
        """Milliseconds of each decode step with no other cache in memory."""
        step = self._step(session, self._filled(session, name, self.warmup + self.new_tokens))
        return [clock(step, session.model.device) for _ in range(self.warmup + self.new_tokens)][self.warmup :]

    # -- numbers ----------------------------------------------------------------------------------------------------------

    def summary(self, rows: Sequence[dict]) -> dict:
        by_id = {r["id"]: r for r in rows if r["status"] == "ok"}
        out = {"n": len(by_id), "n_failed": len(rows) - len(by_id), "score": None, "stderr": None, "per_task": {}}
        out |= dict.fromkeys(("ttft_ms", "tpot_ms", "budget_bytes", "kv_ratio_peak", "kv_bytes_peak"))
        out |= {"context": self.context, "batch": self.batch, "caches": self._caches(by_id)}
        for row in by_id.values():
            out["skipped"] = row["skipped"]
        if decode := by_id.get("decode"):
            tpot = {n: spread(v) for n, v in decode["tpot"].items()}
            best = min((n for n in tpot if n in FULL), key=lambda n: tpot[n]["median"], default=None)
            out |= {k: v for k, v in decode.items() if k.startswith(("kv_", "budget_", "new_", "random_", "model_", "cache_"))}
            out |= {
                "tpot_ms": tpot["method"]["median"],
                "tpot": tpot,
                "best_full": best,
                "tpot_vs_best_full": ratio(decode["tpot"], best),
                "tpot_vs_dynamic_sdpa": ratio(decode["tpot"], "dynamic_sdpa"),
                "throughput_tok_s": out["caches"]["method"]["throughput_tok_s"],
                "attention_ms": {n: median(v) for n, v in decode["attention"].items()},
                "attention": {n: spread(v) for n, v in decode["attention"].items()},
                "routing_share": decode["event_ms"] / mean(decode["tpot"]["method"]),
                "mean_tpot_ms": mean(decode["tpot"]["method"]),
                "workspace_bytes_decode": max(decode["workspace"]["method"]),
                "weight_bytes": decode["weights"],
            }
        if prefill := by_id.get("prefill"):
            ttft = {n: spread(v) for n, v in prefill["ttft"].items()}
            out |= {"ttft_ms": ttft["method"]["median"], "ttft": ttft, "ttft_vs_full": ratio(prefill["ttft"], "dynamic_sdpa")}
            out["workspace_bytes_prefill"] = prefill["workspace"]["method"]
        spaces = [v for k, v in out.items() if k.startswith("workspace_bytes_")]
        out["workspace_bytes_peak"] = max(spaces, default=None)
        if capacity := by_id.get("capacity"):
            out |= {"memory_bytes": self.memory_bytes, "largest_batch": capacity["batch"], "largest_batch_how": capacity["how"]}
        return out

    def _caches(self, by_id: dict[str, dict]) -> dict[str, dict]:
        """A table line per cache: times as :func:`spread`, bytes of the whole batch; what was not measured is None."""

        def of(phase: str, field: str) -> dict:
            return by_id.get(phase, {}).get(field, {})

        tpot, attention, ttft = of("decode", "tpot"), of("decode", "attention"), of("prefill", "ttft")
        most, alone = of("capacity", "batch"), of("capacity", "tpot")
        out = {}
        for name in {**tpot, **ttft, **most}:
            kept, first = of("decode", "persistent").get(name), of("prefill", "workspace").get(name)
            space = of("decode", "workspace").get(name)
            out[name] = {
                "ttft_ms": spread(ttft[name]) if name in ttft else None,
                "tpot_ms": spread(tpot[name]) if name in tpot else None,
                "throughput_tok_s": self.batch * 1e3 / median(tpot[name]) if name in tpot else None,
                "attention_ms": spread(attention[name]) if name in attention else None,
                "persistent_bytes": kept,
                "workspace_bytes": max(space) if space else None,
                "workspace_bytes_median": median(space) if space else None,
                "prefill_workspace_bytes": first,
                "peak_bytes": by_id["decode"]["weights"] + self._peak(kept, max(space), first) if name in tpot else None,
                "largest_batch": most.get(name),
                "largest_batch_tok_s": most[name] * 1e3 / median(alone[name]) if name in alone else None,
            }
        return out

    def _peak(self, kept: int, decode: int, prefill: int | None) -> int:
        """Bytes above the weights: in a decode step, or in the prefill of the last sequences beside the caches of the others."""
        others = 1 - min(self.prefill_batch, self.batch) / self.batch
        return max(kept + decode, int(kept * others) + (prefill or 0))

    def card(self) -> dict:
        return {"benchmark": self.name, "clock": clock_name(), "threads": torch.get_num_threads(), **self.fingerprint()}

    def fingerprint(self) -> dict[str, str]:
        return {}


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
