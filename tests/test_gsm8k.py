"""GSM8K: the prompt, the two ways to compress it, and what counts as an answer."""

import json
import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from evals.gsm8k import GSM8K, ROWS, STOPS, flexible, gold_answer, strict
from evals.sample import render
from qevict.hf.loading import EMBEDDED, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
REAL = Path(os.environ.get("QEVICT_TEST_DATA") or ROOT.parent / "shared/data") / "gsm8k"
real = pytest.mark.skipif(not all((REAL / name).is_file() for name in ROWS), reason=f"no GSM8K in {REAL}")


def row(index, split="test"):
    total = f"{index + 1000:,}"
    return {
        "question": f"{split}: Ann has {index} pens and buys 1,000. How many?",
        "answer": f"She had {index}.\n\nNow {index}+1000 = <<{index}+1000={index + 1000}>>{total} pens.\n#### {total}",
    }


@pytest.fixture
def data(tmp_path):
    for split in ("test", "train"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row(i, split)) + "\n" for i in range(20)))
    return tmp_path


def text(sample):
    return sample.context + sample.instruction + sample.question + sample.answer_prefix


def test_the_prompt(data):
    benchmark = GSM8K(data=str(data), shots=2, n=5)
    samples = benchmark.samples(None)
    assert len(samples) == 5 and len({s.id for s in samples}) == 5
    pairs = text(samples[0]).split("\n\n")
    assert len(pairs) == 3 and all(p.startswith("Q: train: Ann has ") for p in pairs[:2])
    number = int(pairs[0].split("has ")[1].split(" ")[0])
    assert pairs[0] == (
        f"Q: train: Ann has {number} pens and buys 1,000. How many?\nA: She had {number}.\n"
        f"Now {number}+1000 = {number + 1000:,} pens.\nThe answer is {number + 1000}."
    )
    asked = samples[0].meta["row"]
    assert pairs[2] == f"Q: test: Ann has {asked} pens and buys 1,000. How many?\nA:"
    assert samples[0].answers == (str(asked + 1000),) and samples[0].stop == STOPS and samples[0].max_new_tokens == 512
    assert "<<" not in text(samples[0]) and not samples[0].question
    heads = {s.context.rpartition("Q: test")[0] for s in samples}
    assert len(heads) == 1 and GSM8K(data=str(data), shots=2, n=5).samples(None) == samples
    assert GSM8K(data=str(data), shots=2, n=5, seed=1).samples(None)[0].context[:40] != samples[0].context[:40]
    assert text(GSM8K(data=str(data), shots=0, n=20).samples(None)[3]) == f"Q: {row(3)['question']}\nA:"


def test_exemplars_as_context(data):
    benchmark = GSM8K(data=str(data), split="exemplars", n=3)
    whole = GSM8K(data=str(data), n=3)
    assert benchmark.rules.protocol == "agnostic" and whole.rules.protocol == "aware"
    for sample, other in zip(benchmark.samples(None), whole.samples(None), strict=True):
        assert text(sample) == text(other) and sample.question.startswith("Q: test") and sample.context.endswith(".\n\n")
    tokenizer = load_tokenizer(EMBEDDED)
    prompt = render(benchmark.samples(None)[0], tokenizer, benchmark.rules)
    assert tokenizer.decode(prompt.question).startswith("Q: test") and tokenizer.decode(prompt.question).endswith("A:")
    assert render(whole.samples(None)[0], tokenizer, whole.rules).question == ()


def test_a_chat_only_if_asked(data):
    tokenizer = load_tokenizer(EMBEDDED)
    for fields, end in (({}, "A:"), ({"chat": "always"}, "A:<|im_end|>\n<|im_start|>assistant\n"),
                        ({"chat": "always", "cue_side": "assistant"}, "<|im_start|>assistant\nA:")):  # fmt: skip
        benchmark = GSM8K(data=str(data), n=1, shots=1, **fields)
        shown = tokenizer.decode(render(benchmark.samples(None)[0], tokenizer, benchmark.rules).context)
        assert shown.endswith(end) and ("<|im_start|>" in shown) == bool(fields)


def test_a_file_of_solved_problems(data, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        json.dumps({"question": "2+2?", "answer": "It is four. The answer is 4."}) + "\n" + json.dumps(row(1, "mine")) + "\n"
    )
    sample = GSM8K(data=str(data), exemplars=str(path), shots=2, n=1).samples(None)[0]
    assert sample.context.startswith("Q: 2+2?\nA: It is four. The answer is 4.\n\nQ: mine: Ann has 1 pens")
    (data / "train.jsonl").unlink()  # not read
    benchmark = GSM8K(data=str(data), exemplars=str(path), shots=1, n=1)
    assert list(benchmark.fingerprint()) == ["data_test.jsonl", "data_mine.jsonl"]
    with pytest.raises(ValueError, match=r"lower task\.shots=3"):
        GSM8K(data=str(data), exemplars=str(path), shots=3).samples(None)
    path.write_text(json.dumps({"question": "2+2?", "answer": "four"}) + "\n")
    with pytest.raises(ValueError, match="The answer is NUMBER"):
        GSM8K(data=str(data), exemplars=str(path), shots=1).samples(None)
    with pytest.raises(ValueError, match=r"task\.exemplars="):
        GSM8K(data=str(data), exemplars=str(tmp_path / "none"), shots=1).samples(None)


