"""LongBench: prompts equal to the official ones byte for byte, scores equal to the official scorer's, every layout of the data."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from zipfile import ZipFile

import pyarrow
import pyarrow.parquet
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from evals.data import MANIFEST, parse_jsonl, spread
from evals.longbench import LIMITS, PROMPTS, TASKS, LongBench, cut_template, find_config, split_cue
from evals.sample import render
from evals.text_metrics import classification, qa_f1, rouge_l
from qevict.hf.loading import EMBEDDED, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
REAL = Path(os.environ.get("QEVICT_TEST_DATA") or ROOT.parent / "shared/data") / "longbench"
GOLDEN = json.loads((ROOT / "tests/golden/longbench_scores.json").read_text("utf-8"))
FEW_SHOT = [name for name, task in TASKS.items() if task.few_shot]

real_config = pytest.mark.skipif(find_config(REAL, PROMPTS) is None, reason=f"no official LongBench configuration in {REAL}")
real_rows = pytest.mark.skipif(not (REAL / "multi_news.jsonl").is_file(), reason=f"no official LongBench rows in {REAL}")


def template(name):
    """A template with the official ones' structure, in other words."""
    if TASKS[name].few_shot:
        return "Here is how.\n\n{context}\n" + ("" if name == "trec" else "\n") + "{input}"
    space = " " if name == "qasper" else ""
    asked = TASKS[name].question
    if asked == "Now, write":
        return f"Read {name}.\n\nText:\n{{context}}\n\nNow, write it down.\n\n{TASKS[name].cue}"
    return f"Read {name}.\n\nText: {{context}}\n\n{space}Answer it; never say Answer: twice.\n\n{asked}\n{TASKS[name].cue}"


def row(name, index):
    asked = f"What is {{number}} {index}?"
    if TASKS[name].few_shot:
        asked = f"Question: {asked}\n{TASKS[name].cue}" + (" " if name == "samsum" and index % 2 else "")
    return {
        "input": "" if TASKS[name].question == "Now, write" else asked,
        "context": f"Row {index} of {name}: {{context}} Question: {{input}} Answer: none.\u2028More\x85text \\ “é”.\n",
        "answers": [f"number {index}", "City"],
        "length": 12 + index,
        "dataset": name,
        "language": "en",
        "all_classes": ["City", "Country"] if name == "trec" else None,
        "_id": f"{index:048x}",
    }


def jsonl(rows):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)


def write_config(folder, templates=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROMPTS).write_text(json.dumps(templates or {name: template(name) for name in TASKS}))
    (folder / LIMITS).write_text(json.dumps({name: task.limit for name, task in TASKS.items()}))


@pytest.fixture
def data(tmp_path):
    """Three rows of each task, as the official archive has them, and templates of our own."""
    write_config(tmp_path / "config")
    for name in TASKS:
        (tmp_path / f"{name}.jsonl").write_text(jsonl(row(name, i) for i in range(3)), "utf-8")
    return tmp_path


def text(sample):
    return sample.context + sample.instruction + sample.question + sample.answer_prefix


# ------------------------------------------------------------------------------------------------------------ prompts


def check_prompts(benchmark, templates, folder):
    samples = benchmark.samples(None)
    rows = {name: parse_jsonl((folder / f"{name}.jsonl").read_bytes(), name) for name in TASKS}
    for sample in samples:
        official = rows[sample.task][sample.meta["row"]]
        expected = templates[sample.task].format(**official)
        if sample.task == "qasper" and benchmark.preset == "defensivekv":
            expected = expected.replace("\n\n Answer", "\n\nAnswer")
        assert text(sample) == expected
        assert sample.context.endswith(official["context"] + ("\n" if sample.task == "trec" else "\n\n"))
        assert sample.answer_prefix.strip() == TASKS[sample.task].cue
        assert bool(sample.instruction) == ("{input}" in TASKS[sample.task].question and sample.task not in FEW_SHOT)
        assert sample.chat == (sample.task not in FEW_SHOT) and sample.max_new_tokens == TASKS[sample.task].limit
        assert sample.newline_stops == (sample.task == "samsum" and benchmark.preset != "kvpress")
    assert len(samples) == 3 * len(TASKS) == len({s.id for s in samples})


@pytest.mark.parametrize("preset", ["official", "kvpress", "defensivekv"])
def test_the_parts_of_a_prompt_join_to_the_template(data, preset):
    check_prompts(LongBench(data=str(data), preset=preset), {name: template(name) for name in TASKS}, data)


