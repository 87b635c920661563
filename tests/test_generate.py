"""`model.generate` with a tiered cache: greedy, batches, beams, turns, and everything that is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GemmaConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from baselines.adakv import AdaKV
from baselines.criticalkv import AdaCriticalKV
from baselines.fullkv import FullKV
from baselines.snapkv import SnapKV
from baselines.streaming_llm import StreamingLLM
from conftest import FAMILIES, VOCAB, build, call, forced_logits, full_logits, gap, left_padded, plain, tiny, tokens
from qevict import Budget, BudgetError, QEvict, TierCache
from qevict.accounting import measure

METHODS = {
    "fullkv": FullKV(),
    "streaming": StreamingLLM(),
    "streaming-original": StreamingLLM(positions="original"),
    "snapkv": SnapKV(observe=8, interval=4),
    "adakv": AdaKV(observe=8, interval=4),
    "ada-criticalkv": AdaCriticalKV(observe=8, interval=4),
    "qevict": QEvict(),
    "qevict-kv-head": QEvict(granularity="kv_head", window=4, interval=3, meta="uint8"),
    "qevict-binary": QEvict(q=0),
}
EVICTING = [name for name in METHODS if name != "fullkv"]
TIGHT = Budget(nbytes=20_000)  # at most 38 tokens of the tiny model


def generate(model, cache, ids, mask=None, new: int = 20, **kwargs):
    """Greedy tokens and the logits that chose them ``[B, new, vocab]``."""
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1)


def refused(model, ids, cache, match: str, error=ValueError, **kwargs) -> None:
    with pytest.raises(error, match=match):
        generate(model, cache, ids, **kwargs)


# -- greedy ------------------------------------------------------------------------------------------------------------


def test_generate_as_in_the_readme(llama):
    inputs = {"input_ids": tokens(1, 60), "attention_mask": torch.ones(1, 60, dtype=torch.long)}
    cache = TierCache(llama, QEvict(), budget=0.5)
    out = llama.generate(**inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
    assert out.shape == (1, 100)
    assert cache.get_seq_length() == 99  # the last token is never fed back
    assert measure(cache)["total"] <= cache.geometry.full_bytes(99) // 2


@pytest.mark.parametrize("lengths", [[61], [74, 13, 61]], ids=["single", "padded"])
@pytest.mark.parametrize("name", METHODS)
def test_greedy_equals_the_librarys_cache(name, lengths):
    ids, mask = left_padded(lengths)
    want, want_logits = generate(plain(), DynamicCache(), ids, mask)
    got, logits = generate(tiny(), TierCache(tiny(), METHODS[name]), ids, mask)
    assert torch.equal(got, want)
    assert gap(logits, want_logits) < 2e-5


@pytest.mark.parametrize("lengths", [[61], [74, 13, 61]], ids=["single", "padded"])
@pytest.mark.parametrize("name", EVICTING)
def test_greedy_with_eviction_equals_forced_tokens(name, lengths):
    """Positions, masks and lengths that `generate` derives from the cache are right although most tokens are gone."""
    ids, mask = left_padded(lengths)
    got, logits = generate(tiny(), TierCache(tiny(), METHODS[name], TIGHT), ids, mask, new=30)
    again = forced_logits(tiny(), TierCache(tiny(), METHODS[name], TIGHT), ids, mask, got[:, max(lengths) : -1])
    assert gap(logits, again) < 1e-5
    assert gap(logits, full_logits("llama", ids, mask, got[:, max(lengths) : -1])) > 1e-2, "nothing was evicted"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_finite(family, dtype):
    model = build(family, dtype)
    ids, mask = left_padded([90, 31])
    for policy in (QEvict(), QEvict(meta="uint8", granularity="kv_head"), SnapKV(observe=8), StreamingLLM()):
        cache = TierCache(model, policy, Budget(tokens=50))
        assert cache.geometry.dtype == dtype
        assert generate(model, cache, ids, mask)[1].isfinite().all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", torch.float16])
def test_storage_type_apart_from_the_models(llama, dtype):
    """Half the bytes per token, and close to the model's own type."""
    ids, forced = tokens(1, 60), tokens(1, 10, seed=1)
    cache = TierCache(llama, FullKV(), 1.0, dtype)
    got, want = forced_logits(llama, cache, ids, None, forced), full_logits("llama", ids, None, forced)
    assert 0 < gap(got, want) < 0.15
    assert measure(cache)["full"] < 0.6 * plain_bytes(llama, ids, forced)