def test_missing_data_and_bad_fields(data, tmp_path):
    with pytest.raises(ValueError, match=r"python scripts/prepare.py gsm8k"):
        GSM8K(data=str(tmp_path / "none")).samples(None)
    with pytest.raises(ValueError, match=r"the model has 600 positions: lower task.shots or task.max_new_tokens"):
        GSM8K(data=str(data), n=1).items(load_tokenizer("smollm2-135m"), 600)
    with pytest.raises(ValueError, match=r"task.n=21: .*test.jsonl has 20 problems"):
        GSM8K(data=str(data), n=21).samples(None)
    (data / "test.jsonl").write_text(json.dumps({"question": "x", "answer": "18"}) + "\n")
    with pytest.raises(ValueError, match=r"row 0 needs a question, and an answer that ends in #### NUMBER$"):
        GSM8K(data=str(data)).samples(None)
    for fields in ({"n": 0}, {"shots": -1}, {"split": "x"}, {"max_new_tokens": 0}, {"preset": "kvpress"}):
        with pytest.raises(ValueError, match=f"task.{next(iter(fields))}="):
            GSM8K(**fields)
    with pytest.raises(ValueError, match=r"task\.protocol has to be agnostic"):
        GSM8K(split="exemplars", protocol="aware")
    with pytest.raises(ValueError, match=r"task\.split=whole"):
        GSM8K(split="exemplars", shots=0)


CASES = [  # text, reference, strict, flexible, numeric
    ("She has 3 * 6 = 18. The answer is 18.", "18", 1, 1, 1),
    ("The answer is 18", "18", 1, 1, 1),  # at the very end of the text
    ("The answer is 18.\n\nQ: Bob has 99 pens?\nA: The answer is 99.", "18", 1, 1, 1),  # an invented next problem
    ("The answer is $18.", "18", 1, 1, 1),
    ("The answer is $18.00.", "18", 0, 0, 1),
    ("The answer is 18.0", "18", 0, 0, 1),
    ("The answer is 1,800 dollars.", "1800", 1, 1, 1),
    ("The answer is **18**.", "18", 1, 1, 1),
    ("So the answer is: 18", "18", 1, 1, 1),
    ("That makes 18 pens", "18", 0, 1, 1),
    ("#### 18", "18", 0, 1, 1),
    ("18 ... and that is all ...", "18", 0, 1, 1),  # dots are no number
    ("The answer is -5.", "-5", 1, 1, 1),
    ("She loses money: -$5", "-5", 0, 1, 1),
    ("It is 20-15", "15", 0, 1, 1),  # no minus 15
    ("1,2,3", "3", 0, 1, 1),
    ("The answer is 17. No, it is 18", "18", 0, 1, 1),  # the first phrase counts, or the last number
    ("The answer is 18 because 2 * 9 = 18 and 1 + 1 = 2", "18", 1, 0, 0),
    ("The answer is .5", "0.5", 0, 0, 1),
    ("The answer is 180", "18", 0, 0, 0),
    ("I do not know", "18", 0, 0, 0),
    ("", "18", 0, 0, 0),
    ("The answer is 18<|im_end|>19", "18", 1, 1, 1),
    ("The answer is 2.5%", "2.5", 1, 1, 1),
]


@pytest.mark.parametrize(("said", "reference", "by_phrase", "by_last", "by_value"), CASES)
def test_what_counts_as_the_answer(data, said, reference, by_phrase, by_last, by_value):
    benchmark = GSM8K(data=str(data), n=1)
    sample = benchmark.samples(None)[0]
    object.__setattr__(sample, "answers", (reference,))
    scores = benchmark.score(sample, said)
    assert scores == {"score": by_value, "strict": by_phrase, "flexible": by_last, "numeric": by_value}


@real
def test_every_published_row_is_read_and_its_own_solution_counts():
    benchmark = GSM8K(data=str(REAL))
    samples = benchmark.samples(None)
    assert len(samples) == ROWS["test.jsonl"]
    rows = [json.loads(line) for line in (REAL / "test.jsonl").read_text("utf-8").split("\n") if line]
    for sample, published in zip(samples, rows, strict=True):
        assert gold_answer(published["answer"]) == sample.answers[0] == flexible(published["answer"])
        assert benchmark.score(sample, f" Well. The answer is {sample.answers[0]}.")["strict"] == 1
        assert text(sample).endswith(f"Q: {published['question'].strip()}\nA:")
    assert samples[0].context.count("\n\n") == 8 and samples[0].context.count("The answer is ") >= 8
    assert len(load_tokenizer(EMBEDDED)(text(samples[0])).input_ids) < 2000
    assert all(strict(pair) for pair in samples[0].context.split("\n\n")[:8])


def test_the_configuration_and_the_card(data):
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        config = compose("config", ["task=gsm8k", f"task.data={data}", "task.n=2", "task.split=exemplars"])
    benchmark = instantiate(config.task)
    assert len(benchmark.samples(None)) == 2
    card = benchmark.card()
    assert card["protocol"] == "agnostic" and card["shots"] == 8 and card["stop"] == list(STOPS)
    assert len(card["data_test.jsonl"]) == 64 and str(data) not in json.dumps(card)
