"""Aggregation: variables along a chain, common words of a list, frequent words of a coded text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import pi
from random import Random
from string import ascii_lowercase, ascii_uppercase

from evals.ruler.draw import Draw, Setting, Task
from evals.ruler.haystack import NOISE, all_words, word_lists
from evals.ruler.sizing import largest


def distinct(rng: Random, letters: str, length: int, n: int) -> list[str]:
    """``n`` different words of random letters; a larger ``n`` only adds some at the end."""
    words: dict[str, None] = {}
    while len(words) < n:
        words["".join(rng.choices(letters, k=length))] = None
    return list(words)


@dataclass(frozen=True)
class VariableTracking(Task):
    """One chain of variables in lines of noise, after a solved example. The units of haystack are the lines.

    Args:
        hops: variables that are set to another one.
    """

    hops: int = 4

    family = "variable_tracking"
    new_tokens = 30

    def example(self, setting: Setting, rng: Random, tokens: Callable[[str], int]) -> int:
        """Officially 500 tokens, which would leave nothing of a short prompt."""
        state, limit = rng.getstate(), min(500, setting.budget // 2)

        def count(size: int) -> int:
            rng.setstate(state)
            return tokens(str(self._chain(setting, rng, size, letters=3)[0]))

        return largest(count, 0, limit, 12) if count(0) <= limit else 0

    def draw(self, setting: Setting, rng: Random, index: int, size: int) -> Draw:
        solved, names, _ = self._chain(setting, rng, setting.example, letters=3)
        prompt, answers, depths = self._chain(setting, rng, size, letters=5)
        return Draw(prompt, tuple(answers), f"{solved} {' '.join(names)}\n\n", {"depths": depths})

    def _chain(self, setting: Setting, rng: Random, size: int, letters: int):
        """Prompt, names of the chain's variables, and where each is set, in percent of the lines."""
        names = distinct(rng, ascii_uppercase, letters, self.hops + 1)
        value = str(rng.randrange(10_000, 99_999))
        # Official lines end in a space wherever a variable is set to another one.
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
        lines = [NOISE] * size
        places = sorted(rng.sample(range(max(size, len(chain))), len(chain)))
        for step, (place, line) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + step, line)
        prompt = setting.template.fill(context="\n".join(lines), query=value, num_v=len(names))
        return prompt, names, [round(100 * place / max(size, len(chain)), 2) for place in places]


@dataclass(frozen=True)
class CommonWords(Task):
    """The words that a numbered list repeats most, after a solved example. The units of haystack are different words.

    Args:
        common: number of words asked for.
    """

    common: int = 10

    family = "common_words_extraction"
    new_tokens = 120
    smallest = 20  # as many that are no answer as there are answers

    def draw(self, setting: Setting, rng: Random, index: int, size: int) -> Draw:
        long = setting.length >= 4096
        words = rng.sample(all_words(), 40 if long else 20)
        example = self._numbered(setting, rng, words, 10 if long else 3, 3 if long else 1)
        solved = " ".join(f"{place}. {word}" for place, word in enumerate(words[: self.common], 1))
        words = rng.sample(all_words(), len(all_words()))[:size]
        if size > len(words):
            taken = dict.fromkeys(words)
            while len(taken) < size:
                taken["-".join(rng.choice(part) for part in word_lists()[:2])] = None
            words = list(taken)
        prompt = self._numbered(setting, rng, words, 30 if long else 6, 3 if long else 1)
        return Draw(prompt, tuple(words[: self.common]), f"{example} {solved}\n")

    def _numbered(self, setting: Setting, rng: Random, words: list[str], often: int, seldom: int):
        repeated = words[: self.common] * often + words[self.common :] * seldom
        rng.shuffle(repeated)
        context = " ".join(f"{place}. {word}" for place, word in enumerate(repeated, 1))
        return setting.template.fill(context=context, query="", num_cw=self.common)


@dataclass(frozen=True)
class FrequentWords(Task):
    """The three most frequent words of a text whose word frequencies follow a zeta law of exponent 2.

    The units of haystack are the words that the law is scaled to; as its counts are rounded down, fewer are in the text.
    """

    family = "freq_words_extraction"
    new_tokens = 50
    smallest = 53  # from here on the third answer occurs more often than the word after it

    def draw(self, setting: Setting, rng: Random, index: int, size: int) -> Draw:
        # The first rank is noise: dots.
        words = ["...", *distinct(rng, ascii_lowercase, 6, max(setting.budget // 50, 5) - 1)]
        scale = size * 6 / pi**2  # zeta(2) = pi^2 / 6
        text = [word for rank, word in enumerate(words, 1) for _ in range(int(scale / rank**2))]
        rng.shuffle(text)
        return Draw(setting.template.fill(context=" ".join(text), query=""), tuple(words[1:4]))