def plain_bytes(model, ids, forced) -> int:
    cache = TierCache(model, FullKV())
    forced_logits(model, cache, ids, None, forced)
    return measure(cache)["full"]


# -- beams -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[61], [50, 33]], ids=["single", "padded"])
@pytest.mark.parametrize("name", METHODS)
def test_beams_equal_the_librarys_cache(name, lengths):
    ids, mask = left_padded(lengths)
    kwargs = {"num_beams": 3, "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    want = plain().generate(input_ids=ids, attention_mask=mask, past_key_values=DynamicCache(), **kwargs)
    got = tiny().generate(input_ids=ids, attention_mask=mask, past_key_values=TierCache(tiny(), METHODS[name]), **kwargs)
    assert torch.equal(got.sequences, want.sequences)
    assert gap(got.sequences_scores, want.sequences_scores) < 1e-5


@pytest.mark.parametrize("name", EVICTING)
def test_beams_with_eviction_score_their_own_tokens(name):
    """The score of the best beam is what the same policy gives to these tokens without beams: rows never mix."""
    ids = tokens(1, 61)
    out = tiny().generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=TierCache(tiny(), METHODS[name], TIGHT), num_beams=3,
        max_new_tokens=25, do_sample=False, return_dict_in_generate=True, output_scores=True, length_penalty=0.0,
    )  # fmt: skip
    new = out.sequences[:, 61:]
    logits = forced_logits(tiny(), TierCache(tiny(), METHODS[name], TIGHT), ids, None, new[:, :-1])
    score = logits.log_softmax(-1).gather(-1, new[..., None]).sum()
    assert float(score) == pytest.approx(float(out.sequences_scores[0]), abs=1e-3)


@pytest.mark.parametrize("name", EVICTING)
def test_rows_can_be_selected_and_repeated(name):
    """Continuing rows 2, 0, 0 of a batch equals continuing each of these prompts by itself."""
    policy, lengths, pick = METHODS[name], [74, 30, 61], [2, 0, 0]
    if isinstance(policy, QEvict):  # rounded metadata turns the last bit of a matrix product into a step of a scale
        policy = replace(policy, meta="float32")
    ids, mask = left_padded(lengths)
    first, then = tokens(3, 5, seed=1), tokens(3, 25, seed=2)
    cache = TierCache(tiny(), policy, TIGHT)
    forced_logits(tiny(), cache, ids, mask, first)
    cache.batch_select_indices(torch.tensor(pick))
    mask = torch.cat((mask, torch.ones(3, 5, dtype=torch.long)), 1)[pick]
    for step, token in enumerate(then.unbind(-1)):
        mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), 1)
        got = call(tiny(), cache, token[:, None], mask, mask.sum(-1, keepdim=True) - 1).logits[:, -1]
        if step % 8 == 0:
            for row, old in enumerate(pick):
                forced = torch.cat((first[old : old + 1], then[row : row + 1, : step + 1]), 1)
                alone = TierCache(tiny(), policy, TIGHT)
                want = forced_logits(tiny(), alone, ids[old : old + 1, -lengths[old] :], None, forced)[:, -1]
                assert gap(got[row : row + 1], want) < 1e-5, f"row {row}, step {step}"


