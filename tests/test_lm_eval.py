"""lm-eval's generation tasks through the bridge, held to lm-eval's own HFLM on the same weights. A tokenizer of single characters:
equal texts are equal tokens."""

import importlib
import json
import runpy
import string
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from conftest import VOCAB, build

pytest.importorskip("lm_eval", reason="lm-eval is not installed: ./setup.sh dev,lm-eval")

import datasets
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import evals.lm_eval_bridge as module
from baselines.fullkv import FullKV
from evals.benchmark import Session
from evals.lm_eval_bridge import Bridge, GenerationTasks, Harness
from qevict import QEvict, TierCache
from qevict.budget import Budget, BudgetError

ROOT = Path(__file__).resolve().parent.parent
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|end|>")
CHARACTERS = string.printable[:95] + "\n"
BOS, EOS, UNKNOWN, END = 1, 2, 3, 4
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TASK = """
task: toy
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}}}
output_type: {kind}
training_split: train
test_split: test
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_target: "{{{{answer}}}}"
num_fewshot: 2
generation_kwargs: {{until: ["\\n", "Q:"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list:
  - {{name: raw, filter: [{{function: take_first}}]}}
  - {{name: first, filter: [{{function: regex, regex_pattern: "(.)"}}, {{function: take_first}}]}}
metadata: {{version: 3.5}}
"""


def tokenizer_of(adds_bos=True):
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate((*SPECIAL, *CHARACTERS))}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT, clean_up_tokenization_spaces=False, **names)


@pytest.fixture(scope="module")
def tokenizer():
    assert len(SPECIAL) + len(CHARACTERS) == VOCAB
    return tokenizer_of()


def fresh(special=0):
    """A model whose text is varied; ``special`` is how strongly it says special tokens."""
    model = build("llama", seed=2, initializer_range=0.2)
    model.lm_head.weight.data[: len(SPECIAL)] *= special
    return model


def hflm(model, tokenizer):
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")


@pytest.fixture(scope="module")
def theirs(tokenizer):
    return hflm(fresh(), tokenizer)


@pytest.fixture(scope="module")
def model():
    return fresh()


def bridge_of(model, tokenizer, policy=None, budget=1.0):
    def new_cache(budget):
        return TierCache(model, policy or FullKV(), budget, "float32", "reference")

    return Bridge(Session(model, tokenizer, Budget(fraction=budget), new_cache))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Without lm-eval's list of installed packages: pip takes seconds to make it."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture
def ours(model, tokenizer):
    return bridge_of(model, tokenizer)


