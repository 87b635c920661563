"""Questions about documents among other documents: SQuAD and HotpotQA, as published, in the data folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from evals.ruler.draw import Draw, Setting, Task


@dataclass(frozen=True)
class Question:
    """Places in ``Questions.documents`` of what belongs to a question.

    Args:
        given: documents that every prompt holds.
        near: documents that are taken before any other.
        gold: documents, out of ``given``, that hold the answer.
    """

    text: str
    answers: tuple[str, ...]
    given: tuple[int, ...]
    near: tuple[int, ...] = ()
    gold: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    questions: tuple[Question, ...]
    documents: tuple[str, ...]


def read_questions(path: Path) -> Questions:
    """Questions of ``squad.json`` (those with an answer) or ``hotpotqa.json``, in the order of the file.

    Raises:
        ValueError: the file is not in the published form.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        found = _squad(data["data"]) if isinstance(data, dict) else _hotpot(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} has not the form of a published SQuAD or HotpotQA file ({error!r}): prepare the data again"
        ) from error
    if not found.questions:
        raise ValueError(f"{path} has no question with an answer: prepare the data again")
    return found


def _squad(articles: list[dict]) -> Questions:
    documents = sorted({part["context"] for article in articles for part in article["paragraphs"]})
    place = {document: at for at, document in enumerate(documents)}
    questions = []
    for article in articles:
        parts = [place[part["context"]] for part in article["paragraphs"]]
        for part, at in zip(article["paragraphs"], parts, strict=True):
            near = tuple(dict.fromkeys(other for other in parts if other != at))
            for row in part["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in row["answers"]))
                if answers and not row.get("is_impossible", False):
                    questions.append(Question(row["question"], answers, (at,), near, (at,)))
    return Questions(tuple(questions), tuple(documents))


def _hotpot(rows: list[dict]) -> Questions:
    parts = [{title: f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]} for row in rows]
    documents = sorted({document for part in parts for document in part.values()})
    place = {document: at for at, document in enumerate(documents)}
    questions = []
    for row, part in zip(rows, parts, strict=True):
        given = {title: place[document] for title, document in part.items()}
        support = dict.fromkeys(title for title, _ in row.get("supporting_facts", ()))
        gold = tuple(given[title] for title in support if title in given)
        questions.append(Question(row["question"], (row["answer"],), tuple(given.values()), gold=gold))
    return Questions(tuple(questions), tuple(documents))


@dataclass(frozen=True)
class DocumentQa(Task):
    """Sample ``i`` asks question ``i`` of the file. The units of haystack are documents besides the given ones.

    Args:
        file: of the data folder.
    """

    file: str

    family = "qa"
    new_tokens = 32
    match = "part"
    smallest = 0

    @property
    def reads(self) -> str:
        return self.file

    def draw(self, setting: Setting, rng: Random, index: int, size: int) -> Draw:
        question = setting.source.questions[index]
        more = _more(question, len(setting.source.documents), rng)
        chosen = [*question.given, *(next(more) for _ in range(size))]
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {at}:\n{setting.source.documents[place]}" for at, place in enumerate(chosen, 1))
        prompt = setting.template.fill(context=context, query=question.text)
        depths = [round(100 * chosen.index(place) / len(chosen), 2) for place in question.gold]
        return Draw(prompt, question.answers, meta={"depths": depths} if depths else {})


def _more(question: Question, total: int, rng: Random) -> Iterator[int]:
    """Documents to add, without end: near ones, then any other, and when all are used all again."""
    yield from rng.sample(question.near, len(question.near))
    taken = {*question.given, *question.near}
    while True:
        if 2 * len(taken) < total:  # many are left: drawing until a new one comes beats shuffling all
            place = rng.randrange(total)
            if place not in taken:
                taken.add(place)
                yield place
        else:
            left = [place for place in range(total) if place not in taken]
            yield from rng.sample(left, len(left))
            taken = set()