def test_repeat_interleave(llama):
    ids = tokens(2, 70)
    cache = TierCache(llama, QEvict(), TIGHT)
    call(llama, cache, ids)
    cache.batch_repeat_interleave(2)
    got = [call(llama, cache, t[:, None]).logits[:, -1] for t in tokens(2, 20, seed=1).repeat_interleave(2, 0).unbind(-1)]
    want = forced_logits(llama, TierCache(llama, QEvict(), TIGHT), ids, None, tokens(2, 20, seed=1))[:, 1:]
    assert gap(torch.stack(got, 1), want.repeat_interleave(2, 0)) < 1e-4


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_second_turn_equals_the_librarys_cache(name):
    ids, more = tokens(1, 50), tokens(1, 30, seed=1)
    results = []
    for model, cache in ((plain(), DynamicCache()), (tiny(), TierCache(tiny(), METHODS[name]))):
        first, _ = generate(model, cache, ids)
        results.append(generate(model, cache, torch.cat((first, more), 1)))
    (want, want_logits), (got, logits) = results
    assert torch.equal(got, want)
    assert gap(logits, want_logits) < 2e-5


@pytest.mark.parametrize("turn", [2, 30, 150])
@pytest.mark.parametrize("name", EVICTING)
def test_turns_with_eviction_stay_within_the_budget(name, turn):
    """Also a turn that is longer than everything that may be kept."""
    cache = TierCache(tiny(), METHODS[name], TIGHT)
    ids = tokens(1, 60)
    for i in range(3):
        ids, logits = generate(tiny(), cache, ids, new=10)
        assert logits.isfinite().all()
        assert cache.get_seq_length() == ids.shape[1] - 1
        assert measure(cache)["total"] <= TIGHT.nbytes
        ids = torch.cat((ids, tokens(1, turn, seed=i)), 1)


def test_a_second_turn_in_a_padded_batch(llama):
    ids, mask = left_padded([50, 21])
    forced, turn = tokens(2, 4, seed=1), tokens(2, 15, seed=2)
    got, want = [], []
    for model, cache, out in ((llama, TierCache(llama, QEvict()), got), (plain(), DynamicCache(), want)):
        forced_logits(model, cache, ids, mask, forced)
        longer = torch.cat((mask, torch.ones(2, 19, dtype=torch.long)), 1)
        out.append(call(model, cache, turn, longer, (longer.cumsum(-1) - 1)[:, -15:]).logits)
    assert gap(got[0], want[0]) < 2e-5


def test_padding_inside_a_later_turn_is_refused(llama):
    cache = TierCache(llama, QEvict(), TIGHT)
    forced_logits(llama, cache, tokens(2, 50), None, tokens(2, 4, seed=1))
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, 54:57] = 0
    with pytest.raises(ValueError, match="padding inside a later turn"):
        call(llama, cache, tokens(2, 10), mask)


def test_a_cache_of_other_sequences_and_empty_prompts_are_refused(llama):
    cache, ids = TierCache(llama, QEvict(), TIGHT), tokens(2, 50)
    mask = torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ValueError, match=r"the prompts \[1\] of the batch are all padding"):
        call(llama, cache, ids, mask)
    call(llama, cache, ids)
    with pytest.raises(ValueError, match=r"a batch of 3 for a cache that holds 2 sequences of 50 tokens: .*reset\(\)"):
        call(llama, cache, tokens(3, 1))


@pytest.mark.parametrize("name", EVICTING)
def test_two_long_calls_in_a_row_need_a_new_turn(name):
    cache = TierCache(tiny(), METHODS[name], TIGHT)
    call(tiny(), cache, tokens(1, 50))
    with pytest.raises(ValueError, match=r"chunked prefill is refused.*new_turn\(\)"):
        call(tiny(), cache, tokens(1, 9))
    cache = TierCache(tiny(), METHODS[name], TIGHT)
    call(tiny(), cache, tokens(1, 50))
    cache.new_turn()
    assert call(tiny(), cache, tokens(1, 9)).logits.isfinite().all()
    with pytest.raises(ValueError, match="chunked prefill"):
        call(tiny(), cache, tokens(1, 9))


@pytest.mark.parametrize("name", EVICTING)
def test_a_refused_call_leaves_the_cache_as_it_was(name):
    """After the refusal the conversation can go on, as if the call had not been made."""
    ids, forced = tokens(1, 50), tokens(1, 12, seed=1)
    want = forced_logits(tiny(), TierCache(tiny(), METHODS[name], TIGHT), ids, None, forced)[:, 1:]
    cache = TierCache(tiny(), METHODS[name], TIGHT)
    call(tiny(), cache, ids)
    with pytest.raises(ValueError, match="chunked prefill"):
        call(tiny(), cache, tokens(1, 9))
    assert cache.get_seq_length() == 50
    got = [call(tiny(), cache, t[:, None]).logits[:, -1] for t in forced.unbind(-1)]
    assert gap(torch.stack(got, 1), want) < 1e-5


