"""The contract of a task: items in, one record per item out, and a card that says exactly how. ``Benchmark`` is the kind of task
that generates text and scores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Protocol

import torch

from evals.decode import Stop, eos_ids, generate, measure_workspace
from evals.metrics import summarize
from evals.sample import Rules, Sample, render
from qevict.budget import Budget
from qevict.fields import check_fields
from qevict.hf.cache import TierCache

TEMPLATE_TOKENS = 64  # room for a chat template where a prompt is cut to the model's limit
WORKSPACE_STEPS = 10  # decode steps whose workspace is measured; covers a routing event of the default methods


@dataclass(frozen=True)
class Item:
    """One line of a run's records to be.

    Args:
        id: unique within a run, stable across runs; results are resumed by it.
        sha: of what the model reads; a record of another text is not this item's.
        prompt: tokens that are prefilled and compressed at once.
        total: tokens in all, generation included.
        payload: the task's own.
    """

    id: str
    sha: str
    prompt: int
    total: int
    payload: object


@dataclass(frozen=True)
class Session:
    """A model and a method, ready to work."""

    model: torch.nn.Module
    tokenizer: object
    budget: Budget
    new_cache: Callable[[Budget], TierCache]


class Task(Protocol):
    """What the runner needs of ``conf/task/*.yaml``."""

    name: str

    def items(self, tokenizer, positions: int) -> list[Item]:
        """All items, in a fixed order, for a model with so many positions. ValueError: data is missing or does not fit."""
        ...

    def rows(self, session: Session, items: Sequence[Item]) -> Iterator[dict]:
        """Records of the items, each with ``id``, ``prompt_sha`` and ``status`` (``ok`` or ``failed``), as they are finished."""
        ...

    def meter(self, session: Session, items: Sequence[Item]) -> dict[str, int | None]:
        """Workspace bytes by phase (``prefill``, ``decode``), on a run of its own; it also warms up. None: not measured."""
        ...

    def summary(self, rows: Sequence[dict]) -> dict:
        """The numbers of a run from its records."""
        ...

    def card(self) -> dict:
        """How the numbers came about, for the record and for the footers of tables."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """What items and scores depend on besides the fields: versions, and SHA-256 of the data that is read."""
        ...


@dataclass(frozen=True)
class Benchmark:
    """Base of all benchmarks that generate text.

    Args:
        preset: whose protocol: one of ``PRESETS``. The fields below it change single rules of it; null keeps the preset's.
        protocol, instruction_side, cue_side, chat, bos, raw_suffix, extra_new_tokens: see :class:`evals.sample.Rules`.

    Class attributes that a benchmark sets:

    Attributes:
        name: as in ``task=name``.
        PRESETS: rules by preset.
        categories: category of each task, for benchmarks that average over categories.
        truncates: prompts that are too long for the model lose their middle; else they are refused.
        shorter: fields that make prompts shorter, for the message that one is too long.
        max_length: tokens of a prompt's text above which it is cut; None: what the model has room for.
    """

    preset: str = "official"
    protocol: str | None = None
    instruction_side: str | None = None
    cue_side: str | None = None
    chat: str | None = None
    bos: str | None = None
    raw_suffix: str | None = None
    extra_new_tokens: int | None = None

    name: ClassVar[str]
    PRESETS: ClassVar[dict[str, Rules]] = {"official": Rules()}
    categories: ClassVar[dict[str, str]] = {}
    truncates: ClassVar[bool] = False
    shorter: ClassVar[str] = "task.length"
    max_length = None

    def __post_init__(self):
        check_fields(self)
        if self.preset not in self.PRESETS:
            raise ValueError(f"task.preset={self.preset!r}: choose {' or '.join(self.PRESETS)}")
        self.rules  # noqa: B018 - a bad rule is told at once

    @cached_property
    def rules(self) -> Rules:
        """The preset's rules with what this run changes."""
        asked = {f.name: getattr(self, f.name) for f in fields(Rules)}
        return replace(self.PRESETS[self.preset], **{k: v for k, v in asked.items() if v is not None})

    # -- what a benchmark says ------------------------------------------------------------------------------------------

    def samples(self, tokenizer) -> list[Sample]:
        """All samples, in a fixed order.

        Raises:
            ValueError: data is missing (with the command that gets it), or does not fit.
        """
        raise NotImplementedError

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """``score`` in [0, 1], and perhaps other scores beside it."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, str]:
        return {}

    # -- what the runner asks ---------------------------------------------------------------------------------------------

    def card(self) -> dict:
        return {"benchmark": self.name, "preset": self.preset, **asdict(self.rules), **self.fingerprint()}

    def items(self, tokenizer, positions: int) -> list[Item]:
        out = []
        for sample in self.samples(tokenizer):
            new = sample.max_new_tokens + self.rules.extra_new_tokens
            sample = replace(sample, max_new_tokens=new)
            room = self.max_length or positions - new - TEMPLATE_TOKENS
            prompt = render(sample, tokenizer, self.rules, room if self.truncates else None)
            if len(prompt) + new > positions:
                raise ValueError(
                    f"sample {sample.id} needs {len(prompt) + new} tokens ({len(prompt)} prompt + {new} new), the model has "
                    f"{positions} positions: lower {self.shorter}, or use a model with a longer context"
                )
            out.append(Item(sample.id, prompt.sha, len(prompt.context), len(prompt) + new, (sample, prompt)))
        return out

    def meter(self, session: Session, items: Sequence[Item]) -> dict[str, int | None]:
        longest = max(items, key=lambda item: item.total)
        cache = session.new_cache(_budget(session, longest))
        return measure_workspace(session.model, cache, longest.payload[1], WORKSPACE_STEPS)

    def rows(self, session: Session, items: Sequence[Item]) -> Iterator[dict]:
        eos = eos_ids(session.model, session.tokenizer)
        for item in items:
            yield self._row(session, item, eos)

    def _row(self, session: Session, item: Item, eos: set[int]) -> dict:
        """One sample's record. An error in it is recorded; out of memory and interrupts end the run."""
        sample, prompt = item.payload
        row = {
            "id": sample.id,
            "task": sample.task,
            "prompt_sha": prompt.sha,
            "prompt_tokens": len(prompt),
            "prompt_cut": prompt.cut,
            "answers": list(sample.answers),
            "meta": sample.meta,
        }
        try:
            cache, stop = session.new_cache(_budget(session, item)), Stop.of(sample, eos, session.tokenizer)
            made = generate(session.model, session.tokenizer, cache, prompt, sample.max_new_tokens, stop)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return row | {"status": "failed", "error": f"{type(error).__name__}: {error}".split("\n")[0], "score": None}
        return row | {
            "status": "ok",
            "error": None,
            "prediction": made.text,
            **self.score(sample, made.text),
            "new_tokens": len(made.tokens),
            "stopped": made.stopped,
            **made.record(),
        }

    def summary(self, rows: Sequence[dict]) -> dict:
        return summarize(rows, self.categories)


def _budget(session: Session, item: Item) -> Budget:
    """The session's budget, told how much this sample may generate."""
    return replace(session.budget, max_new_tokens=item.payload[0].max_new_tokens)
