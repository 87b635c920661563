"""RULER's 13 tasks: lengths, construction, reproducibility, scoring, errors. Offline, with a word-level tokenizer."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from evals.data import sha256
from evals.ruler import GROUPS, TASKS, Ruler
from evals.ruler.haystack import NOISE, Essays
from evals.ruler.sizing import largest
from evals.ruler.templates import BUILTIN
from evals.sample import Rules, Sample, render
from qevict.hf.loading import EMBEDDED, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("QEVICT_TEST_DATA") or ROOT.parent / "shared/data")
ESSAYS = SHARED / "essays"
TEMPLATES = SHARED / "ruler/templates.json"
CHAT = "{% for m in messages %}<s> {{ m['role'] }} : {{ m['content'] }} </s> {% endfor %}<s> assistant :"
NIAH = GROUPS["niah"]
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+(?: \S+)?) is: (\S+)\.")
# Most tokens one more unit of haystack takes with the embedded tokenizer, where that is more than 1 % of a short prompt.
LARGEST_UNIT = {"niah_single_1": 26, "niah_multikey_2": 29, "niah_multikey_3": 87, "vt": 26, "fwe": 20, "qa_1": 60, "qa_2": 60}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token per word or sign; BOS on plain text."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT
    return fast


def write_questions(folder: Path) -> str:
    """The two question files in their published form, made up."""

    def paragraph(article: int, part: int) -> dict:
        answers = [{"text": f"answer{article}{part}"}, {"text": f"answer{article}{part}"}, {"text": "the answer"}]
        return {
            "context": f"About {article} and {part}: the answer is answer{article}{part}.",
            "qas": [
                {"question": "Is there none?", "answers": [], "is_impossible": True},
                {"question": f"What about {article} and {part}?", "answers": answers, "is_impossible": False},
            ],
        }

    articles = [{"title": f"T{a}", "paragraphs": [paragraph(a, p) for p in range(3)]} for a in range(4)]
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    rows = [
        {
            "question": f"What is fact {i}?",
            "answer": f"word{i}",
            "context": [[f"Title {i} {j}", ["It is ", f"word{i}." if j == 3 else "nothing."]] for j in range(10)],
            "supporting_facts": [[f"Title {i} 3", 1], [f"Title {i} 7", 0], [f"Title {i} 3", 0]],
        }
        for i in range(8)
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(rows))
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@pytest.fixture(scope="module")
def embedded() -> PreTrainedTokenizerFast:
    return load_tokenizer(EMBEDDED)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_questions(tmp_path_factory.mktemp("ruler"))


def texts(samples: list[Sample]) -> list[tuple[str, str, str]]:
    return [(sample.context, sample.question, sample.answer_prefix) for sample in samples]


# ------------------------------------------------------------------------------------------------------------ length


@pytest.mark.parametrize("length", [1024, 4096, 8192])
@pytest.mark.parametrize("task", TASKS)
def test_length_is_kept_and_used(task, length, embedded, data):
    for protocol in ("aware", "agnostic"):
        bench = Ruler(tasks=(task,), length=length, n=2, protocol=protocol, data=data)
        for sample in bench.samples(embedded):
            tokens = len(render(sample, embedded, bench.rules))
            total = tokens + sample.max_new_tokens
            assert length - max(length // 100, LARGEST_UNIT.get(task, 0)) <= total <= length
            assert sample.meta["tokens"] == tokens
            assert sample.meta["length"] == length
            assert sample.max_new_tokens == (128 if task in NIAH else {"vt": 30, "cwe": 120, "fwe": 50}.get(task, 32))
            assert all(answer in sample.context for answer in sample.answers)


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multivalue", "vt", "cwe", "fwe", "qa_1", "qa_2"])
def test_one_more_unit_does_not_fit(task, tokenizer, data):
    bench = Ruler(tasks=(task,), length=1024, n=1, data=data)
    setting = bench._setting(task, 1024, tokenizer)
    size, sample = bench._fitted(task, setting, tokenizer, 0, 8)
    assert texts([sample]) == texts(bench.samples(tokenizer))
    longer = bench._counts(bench._sample(task, setting, 0, size + 1), tokenizer)
    assert max(longer.values()) > setting.budget >= sample.meta["tokens"]


def test_other_limits_leave_other_room(tokenizer):
    for changes in ({"max_new_tokens": 64}, {"extra_new_tokens": 20}, {"max_new_tokens": 60, "extra_new_tokens": 4}):
        bench = Ruler(tasks=("niah_single_2", "fwe"), length=512, n=1, **changes)
        for sample in bench.samples(tokenizer):
            assert sample.max_new_tokens == changes.get("max_new_tokens", TASKS[sample.task].new_tokens)
            total = len(render(sample, tokenizer, bench.rules)) + sample.max_new_tokens + changes.get("extra_new_tokens", 0)
            assert 512 - 6 <= total <= 512


def test_without_chat_template(tokenizer):
    bench = Ruler(length=2048, n=1, chat="never")
    for sample in bench.samples(tokenizer):
        prompt = render(sample, tokenizer, bench.rules)
        plain = tokenizer(sample.context + sample.question + sample.answer_prefix).input_ids
        assert list(prompt.context) == plain
        assert len(prompt) <= 2048 - sample.max_new_tokens


@pytest.mark.parametrize("slope", [1, 3, 40])
@pytest.mark.parametrize("guess", [1, 2, 50, 5000])
def test_search_finds_the_largest_size(slope, guess):
    counts = []

    def tokens(size: int) -> int:
        counts.append(size)
        return slope * size + 17 * (size // 29) + 5

    size = largest(tokens, 1, 900, guess)
    assert tokens(size) <= 900 < tokens(size + 1)
    assert len(counts) < 14


def test_search_stands_a_count_that_stands_still():
    assert largest(lambda size: size // 8, 0, 100, 1) == 807


def test_prose_is_cut_and_repeated_by_words():
    prose = Essays(("a b c.", "d e."), (3, 5))
    assert prose.first(3) == ["a b c."]
    assert prose.first(4) == ["a b c.", "d"]
    assert prose.first(12) == ["a b c.", "d e.", "a b c.", "d e.", "a b"]


def test_short_essays_are_repeated(tmp_path, tokenizer):
    (tmp_path / "one.txt").write_text("It rained all day. Nobody\ncame to the shop.")
    (sample,) = Ruler(tasks=("niah_single_2",), length=1024, n=1, haystack=str(tmp_path)).samples(tokenizer)
    assert sample.context.count("Nobody came to the shop.") > 50


# ------------------------------------------------------------------------------------------------------ construction


@pytest.mark.parametrize("task", NIAH)
def test_prompt_parts(task, tokenizer):
    for sample in Ruler(tasks=(task,), length=1024, n=3).samples(tokenizer):
        assert sample.task == task
        one = len(sample.answers) == 1
        assert sample.question.startswith(f"What {'is' if one else 'are all'} the special magic ")
        assert sample.answer_prefix.startswith(" ")
        assert sample.answer_prefix.endswith(" is" if one else " are")
        assert sample.context.endswith("\n")
        assert all(answer in sample.context for answer in sample.answers)
        found = {value: key for _, key, value in NEEDLE.findall(sample.context)}
        for answer in sample.answers:
            assert found[answer] in sample.question
            assert found[answer] in sample.answer_prefix
        assert len(sample.meta["depths"]) == len(sample.answers)


@pytest.mark.parametrize("task", NIAH)
def test_numbers_of_needles(task, tokenizer):
    (sample,) = Ruler(tasks=(task,), length=1024, n=1).samples(tokenizer)
    needles = NEEDLE.findall(sample.context)
    keys, values = {key for _, key, _ in needles}, {value for _, _, value in needles}
    wanted = {  # needles, keys, answers; None: as many as fit
        "niah_single_1": (1, 1, 1),
        "niah_single_2": (1, 1, 1),
        "niah_single_3": (1, 1, 1),
        "niah_multikey_1": (4, 4, 1),
        "niah_multikey_2": (None, None, 1),
        "niah_multikey_3": (None, None, 1),
        "niah_multivalue": (4, 1, 4),
        "niah_multiquery": (4, 4, 4),
    }[task]
    if wanted[0]:
        assert (len(needles), len(keys)) == wanted[:2]
    else:
        assert len(needles) == len(keys) > 10
        assert sample.context.count("\n") == len(needles) + 1
    assert len(values) == len(needles)
    assert len(sample.answers) == wanted[2]
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
    assert all(re.fullmatch(uuid if TASKS[task].value == "uuids" else r"[1-9]\d{6}", value) for value in values)
    assert all(re.fullmatch(uuid, key) if TASKS[task].key == "uuids" else "-" in key for key in keys)
    assert (NOISE in sample.context) == (task == "niah_single_1")


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multivalue"])
def test_depth_is_where_the_answer_lies(task, tokenizer):
    samples = Ruler(tasks=(task,), length=4096, n=12).samples(tokenizer)
    for sample in samples:
        for answer, depth in zip(sample.answers, sample.meta["depths"], strict=True):
            # Depth counts sentences, which differ in length, so characters agree only roughly.
            assert abs(100 * sample.context.index(answer) / len(sample.context) - depth) < 15
    depths = [sample.meta["depths"][0] for sample in samples]
    assert min(depths) < 40
    assert max(depths) > 60


# --------------------------------------------------------------------------------------------------- reproducibility


def test_same_seed_same_prompts(tokenizer, data):
    bench = Ruler(tasks="all", length=1024, n=2, data=data)
    first, again = bench.samples(tokenizer), replace(bench).samples(tokenizer)
    assert first == again
    ids = [sample.id for sample in first]
    assert ids[:2] == ["niah_single_1-0000", "niah_single_1-0001"]
    assert len(set(ids)) == len(ids) == 26
    other = replace(bench, seed=43).samples(tokenizer)
    assert not {text[0] for text in texts(first)} & {text[0] for text in texts(other)}


def test_sample_depends_on_neither_task_list_nor_number(tokenizer, data):
    everything = {sample.id: sample for sample in Ruler(tasks="all", length=1024, n=3, data=data).samples(tokenizer)}
    tasks = ("qa_1", "niah_multiquery", "fwe", "vt", "niah_single_2", "qa_2", "cwe")
    for sample in Ruler(tasks=tasks, length=1024, n=2, data=data).samples(tokenizer):
        assert sample == everything[sample.id]


def test_needles_are_those_of_the_first_generator(tokenizer):
    """Version 2 kept the text of the first version's tasks. This one depends on no word list."""
    samples = Ruler(tasks="niah_multikey_3", length=1024, n=3).samples(tokenizer)
    assert sha256(json.dumps(texts(samples)).encode()) == "08ec7d88654b0e81c7676d11415eeb5f03c75a373cc5f3e08cb7a4623db9b2b7"