def test_a_refused_prompt_leaves_the_cache_empty(llama):
    """A prompt that is too short for the budget, or wrongly padded, is no reason to start over with a new cache."""
    ids, forced = tokens(2, 60), tokens(2, 12, seed=1)
    want = forced_logits(llama, TierCache(llama, QEvict(), 0.5), ids, None, forced)
    cache = TierCache(llama, QEvict(), 0.5)
    with pytest.raises(BudgetError):
        call(llama, cache, ids[:, :9])
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="pad on the left"):
        call(llama, cache, ids, (torch.arange(60) < torch.tensor([[60], [50]])).long())
    assert cache.get_seq_length() == 0
    assert measure(cache)["total"] == measure(cache)["tables"]
    got = [call(llama, cache, ids).logits[:, -1]] + [call(llama, cache, t[:, None]).logits[:, -1] for t in forced.unbind(-1)]
    assert gap(torch.stack(got, 1), want) < 1e-5


# -- chunked prefill -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVICTING)
def test_chunked_prefill_is_refused_with_eviction(name):
    refused(tiny(), tokens(1, 60), TierCache(tiny(), METHODS[name], TIGHT), "chunked prefill is refused", prefill_chunk_size=16)


@pytest.mark.parametrize("lengths", [[61], [61, 58]], ids=["single", "padded"])
@pytest.mark.parametrize("name", METHODS)
def test_chunked_prefill_without_eviction(name, lengths):
    """The reference is chunked as well: in 5.2 chunks change what the library itself generates."""
    ids, mask = left_padded(lengths)
    want, want_logits = generate(plain(), DynamicCache(), ids, mask, prefill_chunk_size=16)
    got, logits = generate(tiny(), TierCache(tiny(), METHODS[name]), ids, mask, prefill_chunk_size=16)
    assert torch.equal(got, want)
    assert gap(logits, want_logits) < 2e-5


# -- copies, reuse, other caches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_deep_copy_is_independent(name):
    budget = 1.0 if name == "fullkv" else TIGHT
    ids, left, right = tokens(1, 60), tokens(1, 30, seed=1), tokens(1, 30, seed=2)
    cache = TierCache(tiny(), METHODS[name], budget)
    call(tiny(), cache, ids)
    twin = copy.deepcopy(cache)
    results = {}
    for a, b in zip(left.unbind(-1), right.unbind(-1), strict=True):  # interleaved, with different tokens
        results.setdefault("left", []).append(call(tiny(), cache, a[:, None]).logits[:, -1])
        results.setdefault("right", []).append(call(tiny(), twin, b[:, None]).logits[:, -1])
    for side, forced in (("left", left), ("right", right)):
        want = forced_logits(tiny(), TierCache(tiny(), METHODS[name], budget), ids, None, forced)[:, 1:]
        assert torch.equal(torch.stack(results[side], 1), want)


@pytest.mark.parametrize("name", METHODS)
def test_reset_makes_a_cache_as_new(name):
    budget = 1.0 if name == "fullkv" else TIGHT
    ids, mask = left_padded([60, 20])
    forced = tokens(2, 20, seed=1)
    cache = TierCache(tiny(), METHODS[name], budget)
    forced_logits(tiny(), cache, tokens(1, 77), None, tokens(1, 3))
    cache.reset()
    assert cache.get_seq_length() == 0
    want = forced_logits(tiny(), TierCache(tiny(), METHODS[name], budget), ids, mask, forced)
    assert torch.equal(forced_logits(tiny(), cache, ids, mask, forced), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_cache_on_tiered_attention_equals_sdpa(family):
    """Attaching a tiered cache does not change the model for others, with or without a cache, padded or not."""
    model = build(family)
    TierCache(model, QEvict())
    assert model.config._attn_implementation == "tiered"
    ids, mask = left_padded([40, 11])
    forced = tokens(2, 5, seed=1)
    assert torch.equal(forced_logits(model, DynamicCache(), ids, mask, forced), full_logits(family, ids, mask, forced))
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, plain(family)(ids, attention_mask=mask).logits)


