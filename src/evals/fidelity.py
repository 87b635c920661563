"""How close a compressed cache stays to the full one on real text, token by token: the low-variance yardstick.

A text's first ``context`` tokens are prefilled, the next ``forced`` tokens are fed one by one whatever the model predicts, so all
methods see the same tokens. Every prediction is compared with that of an uncompressed cache (the library's own, in the model's
type): KL divergence, agreement of the most likely token, likelihood of the true next token, and each layer's attention output.
Errors add up over layers and tokens as they do in use.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import ClassVar

import torch
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from evals.benchmark import Item, Session
from evals.data import read_jsonl, require, sha256
from evals.decode import cache_keyword
from evals.metrics import estimates, summarize
from evals.ruler import essay_text
from qevict.accounting import full_bytes, measure
from qevict.fields import check_fields
from qevict.hf.cache import HandleLayer, TierCache, geometry_of

VALUES = ("kl", "top1", "nll_difference", "attention_error")
REMEMBERED = 6 << 30  # bytes of references that are kept for the next method in this process
States = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # q [B, H_q, T, d], k and v [B, H, T, d] of each layer, after RoPE


@dataclass(frozen=True)
class Trace:
    """What a model said about forced tokens: ``log_probs [B, N, vocabulary]`` and ``attention [layers, B, N, hidden]``; and the
    prompt's states, which are the same with every method, so that only the first one pays for the prefill."""

    log_probs: torch.Tensor
    attention: torch.Tensor
    prompt: States | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.log_probs, self.attention, *(t for states in self.prompt or () for t in states)))


class _PromptLayer(HandleLayer):
    """Keeps the states of a prompt; attention is ordinary."""

    def update(self, k: torch.Tensor, v: torch.Tensor, *args, **kwargs):
        self.states = (k, v)
        return self, self

    def attend(self, module, q, mask, scaling, position_ids, **kwargs) -> torch.Tensor:
        k, v = self.states
        self.states = (q, k, v)
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **kwargs)[0]


_references: OrderedDict[tuple, Trace] = OrderedDict()