@real_config
@pytest.mark.parametrize("preset", ["official", "kvpress", "defensivekv"])
def test_the_parts_of_a_prompt_join_to_the_official_template(data, preset):
    templates = json.loads(find_config(REAL, PROMPTS).read_text("utf-8"))
    check_prompts(LongBench(data=str(data), preset=preset, templates=str(REAL / "config")), templates, data)
    limits = json.loads(find_config(REAL, LIMITS).read_text("utf-8"))
    assert {name: limits[name] for name in TASKS} == {name: task.limit for name, task in TASKS.items()}


@real_rows
@real_config
def test_official_rows_of_multi_news():
    benchmark = LongBench(tasks=("multi_news",), data=str(REAL))
    samples = benchmark.samples(None)
    rows = parse_jsonl((REAL / "multi_news.jsonl").read_bytes(), "multi_news")
    official = json.loads(find_config(REAL, PROMPTS).read_text("utf-8"))["multi_news"]
    assert [text(s) for s in samples] == [official.format(**r) for r in rows] and len(samples) == 200
    assert benchmark.score(samples[0], samples[0].answers[0])["score"] == pytest.approx(1, abs=1e-6)
    assert 0 < benchmark.score(samples[0], samples[1].answers[0])["score"] < 0.5


def test_presets_put_instruction_and_cue_where_their_projects_do(data):
    tokenizer = load_tokenizer(EMBEDDED)

    def pieces(name, preset, **fields):
        benchmark = LongBench(tasks=(name,), data=str(data), preset=preset, **fields)
        prompt = render(benchmark.samples(None)[0], tokenizer, benchmark.rules)
        return tokenizer.decode(prompt.context), tokenizer.decode(prompt.question), benchmark

    context, question, _ = pieces("hotpotqa", "official")
    assert context.count("<|im_start|>user") == 1 and not question
    assert "\nAnswer:<|im_end|>\n<|im_start|>assistant\n" in context
    context, question, benchmark = pieces("hotpotqa", "kvpress")
    assert context.endswith("never say Answer: twice.\n\n") and question.startswith("Question: What is")
    assert question.endswith("<|im_start|>assistant\nAnswer:") and benchmark.rules.extra_new_tokens == 20
    context, question, _ = pieces("hotpotqa", "defensivekv")
    assert question.startswith("Answer it; never") and question.endswith("\nAnswer:<|im_end|>\n<|im_start|>assistant\n")
    context, question, _ = pieces("trec", "defensivekv")
    assert context.startswith("Here is how.") and question == "Question: What is {number} 0?\nType:"
    context, question, _ = pieces("trec", "kvpress")
    assert "<|im_start|>user" in context and question.endswith("assistant\nType:")
    _, question, _ = pieces("trec", "kvpress", chat="never")
    assert question.endswith("0?\n\nType:")  # their suffix where there is no template
    assert LongBench(preset="kvpress", newline_stops=True)._newline_stops


def test_a_long_prompt_loses_its_middle(data):
    tokenizer = load_tokenizer(EMBEDDED)
    benchmark = LongBench(tasks=("hotpotqa",), data=str(data), max_length=64)
    sample = benchmark.samples(None)[0]
    sample = replace(sample, context=sample.context.replace("Row 0", "Row 0" + " and on" * 200))
    prompt = render(sample, tokenizer, benchmark.rules, benchmark.max_length)
    shown = tokenizer.decode(prompt.context)
    assert prompt.cut > 150 and "Read hotpotqa." in shown and shown.rstrip().endswith("Answer:<|im_end|>\n<|im_start|>assistant")


@pytest.mark.parametrize(
    "bad", ["{input} alone", "{context} alone", "{context}\n\nQuestion: {input} no cue", "Question: {input}\nAnswer: {context}"]
)
def test_a_template_that_cannot_be_cut_is_named(bad):
    with pytest.raises(ValueError, match="template of hotpotqa needs"):
        cut_template(bad, "hotpotqa")


def test_a_place_that_rows_do_not_fill_is_named(data):
    write_config(data / "config", {name: template(name).replace("Read", "{nothing}") for name in TASKS})
    with pytest.raises(ValueError, match="'nothing'"):
        LongBench(tasks=("hotpotqa",), data=str(data)).samples(None)


# --------------------------------------------------------------------------------------------------------------- data