def test_two_caches_on_one_model_do_not_mix(llama):
    ids, forced = tokens(1, 60), tokens(1, 20, seed=1)
    policies = (QEvict(), StreamingLLM())
    want = [forced_logits(llama, TierCache(llama, p, TIGHT), ids, None, forced)[:, 1:] for p in policies]
    caches = [TierCache(llama, p, TIGHT) for p in policies]
    for cache in caches:
        call(llama, cache, ids)
    got = [[call(llama, cache, t[:, None]).logits[:, -1] for cache in caches] for t in forced.unbind(-1)]
    for i, expected in enumerate(want):
        assert torch.equal(torch.stack([step[i] for step in got], 1), expected)


# -- refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_prompt_lookup_is_refused(name):
    ids = tokens(1, 12).repeat(1, 5)
    cache = TierCache(tiny(), METHODS[name], 1.0 if name == "fullkv" else TIGHT)
    with pytest.raises((ValueError, NotImplementedError), match=r"crop|assisted|prompt-lookup"):
        generate(tiny(), cache, ids, prompt_lookup_num_tokens=3, eos_token_id=VOCAB - 1)  # 5.2 needs an end token here


def test_assisted_decoding_is_refused(llama):
    with pytest.raises((ValueError, NotImplementedError), match=r"crop|assisted|prompt-lookup"):
        generate(llama, TierCache(llama, QEvict(), TIGHT), tokens(1, 60), assistant_model=plain("mistral"))


def test_cropping_is_refused_with_the_reason(llama):
    cache = TierCache(llama, QEvict(), TIGHT)
    call(llama, cache, tokens(1, 60))
    with pytest.raises(NotImplementedError, match="evicted tokens cannot come back"):
        cache.crop(10)


def test_a_second_cache_implementation_is_refused(llama):
    refused(llama, tokens(1, 60), TierCache(llama, QEvict(), TIGHT), "cache_implementation", cache_implementation="static")


@pytest.mark.parametrize("where", ["right", "middle"])
def test_padding_elsewhere_is_refused(llama, where):
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, slice(30, 40) if where == "right" else slice(10, 20)] = 0
    with pytest.raises(ValueError, match="pad on the left"):
        call(llama, TierCache(llama, QEvict(), TIGHT), ids, mask)


def test_packed_sequences_are_refused(llama):
    positions = torch.cat((torch.arange(20), torch.arange(20)))[None]
    with pytest.raises(ValueError, match="not consecutive"):
        call(llama, TierCache(llama, QEvict(), TIGHT), tokens(1, 40), torch.ones(1, 40, dtype=torch.long), positions)


def test_training_with_dropout_is_refused():
    model = build("llama", attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        call(model, TierCache(model, QEvict(), TIGHT), tokens(1, 60))


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32, "factor": 2.0}
UNSUPPORTED = {
    "gpt2": (
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1),
        "'gpt2' is not supported; supported: llama, mistral",
    ),
    "gemma": (GemmaConfig(**SMALL, head_dim=16), "'gemma' is not supported"),
    "mistral-window": (MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=16), "sliding-window"),
    "qwen2-window": (
        Qwen2Config(**SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        "sliding-window",
    ),
    "dynamic": (
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "'dynamic' changes",
    ),
    "longrope": (LlamaConfig(**SMALL, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **LONG}), "'longrope' changes"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models_are_refused_and_left_alone(name):
    config, message = UNSUPPORTED[name]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=message):
        TierCache(model, QEvict(), 0.5)
    assert model.config._attn_implementation == "sdpa"


def test_an_unknown_storage_type_is_refused(llama):
    for dtype in ("int8", torch.int8, torch.float64):
        with pytest.raises(ValueError, match="choose one of float16, bfloat16, float32"):
            TierCache(llama, QEvict(), 0.5, dtype)