@dataclass(frozen=True)
class Fidelity:
    """Teacher-forced comparison with the full cache.

    Args:
        sources: texts: ``pydoc`` (Python's reference pages), ``multi_news`` (LongBench), ``gsm8k`` (solved problems), or a text
            file.
        n: texts per source.
        context: tokens that are prefilled.
        forced: tokens that are fed one by one.
        batch: texts at a time.
        offset: pieces of each source that are passed over before the first, so that choices are made on other texts than they
            are reported on.
        data: folder that holds the prepared data of ``multi_news`` and ``gsm8k`` (folders ``longbench``, ``gsm8k``).
    """

    sources: tuple[str, ...] = ("pydoc",)
    n: int = 16
    context: int = 1024
    forced: int = 128
    batch: int = 8
    offset: int = 0
    data: str | None = None

    name: ClassVar[str] = "fidelity"

    def __post_init__(self):
        check_fields(self)
        object.__setattr__(self, "sources", (self.sources,) if isinstance(self.sources, str) else tuple(self.sources))
        if not self.sources:
            raise ValueError("task.sources is empty: name pydoc, multi_news, gsm8k or a text file")
        for field, low in (("n", 1), ("context", 1), ("forced", 1), ("batch", 1), ("offset", 0)):
            if getattr(self, field) < low:
                raise ValueError(f"task.{field}={getattr(self, field)}: it has to be {low} or more")

    # -- texts ----------------------------------------------------------------------------------------------------------

    def _file(self, benchmark: str, name: str) -> Path:
        folder = None if self.data is None else str(Path(self.data).expanduser() / benchmark)
        return require(benchmark, [name], folder)[0]

    def _texts(self, source: str) -> list[str]:
        """Documents of a source; pieces are taken from one document each, or from all of them joined if they are short."""
        if source == "pydoc":
            return [essay_text("pydoc")]
        if source == "multi_news":
            return [row["context"] for row in read_jsonl(self._file("longbench", "multi_news.jsonl"))]
        if source == "gsm8k":
            rows = read_jsonl(self._file("gsm8k", "test.jsonl"))
            return ["\n\n".join(f"Question: {r['question']}\nAnswer: {r['answer']}" for r in rows)]
        path = Path(source).expanduser()
        if not path.is_file():
            raise ValueError(f"task.sources: {source!r} is no text file: choose pydoc, multi_news, gsm8k or a file")
        try:
            return [path.read_text("utf-8")]
        except UnicodeDecodeError as error:
            raise ValueError(f"task.sources: {source!r} is no UTF-8 text ({error.reason} at byte {error.start})") from None

    def items(self, tokenizer, positions: int) -> list[Item]:
        need = self.context + self.forced + 1
        if need > positions:
            raise ValueError(f"task.context + task.forced = {need - 1} tokens: the model has {positions} positions")
        out = []
        for source in self.sources:
            pieces = self._pieces([tokenizer(t, add_special_tokens=False).input_ids for t in self._texts(source)], need, source)
            for i, ids in enumerate(pieces, self.offset):
                sha = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
                name = source if "/" not in source else Path(source).stem
                out.append(Item(f"{name}-{i:04d}", sha, self.context, need - 1, (name, ids)))
        return out

    def _pieces(self, documents: list[list[int]], need: int, source: str) -> list[list[int]]:
        """``n`` pieces of ``need`` tokens that do not overlap: one per long enough document, or evenly spaced in a single one."""
        if len(documents) > 1:
            pieces = [d[:need] for d in documents if len(d) >= need][self.offset :][: self.n]
        else:
            room = len(documents[0]) // need
            first = [i * room // self.n + self.offset for i in range(self.n)]
            # an offset reaches at most up to the next piece: the pieces of all smaller offsets are others
            pieces = [documents[0][i * need :][:need] for i in first] if self.offset < room // self.n else []
        if len(pieces) < self.n:
            raise ValueError(
                f"task.sources: {source} has fewer than task.n={self.n} pieces of {need} tokens from task.offset={self.offset} on: "
                "lower task.n, task.offset or task.context"
            )
        return pieces

    # -- work -----------------------------------------------------------------------------------------------------------

    def meter(self, session: Session, items: Sequence[Item]) -> dict[str, int | None]:
        return {"prefill": None, "decode": None}

    def rows(self, session: Session, items: Sequence[Item]) -> Iterator[dict]:
        for start in range(0, len(items), self.batch):
            yield from self._batch(session, items[start : start + self.batch])

    def _batch(self, session: Session, items: Sequence[Item]) -> list[dict]:
        ids = torch.tensor([item.payload[1] for item in items], device=session.model.device)
        rows = [
            {"id": item.id, "task": item.payload[0], "prompt_sha": item.sha, "prompt_tokens": self.context, "error": None}
            for item in items
        ]
        cache, size = session.new_cache(session.budget), len(items)
        reference = self._reference(session, ids)
        held, ratio, used = [], [], []
        values: dict[str, list[torch.Tensor]] = {name: [] for name in VALUES}
        layers = []
        for t, (log_probs, attention) in enumerate(self._forced(session.model, cache, ids, reference.prompt)):
            full = reference.log_probs[:, t]
            true = ids[:, self.context + t + 1, None]
            values["kl"].append((full.exp() * (full - log_probs)).sum(-1))
            values["top1"].append((full.argmax(-1) == log_probs.argmax(-1)).float())
            values["nll_difference"].append((full - log_probs).gather(-1, true).squeeze(-1))
            wanted = reference.attention[:, :, t]
            layers.append((attention - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12))
            values["attention_error"].append(layers[-1].mean(0))
            held.append(measure(cache)["total"])
            ratio.append(held[-1] / full_bytes(cache))
            used.append(held[-1] / size / session.budget.resolve(cache.geometry, self.context, cache.store.seen))
        by_layer = torch.stack(layers).mean(0).T.tolist()
        for i, row in enumerate(rows):
            row |= {name: float(torch.stack(v)[:, i].mean()) for name, v in values.items()}
            row |= {
                "status": "ok",
                "score": row["top1"],
                "attention_error_by_layer": by_layer[i],
                "kl_by_token": [round(float(x[i]), 6) for x in values["kl"]],
                "new_tokens": self.forced,
                "kv_bytes_peak": max(held) / size,
                "kv_bytes_final": held[-1] / size,
                "kv_ratio_peak": max(ratio),
                "kv_ratio_final": ratio[-1],
                "budget_used_peak": max(used),
                "budget_bytes": session.budget.resolve(cache.geometry, self.context, cache.store.seen),
            }
        return rows

    def _reference(self, session: Session, ids: torch.Tensor) -> Trace:
        key = (id(session.model), self.context, hashlib.sha256(ids.cpu().numpy().tobytes()).digest())
        if key not in _references:
            prompt = self._prompt(session, ids)
            said = list(self._forced(session.model, DynamicCache(config=session.model.config), ids, prompt))
            _references[key] = Trace(torch.stack([s for s, _ in said], 1), torch.stack([a for _, a in said], 2), prompt)
            while len(_references) > 1 and sum(r.nbytes for r in _references.values()) > REMEMBERED:
                _references.popitem(last=False)
        return _references[key]

    @torch.inference_mode()
    def _prompt(self, session: Session, ids: torch.Tensor) -> States | None:
        """The prompt's states; None if they are too large to keep."""
        model = session.model
        g = geometry_of(model.config.get_text_config(), model.dtype)
        heads = g.query_heads + 2 * g.kv_heads
        if len(ids) * self.context * g.layers * heads * g.head_dim * model.dtype.itemsize > REMEMBERED // 2:
            return None
        cache = Cache(layers=[_PromptLayer() for _ in range(g.layers)])
        model(input_ids=ids[:, : self.context], use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
        return [layer.states for layer in cache.layers]

    @torch.inference_mode()
    def _forced(self, model, cache, ids: torch.Tensor, prompt: States | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """After each forced token: log probabilities ``[B, vocabulary]`` fp32 and attention outputs ``[layers, B, hidden]``.
        ``prompt``: its states, if they are known."""
        outputs: list[torch.Tensor] = []
        hooks = [
            layer.self_attn.register_forward_hook(lambda module, args, out: outputs.append(out[0][:, -1].float()))
            for layer in model.get_decoder().layers
        ]
        keyword = cache_keyword(model)
        pieces = [(0, self.context), *((t, t + 1) for t in range(self.context, self.context + self.forced))]
        for i, (q, k, v) in enumerate(prompt or ()):
            if isinstance(cache, TierCache):
                cache.load(i, q, k, v, model.get_decoder().layers[i].self_attn)
            else:
                cache.update(k, v, i)
        try:
            for start, end in pieces[1:] if prompt else pieces:
                outputs.clear()
                positions = torch.arange(start, end, device=ids.device).expand(len(ids), -1)
                out = model(
                    input_ids=ids[:, start:end], position_ids=positions, use_cache=True, logits_to_keep=1, **{keyword: cache}
                )
                if start:  # the prompt's own prediction is exact with every method
                    yield out.logits[:, -1].float().log_softmax(-1), torch.stack(outputs)
        finally:
            for hook in hooks:
                hook.remove()

    # -- numbers ----------------------------------------------------------------------------------------------------------

    def summary(self, rows: Sequence[dict]) -> dict:
        """Means over texts (of the sources' means) with 95 % bootstrap intervals over texts."""
        good = [r for r in rows if r["status"] == "ok"]
        out = summarize(rows) | estimates(rows, VALUES)
        if good:
            out["attention_error_by_layer"] = [mean(x) for x in zip(*(r["attention_error_by_layer"] for r in good), strict=True)]
        out["forced_tokens"] = sum(r["new_tokens"] for r in good)
        return out

    def card(self) -> dict:
        return {
            "benchmark": self.name,
            "reference": "uncompressed cache in the model's type",
            "context": self.context,
            "forced": self.forced,
            **self.fingerprint(),
        }

    def fingerprint(self) -> dict[str, str]:
        return {s: sha256("\x00".join(self._texts(s)).encode()) for s in self.sources}