def formatted_rows(name, count=2):
    """What kvpress' script makes of official rows; in samsum the cue stays where white space follows it."""
    made = []
    for i in range(count):
        official = row(name, i)
        parts = cut_template(template(name), name)
        cue = TASKS[name].cue
        made.append(
            {k: v for k, v in official.items() if k != "input"}
            | {
                "context": (parts.context + parts.instruction).format(**official),
                "question": parts.question.format(**official).removesuffix(cue),
                "answer_prefix": cue,
                "task": name,
                "max_new_tokens": TASKS[name].limit + 20,
            }
        )
    return made


def test_every_layout_gives_the_same_prompts(tmp_path, data):
    reference = LongBench(data=str(data), n=2, seed=1).samples(None)
    (tmp_path / "a").mkdir()
    write_config(tmp_path / "a" / "LongBench/config")
    with ZipFile(tmp_path / "a/data.zip", "w") as archive:
        for name in TASKS:
            archive.writestr(f"data/{name}_e.jsonl", "{}")
            archive.writestr(f"data/{name}.jsonl", (data / f"{name}.jsonl").read_bytes())
    (tmp_path / "b/data").mkdir(parents=True)
    write_config(tmp_path / "b")
    for name in TASKS:
        (tmp_path / "b/data" / f"{name}.jsonl").write_bytes((data / f"{name}.jsonl").read_bytes())
    prints = LongBench(data=str(data)).fingerprint()
    for folder in ("a", "b"):
        benchmark = LongBench(data=str(tmp_path / folder), n=2, seed=1)
        assert benchmark.samples(None) == reference and benchmark.fingerprint() == prints


def test_formatted_rows_are_not_wrapped_again_and_no_cue_is_doubled(tmp_path):
    for name in TASKS:
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(formatted_rows(name)), tmp_path / name / "test-00000-of-00001.parquet"
        )
    benchmark = LongBench(data=str(tmp_path), preset="kvpress")
    for sample in benchmark.samples(None):
        expected = template(sample.task).format(**row(sample.task, sample.meta["row"]))
        assert text(sample) == expected.rstrip()  # samsum's white space behind the cue is lost in these rows
        assert sample.max_new_tokens == TASKS[sample.task].limit  # the preset adds its 20 by itself
        assert sample.answers == (f"number {sample.meta['row']}", "City")
    assert PROMPTS not in benchmark.fingerprint()
    assert len(LongBench(data=str(tmp_path), preset="official").samples(None)) == 24
    assert LongBench(data=str(tmp_path), preset="defensivekv", tasks=("samsum", "gov_report")).samples(None)
    with pytest.raises(ValueError, match="instruction_side=context"):
        LongBench(data=str(tmp_path), preset="defensivekv", tasks=("qasper",)).samples(None)


def test_split_cue():
    assert split_cue("a\nSummary: ", "Summary:") == ("a\n", "Summary: ")
    assert split_cue("Summary: a ", "Summary:") == ("Summary: a ", "")
    assert split_cue("a", "") == ("a", "")


def test_rows_are_spread_over_the_file(data):
    assert spread(200, None, "x") == spread(200, 200, "x") == spread(200, 999, "x") == list(range(200))
    for n in (1, 7, 150, 199):
        chosen = spread(200, n, "1/qasper")
        assert len(set(chosen)) == n and chosen == sorted(chosen) == spread(200, n, "1/qasper")
        assert {j - i for i, j in pairwise([-1, *chosen, 200])} <= set(range(1, 200 // n + 2)) or n == 1
    assert len({tuple(spread(200, 5, f"{seed}/qasper")) for seed in range(20)}) > 10
    with pytest.raises(ValueError, match=r"task.n=999: the largest of these tasks has \d+ rows"):
        LongBench(data=str(data), n=999, tasks=("trec", "samsum")).samples(None)
    ids = [s.id for s in LongBench(data=str(data), n=1, tasks=("trec", "samsum")).samples(None)]
    assert [i[:-4] for i in ids] == ["trec-", "samsum-"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "trec.jsonl").unlink(), "has no trec.jsonl; get it with `python scripts/prepare.py longbench`"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {"trec.jsonl": {"sha256": "0"}}}'), "not what manifest.json"),
        (lambda folder: ((folder / "trec.jsonl").rename(folder / "trec.parquet"),
            (folder / MANIFEST).write_text('{"files": {"trec.parquet": {"sha256": "0"}}}')), "not what manifest.json"),
        (lambda folder: (folder / "config" / PROMPTS).unlink(), f"has no {PROMPTS}; get it with"),
        (lambda folder: (folder / "config" / PROMPTS).write_text("{}"), "no entry for 'trec'"),
        (lambda folder: (folder / "config" / LIMITS).write_text('{"trec": "64"}'), "no int"),
        (lambda folder: (folder / "trec.jsonl").write_text(""), "no rows of trec"),
        (lambda folder: (folder / "trec.jsonl").write_text("[1]\n"), "line 1 is no JSON object"),
        (lambda folder: (folder / "trec.jsonl").write_text(jsonl([row("qasper", 0)])), "row 0 of trec has no usable all_classes"),
        (lambda folder: (folder / "trec.jsonl").write_text(jsonl([{"context": "x"}])), "no usable input, answers, all_classes"),
        (lambda folder: ((folder / "trec.jsonl").unlink(), (folder / "data.zip").write_text("x")), "is no zip file"),
        (lambda folder: ((folder / "trec.jsonl").unlink(), (folder / "trec.parquet").write_text("x")), "is no parquet file"),
    ],
)  # fmt: skip
def test_data_that_does_not_do_is_told_in_one_sentence(data, spoil, said):
    spoil(data)
    with pytest.raises(ValueError) as error:
        LongBench(tasks=("trec",), data=str(data)).samples(None)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "fields", [{"tasks": ("nothing",)}, {"tasks": ()}, {"tasks": ("trec", "trec")}, {"n": 0}, {"max_length": 1}, {"preset": "x"}]
)
def test_fields_that_do_not_do(fields):
    with pytest.raises(ValueError, match=f"task.{next(iter(fields))}="):
        LongBench(**fields)


