"""What every benchmark hands to the runner."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """One question about one context.

    Args:
        id: unique within a run, stable across runs; results are resumed by it.
        task: name of the task that the score is averaged under.
        context: what is compressed first in the agnostic protocol.
        question: asked about the context.
        answer_prefix: begins the model's answer (after the assistant header in a chat).
        answers: references.
        max_new_tokens: generation limit, in tokens.
        chat: wrap in the model's chat template, if it has one.
        meta: whatever the benchmark wants in the record (lengths, depths).
    """

    id: str
    task: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    chat: bool = True
    meta: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """Token ids of a sample: ``context`` is prefilled in one call; ``question`` follows as a turn of its own.

    In the ``aware`` protocol everything is context and ``question`` is empty.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.context) + len(self.question)

    @property
    def sha(self) -> str:
        text = ",".join(map(str, self.context)) + "|" + ",".join(map(str, self.question))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def render(sample: Sample, tokenizer, protocol: str) -> Prompt:
    """Token ids of a sample.

    ``aware``: context and question are one user message, compressed together. ``agnostic``: the chat is rendered with the
    context alone, cut behind it, and the question with the rest of the template follows uncompressed, tokenized apart.
    A template that renders BOS itself does not get a second one from the tokenizer.
    """
    if protocol not in ("aware", "agnostic"):
        raise ValueError(f"task.protocol={protocol!r}: choose aware or agnostic")
    mark = "\x00cut\x00"
    if sample.chat and tokenizer.chat_template:
        message = [{"role": "user", "content": sample.context + mark + sample.question}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    else:
        text = sample.context + mark + sample.question
    head, tail = text.split(mark)
    tail += sample.answer_prefix
    if protocol == "aware":
        head, tail = head + tail, ""
    ids = list(tokenizer(head, add_special_tokens=False).input_ids)
    bos = tokenizer.bos_token_id
    if tokenizer_adds_bos(tokenizer) and ids[:1] != [bos]:
        ids.insert(0, bos)
    return Prompt(tuple(ids), tuple(tokenizer(tail, add_special_tokens=False).input_ids) if tail else ())


def tokenizer_adds_bos(tokenizer) -> bool:
    """Whether plain text gets a BOS token in front."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a").input_ids[:1] == [bos]
