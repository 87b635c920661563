"""What every benchmark hands to the runner, and how it becomes token ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

CHOICES = {
    "protocol": ("aware", "agnostic"),
    "instruction_side": ("context", "question"),
    "cue_side": ("user", "assistant"),
    "chat": ("task", "always", "never"),
    "bos": ("tokenizer", "chat", "never"),
}


@dataclass(frozen=True)
class Rules:
    """How samples become prompts.

    Args:
        protocol: ``aware``: context and question are compressed together; ``agnostic``: the question follows uncompressed.
        instruction_side: ``agnostic`` only: whether the instruction after the context belongs to the context or the question.
        cue_side: the answer's cue ends the user's message, or begins the assistant's (without a template there is no difference).
        chat: ``task``: as each sample says; ``always`` or ``never`` wrap in the model's chat template.
        bos: ``tokenizer``: as the tokenizer does; ``chat``: not for prompts without a template; ``never``.
        raw_suffix: what follows the question where there is no template.
        extra_new_tokens: added to every sample's limit.
    """

    protocol: str = "aware"
    instruction_side: str = "question"
    cue_side: str = "user"
    chat: str = "task"
    bos: str = "tokenizer"
    raw_suffix: str = ""
    extra_new_tokens: int = 0

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"task.{name}={getattr(self, name)!r}: choose {' or '.join(allowed)}")
        if self.extra_new_tokens < 0:
            raise ValueError(f"task.extra_new_tokens={self.extra_new_tokens}: it has to be 0 or more")


@dataclass(frozen=True)
class Sample:
    """One question about one context. The parts, in the order they are read, join without anything between them.

    Args:
        id: unique within a run, stable across runs; results are resumed by it.
        task: name of the task that the score is averaged under.
        context: what is compressed first in the agnostic protocol.
        question: asked about the context.
        answer_prefix: the cue that the answer begins with.
        answers: references.
        max_new_tokens: generation limit, in tokens.
        instruction: stands between context and question.
        chat: wrap in the model's chat template, if it has one.
        classes: all classes, for classification.
        stop: texts that end the generation; they are cut off.
        newline_stops: a newline token ends the generation too, but is never the first token.
        meta: whatever the benchmark wants in the record (lengths, depths).
    """

    id: str
    task: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    instruction: str = ""
    chat: bool = True
    classes: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    newline_stops: bool = False
    meta: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """Token ids of a sample: ``context`` is prefilled in one call; ``question`` follows as a turn of its own.

    In the ``aware`` protocol everything is context and ``question`` is empty. ``cut`` tokens were taken out of the middle.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    cut: int = 0

    def __len__(self) -> int:
        return len(self.context) + len(self.question)

    @property
    def sha(self) -> str:
        text = ",".join(map(str, self.context)) + "|" + ",".join(map(str, self.question))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def render(sample: Sample, tokenizer, rules: Rules, limit: int | None = None) -> Prompt:
    """Token ids of a sample.

    In the ``agnostic`` protocol the chat is rendered with the context alone, cut behind it, and the rest follows, tokenized
    apart. A template that renders BOS itself does not get a second one from the tokenizer.

    Args:
        limit: tokens that the text (without the chat template) may have. A longer one loses its middle: the first and the last
            half of the tokens stay, as LongBench does.
    """
    cue = sample.answer_prefix
    before, after = sample.context, sample.instruction + sample.question
    if rules.protocol == "agnostic" and rules.instruction_side == "context":
        before, after = before + sample.instruction, sample.question
    chat = tokenizer.chat_template and {"task": sample.chat, "always": True, "never": False}[rules.chat]
    if rules.cue_side == "user" or not chat:
        after, cue = after + ("" if chat else rules.raw_suffix) + cue, ""
    cut = 0
    if limit is not None:
        before, cut = _without_middle(before, after + cue, tokenizer, limit)
    mark = "\x00cut\x00"
    text = before + mark + after
    if chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    head, tail = text.split(mark)
    tail += cue
    if rules.protocol == "aware":
        head, tail = head + tail, ""
    ids = list(tokenizer(head, add_special_tokens=False).input_ids)
    bos = tokenizer.bos_token_id
    wants = rules.bos == "tokenizer" or (rules.bos == "chat" and chat)
    if wants and tokenizer_adds_bos(tokenizer) and ids[:1] != [bos]:
        ids.insert(0, bos)
    return Prompt(tuple(ids), tuple(tokenizer(tail, add_special_tokens=False).input_ids) if tail else (), cut)


def _without_middle(before: str, after: str, tokenizer, limit: int) -> tuple[str, int]:
    """``before`` with so much of its middle taken out that ``before + after`` has ``limit`` tokens; how many were taken."""
    ids = tokenizer(before + after, add_special_tokens=False).input_ids
    if len(ids) <= limit:
        return before, 0
    half = limit // 2
    kept = tokenizer.decode(ids[:half], skip_special_tokens=True) + tokenizer.decode(
        ids[len(ids) - half :], skip_special_tokens=True
    )
    if not kept.endswith(after):
        raise ValueError(
            f"a question of {len(tokenizer(after).input_ids)} tokens does not fit half of {limit}: raise task.max_length"
        )
    return kept[: len(kept) - len(after)], len(ids) - 2 * half


def tokenizer_adds_bos(tokenizer) -> bool:
    """Whether plain text gets a BOS token in front."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a").input_ids[:1] == [bos]
