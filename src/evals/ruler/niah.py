"""Needles in a haystack: find the values of the asked keys."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from evals.ruler.draw import Draw, Setting, Task
from evals.ruler.haystack import NOISE, word_lists

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = [round(100 * step / 39) for step in range(40)]  # percent; where needles may lie between sentences
KINDS: dict[str, Callable[[Random], str]] = {
    "words": lambda rng: "-".join(rng.choice(words) for words in word_lists()[:2]),
    "numbers": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class Niah(Task):
    """The units of haystack are words of an essay, lines otherwise.

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
    new_tokens = 128

    @property
    def reads(self) -> str | None:
        return "essays" if self.haystack == "essay" else None

    def draw(self, setting: Setting, rng: Random, index: int, size: int) -> Draw:
        pairs = [(self._key(rng), [self._value(rng) for _ in range(self.values)]) for _ in range(self.keys)]
        asked = rng.sample(pairs, self.queries)
        needles = [(key, value) for key, values in pairs for value in values]
        rng.shuffle(needles)
        if self.reads:
            depths = sorted(rng.sample(DEPTHS, len(needles)))
            units, glue = setting.source.first(size), " "
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
            prompt=(setting.template.singular() if one else setting.template).fill(
                context=glue.join(units),
                type_needle_v=self.value[:-1] if one else self.value,
                query=queries[0] if len(queries) == 1 else ", ".join(queries[:-1]) + ", and " + queries[-1],
            ),
            answers=tuple(value for _, value in answers),
            meta={"depths": [depth_of[answer] for answer in answers]},
        )

    def _key(self, rng: Random) -> str:
        return KINDS[self.key](rng)

    def _value(self, rng: Random) -> str:
        return KINDS[self.value](rng)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value, key=key, value=value)

    def _line(self, rng: Random) -> str:
        return NOISE if self.haystack == "noise" else self._needle(self._key(rng), self._value(rng))