def test_the_configuration_and_the_card(data):
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        config = compose("config", ["task=longbench", f"task.data={data}", "task.tasks=[trec,samsum]", "task.preset=kvpress"])
    benchmark = instantiate(config.task)
    assert benchmark.tasks == ("trec", "samsum") and benchmark.seed == 42
    assert tuple(compose_tasks()) == tuple(TASKS)
    card = benchmark.card()
    assert card["protocol"] == "agnostic" and card["rouge"] == "1.0.1" and len(card[PROMPTS]) == len(card["data_trec"]) == 64
    assert json.loads(json.dumps(card)) == card and str(data) not in json.dumps(card)


def compose_tasks():
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return compose("config", ["task=longbench"]).task.tasks


# -------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("name", list(GOLDEN["tasks"]))
def test_scores_equal_the_official_scorer(data, name):
    benchmark = LongBench(tasks=(name,), data=str(data))
    sample, golden = benchmark.samples(None)[0], GOLDEN["tasks"][name]
    scores = []
    for case in golden["cases"]:
        asked = replace(sample, answers=tuple(case["answers"]), classes=tuple(GOLDEN["classes"]))
        scores.append(benchmark.score(asked, case["prediction"])["score"])
        assert scores[-1] == case["score"], case
    assert len(scores) >= 20
    assert round(100 * sum(scores) / len(scores), 2) == golden["mean_x100"]


def test_text_that_overflows_the_official_scorer_is_scored_and_told(data):
    for count, official in GOLDEN["stack"].items():
        if int(count) > 600:
            continue  # known to be 0 from 600 on; a table of a million entries takes seconds
        made, answer = (" ".join(["same", *(f"{side}{i}" for i in range(int(count) - 1))]) for side in "pa")
        score, deep = rouge_l(made, answer)
        assert score == pytest.approx(1 / int(count), rel=1e-4)
        assert deep == (official == 0) and (deep or score == official)
        benchmark = LongBench(tasks=("multi_news",), data=str(data))
        told = benchmark.score(replace(benchmark.samples(None)[0], answers=(answer,)), made)
        assert told == {"score": score, "rouge_overflow": float(deep)}


def test_classes_are_dropped_as_the_official_scorer_does():
    # "Title" is dropped, and so the next one, also a part of the right name, is not looked at: it stays and halves the score
    assert classification("Title of a person", "Title of a person", ["Title", "person", "Title of a person"]) == 1 / 2
    assert classification("Title of a person", "Title of a person", ["Title", "Title of a person", "person"]) == 1


def test_words_in_any_order():
    rng = Random(0)
    vocabulary = ["the", "a", "red", "blue", "U.S.", "green!", "An", "é"]
    for _ in range(200):
        one, other = (" ".join(rng.choices(vocabulary, k=rng.randint(0, 8))) for _ in range(2))
        assert 0 <= qa_f1(one, other) == qa_f1(other, one) <= 1
