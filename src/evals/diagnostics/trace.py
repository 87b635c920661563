"""What the full cache attends to on the forced tokens of a text: made once per model and text, kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from evals.full_caches import PackedLayer
from qevict.artifact import artifact_path, save_artifact
from qevict.engine.reference import causal_attention_mass
from qevict.hf.attention import NAME

FIRST = 8  # tokens whose mass is kept one by one: a method's sinks are some of them
PROMPT_QUERIES = 32  # last queries of the prompt whose mass is kept: the scores that routing starts with
VERSION = 1


def grid(prompt: int, tokens: int, window: int) -> tuple[int, int]:
    """Column where the first unit begins, and how many units hold ``tokens`` tokens: the grid ends where the prompt does."""
    origin = prompt - window * -(-prompt // window)
    return origin, -(-(tokens - origin) // window)


def check_grain(grain: int, window: int) -> None:
    """Raise a ValueError unless units are made of whole groups."""
    if window % grain:
        raise ValueError(f"task.grain={grain} does not divide the method's window of {window}: set task.grain to a divisor")


@dataclass(frozen=True)
class Trace:
    """One text of ``prompt`` and N forced tokens, as the full cache sees it.

    Attributes:
        grain: tokens per stored group; the groups are cut on the grid of units that :func:`grid` gives.
        mass: ``[N, L, H, groups]`` fp16 share of a step's attention (mean over each KV head's query group), without the first
            ``FIRST`` tokens.
        first: ``[N, L, H, FIRST]`` fp16, those tokens.
        prompt_mass, prompt_first: the same summed over the prompt's last queries, ``[L, H, ...]`` fp32.
        hidden: ``[N, hidden]`` fp32 what the output layer reads: all of the prediction in a fraction of its bytes.
        attention: ``[L, N, hidden]`` fp16 attention outputs, after the output projection.
    """

    prompt: int
    grain: int
    mass: Tensor
    first: Tensor
    prompt_mass: Tensor
    prompt_first: Tensor
    hidden: Tensor
    attention: Tensor

    @property
    def steps(self) -> int:
        return len(self.mass)

    def places(self, window: int, sink: int) -> tuple[Tensor, Tensor]:
        """Mass of a method's places (its sinks together, then its units): of the steps ``[N, L, H, P]`` and of the prompt
        ``[L, H, P]``, fp32.

        Raises:
            ValueError: the units are not made of whole groups, or a sink is not among the first tokens.
        """
        if window % self.grain:
            raise ValueError(
                f"task.grain={self.grain} does not divide the method's window of {window}: set task.grain to a divisor"
            )
        if sink > FIRST:
            raise ValueError(
                f"{sink} sink tokens: a trace keeps the first {FIRST} tokens one by one, set method.sink to {FIRST} or less"
            )
        pairs = ((self.mass, self.first), (self.prompt_mass, self.prompt_first))
        return tuple(self._places(mass.float(), first.float(), window, sink) for mass, first in pairs)

    def _places(self, mass: Tensor, first: Tensor, window: int, sink: int) -> Tensor:
        tokens = self.prompt + self.steps
        origin, units = grid(self.prompt, tokens, window)
        before = (grid(self.prompt, tokens, self.grain)[0] - origin) // self.grain
        after = units * (window // self.grain) - before - mass.shape[-1]
        out = pad(mass, (before, after)).unflatten(-1, (units, -1)).sum(-1)
        for token in range(sink, first.shape[-1]):
            out[..., (token - origin) // window] += first[..., token]
        return torch.cat((first[..., :sink].sum(-1, keepdim=True), out), -1)


class TracedLayer(PackedLayer):
    """A full layer that tells ``note(mass [B, H, seen])`` where each generated token attends to, mean over the query group.

    Of the prompt it tells the sum over its last ``PROMPT_QUERIES`` queries.
    """

    def __init__(self, room: int, note: Callable[[Tensor], None]):
        super().__init__(room)
        self.note = note

    def attend(self, module, query, mask, scaling, position_ids, **kwargs) -> Tensor:
        k, v = self.k[:, :, : self.seen], self.v[:, :, : self.seen]
        if query.shape[2] > 1:
            real = torch.ones(k.shape[0], self.seen, dtype=torch.bool, device=k.device)
            self.note(causal_attention_mass(query, k, real, scaling, PROMPT_QUERIES))
            return super().attend(module, query, mask, scaling, position_ids, **kwargs)
        packed = query.squeeze(2).unflatten(1, (k.shape[1], -1))  # [B, H, group, d]
        weights = (packed.float() @ k.float().transpose(-1, -2) * scaling).softmax(-1)
        self.note(weights.mean(2))
        return (weights.to(v.dtype) @ v).flatten(1, 2).unsqueeze(1)


class Recorder:
    """Collects what the layers of a batch tell, by group of ``grain`` tokens."""

    def __init__(self, prompt: int, steps: int, grain: int):
        self.prompt, self.grain = prompt, grain
        tokens = prompt + steps
        origin, self.groups = grid(prompt, tokens, grain)
        self.group = (torch.arange(tokens) - origin) // grain
        self.mass: list[Tensor] = []  # [B, H, groups], layer after layer, call after call
        self.first: list[Tensor] = []

    def note(self, mass: Tensor) -> None:
        mass = mass.cpu()
        first = min(FIRST, self.prompt)
        self.first.append(mass[..., :first].clone())
        rest = mass.clone()
        rest[..., :first] = 0
        out = torch.zeros(*mass.shape[:-1], self.groups).index_add_(-1, self.group[: mass.shape[-1]], rest)
        self.mass.append(out if len(self.mass) < self.layers else out.half())

    def cache(self, layers: int) -> Cache:
        self.layers = layers
        return Cache(layers=[TracedLayer(len(self.group), self.note) for _ in range(layers)])

    def tensors(self) -> dict[str, Tensor]:
        """What a :class:`Trace` needs of it, each with a leading batch axis."""
        n = self.layers
        out = {}
        for name, said in (("mass", self.mass), ("first", self.first)):
            steps = torch.stack(said[n:]).half().unflatten(0, (-1, n))  # [N, L, B, H, ...]
            out[name] = steps.permute(2, 0, 1, 3, 4)
            out[f"prompt_{name}"] = torch.stack(said[:n], 1)
        return out


_digests: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()


def digest_of(model: torch.nn.Module) -> str:
    """Identity of all that a trace depends on: configuration, every weight, and the types they are loaded in."""
    if model not in _digests:
        config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
        sha = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for name, weight in model.state_dict().items():
            sha.update(f"{name} {weight.dtype}".encode())
            sha.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        _digests[model] = sha.hexdigest()[:16]
    return _digests[model]


def path_of(digest: str, ids: list[int], prompt: int, grain: int) -> Path:
    """Where the trace of a text lies: in the user's cache, by model and text (prompt, forced tokens and the one after them)."""
    text = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
    return artifact_path("traces", f"{digest}-{text}", {"p": prompt, "n": len(ids) - prompt - 1, "g": grain, "v": VERSION})


