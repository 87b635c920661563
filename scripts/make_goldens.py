"""Record what other packages compute, as references of the tests. Each part runs in an environment of its own.

Which prompt tokens kvpress keeps (it needs an older transformers than this project). Each entry is a bit per
(layer, KV head, token), packed along the tokens, lowest token in the highest bit:

    python -m venv kvpress-env && kvpress-env/bin/pip install kvpress==0.5.5 transformers==5.2.0 torch==2.13.0 safetensors
    kvpress-env/bin/python scripts/make_goldens.py kvpress ~/.cache/qevict/smollm2-135m-*-v1 tests/golden/kvpress.safetensors

Which codes, scales and shifts optimum-quanto gives a ``[tokens, channels]`` tensor, for keys (``k``) and values (``v``):

    python -m venv quanto-env && quanto-env/bin/pip install optimum-quanto==0.2.7 torch==2.13.0 safetensors
    quanto-env/bin/python scripts/make_goldens.py quanto tests/golden/quanto.safetensors
"""

from __future__ import annotations

import importlib.metadata
import sys
from pydoc_data.topics import topics

import numpy as np
import torch
from safetensors.numpy import save_file

TOKENS = 600
RATIOS = (0.5, 0.8)
WINDOWS = ((64, 5), (32, 5))


def kept(model, ids: torch.Tensor, press, full: list[torch.Tensor]) -> np.ndarray:
    """``[layers, kv_heads, tokens]`` bool of the entries that a press keeps."""
    from transformers import DynamicCache

    attentions = [layer.self_attn for layer in model.model.layers]
    for module in attentions:
        module.masked_key_indices = None
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(ids, past_key_values=cache)
    out = []
    for module, layer, everything in zip(attentions, cache.layers, full, strict=True):
        heads, length = everything.shape[1:3]
        mask = torch.zeros(heads, length, dtype=torch.bool)
        if module.masked_key_indices is not None:
            _, head, position = (index.cpu() for index in module.masked_key_indices)
            mask[:] = True
            mask[head, position] = False
        else:
            for head in range(heads):  # stored rows are exact copies of rows of the full cache
                same = (layer.keys[0, head][:, None] == everything[0, head][None]).all(-1)
                if not bool((same.sum(-1) == 1).all()):
                    raise RuntimeError("a stored key matches no, or several, keys of the full cache")
                mask[head, same.int().argmax(-1)] = True
        out.append(mask)
    for module in attentions:
        module.masked_key_indices = None
    return torch.stack(out).numpy()


def kvpress(folder: str, target: str) -> None:
    from kvpress import AdaKVPress, CriticalAdaKVPress, CriticalKVPress, SnapKVPress, StreamingLLMPress
    from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = "\n".join(topics[name] for name in sorted(topics))[:6000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    full = [layer.keys for layer in cache.layers]
    out = {"ids": ids[0].to(torch.int32).numpy()}
    for ratio in RATIOS:
        out[f"streaming_llm/{ratio}"] = kept(model, ids, StreamingLLMPress(ratio, n_sink=4), full)
        for window, kernel in WINDOWS:
            base = SnapKVPress(ratio, window_size=window, kernel_size=kernel)
            presses = {
                "snapkv": base,
                "adakv": AdaKVPress(base, alpha_safeguard=0.2),
                "criticalkv": CriticalKVPress(base, epsilon=1e-4, first_stage_ratio=0.5),
                "ada_criticalkv": CriticalAdaKVPress(base, alpha_safeguard=0.2, epsilon=1e-4, first_stage_ratio=0.5),
            }
            for name, press in presses.items():
                out[f"{name}/{ratio}/{window}/{kernel}"] = kept(model, ids, press, full)
                print(name, ratio, window, out[f"{name}/{ratio}/{window}/{kernel}"].sum((1, 2))[:3], flush=True)
    packed = {n: v if n == "ids" else np.packbits(v, axis=-1) for n, v in out.items()}
    save_file(packed, target, metadata=versions("kvpress", "transformers", "torch"))


def quanto(target: str) -> None:
    from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight
    from optimum.quanto.tensor.grouped import ungroup

    normal = [np.random.default_rng(seed).standard_normal for seed in (0, 1)]
    inputs = ((normal[0]((64, 64)), 32), (normal[1]((128, 80)) * 3 + 1, 16))
    out = {}
    for x, size in inputs:
        x = torch.from_numpy(x.astype(np.float32))
        tokens, channels = x.shape
        for bits, kind in ((2, qint2), (4, qint4)):
            for name, axis in (("k", -1), ("v", 0)):  # keys: groups of tokens of a channel; values: of channels of a token
                scales, shifts = MaxOptimizer()(x, kind, axis, size)
                packed = quantize_weight(x, kind, axis, scales, shifts, size)._data
                key = f"{name}/{bits}/{tokens}x{channels}"
                out[f"{key}/codes"] = ungroup(packed.unpack(), axis, x.shape).contiguous().numpy()
                for what, grid in (("scales", scales), ("shifts", shifts)):
                    # quanto orders the groups of keys channel by channel
                    grid = grid.reshape(channels, -1).T if name == "k" else grid.reshape(tokens, -1)
                    out[f"{key}/{what}"] = grid.contiguous().numpy()
    save_file(out, target, metadata=versions("optimum-quanto", "torch"))


def versions(*packages: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


if __name__ == "__main__":
    {"kvpress": kvpress, "quanto": quanto}[sys.argv[1]](*sys.argv[2:])