def test_protocols_share_the_text(tokenizer, data):
    common = {"tasks": "all", "length": 1024, "n": 2, "data": data}
    aware, agnostic = (Ruler(protocol=p, **common).samples(tokenizer) for p in ("aware", "agnostic"))
    assert texts(aware) == texts(agnostic)


def test_presets():
    assert Ruler().rules == Rules("aware", cue_side="assistant")
    for preset in ("kvpress", "defensivekv"):
        rules = Ruler(preset=preset).rules
        assert (rules.protocol, rules.cue_side, rules.extra_new_tokens) == ("agnostic", "assistant", 0)
    card = Ruler(preset="kvpress", tasks="fwe", max_new_tokens=60).card()
    assert card["raw_suffix"] == "\n"
    assert (card["tasks"], card["max_new_tokens"], card["length"]) == (["fwe"], 60, 4096)


def test_fingerprint_follows_the_data(tmp_path, data):
    plain = Ruler(tasks=("niah_single_1",)).fingerprint()
    assert set(plain) == {"generator", "words"}
    assert set(Ruler(tasks="all", data=data).fingerprint()) == {
        "generator",
        "words",
        "haystack",
        "punkt",
        "squad.json",
        "hotpotqa.json",
    }

    def of(folder: str, essay: str, prefix: str) -> dict[str, str]:
        path = tmp_path / folder
        path.mkdir()
        (path / "essay.txt").write_text(essay)
        niah = {**BUILTIN["niah"], "answer_prefix": prefix}
        (path / "templates.json").write_text(json.dumps({"templates": {"niah": niah}}))
        bench = Ruler(tasks="niah", haystack=str(path), templates=str(path / "templates.json"))
        assert str(tmp_path) not in json.dumps(bench.card())
        return bench.fingerprint()

    one, moved, essay, prefix = of("a", "x.", " p"), of("b", "x.", " p"), of("c", "y.", " p"), of("d", "x.", " q")
    assert one == moved
    assert one["haystack"] != essay["haystack"]
    assert one["templates"] != prefix["templates"]


