"""Other scores for the windows of QEvict: score x allocation x storage, with only the score exchanged.

The paper's appendix tries exponentially decayed attention, an attention p-norm and the L2 norm of keys beside its cumulative
attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from qevict.method import QEvict
from qevict.policy import Candidates, PromptView

RANKERS = ("cumulative", "decayed", "last_query", "peak", "key_norm")
SUMS = ("cumulative", "decayed")  # what sums attention, of the prompt's queries and of generated ones
MOST_TOKENS = 1e9  # weights are fp32
ABOVE_MASS = 1000.0  # brings key norms out of the reach of attention, which then only breaks ties


@dataclass(frozen=True)
class Ranked(QEvict):
    """QEvict whose windows are ranked by another score.

    Args:
        ranker: ``cumulative`` attention (QEvict's own, p-norm with p = 1); ``decayed``: halved every ``half_life`` generated
            tokens; ``last_query``: attention of the newest query alone; ``peak``: the highest that any query of any head paid
            (p-norm with p = infinity; 4 more bytes per window); ``key_norm``: windows of short keys first (short keys draw
            attention, arXiv 2406.11430).
        half_life: generated tokens, for ``decayed``.
        prompt_norm: p of the p-norm mean over the prompt's last queries and a group's heads; 1 is the plain mean. Higher ones keep
            what few queries look at but look at hard. For ``cumulative`` and ``decayed``.
        query_half_life: tokens from the prompt's end back over which a query's weight in that mean halves; None: all count alike.
        prompt_weight: generated tokens that the prompt's queries count as together, and those of a later turn; None: each counts
            as one. A lower one lets windows that were generated compete. For the same.
        follow: share of a prompt window's score that the window after it has at least, the one after that ``follow`` squared, and
            so on: what attention finds is read on from there. For the same.

    With ``key_norm`` the prompt's windows are ranked by their keys, those generated later rank as average ones and among
    themselves by attention: the store weighs no keys that arrive while decoding.
    """

    ranker: str = "cumulative"
    half_life: float = 64.0
    prompt_norm: float = 1.0
    query_half_life: float | None = None
    prompt_weight: float | None = None
    follow: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.ranker not in RANKERS:
            raise ValueError(f"ranker={self.ranker!r}: choose one of {', '.join(RANKERS)}")
        if self.half_life <= 0:
            raise ValueError(f"half_life={self.half_life:g} is not positive: set method.half_life to a number of tokens above 0")
        if self.prompt_norm < 1:
            raise ValueError(f"prompt_norm={self.prompt_norm:g} is below 1: set method.prompt_norm to 1 (the mean) or more")
        for name in ("query_half_life", "prompt_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST_TOKENS:
                raise ValueError(
                    f"{name}={value:g} is outside (0, {MOST_TOKENS:g}]: set method.{name} to a number of tokens in it, or null"
                )
        if not 0 <= self.follow < 1:
            raise ValueError(f"follow={self.follow:g} is outside [0, 1): set method.follow to 0 (off) or a share below 1")
        of_sums = ("prompt_norm", "query_half_life", "prompt_weight", "follow")
        told = {n: x for n in of_sums if (x := getattr(self, n)) != getattr(Ranked, n)}
        if told and self.ranker not in SUMS:
            rest = " ".join(f"method.{n}={'null' if (off := getattr(Ranked, n)) is None else f'{off:g}'}" for n in told)
            raise ValueError(
                f"ranker={self.ranker} has no use for {', '.join(f'{n}={x:g}' for n, x in told.items())}: set {rest}, or "
                f"method.ranker to {' or '.join(SUMS)}"
            )

    @property
    def channels(self) -> tuple[str, ...]:
        return ("score", "peak") if self.ranker == "peak" else ("score",)

    @property
    def prompt_queries(self) -> int | None:
        return 1 if self.ranker == "last_query" else super().prompt_queries

    @property
    def mass_every_step(self) -> bool:
        return super().mass_every_step and self.ranker not in ("last_query", "key_norm")

    def prompt_scores(self, view: PromptView) -> dict[str, Tensor]:
        if self.ranker == "key_norm":
            length = view.k.float().norm(dim=-1) * view.real[:, None]
            mean = length.sum(-1, keepdim=True) / view.real.sum(-1)[:, None, None]
            return {"score": self.together(ABOVE_MASS * (mean - length))}
        if self.ranker == "peak":
            return super().prompt_scores(view) | {"peak": self._prompt_peak(view)}
        if (self.prompt_norm, self.query_half_life, self.prompt_weight) == (1, None, None):
            score = super().prompt_scores(view)["score"]
        else:
            mean = view.norm(self.prompt_queries, self.prompt_norm, self.query_half_life)
            weight = view.asked(self.prompt_queries)[:, None, None] if self.prompt_weight is None else self.prompt_weight
            score = self.together(mean * weight)
        return {"score": self._followed(score, view) if self.follow else score}

    def turn_weight(self, queries: int) -> float:
        return 1.0 if self.prompt_weight is None else self.prompt_weight / queries

    def _inside(self, view: PromptView) -> Tensor:
        """``[B, T]`` True for real tokens that are no sinks."""
        first = view.real.int().argmax(-1)[:, None] + self.sink
        return torch.arange(view.length, device=view.k.device) >= first

    def _followed(self, score: Tensor, view: PromptView) -> Tensor:
        """Each token's score or, if that is more, ``follow`` times that of the token one window before, which may be passed on in
        its turn. Sinks pass nothing on: theirs says nothing about what comes after them."""
        score = score * self._inside(view)[:, None]
        windows = 1  # each round reaches twice as far back
        while (tokens := windows * self.window) < view.length:
            score = torch.maximum(score, self.follow**windows * pad(score, (tokens, 0))[..., :-tokens])
            windows *= 2
        return score

    def _prompt_peak(self, view: PromptView) -> Tensor:
        """``[B, G, T]``: a window's highest attention at its last token, 0 at its others, so that a window's sum is its peak. Sinks
        are left out."""
        asked = view.length if self.prompt_queries is None else min(self.prompt_queries, view.length)
        rows = torch.arange(view.length - asked, view.length, device=view.k.device)
        weights = view.attention(rows) * self._inside(view)[:, None, None, None]
        units = pad(weights, (-view.length % self.window, 0)).unflatten(-1, (-1, self.window)).sum(-1).amax((2, 3))  # [B, H, U]
        spread = torch.zeros(*units.shape, self.window, device=units.device)
        spread[..., -1] = units
        peak = spread.flatten(-2)[..., -view.length :]
        return peak if self.per_head else peak.amax(1, keepdim=True)

    def rank(self, c: Candidates) -> Tensor:
        return c.peak if self.ranker == "peak" else c.score

    def carry(self, score: Tensor, interval: int) -> Tensor:
        if self.ranker == "last_query":
            return torch.zeros_like(score)
        return score * 0.5 ** (interval / self.half_life) if self.ranker == "decayed" else score
