"""Greedy decoding of one prompt, with times and bytes. Not ``generate``: that decodes text for stop strings at every step."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field

import torch

from evals.meters import workspace
from evals.sample import Prompt, Sample
from qevict.accounting import full_bytes, measure
from qevict.hf.cache import TierCache


@dataclass
class Generation:
    """What one prompt gave. Times in ms, sizes in bytes; ``tpot_ms`` is None below two tokens."""

    tokens: list[int]
    text: str
    stopped: str
    ttft_ms: float
    tpot_ms: float | None
    budget_bytes: int
    bytes_peak: dict[str, int]
    bytes_final: dict[str, int]
    ratio_peak: float
    ratio_final: float
    budget_used_peak: float

    def record(self) -> dict:
        """Measurements as they are stored, see docs/records.md."""
        return {
            "budget_bytes": self.budget_bytes,
            "kv_bytes_peak": self.bytes_peak["total"],
            "kv_bytes_final": self.bytes_final["total"],
            "kv_ratio_peak": self.ratio_peak,
            "kv_ratio_final": self.ratio_final,
            "budget_used_peak": self.budget_used_peak,
            "kv_parts_peak": self.bytes_peak,
            "kv_parts_final": self.bytes_final,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
        }


@dataclass
class _Bytes:
    """Follows persistent bytes between steps, outside the timed parts."""

    peak: dict[str, int] = field(default_factory=lambda: {"total": -1})
    last: dict[str, int] = field(default_factory=dict)
    ratio_peak: float = 0.0
    ratio: float = 0.0
    used_peak: float = 0.0

    def read(self, cache: TierCache, prompt: int) -> None:
        self.last = measure(cache)
        self.used_peak = max(self.used_peak, self.last["total"] / cache.budget.resolve(cache.geometry, prompt, cache.store.seen))
        self.ratio = self.last["total"] / full_bytes(cache)
        self.ratio_peak = max(self.ratio_peak, self.ratio)
        if self.last["total"] > self.peak["total"]:
            self.peak = self.last


def eos_ids(model, tokenizer) -> set[int]:
    """Every end token that the model's generation config or the tokenizer names (Llama 3 has several)."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id}
    return {i for i in ids if i is not None}


@dataclass(frozen=True)
class Stop:
    """What ends a generation: one of ``tokens``, or one of ``texts`` in what was generated. ``never_first``: the first token is
    none of ``tokens`` (a minimum length of one)."""

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()
    never_first: bool = False

    @classmethod
    def of(cls, sample: Sample, eos: set[int], tokenizer) -> Stop:
        newline = set(tokenizer("\n", add_special_tokens=False).input_ids[-1:]) if sample.newline_stops else set()
        return cls(frozenset(eos | newline), sample.stop, sample.newline_stops)

    def cut(self, text: str) -> str:
        """The text before the first stop text in it."""
        return text[: min((at for t in self.texts if (at := text.find(t)) >= 0), default=len(text))]


def cache_keyword(model) -> str:
    """What a model calls its cache argument; transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Stepper:
    """Feeds tokens to a model with one cache."""

    def __init__(self, model, cache: TierCache):
        self.model, self.cache, self.keyword = model, cache, cache_keyword(model)

    def __call__(self, ids: list[int] | tuple[int, ...], banned: frozenset[int] = frozenset()) -> int:
        """The greedy next token after ``ids``, none of ``banned``."""
        logits = self.logits(ids)
        if banned:
            logits[list(banned)] = float("-inf")
        return int(logits.argmax())

    @torch.inference_mode()
    def logits(self, ids: list[int] | tuple[int, ...]) -> torch.Tensor:
        """``[vocabulary]`` logits after ``ids``."""
        start = self.cache.get_seq_length()
        tokens = torch.tensor([ids], device=self.model.device)
        positions = torch.arange(start, start + len(ids), device=self.model.device).unsqueeze(0)
        out = self.model(input_ids=tokens, position_ids=positions, use_cache=True, logits_to_keep=1, **{self.keyword: self.cache})
        return out.logits[0, -1]

    def prefill(self, prompt: Prompt, banned: frozenset[int] = frozenset()) -> int:
        if not prompt.question:
            return self(prompt.context, banned)
        self.logits(prompt.context)
        self.cache.new_turn()
        return self(prompt.question, banned)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


def generate(model, tokenizer, cache: TierCache, prompt: Prompt, max_new_tokens: int, stop: Stop) -> Generation:
    """Greedy continuation of a prompt of at most ``max_new_tokens`` tokens; what stopped it is not part of it."""
    device, step, held = model.device, Stepper(model, cache), _Bytes()
    began = _now(device)
    token = step.prefill(prompt, stop.tokens if stop.never_first else frozenset())
    ttft = _now(device) - began
    held.read(cache, len(prompt.context))
    tokens, text, spent = [], "", 0.0
    while token not in stop.tokens and len(tokens) < max_new_tokens:
        tokens.append(token)
        if stop.texts:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
        if len(tokens) == max_new_tokens or stop.cut(text) != text:
            break
        began = _now(device)
        token = step([token])
        spent += _now(device) - began
        held.read(cache, len(prompt.context))
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    stopped = "eos" if token in stop.tokens else "text" if stop.cut(text) != text else "length"
    steps = len(tokens) if stopped == "eos" else len(tokens) - 1
    budget = cache.budget
    limit = budget.resolve(cache.geometry, len(prompt.context), cache.store.seen)
    return Generation(
        tokens=tokens,
        text=stop.cut(text),
        stopped=stopped,
        ttft_ms=ttft,
        tpot_ms=spent / steps if steps > 0 else None,
        budget_bytes=limit,
        bytes_peak=held.peak,
        bytes_final=held.last,
        ratio_peak=held.ratio_peak,
        ratio_final=held.ratio,
        budget_used_peak=held.used_peak,
    )


def measure_workspace(model, cache: TierCache, prompt: Prompt, steps: int) -> dict[str, int]:
    """Peak temporary bytes of the prefill and of one decode step (the worst of ``steps``), on a run of its own."""
    step = Stepper(model, cache)
    token = [0]

    def prefill():
        token[0] = step.prefill(prompt)

    def decode():
        token[0] = step([token[0]])

    out = {"prefill": workspace(model.device, prefill)}
    out["decode"] = max(workspace(model.device, decode) for _ in range(steps))
    return out
