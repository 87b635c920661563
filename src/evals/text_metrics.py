"""Metrics of generated text, each equal to the official LongBench scorer (THUDM/LongBench 2e00731), in [0, 1].

One deviation, which is told: where the official scorer overflows Python's stack and so scores 0, :func:`rouge_l` scores.
"""

from __future__ import annotations

import contextlib
import re
import string
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from rouge import Rouge

PUNCTUATION = str.maketrans("", "", string.punctuation)
STACK = 1000  # Python's default, which the official scorer runs under


def words(text: str) -> list[str]:
    """Words of a text in lower case, without ASCII punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the two multisets of words."""
    ours, theirs = words(prediction), words(answer)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(ours), shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the prediction names, if the right one is among them.

    Classes whose name is a part of the right one's do not count; as in the official scorer, the list is changed while it
    is walked, so that the class behind a dropped one is not looked at.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def rouge_l(prediction: str, answer: str) -> tuple[float, bool]:
    """ROUGE-L F of package ``rouge``, summary level, and whether the official scorer would have run out of stack.

    The package finds a longest common subsequence by recursion, one call per word. With two sentences of together about
    1,000 words (a text without full stops is one sentence) that is deeper than Python allows by default; the official
    scorer takes every exception as a score of 0. Here it is scored with as much stack as it takes.
    """
    try:
        with _stack(STACK - 2):  # as much as the package has in the official script, and one for _rouge_l
            return _rouge_l(prediction, answer), False
    except RecursionError:
        pass
    longest = sum(max(len(s.split()) for s in text.split(".")) for text in (prediction, answer))
    with _stack(STACK + longest):
        return _rouge_l(prediction, answer), True


@lru_cache(maxsize=1)
def _scorer() -> Rouge:
    return Rouge(metrics=["rouge-l"], stats=["f"])


def _rouge_l(prediction: str, answer: str) -> float:
    try:
        return _scorer().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except ValueError:  # no sentence in one of them: empty, or nothing but full stops
        return 0.0


@contextlib.contextmanager
def _stack(frames: int) -> Iterator[None]:
    """The caller may nest exactly so many calls, however many lie above it."""
    depth, frame = 0, sys._getframe(2)  # 0 and 1 are this context manager's
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
