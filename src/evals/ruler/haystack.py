"""What hides the needles: prose, a line of noise, and the word lists that keys and words are drawn from."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path

from wonderwords import Defaults, RandomWord

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


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


@cache
def word_lists() -> tuple[list[str], list[str], list[str]]:
    """Adjectives, nouns and verbs, each sorted (wonderwords 2 returns them in any order)."""
    words = RandomWord(adjective=Defaults.ADJECTIVES, noun=Defaults.NOUNS, verb=Defaults.VERBS)
    adjectives, nouns, verbs = (sorted(words.filter(include_categories=[kind])) for kind in ("adjective", "noun", "verb"))
    return adjectives, nouns, verbs


@cache
def all_words() -> tuple[str, ...]:
    """The three lists as one, sorted, each word once."""
    return tuple(sorted({word for words in word_lists() for word in words}))
