"""GSM8K (Cobbe et al., 2021, arXiv:2110.14168): grade-school problems, solved in words after a few solved ones.

Prompt: ``Q:``/``A:`` pairs with a blank line between them, answers ending in "The answer is N.", greedy decoding up to the next
``Q:``, as lm-eval's ``gsm8k_cot`` (0.4.13). Known deviations:

* The solved problems are drawn from the train split; ``exemplars`` takes a file of others (those of Wei et al., say).
* An answer at the very end of the text counts: lm-eval's strict pattern wants one more character.
* A number needs a digit, commas stand before three digits, and a hyphen behind a digit is no minus: lm-eval's flexible pattern
  takes "..." for a number, "1,2,3" for 123 and the end of "5-3" for -3.
* The answer phrase may be in any case, and bold or a dollar sign may stand before its number.
* The main score compares numbers: 18.0 and $18.00 are 18.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from random import Random
from typing import ClassVar

from evals.benchmark import Benchmark
from evals.data import data_dir, read_jsonl, require, sha256, sources, spread
from evals.sample import Rules, Sample

ROWS = {"test.jsonl": 1319, "train.jsonl": 7473}
STOPS = ("Q:", "</s>", "<|im_end|>")
SPLITS = ("whole", "exemplars")
NUMBER = r"(?:(?<![\d.,)])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
PHRASE = re.compile(rf"the answer is:?\s*\**\s*({NUMBER})", re.IGNORECASE)


# ------------------------------------------------------------------------------------------------------------ numbers


def gold_answer(answer: str) -> str:
    """The number behind the last ``####``, without commas."""
    return answer.rpartition("####")[2].strip().replace(",", "")


def strict(text: str) -> str | None:
    """The number of the first "The answer is N", without commas and dollar sign."""
    found = PHRASE.search(text)
    return _plain(found[1]) if found else None


def flexible(text: str) -> str | None:
    """The last number of a text, without commas and dollar sign."""
    found = re.findall(NUMBER, text)
    return _plain(found[-1]) if found else None


def same_number(one: str | None, other: str) -> bool:
    """Whether both are the same number, however written."""
    return one is not None and Decimal(one) == Decimal(other)


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")


# -------------------------------------------------------------------------------------------------------- solved ones


def worked(row: dict) -> str:
    """A solved problem as it stands in a prompt: without calculator annotations, ending in "The answer is N."."""
    answer = row["answer"].strip()
    if "####" in answer:
        steps = re.sub(r"<<[^>]*>>", "", answer.rpartition("####")[0])
        lines = [line.strip() for line in steps.splitlines() if line.strip()]  # a blank line would end the pair
        answer = "\n".join([*lines, f"The answer is {gold_answer(answer)}."])
    return f"Q: {row['question'].strip()}\nA: {answer}\n\n"


def check_rows(rows: list[dict], path: Path, gold: bool) -> list[dict]:
    """Raise a ValueError if a row lacks a question or an answer whose number can be told."""
    for i, row in enumerate(rows):
        question, answer = row.get("question"), row.get("answer")
        usable = isinstance(question, str) and isinstance(answer, str)
        if usable and (gold or "####" in answer):
            usable = "####" in answer and re.fullmatch(r"-?\d+(\.\d+)?", gold_answer(answer)) is not None
        elif usable:
            usable = strict(answer) is not None
        if not usable:
            either = "#### NUMBER" if gold else "#### NUMBER or The answer is NUMBER."
            raise ValueError(f"{path} row {i} needs a question, and an answer that ends in {either}")
    return rows


# ---------------------------------------------------------------------------------------------------------- benchmark


