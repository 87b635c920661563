"""RULER's needle tasks: lengths, construction, reproducibility, scoring, errors. Offline, with a word-level tokenizer."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from evals import ruler
from evals.ruler import NOISE, TASKS, Essays, Ruler, largest
from evals.sample import Sample, render

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared/data"
ESSAYS = SHARED / "essays"
TEMPLATES = SHARED / "ruler/templates.json"
CHAT = "{% for m in messages %}<s> {{ m['role'] }} : {{ m['content'] }} </s> {% endfor %}<s> assistant :"
# Most tokens one more unit of haystack can take with the tokenizer below: a word of prose, or a line and its newline.
LARGEST_UNIT = {"essay": 64, "noise": 25, "needle": 32}
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+(?: \S+)?) is: (\S+)\.")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token per word or sign; BOS on plain text."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT
    return fast


def texts(samples: list[Sample]) -> list[tuple[str, str, str]]:
    return [(sample.context, sample.question, sample.answer_prefix) for sample in samples]


# ------------------------------------------------------------------------------------------------------------ length


@pytest.mark.parametrize("length", [512, 1024, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_length_is_kept_and_used(task, length, tokenizer):
    limit = length - 128
    for protocol in ("aware", "agnostic"):
        for sample in Ruler(tasks=(task,), length=length, n=2, protocol=protocol).samples(tokenizer):
            tokens = len(render(sample, tokenizer, protocol))
            assert limit - LARGEST_UNIT[TASKS[task].haystack] < tokens <= limit
            assert sample.meta["tokens"] == tokens
            assert sample.meta["length"] == length


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multivalue"])
def test_one_more_unit_does_not_fit(task, tokenizer):
    bench = Ruler(tasks=(task,), length=1024, n=1)
    (sample,) = bench.samples(tokenizer)
    size = next(size for size in range(1, 1024) if bench._sample(task, 0, size).context == sample.context)
    longer = bench._sample(task, 0, size + 1)
    assert ruler.count(longer, tokenizer) > 1024 - 128 >= ruler.count(sample, tokenizer)


def test_without_chat_template(tokenizer):
    for sample in Ruler(length=512, n=1, chat=False).samples(tokenizer):
        prompt = render(sample, tokenizer, "aware")
        plain = tokenizer(sample.context + sample.question + sample.answer_prefix).input_ids
        assert list(prompt.context) == plain
        assert len(prompt) <= 512 - 128


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


@pytest.mark.parametrize("task", TASKS)
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


@pytest.mark.parametrize("task", TASKS)
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


def test_same_seed_same_prompts(tokenizer):
    bench = Ruler(length=512, n=2)
    first, again = bench.samples(tokenizer), Ruler(length=512, n=2).samples(tokenizer)
    assert first == again
    ids = [sample.id for sample in first]
    assert ids[:2] == ["niah_single_1-0000", "niah_single_1-0001"]
    assert len(set(ids)) == len(ids) == 16
    other = replace(bench, seed=43).samples(tokenizer)
    assert not set(texts(first)) & set(texts(other))


def test_sample_depends_on_neither_task_list_nor_number(tokenizer):
    everything = {sample.id: sample for sample in Ruler(length=512, n=3).samples(tokenizer)}
    for sample in Ruler(tasks=("niah_multiquery", "niah_single_2"), length=512, n=2).samples(tokenizer):
        assert sample == everything[sample.id]


def test_protocols_share_the_text(tokenizer):
    aware, agnostic = (Ruler(length=512, n=2, protocol=p).samples(tokenizer) for p in ("aware", "agnostic"))
    assert texts(aware) == texts(agnostic)


def test_fingerprint_follows_the_data(tmp_path):
    plain = Ruler(tasks=("niah_single_1",)).fingerprint()
    assert set(plain) == {"generator", "words"}
    assert set(Ruler().fingerprint()) == {"generator", "words", "haystack", "punkt"}

    def of(folder: str, essay: str, prefix: str) -> dict[str, str]:
        path = tmp_path / folder
        path.mkdir()
        (path / "essay.txt").write_text(essay)
        niah = {**ruler.BUILTIN["niah"], "answer_prefix": prefix}
        (path / "templates.json").write_text(json.dumps({"templates": {"niah": niah}}))
        return Ruler(haystack=str(path), templates=str(path / "templates.json")).fingerprint()

    one, moved, essay, prefix = of("a", "x.", " p"), of("b", "x.", " p"), of("c", "y.", " p"), of("d", "x.", " q")
    assert one == moved
    assert one["haystack"] != essay["haystack"]
    assert one["templates"] != prefix["templates"]
    assert str(tmp_path) not in json.dumps(one)


def test_config_holds_the_defaults():
    config = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/task/ruler.yaml"))
    assert config.pop("_target_") == "evals.ruler.Ruler"
    assert config["seed"] == "${seed}"  # one seed for the run
    config["seed"] = Ruler().seed
    assert set(config) == set(Ruler.__dataclass_fields__)
    assert Ruler(**config) == Ruler()


# ----------------------------------------------------------------------------------------------------- official data


@pytest.mark.skipif(not TEMPLATES.is_file(), reason="official RULER templates are not in ../shared/data/ruler")
def test_official_templates(tokenizer):
    samples = {s.task: s for s in Ruler(length=512, n=1, templates=str(TEMPLATES)).samples(tokenizer)}
    single, multi = samples["niah_single_3"], samples["niah_multiquery"]
    assert single.context.startswith("A special magic uuid is hidden within the following text. ")
    assert multi.context.startswith("Some special magic numbers are hidden within the following text. ")
    key = NEEDLE.search(single.context)[2]
    assert single.question == f"What is the special magic uuid for {key} mentioned in the provided text?"
    assert single.answer_prefix == f" The special magic uuid for {key} mentioned in the provided text is"
    assert multi.question.startswith("What are all the special magic numbers for ")
    assert multi.question.count(", ") == 3
    assert ", and " in multi.question


@pytest.mark.skipif(not ESSAYS.is_dir(), reason="the essays are not in ../shared/data/essays")
def test_official_essays(tokenizer):
    for sample in Ruler(tasks=("niah_single_2", "niah_multikey_1"), n=2, haystack=str(ESSAYS)).samples(tokenizer):
        assert 4096 - 128 - LARGEST_UNIT["essay"] < len(render(sample, tokenizer, "aware")) <= 4096 - 128
        assert all(answer in sample.context for answer in sample.answers)


# ----------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize(
    ("answers", "prediction", "score"),
    [
        (("1234567",), " 1234567.", 1.0),
        (("1234567",), "123 4567", 0.0),
        (("1234567",), "", 0.0),
        (("AbC-d",), "it is aBc-D", 1.0),
        (("1", "2", "3", "4"), "1, 3 and 5", 0.5),
        (("1234567",), "\x00\x1f1234567\x07", 1.0),
        (("1234567",), "123\x004567", 0.0),  # a control character becomes a newline; it is not dropped
    ],
)
def test_score(answers, prediction, score):
    sample = Sample("x", "niah_single_1", "", "", "", answers, 128)
    assert Ruler().score(sample, prediction) == {"score": score}


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": ("niah_single_1", "niah_single_9")}, r"niah_single_9.*niah_multiquery"),
        ({"tasks": ()}, r"task\.tasks=\[\].*niah_single_1"),
        ({"tasks": ("niah_single_1", "niah_single_1")}, "each once"),
        ({"n": 0}, r"task\.n=0: .*1 or more"),
        ({"max_new_tokens": 0}, r"task\.max_new_tokens=0: .*1 or more"),
        ({"protocol": "blind"}, r"task\.protocol='blind': choose aware or agnostic"),
        ({"haystack": "no/such/folder"}, r"task\.haystack='no/such/folder'.*\*\.txt"),
        ({"templates": "no/such/file.json"}, r"task\.templates='no/such/file\.json'.*builtin"),
    ],
)
def test_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Ruler(**fields)


def test_empty_haystack_folder(tmp_path):
    with pytest.raises(ValueError, match=r"has no text.*\*\.txt"):
        Ruler(haystack=str(tmp_path))
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match="has no text"):
        Ruler(haystack=str(tmp_path))
    Ruler(tasks="niah_single_1", haystack=str(tmp_path))  # reads no prose


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "'templates' key"),
        ("{}", "'templates' key"),
        ('{"templates": {}}', r"lacks templates\.niah\.template"),
        ('{"templates": {"niah": {"template": "x"}}}', r"lacks templates\.niah\.answer_prefix"),
        ('{"templates": {"niah": {"template": "{context} Why?", "answer_prefix": ""}}}', "What are all"),
        ('{"templates": {"niah": {"template": "What are all the special magic", "answer_prefix": ""}}}', "{context}"),
    ],
)
def test_bad_template_file(content, message, tmp_path):
    path = tmp_path / "templates.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Ruler(templates=str(path))


@pytest.mark.parametrize("task", TASKS)
def test_length_too_small_names_the_smallest(task, tokenizer):
    bench = Ruler(tasks=(task,), length=130, n=3)
    with pytest.raises(ValueError, match=rf"task\.length=130 is too small for {task}") as error:
        bench.samples(tokenizer)
    smallest = int(re.search(r"set it to (\d+) tokens", str(error.value))[1])
    assert len(replace(bench, length=smallest).samples(tokenizer)) == 3
    with pytest.raises(ValueError, match="too small"):
        replace(bench, length=smallest - 1).samples(tokenizer)
