"""A text whose early facts are asked for late: prose, codes of things in its first part, questions and answers in its last."""

from __future__ import annotations

from random import Random

from evals.ruler import essay_text

CHARACTERS = 4  # of English prose per token, roughly: only decides where facts and questions stand
PARAGRAPH = 400  # characters
COLOURS = ("amber", "black", "copper", "green", "indigo", "ivory", "purple", "silver")
THINGS = ("anchor", "bridge", "candle", "garden", "harbour", "lantern", "mirror", "orchard", "river", "station", "tower", "violin")


def recall_text(seed: int, context: int, forced: int, facts: int = 16) -> str:
    """More than ``context + forced`` tokens: ``facts`` codes between a tenth and eight tenths of the context, and from its end on,
    after every second paragraph, a question for one of them with its answer."""
    rng = Random(seed)
    prose = essay_text("pydoc")
    need = 2 * CHARACTERS * (context + forced)
    start = rng.randrange(max(1, len(prose) - need))
    part = prose[start : start + need]
    paragraphs = [part[i : i + PARAGRAPH] for i in range(0, len(part), PARAGRAPH)]
    names = [f"{c} {t}" for c in COLOURS for t in THINGS]
    codes = {name: str(rng.randrange(10_000, 100_000)) for name in rng.sample(names, facts)}
    first = CHARACTERS * context // PARAGRAPH
    places = range(first // 10, first * 8 // 10)
    if len(places) < facts:
        least = -(-(facts + 1) * 10 // 7) * PARAGRAPH // CHARACTERS
        raise ValueError(f"task.context={context}: source recall tells {facts} facts there, set task.context to {least} or more")
    told = dict(zip(sorted(rng.sample(places, facts)), codes, strict=True))
    out = []
    for i, paragraph in enumerate(paragraphs):
        out.append(paragraph)
        if i in told:
            out.append(f"\nThe code of the {told[i]} is {codes[told[i]]}.\n")
        if i >= first and i % 2:
            name = rng.choice(list(codes))
            out.append(f"\nQuestion: What is the code of the {name}? Answer: {codes[name]}.\n")
    return "".join(out)