@dataclass(frozen=True)
class GSM8K(Benchmark):
    """GSM8K with solved problems in the prompt.

    Args:
        n: problems of the test split, evenly spread (:func:`evals.data.spread`); None: all.
        seed: which problems, if not all, and which solved ones.
        shots: solved problems in the prompt, the same for all.
        exemplars: JSONL file whose first ``shots`` rows (``question``, ``answer``) are the solved ones; None: drawn from train.
        split: ``whole``: the whole prompt is compressed; ``exemplars``: the solved problems are the context, the problem follows
            uncompressed (protocol ``agnostic``).
        max_new_tokens: generation limit, in tokens.
        data: folder with ``test.jsonl`` and ``train.jsonl``; None: where ``scripts/prepare.py gsm8k`` puts them.
    """

    n: int | None = None
    seed: int = 42
    shots: int = 8
    exemplars: str | None = None
    split: str = "whole"
    max_new_tokens: int = 512
    data: str | None = None

    name: ClassVar[str] = "gsm8k"
    shorter: ClassVar[str] = "task.shots or task.max_new_tokens"

    def __post_init__(self):
        super().__post_init__()
        if self.split not in SPLITS:
            raise ValueError(f"task.split={self.split!r}: choose {' or '.join(SPLITS)}")
        for field, least in (("n", 1), ("shots", 0), ("max_new_tokens", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ValueError(f"task.{field}={value}: it has to be {least} or more")
        if self.split == "exemplars" and self.rules.protocol == "aware":
            raise ValueError("task.split=exemplars compresses before the problem is read: task.protocol has to be agnostic")
        if self.split == "exemplars" and not self.shots:
            raise ValueError("task.shots=0 leaves nothing to compress: set task.split=whole")

    @cached_property
    def rules(self) -> Rules:
        """The preset's rules with what this run changes; the split chooses the protocol if the run does not."""
        rules = super().rules
        return replace(rules, protocol="agnostic") if self.split == "exemplars" and self.protocol is None else rules

    def samples(self, tokenizer) -> list[Sample]:
        path = self._file("test.jsonl")
        rows = check_rows(read_jsonl(path), path, gold=True)
        if self.n is not None and self.n > len(rows):
            raise ValueError(f"task.n={self.n}: {path} has {len(rows)} problems, lower task.n, or leave it out for all")
        solved = "".join(worked(row) for row in self._solved)
        return [self._sample(i, rows[i], solved) for i in spread(len(rows), self.n, f"{self.seed}/gsm8k")]

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """``score`` is ``numeric``: the last number equals the reference; ``flexible``: literally; ``strict``: the number of the
        first answer phrase does, literally."""
        for stop in sample.stop:
            prediction = prediction.split(stop)[0]  # an invented next problem is not part of the answer
        gold, last = sample.answers[0], flexible(prediction)
        numeric = float(same_number(last, gold))
        return {"score": numeric, "strict": float(strict(prediction) == gold), "flexible": float(last == gold), "numeric": numeric}

    def fingerprint(self) -> dict[str, str]:
        return {f"data_{path.name}": sha256(path.read_bytes()) for path in self._files}

    def card(self) -> dict:
        return super().card() | {
            "n": self.n,
            "seed": self.seed,
            "shots": self.shots,
            "split": self.split,
            "max_new_tokens": self.max_new_tokens,
            "stop": list(STOPS),
            "sources": sources(data_dir(self.name, self.data), self.fingerprint().values()),
        }

    def _file(self, name: str) -> Path:
        return require(self.name, [name], self.data)[0]

    @cached_property
    def _files(self) -> list[Path]:
        """The files that are read: the test split, and where the solved problems come from."""
        files = [self._file("test.jsonl")]
        if self.shots and self.exemplars is None:
            files.append(self._file("train.jsonl"))
        elif self.shots:
            files.append(Path(self.exemplars).expanduser())
        return files

    @cached_property
    def _solved(self) -> list[dict]:
        if not self.shots:
            return []
        path = self._files[1]
        if not path.is_file():
            raise ValueError(f"task.exemplars={self.exemplars!r} is no file: name a JSONL file of questions and answers")
        rows = check_rows(read_jsonl(path), path, gold=False)
        if len(rows) < self.shots:
            raise ValueError(f"{path} has {len(rows)} solved problems: lower task.shots={self.shots}")
        return rows[: self.shots] if self.exemplars else Random(f"{self.seed}/gsm8k/shots").sample(rows, self.shots)

    def _sample(self, index: int, row: dict, solved: str) -> Sample:
        problem = f"Q: {row['question'].strip()}\n"
        whole = self.split == "whole"
        return Sample(
            id=f"gsm8k-{index:04d}",
            task="gsm8k",
            context=solved + problem if whole else solved,
            question="" if whole else problem,
            answer_prefix="A:",
            answers=(gold_answer(row["answer"]),),
            max_new_tokens=self.max_new_tokens,
            chat=False,
            stop=STOPS,
            meta={"row": index},
        )