def instances(*asked, **arguments):
    """Requests of prompts, or of prompts with arguments of their own."""
    pairs = [a if isinstance(a, tuple) else (a, arguments) for a in asked]
    return [Instance("generate_until", {}, pair, 0, ("toy", i, 1)) for i, pair in enumerate(pairs)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A task of six questions of different lengths in local files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    rows = [{"question": f"{'the sky is wide, ' * (8 + i % 3)}say {i}?", "answer": CHARACTERS[i]} for i in range(9)]
    for name, part in (("train", rows[6:]), ("test", rows[:6])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/toy.yaml").write_text(TASK.format(folder=tmp_path, kind="generate_until"))
    return tmp_path


def evaluate(lm, folder, **options):
    manager = GenerationTasks(include_path=str(folder / "tasks"), include_defaults=False)
    return lm_eval.simple_evaluate(lm, tasks=["toy"], task_manager=manager, **options)


# ------------------------------------------------------------------------------------------------------- against lm-eval


@pytest.mark.parametrize("chat", [False, True])
def test_a_task_gives_what_it_gives_with_lm_evals_own_model(folder, ours, theirs, chat):
    mine, other = (evaluate(lm, folder, apply_chat_template=chat) for lm in (ours, theirs))
    for a, b in zip(mine["samples"]["toy"], other["samples"]["toy"], strict=True):
        assert a == b  # document, prompt, answers before and after the filters, scores
    assert mine["results"] == other["results"]
    answers = {s["resps"][0][0] for s in mine["samples"]["toy"]}
    assert len(answers) > 3  # the model does not say the same to everything
    prompt = mine["samples"]["toy"][0]["arguments"][0][0]
    assert prompt.startswith("<s>[user] Q: " if chat else "Q: ") and prompt.count("A:") == 3


def test_stop_texts_cut_as_in_lm_eval(ours, theirs):
    prompts = [f"{i} bottles of beer on the wall" for i in range(3)]
    free = ours.generate_until(instances(*prompts, max_gen_toks=30))
    assert free == theirs.generate_until(instances(*prompts, max_gen_toks=30), disable_tqdm=True)
    assert min(map(len, free)) > 12 and any(text.index(text[8]) == 8 for text in free)
    asked = []
    for prompt, text in zip(prompts, free, strict=True):
        asked += [
            (prompt, {"max_gen_toks": 30, "until": [text[8]]}),
            (prompt, {"max_gen_toks": 30, "until": [text[9:12], text[6:8]]}),  # the second one is met first
            (prompt, {"max_gen_toks": 30, "until": [text[8], text[7:9]]}),  # both end at once: the first one cuts
            (prompt, {"max_gen_toks": 30, "until": text[4:8]}),
            (prompt, {"max_new_tokens": 5, "until": []}),
            (prompt, {"max_gen_toks": 30, "until": ["not said"], "temperature": 1, "do_sample": False, "num_beams": 1}),
        ]
    mine = ours.generate_until(instances(*asked))
    assert mine == theirs.generate_until(instances(*asked), disable_tqdm=True)
    for i, text in enumerate(free):
        one, early, overlap, plain, short, whole = mine[6 * i : 6 * i + 6]
        assert one == text[: text.index(text[8])] and early == text[: min(text.index(text[6:8]), text.index(text[9:12]))]
        assert overlap == text[: text.index(text[8])]
        assert plain == text[: text.index(text[4:8])] and short == text[:5] and whole == text


def test_special_tokens_stop(tokenizer):
    """The end token, and a special token named as a stop text: neither is in the decoded text."""
    ours, theirs = bridge_of(fresh(3), tokenizer), hflm(fresh(3), tokenizer)
    prompts = [f"{c}{c} and so on" for c in "abcdefgh"]
    free = ours.generate_until(instances(*prompts, max_gen_toks=20))
    assert free == theirs.generate_until(instances(*prompts, max_gen_toks=20), disable_tqdm=True)
    assert {row["stopped"] for row in ours.rows.values()} == {"eos", "length"}
    mine = ours.generate_until(instances(*prompts, max_gen_toks=20, until=["<|end|>"]))
    assert mine == theirs.generate_until(instances(*prompts, max_gen_toks=20, until=["<|end|>"]), disable_tqdm=True)
    assert mine != free and all(text.startswith(cut) for text, cut in zip(free, mine, strict=True))
    for until, stops in (("<|end|>", {EOS, END}), ("nd|", {EOS, END}), ("k>", {EOS, UNKNOWN}), (None, {EOS}), ("", {EOS})):
        assert ours.request(instances("a", until=[until])[0]).stop.tokens == stops


def test_answers_come_in_the_order_of_the_requests(ours):
    asked = [("long " * 30, {"max_gen_toks": 9}), ("a", {"max_gen_toks": 3}), ("mid " * 9, {"max_gen_toks": 6})]
    together = ours.generate_until(instances(*asked))
    assert [ours.rows[f"toy-{i:04d}-0"]["new_tokens"] for i in range(3)] == [9, 3, 6]
    assert together == [ours.generate_until(instances(one))[0] for one in asked]


# --------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(("adds", "raw"), [(True, 1), (False, 0)])
def test_one_bos(model, adds, raw):
    tokenizer = tokenizer_of(adds)
    bridge = bridge_of(model, tokenizer)
    chat = bridge.apply_chat_template([{"role": "user", "content": "hi"}])
    assert chat == "<s>[user] hi\n[assistant] "
    for text, count in (("hi", raw), (chat, 1)):
        prompt = bridge.request(instances(text)[0]).prompt
        assert prompt.context.count(BOS) == count and not prompt.question
        assert tokenizer.decode(prompt.context) == ("<s>" * count + "hi" if text == "hi" else chat)


def test_an_open_last_message_and_the_name(ours):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So:"}]
    assert ours.apply_chat_template(messages, add_generation_prompt=False) == "<s>[user] hi\n[assistant] So:"
    assert "/" not in ours.tokenizer_name


# ---------------------------------------------------------------------------------------------------------------- budget


def test_bytes_stay_within_the_budget_and_are_beside_the_scores(folder, model, tokenizer):
    bridge = bridge_of(model, tokenizer, QEvict(), 0.3)
    results = evaluate(bridge, folder)
    module._add_bytes(results, bridge)
    of = results["results"]["toy"]
    rows = list(bridge.rows.values())
    assert len(rows) == 6 and all(0.15 < row["kv_ratio_peak"] <= 0.3 for row in rows)
    assert all(row["kv_bytes_peak"] <= row["budget_bytes"] for row in rows)
    # M_full in fp32: layers * (keys and values) * heads * dimension * 4 bytes for each token seen
    assert all(r["kv_bytes_peak"] <= 0.3 * 2 * 2 * 2 * 16 * 4 * (r["prompt_tokens"] + r["new_tokens"]) for r in rows)
    assert of["kv_ratio_peak"] == max(row["kv_ratio_peak"] for row in rows)
    assert of["kv_bytes_peak"] == sum(row["kv_bytes_peak"] for row in rows) / 6
    assert of["exact_match,first"] == sum(row["exact_match,first"] for row in rows) / 6
    assert rows[2]["answers"] == ["2"]


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"do_sample": True, "temperature": 0.7}, "greedy"),
        ({"temperature": 0.2}, "greedy"),
        ({"num_beams": 10}, "num_beams"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"max_gen_toks": 0}, "max_gen_toks=0"),
    ],
)
def test_what_is_not_greedy_is_refused_before_anything_is_generated(ours, arguments, words):
    with pytest.raises(ValueError, match=words):
        ours.generate_until(instances(("fine", {}), ("not", arguments)))
    assert not ours.rows


