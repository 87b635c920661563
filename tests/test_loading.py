"""The embedded model, its tokenizer, and the refusals of the loader."""

import json
from pathlib import Path

import pytest
import torch

from qevict.hf.loading import EMBEDDED, GGUF_SHA256, HUB_ID, ModelError, load_config, load_model, load_tokenizer, resolve


def test_the_embedded_tokenizer_splits_text_as_the_model_learnt_it():
    tokenizer = load_tokenizer(EMBEDDED)
    text = "Hello world, it's 12345 tokens."
    assert tokenizer(text).input_ids == [19556, 905, 28, 357, 506, 216, 33, 34, 35, 36, 37, 17837, 30]
    assert tokenizer.eos_token_id == 2 and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>assistant\n")
    ids = tokenizer(chat).input_ids
    assert ids.count(1) == 3 and ids.count(2) == 2  # the special tokens of the template are single ids


def test_the_embedded_model_is_converted_once_and_says_where_it_comes_from():
    path, source = resolve(EMBEDDED)
    assert source.kind == "packaged gguf" and source.sha == GGUF_SHA256
    note = json.loads(Path(path, "source.json").read_text())
    assert note["sha256"] == GGUF_SHA256
    model, _ = load_model(EMBEDDED, device="cpu")
    assert model.config.num_hidden_layers == 30 and model.dtype == torch.float32
    tokenizer = load_tokenizer(EMBEDDED)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])


def test_without_the_package_the_hub_model_is_named(monkeypatch):
    monkeypatch.setattr("qevict.hf.loading._packaged_gguf", lambda: None)
    target, source = resolve(EMBEDDED)
    assert target == HUB_ID and source.kind == "hub"


def test_a_damaged_package_is_refused(tmp_path, monkeypatch):
    broken = tmp_path / "x.gguf"
    broken.write_bytes(b"GGUF not really")
    monkeypatch.setenv("QEVICT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("qevict.hf.loading._packaged_gguf", lambda: broken)
    with pytest.raises(ModelError, match="is damaged"):
        resolve(EMBEDDED)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("QEVICT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="QEVICT_CACHE"):
        resolve(EMBEDDED)


@pytest.mark.parametrize("path", ["/nowhere", "nowhere", "./x/y", "a/b/c"])
def test_what_is_no_model_is_refused(path):
    with pytest.raises(ModelError, match="is not a model folder"):
        resolve(path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(str(tmp_path))


def test_unknown_dtype_is_refused():
    with pytest.raises(ModelError, match="float16"):
        load_model(EMBEDDED, dtype="int4", device="cpu")