def test_config_holds_the_defaults():
    config = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/task/ruler.yaml"))
    assert config.pop("_target_") == "evals.ruler.Ruler"
    assert config["seed"] == "${seed}"  # one seed for the run
    config["seed"] = Ruler().seed
    assert set(config) == {field.name for field in fields(Ruler)}
    assert Ruler(**config) == Ruler()


# ----------------------------------------------------------------------------------------------------- official data


@pytest.mark.skipif(not TEMPLATES.is_file(), reason=f"no official RULER templates in {SHARED}/ruler")
def test_official_templates(tokenizer, data):
    bench = Ruler(tasks="all", length=1024, n=1, templates=str(TEMPLATES), data=data)
    samples = {s.task: s for s in bench.samples(tokenizer)}
    single, multi = samples["niah_single_3"], samples["niah_multiquery"]
    assert single.context.startswith("A special magic uuid is hidden within the following text. ")
    assert multi.context.startswith("Some special magic numbers are hidden within the following text. ")
    key = NEEDLE.search(single.context)[2]
    assert single.question == f"What is the special magic uuid for {key} mentioned in the provided text?"
    assert single.answer_prefix == f" The special magic uuid for {key} mentioned in the provided text is"
    assert multi.question.startswith("What are all the special magic numbers for ")
    assert multi.question.count(", ") == 3
    assert ", and " in multi.question
    # each example ends as its answers do, and the prompt proper begins with the template's first words
    assert re.search(r"they are:  [A-Z]{3}( [A-Z]{3}){4}\n\nMemorize and track", samples["vt"].context)
    assert re.search(r"in the list are: 1\. \S.* 10\. \S+\nBelow is a numbered", samples["cwe"].context)
    assert samples["vt"].answer_prefix.endswith("they are: ")
    assert samples["fwe"].question.startswith("Question: Do not provide any explanation.")
    for task in ("qa_1", "qa_2"):
        assert samples[task].context.startswith("Answer the question based on the given documents.")
        assert samples[task].question.startswith("Answer the question based on the given documents.")
        assert samples[task].answer_prefix == " Answer:"
    source = json.loads(TEMPLATES.read_text("utf-8"))["templates"]
    for task in TASKS.values():
        assert task.new_tokens == source[task.family]["tokens_to_generate"]


@pytest.mark.skipif(not ESSAYS.is_dir(), reason=f"no essays in {SHARED}")
def test_official_essays(embedded):
    for sample in Ruler(tasks=("niah_single_2", "niah_multikey_1"), n=2, haystack=str(ESSAYS)).samples(embedded):
        assert 4096 - 40 <= sample.meta["tokens"] + 128 <= 4096
        assert all(answer in sample.context for answer in sample.answers)