def nbytes(config, prompt: int, forced: int, grain: int) -> int:
    """Bytes of one trace on disk."""
    layers, heads, hidden = config.num_hidden_layers, config.num_key_value_heads, config.hidden_size
    groups = grid(prompt, prompt + forced, grain)[1] + FIRST
    return layers * heads * groups * (2 * forced + 4) + forced * hidden * (4 + 2 * layers)


def there(path: Path) -> bool:
    """Whether a trace is on disk and whole. One that is not is made again."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def load(path: Path, prompt: int, grain: int) -> Trace:
    return Trace(prompt, grain, **load_file(path))


Forced = Callable[[torch.nn.Module, Cache, Tensor], Iterable[tuple[Tensor, Tensor]]]


def make(model: torch.nn.Module, ids: Tensor, prompt: int, grain: int, forced: Forced, paths: list[Path]) -> None:
    """Trace a batch ``ids [B, prompt + N + 1]`` with the full cache, and write one file per text.

    ``forced(model, cache, ids)`` feeds the tokens and yields predictions and attention outputs ``[L, B, hidden]`` per step.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    recorder = Recorder(prompt, ids.shape[1] - prompt - 1, grain)
    hidden: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: hidden.append(args[0][:, -1].float().cpu()))
    try:
        attention = [said.half().cpu() for _, said in forced(model, recorder.cache(config.num_hidden_layers), ids)]
    finally:
        hook.remove()
    tensors = recorder.tensors()
    tensors["hidden"] = torch.stack(hidden[1:], 1)  # the first is the prompt's
    tensors["attention"] = torch.stack(attention, 2).transpose(0, 1)  # [B, L, N, hidden]
    for i, path in enumerate(paths):
        about = {"model_digest": digest_of(model), "prompt": prompt, "grain": grain, "version": VERSION}
        save_artifact(path, {name: t[i].contiguous() for name, t in tensors.items()}, about)