def test_what_does_not_fit_is_refused_before_anything_is_generated(ours, model, tokenizer):
    with pytest.raises(ValueError, match=r"toy-0001-0 needs 8193 tokens \(8093 prompt \+ 100 new\), the model has 8192 positions"):
        ours.generate_until(instances("fine", "x" * 8092, max_gen_toks=100))
    with pytest.raises(ValueError, match="empty prompt"):
        bridge_of(model, tokenizer_of(False)).generate_until(instances(""))
    small = bridge_of(model, tokenizer, QEvict(), 0.05)
    with pytest.raises(BudgetError, match="smallest workable"):
        small.generate_until(instances("x" * 4000, "a short one"))
    assert not ours.rows and not small.rows


def test_log_likelihoods_are_refused(folder, ours):
    for ask in (ours.loglikelihood, ours.loglikelihood_rolling):
        with pytest.raises(ValueError, match="only generation tasks"):
            ask([])
    (folder / "tasks/toy.yaml").write_text(TASK.format(folder=folder, kind="loglikelihood"))
    with pytest.raises(ValueError, match=r"^toy asks for log-likelihoods"):
        evaluate(ours, folder)


def test_a_template_that_is_missing_or_refuses_is_named(model):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(ValueError, match=r"refuses messages of system, user \(no system messages\): run without --chat"):
        bridge_of(model, tokenizer).apply_chat_template([{"role": r, "content": "x"} for r in ("system", "user")])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        bridge_of(model, tokenizer).apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "fields", [{"tasks": []}, {"limit": 0}, {"num_fewshot": -1}, {"files": "nowhere"}, {"limit": "x"}, {"chat": "x"}]
)
def test_wrong_fields_are_named(fields):
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match="no task" if name == "tasks" else str(value)):
        Harness(**{"tasks": ["toy"]} | fields)


# -------------------------------------------------------------------------------------------------------------- the script


@pytest.fixture
def command(folder, model, tokenizer, monkeypatch):
    """The script as a function of further arguments; its exit status."""
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])

    def call(*further, tasks="toy"):
        fixed = ["--include", str(folder / "tasks"), "--out", str(folder / "out"), f"model.path={folder / 'model'}"]
        monkeypatch.setattr(sys, "argv", ["lm_eval.py", *fixed, "backend=reference", *further, "--tasks", tasks, "progress=false"])
        return runpy.run_path(str(ROOT / "scripts/lm_eval.py"))["main"]()

    return call


