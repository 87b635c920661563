"""Prompt templates by task family: official ones from a JSON file, or stand-ins in our own words."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

# By family: where the question begins in a template, and in prompts that come as one text. It may occur before, the last counts.
OPENINGS = {
    "niah": re.compile(r"What (?:are all|is) the special magic"),
    "variable_tracking": re.compile(r"Question: Find all variables"),
    "common_words_extraction": re.compile(r"Question: What are the 10 most common"),
    "freq_words_extraction": re.compile(r"Question: Do not provide"),
    "qa": re.compile(r"Answer the question based on the given documents"),
}
BUILTIN = {
    "niah": {
        "template": (
            "Some special magic {type_needle_v} are buried in the text below. Read it closely: "
            "a question about the {type_needle_v} follows at the end.\n{context}\n"
            "What are all the special magic {type_needle_v} given for {query} in the text above?"
        ),
        "answer_prefix": " In the text above, the special magic {type_needle_v} for {query} are",
    },
    "variable_tracking": {
        "template": (
            "Variables are set somewhere in the text below, some of them to the value of another. Keep track of them.\n\n"
            "{context}\nQuestion: Find all variables that hold the value {query} at the end of the text above."
        ),
        "answer_prefix": " Answer: Following the text above, the value {query} is held by {num_v} variables, namely: ",
    },
    "common_words_extraction": {
        "template": (
            "The numbered list below repeats a few words far more often than the rest. Note which ones.\n{context}\n"
            "Question: What are the 10 most common words of this list?"
        ),
        "answer_prefix": " Answer: The 10 words that the list repeats most often are:",
    },
    "freq_words_extraction": {
        "template": (
            "The text below is in code. Count how often each coded word occurs, and keep the three with the highest counts. "
            "{context}\nQuestion: Do not provide reasons, and do not count the dots '....'. "
            "Which three words does the text in code use most?"
        ),
        "answer_prefix": " Answer: The three words that the text in code uses most are:",
    },
    "qa": {
        "template": (
            "Answer the question based on the given documents, in as few words as it takes and without a sentence around "
            "them.\n\nHere are the documents.\n\n{context}\n\nAnswer the question based on the given documents, in as few words "
            "as it takes and without a sentence around them.\n\nQuestion: {query}"
        ),
        "answer_prefix": " Answer:",
    },
}


@dataclass(frozen=True)
class Template:
    """The three parts of a prompt, with places for ``context`` and for what a family asks about."""

    context: str
    question: str
    answer_prefix: str

    def singular(self) -> Template:
        """The official rewrite for a single answer."""

        def rewrite(text: str) -> str:
            return text.replace("Some", "A").replace("are all", "is").replace("are", "is").replace("answers", "answer")

        return Template(rewrite(self.context), rewrite(self.question), rewrite(self.answer_prefix))

    def fill(self, **fields) -> Template:
        return Template(*(part.format(**fields) for part in (self.context, self.question, self.answer_prefix)))

    def __str__(self) -> str:
        return self.context + self.question + self.answer_prefix


def split_question(text: str, family: str) -> tuple[str, str] | None:
    """Text before and from the last opening of the family's question, or None."""
    found = list(OPENINGS[family].finditer(text))
    return (text[: found[-1].start()], text[found[-1].start() :]) if found else None


def read_template(path: str, family: str) -> Template:
    """Template of a task family, from a JSON file or built in, cut where the question opens last."""
    entries = BUILTIN
    if path != "builtin":
        try:
            entries = json.loads(Path(path).expanduser().read_text("utf-8"))["templates"]
        except OSError as error:
            raise ValueError(f"task.templates={path!r} cannot be read: name a JSON file, or use builtin") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"task.templates={path!r} is no JSON object with a 'templates' key: add it") from error
    entry = entries.get(family, {})
    for key in ("template", "answer_prefix"):
        if key not in entry:
            raise ValueError(f"task.templates={path!r} lacks templates.{family}.{key}: add it, or use builtin")
    parts = split_question(entry["template"], family)
    if parts is None or "{context}" not in parts[0]:
        raise ValueError(
            f"task.templates={path!r}: templates.{family}.template needs {{context}} and behind it a question that "
            f"opens with {OPENINGS[family].pattern!r}"
        )
    template = Template(*parts, entry["answer_prefix"])
    try:
        template.fill(**dict.fromkeys(("context", "query", "type_needle_v", "num_v", "num_cw"), ""))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"task.templates={path!r}: templates.{family} has a place that nothing fills: {error}") from error
    return template
