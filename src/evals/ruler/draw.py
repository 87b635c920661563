"""What the tasks of RULER have in common: a setting goes in, the parts of one prompt come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from evals.ruler.templates import Template


@dataclass(frozen=True)
class Setting:
    """What the samples of a task share.

    Args:
        template: the task's template.
        length: prompt plus generation, in tokens.
        budget: the prompt's share of it, in tokens.
        source: what ``Task.reads`` names: :class:`~evals.ruler.haystack.Essays`, :class:`~evals.ruler.qa.Questions`, or nothing.
        example: units of haystack in the worked example, as ``Task.example`` says.
    """

    template: Template
    length: int
    budget: int
    source: object = None
    example: int = 0


@dataclass(frozen=True)
class Draw:
    """What a task makes of its template.

    Args:
        prompt: the template, filled.
        answers: references.
        example: a solved prompt in front of it.
        meta: what the record holds about the sample, ``depths`` in percent of the haystack for one.
    """

    prompt: Template
    answers: tuple[str, ...]
    example: str = ""
    meta: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One of the 13 tasks.

    Attributes:
        family: key of its template.
        new_tokens: official generation limit.
        match: ``all``: share of the references found; ``part``: any of them.
        smallest: fewest units of haystack.
        reads: ``essays``, a file of the data folder, or nothing.
    """

    family: ClassVar[str]
    new_tokens: ClassVar[int]
    match: ClassVar[str] = "all"
    smallest: ClassVar[int] = 1

    @property
    def reads(self) -> str | None:
        return None

    def example(self, setting: Setting, rng: Random, tokens: Callable[[str], int]) -> int:
        """Units of haystack in the worked example, for tasks whose example has a size."""
        return 0

    def draw(self, setting: Setting, rng: Random, index: int, size: int) -> Draw:
        """Sample ``index`` with ``size`` units of haystack. What is asked for does not depend on ``size``."""
        raise NotImplementedError