def test_the_script_leaves_a_record_and_repeats_nothing(command, folder, capsys, monkeypatch):
    asked = ("--limit", "4", "--num-fewshot", "1", "--gen-kwargs", "max_gen_toks=7", "method=qevict", "budget=0.3")
    assert command(*asked) == 0
    table = capsys.readouterr().out
    assert "exact_match" in table and "kv ratio" in table
    where = Path(table.strip().splitlines()[-1].removeprefix("run: "))
    report = json.loads((where / "results.json").read_text())
    card, results = report["card"], report["results"]["toy"]
    assert 0 < results["kv_ratio_peak"] <= 0.3 and {"exact_match,raw", "exact_match,first"} <= results.keys()
    assert card["lm_eval"] == lm_eval.__version__ and card["method"] == "qevict" and card["budget"] == "0.3"
    assert (
        card["limit"] == 4
        and card["generation"] == "max_gen_toks=7"
        and card["seeds"] == {"random": 0, "numpy": 1234, "torch": 42, "fewshot": 1234}
    )
    toy = card["tasks"]["toy"]
    assert (toy["version"], toy["num_fewshot"], toy["n"], toy["n_available"]) == (3.5, 1, 4, 6)
    assert toy["generation"]["max_gen_toks"] == 7 and len(toy["hash"]) == 64 and str(folder) not in json.dumps(report)
    rows = {r["id"]: r for r in map(json.loads, (where / "samples.jsonl").read_text().splitlines())}
    assert len(rows) == 4 and all(r["new_tokens"] <= 7 and r["exact_match,raw"] in (0, 1) for r in rows.values())
    for r in rows.values():  # M_full in the type of cache.dtype, which the last token never enters
        full = 2 * 2 * 2 * 16 * 2 * (r["prompt_tokens"] + r["new_tokens"] - 1)
        assert r["kv_bytes_final"] / r["kv_ratio_final"] == pytest.approx(full)
    assert json.loads((where / "status.json").read_text()) == {"state": "done", "done": 4, "total": 4, "error": None}

    size = (where / "samples.jsonl").stat().st_size
    monkeypatch.setattr(module, "generate", None)  # would fail
    assert command(*asked) == 0
    again = json.loads((where / "results.json").read_text())
    assert again == report and (where / "samples.jsonl").stat().st_size == size


def test_an_interrupted_run_goes_on(command, folder, capsys, monkeypatch):
    """Two answers, then a signal; the second start asks for the rest alone."""
    real, asked = module.generate, []

    def generate(*args):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(args[3])
        return real(*args)

    monkeypatch.setattr(module, "generate", generate)
    assert command("--limit", "4", "method=snapkv", "budget=0.5") == 130
    (where,) = (folder / "out").iterdir()
    status = json.loads((where / "status.json").read_text())
    assert status["state"] == "interrupted" and (status["done"], status["total"]) == (2, 4)
    monkeypatch.setattr(module, "generate", lambda *args: asked.append(args[3]) or real(*args))
    assert command("--limit", "4", "method=snapkv", "budget=0.5") == 0
    assert len({p.sha for p in asked}) == len(asked) == 4
    assert "interrupted: what is finished is kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("further", "words"),
    [
        (("method=nope",), "method/nope"),
        (("task=ruler",), "--tasks"),
        (("--limit", "0"), "limit=0"),
        (("budget=0.01",), "smallest workable"),
        (("--gen-kwargs", "do_sample=True"), "greedy"),
        (("--include", "nowhere"), "nowhere is no folder"),
    ],
)
def test_the_script_fails_with_one_line(command, capsys, further, words):
    assert command(*further) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and words in errors[0]


def test_task_names_may_be_separated_by_commas(command, folder, capsys):
    (folder / "tasks/other.yaml").write_text(TASK.format(folder=folder, kind="generate_until").replace("task: toy", "task: other"))
    assert command("--limit", "0.3", "method=fullkv", tasks="toy,other") == 0
    report = json.loads((Path(capsys.readouterr().out.strip().splitlines()[-1][5:]) / "results.json").read_text())
    assert {name: task["n"] for name, task in report["card"]["tasks"].items()} == {"toy": 2, "other": 2}  # 30 % of six, rounded up


def test_unknown_tasks_and_data_out_of_reach_are_named(folder):
    manager = GenerationTasks(include_path=str(folder / "tasks"), include_defaults=False)
    with pytest.raises(ValueError, match=r"'nope' is not a registered .*--include adds a folder"):
        manager.load(["nope"])
    (folder / "test.jsonl").unlink()
    with pytest.raises(ValueError, match=r"--include a task with local files"):
        manager.load(["toy"])


def test_the_package_is_not_taken_for_the_script_and_its_absence_is_said(command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "evals.lm_eval_bridge")
    assert command() == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "./setup.sh dev,lm-eval" in error and 'pip install "qevict[lm-eval]"' in error
    assert Path(importlib.machinery.PathFinder.find_spec("lm_eval").origin).parent.name == "lm_eval"
