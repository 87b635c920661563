"""RULER's tasks other than needles: what their prompts hold, and how a tokenizer's BOS gets into them."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from evals.ruler import Ruler
from evals.ruler.haystack import NOISE, all_words
from evals.sample import render
from test_ruler import word_tokenizer, write_questions


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_questions(tmp_path_factory.mktemp("ruler"))


@pytest.mark.parametrize(("length", "lines"), [(512, (0, 12)), (8192, (12, 20))])
def test_variables_follow_the_chain(length, lines, tokenizer):
    for sample in Ruler(tasks="vt", length=length, n=3).samples(tokenizer):
        example, context = sample.context.split("\n\nVariables", 1)
        found = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", context)
        assert [name for name, _ in found] == list(sample.answers) == list(dict.fromkeys(sample.answers))
        assert [value for _, value in found] == [found[0][1], *sample.answers[:-1]]
        assert 10_000 <= int(found[0][1]) < 99_999
        assert found[0][1] in sample.question
        assert found[0][1] in sample.answer_prefix
        assert " 5 " in sample.answer_prefix
        assert context.count(NOISE) > context.count("VAR") / 2 - 5
        assert len(sample.meta["depths"]) == 5
        # the example is a prompt of the same form with another value, solved
        solved = re.findall(r"VAR ([A-Z]{3}) = ", example)
        assert example.endswith("namely:  " + " ".join(solved))
        assert len(set(solved)) == 5
        assert found[0][1] not in example
        assert lines[0] <= example.count(NOISE) <= lines[1]


@pytest.mark.parametrize(("length", "often", "seldom", "example"), [(2048, 6, 1, (20, 3, 1)), (8192, 30, 3, (40, 10, 3))])
def test_common_words_are_repeated(length, often, seldom, example, tokenizer):
    for sample in Ruler(tasks="cwe", length=length, n=2).samples(tokenizer):
        solved, asked = sample.context.rsplit("The numbered list", 1)
        words, answers = solved.split("most often are:")

        def numbered(text: str) -> list[str]:
            found = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\n|$)", text)
            assert [int(place) for place, _ in found] == list(range(1, len(found) + 1))
            return [word for _, word in found]

        counts = Counter(numbered(asked))
        assert {word for word, n in counts.items() if n == often} == set(sample.answers)
        assert {n for word, n in counts.items() if word not in sample.answers} == {seldom}
        assert len(sample.answers) == 10
        counts = Counter(numbered(words))
        assert len(counts) == example[0]
        assert {word for word, n in counts.items() if n == example[1]} == set(numbered(answers))
        assert set(counts.values()) == set(example[1:])


def test_more_common_words_than_the_lists_have(tokenizer):
    bench = Ruler(tasks="cwe", n=1)
    setting = bench._setting("cwe", 4096, tokenizer)
    few, many = (bench._sample("cwe", setting, 0, size) for size in (500, len(all_words()) + 50))
    assert few.answers == many.answers
    counts = Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |\n|$)", many.context.rsplit("The numbered list", 1)[1]))
    assert len(counts) == len(all_words()) + 50
    assert sum(word not in all_words() for word in counts) == 50


@pytest.mark.parametrize("length", [512, 4096])
def test_frequent_words_follow_the_law(length, tokenizer):
    for sample in Ruler(tasks="fwe", length=length, n=3).samples(tokenizer):
        counts = Counter(re.findall(r"(?<= )(?:[a-z]{6}|\.\.\.)(?= |\n)", sample.context.split("highest counts.")[1]))
        ranked = counts.most_common()
        assert ranked[0][0] == "..."
        assert [word for word, _ in ranked[1:4]] == list(sample.answers)
        assert ranked[3][1] > ranked[4][1]
        for rank, (_, n) in enumerate(ranked[:4], 1):
            assert abs(n - ranked[0][1] / rank**2) <= 1
        assert len(counts) <= (length - 50) // 50


def test_questions_come_with_their_documents(tokenizer, data):
    squad, hotpot = (
        {s.task: s for s in Ruler(tasks="all", length=1024, n=6, data=data).samples(tokenizer)}[t] for t in ("qa_1", "qa_2")
    )
    assert squad.question.endswith("Question: What about 1 and 2?")  # number 6 of those that have an answer
    assert squad.answers == ("answer12", "the answer")
    assert hotpot.question.endswith("Question: What is fact 5?")
    for sample, depths in ((squad, 1), (hotpot, 2)):
        numbers = [int(n) for n in re.findall(r"Document (\d+):\n", sample.context)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(sample.meta["depths"]) == depths
        parts = re.split(r"Document \d+:\n", sample.context)[1:]
        gold = [part for part in parts if sample.answers[0] in part]
        assert gold[0] == parts[round(sample.meta["depths"][0] * len(parts) / 100)]
    assert len([part for part in parts if part.startswith("Title 5 ")]) >= 10


def test_near_documents_come_first_and_all_are_used_again(tokenizer, data):
    bench = Ruler(tasks="qa_1", n=1, data=data)
    setting = bench._setting("qa_1", 4096, tokenizer)
    for size in (0, 1, 2, 5, 11, 12, 30):
        found = re.findall(r"About (\d) and (\d)", bench._sample("qa_1", setting, 0, size).context)
        assert len(found) == size + 1
        assert ("0", "0") in found
        assert sum(article == "0" for article, _ in found[: size + 1]) >= min(size + 1, 3)
        assert len(set(found)) == min(size + 1, 12)


# --------------------------------------------------------------------------------------------------------------- BOS

# Token of the beginning, whether plain text gets it, and the chat template: each family's habit, with the bodies cut short.
FAMILIES = {
    "llama3": (
        "<|begin_of_text|>",
        True,
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
        "{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": ("<s>", True, "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"),
    "qwen": (
        None,
        False,
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    ),
    "smollm2": (  # its BOS is what every message begins with, and plain text does not get it
        "<|im_start|>",
        False,
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    ),
}


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Bytes as tokens, with a family's BOS and chat template."""
    bos, adds, template = FAMILIES[name]
    special = ["<|begin_of_text|>", "<s>", "<|im_start|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if adds:
        made.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=bos, additional_special_tokens=special)
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("chat", ["task", "never"])
@pytest.mark.parametrize("preset", ["official", "kvpress", "defensivekv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_bos_at_most_where_it_belongs(family, preset, chat):
    bos, adds, _ = FAMILIES[family]
    tokenizer = family_tokenizer(family)
    bench = Ruler(tasks=("niah_single_1", "vt", "fwe"), length=3072, n=1, preset=preset, chat=chat)
    for sample in bench.samples(tokenizer):
        prompt = render(sample, tokenizer, bench.rules)
        assert len(prompt) + sample.max_new_tokens <= 3072
        ids = prompt.context + prompt.question
        if bos is None:
            continue
        beginning = tokenizer.bos_token_id
        if family == "smollm2":  # one for each of the two messages, none of its own
            assert ids.count(beginning) == (2 if chat == "task" else 0)
            assert (ids[0] == beginning) == (chat == "task")
        else:
            wanted = adds and not (chat == "never" and preset == "defensivekv")
            assert ids.count(beginning) == wanted
            assert (ids[0] == beginning) == wanted
