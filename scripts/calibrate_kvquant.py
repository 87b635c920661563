"""Calibrate KVQuant for a model: thresholds, codebooks weighed by Fisher information, and Q-Norm scalars, from plain text.

    python scripts/calibrate_kvquant.py --bits 2 --outliers 0.01

As the authors do: 16 sequences of 2,048 tokens; the weight of a key or value is the squared gradient of the language-modelling
loss with respect to it, from the same sequences. The artifact goes to the user's cache, where ``method=kvquant`` finds it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch

from baselines.kvquant import KVQuant
from evals.cli import EXPECTED, one_line
from qevict.artifact import ArtifactError, artifact_path, model_digest, save_artifact
from qevict.hf.cache import geometry_of
from qevict.hf.loading import load_config, load_model, load_tokenizer


def read_text(files: list[Path]) -> str:
    """The files' text, or the reference pages that come with Python."""
    return "\n\n".join(f.read_text() for f in files) if files else "\n\n".join(topics[name] for name in sorted(topics))


def collect(model, ids: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Of one sequence ``ids [1, T]``: per layer keys before RoPE and values ``[T, H * d]`` and the squares of their gradients."""
    kept, hooks = [], []

    def keep(module, args, out):
        out = out.detach().requires_grad_() if not out.requires_grad else out
        out.retain_grad()
        kept.append(out)
        return out

    for layer in model.get_decoder().layers:
        attention = layer.self_attn
        for module in (getattr(attention, "k_norm", attention.k_proj), attention.v_proj):  # k_norm: what RoPE is applied to
            hooks.append(module.register_forward_hook(keep))
    try:
        logits = model(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
    finally:
        for hook in hooks:
            hook.remove()
    flat = [(x.detach()[0].flatten(1).half(), (x.grad[0].flatten(1).float() ** 2)) for x in kept]
    return [(*flat[i], *flat[i + 1]) for i in range(0, len(flat), 2)]


def calibrate(model, tokenizer, policy: KVQuant, text: str, sequences: int) -> dict[str, torch.Tensor]:
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) < sequences * policy.length:
        raise ArtifactError(
            f"the text has {len(ids)} tokens, {sequences} sequences of {policy.length} need {sequences * policy.length}: "
            "give more --text, or lower --sequences"
        )
    starts = torch.linspace(0, len(ids) - policy.length, sequences).long().tolist()
    found = []
    for i, start in enumerate(starts):
        found.append(collect(model, ids[None, start : start + policy.length].to(model.device)))
        print(f"sequence {i + 1} of {sequences}", flush=True)
    g = geometry_of(model.config.get_text_config(), torch.float16)
    scaling = getattr(model.get_decoder().rotary_emb, "attention_scaling", 1.0)  # stored keys carry it
    whole = KVQuant(bits=policy.bits, outliers=policy.outliers, first=0, q_norm=policy.normed)
    tensors = {}
    for layer in range(g.layers):
        # the first tokens of every sequence stay in full, so they do not count
        parts = [torch.cat([f[layer][j][policy.first :] for f in found]) for j in range(4)]
        k, k_weight, v, v_weight = (p.float().unflatten(-1, (g.kv_heads, g.head_dim)).transpose(0, 1) for p in parts)
        tables = whole.calibrate(g, k * scaling, v, k_weight, v_weight)
        tensors |= {f"{layer}.{name}": t for name, t in tables.items()}
        print(f"layer {layer + 1} of {g.layers}", flush=True)
    return tensors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    default = KVQuant()
    parser.add_argument("--model", default="smollm2-135m", help="embedded model, folder or hub id")
    parser.add_argument("--revision", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="text files; none: Python's own reference pages")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--bits", type=int, default=default.bits)
    parser.add_argument("--outliers", type=float, default=default.outliers)
    parser.add_argument("--first", type=int, default=default.first, help="first tokens in full")
    parser.add_argument("--q-norm", choices=("True", "False"), default=None, help="none: at 2 bits")
    parser.add_argument("--length", type=int, default=default.length, help="tokens of a sequence")
    parser.add_argument("--out", type=Path, default=None, help="file to write; none: the user's cache")
    o = parser.parse_args()
    try:
        q_norm = None if o.q_norm is None else o.q_norm == "True"
        policy = KVQuant(bits=o.bits, outliers=o.outliers, first=o.first, q_norm=q_norm, length=o.length)
        if o.sequences < 1 or o.length <= o.first + 1:
            raise ArtifactError(
                f"--sequences {o.sequences} --length {o.length}: give at least 1 sequence of more than --first tokens"
            )
        if o.out is not None and (o.out.suffix != ".safetensors" or not o.out.parent.is_dir()):
            raise ArtifactError(f"--out {o.out}: give a file that ends in .safetensors, in a folder that exists")
        text = read_text(o.text)
        positions = load_config(o.model, o.revision).get_text_config().max_position_embeddings
        if o.length > positions:
            raise ArtifactError(f"--length {o.length}: the model has {positions} positions")
        model, source = load_model(o.model, o.revision, o.dtype, o.device)
        model.requires_grad_(False)
        digest = model_digest(model)
        tensors = calibrate(model, load_tokenizer(o.model, o.revision), policy, text, o.sequences)
        path = o.out or artifact_path("kvquant", digest, policy.setting())
        about = {
            "model_digest": digest,
            **policy.setting(),
            "model": o.model,
            "model_sha": source.sha,
            "sequences": o.sequences,
            "text": [str(f) for f in o.text] or "pydoc_data.topics",
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        save_artifact(path, tensors, about)
    except EXPECTED as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
