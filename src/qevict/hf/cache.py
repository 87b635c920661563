"""A transformers cache whose layers are stored in tiers. Works with plain ``model.generate(past_key_values=cache)``."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from qevict.budget import Budget, Geometry
from qevict.engine import cpu
from qevict.hf.attention import NAME
from qevict.hf.rope import Rope
from qevict.policy import Policy, PromptView
from qevict.quantizer import Quantizer
from qevict.store.arena import DECODERS, Arena
from qevict.store.history import History

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BACKENDS = ("auto", "reference", *DECODERS)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def geometry_of(config, dtype: torch.dtype) -> Geometry:
    """Sizes from a model configuration.

    Raises:
        ValueError: a model family, or a kind of attention, that the store does not support.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"model family {config.model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    types = set(getattr(config, "layer_types", None) or ())
    if types - {"full_attention"} or (not types and getattr(config, "sliding_window", None)):
        raise ValueError(
            f"{config.model_type} with sliding-window or chunked attention is not supported: its layers already forget; "
            "use a model with full attention in every layer (Mistral v0.2 and later, Qwen with use_sliding_window=false)"
        )
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(config.num_hidden_layers, heads, config.num_key_value_heads, dim, dtype)


class HandleLayer(CacheLayerMixin):
    """A layer whose ``update`` hands itself to the attention function in the place of keys and values, which then calls its
    ``attend``. Lengths are logical (tokens seen, not tokens stored), so that masks and position ids follow by themselves."""

    is_sliding = is_compileable = is_croppable = supports_early_init = False
    is_initialized = True
    seen = 0

    def lazy_initialization(self, *args, **kwargs):
        """Nothing to do: the store is made when the first tokens arrive."""

    def get_seq_length(self, *args) -> int:
        return self.seen

    def get_mask_sizes(self, query) -> tuple[int, int]:
        return self.seen + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class TierLayer(HandleLayer):
    """One layer of a :class:`TierCache`."""

    def __init__(self, cache: TierCache, index: int):
        self.cache, self.index, self.pending = cache, index, None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        self.pending = (key_states, value_states)
        self.seen += key_states.shape[-2]
        return self, self

    def __getattr__(self, name: str):  # only for what a layer does not have: someone took it for a tensor
        raise AttributeError(
            f"a tiered cache layer has no {name!r}: only {NAME!r} attention reads it, model.set_attn_implementation({NAME!r})"
        )

    def attend(self, module, query, mask, scaling, position_ids, **kwargs) -> Tensor:
        (k, v), self.pending = self.pending, None
        return self.cache.attend(self.index, module, query, k, v, mask, scaling, position_ids, **kwargs)

    def crop(self, *args):
        raise NotImplementedError("evicted tokens cannot come back: assisted and prompt-lookup decoding need another cache")


class TierCache(Cache):
    """Cache of one batch, for one conversation.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 causal model; its attention is switched to ``tiered``, which equals
            ``sdpa`` for every other cache.
        policy: the method, for example ``QEvict()``.
        budget: a fraction of FullKV's bytes, or a :class:`Budget`.
        dtype: storage type of full-precision keys and values; None: the model's.
        backend: how single tokens are decoded: ``reference`` (PyTorch), ``cpu`` or ``triton`` (the fused kernels of CPUs and GPUs),
            or ``auto``: the kernel of the device where it can be had and knows the head dimension and the method's codes.

    Raises:
        ValueError: an unsupported family, sliding-window attention, or length-dependent RoPE.
        BudgetError: at the first prompt, when the budget cannot hold what the method must keep.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        budget: float | Budget = 1.0,
        dtype: torch.dtype | str | None = None,
        backend: str = "auto",
    ):
        if not isinstance(policy, Policy):
            raise ValueError(f"{policy!r} is not a method: give an object such as QEvict()")
        config = model.config.get_text_config()
        dtype = DTYPES.get(dtype, dtype)
        if dtype not in (None, *DTYPES.values()):
            raise ValueError(f"cache dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
        self.geometry = geometry_of(config, dtype or model.dtype)
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}: choose one of {', '.join(BACKENDS)}")
        self.backend = backend
        self.rope = Rope(model.get_decoder().rotary_emb)
        self.policy = policy
        self.budget = budget if isinstance(budget, Budget) else Budget(fraction=budget)
        policy.codec(self.geometry)  # a codec that does not fit the head dimension says so now
        self.tables = policy.tables(model) if isinstance(policy, Quantizer) else None
        if backend in DECODERS and backend not in policy.kernels:
            name = type(policy).__name__
            raise ValueError(f"backend={backend}: {name} is decoded by the reference; use backend=auto or reference")
        if config._attn_implementation != NAME:
            model.set_attn_implementation(NAME)
        super().__init__(layers=[TierLayer(self, i) for i in range(self.geometry.layers)])
        self.reset()

    def reset(self):
        """Forget everything: ready for another prompt."""
        self.store: Arena | History | None = None
        self.turn_open, self._real = True, None
        for layer in self.layers:
            layer.seen, layer.pending = 0, None

    def decoder(self, device: torch.device) -> str:
        """The backend that is used on a device: what ``auto`` comes to.

        Raises:
            ValueError: the backend that was asked for does not work here.
        """
        if self.backend == "reference":
            return "reference"
        auto, dim = self.backend == "auto", self.geometry.head_dim
        name = ("triton" if device.type == "cuda" else "cpu") if auto else self.backend
        why = _refusal(name, dim, device)
        if auto:
            usable = not why and name in self.policy.kernels and (name != "cpu" or cpu.available(dim))
            return name if usable else "reference"
        if why:
            raise ValueError(f"backend={name}: {why}; use backend=auto or reference")
        if name == "cpu":
            cpu.library(dim)  # says why, if it cannot be had
        return name

    def new_turn(self) -> None:
        """Announce that the next multi-token call is a new turn, although no token was generated since the last one."""
        self.turn_open = True

    @torch.no_grad()
    def attend(self, index, module, q, k, v, mask, scaling, positions, **kwargs) -> Tensor:
        """One layer of one forward call. q ``[B, H_q, n, d]``, k and v ``[B, H, n, d]``, all after RoPE."""
        n = q.shape[-2]
        if scaling is None:
            scaling = q.shape[-1] ** -0.5
        if index == 0:
            try:
                if kwargs.get("dropout"):
                    raise ValueError("the cache is for inference: call model.eval() first")
                self._begin(n, k, mask, positions)
            except (ValueError, cpu.CompilerError):  # refused: the cache is as it was before the call
                self.layers[0].seen -= n
                raise
        if self._in_prompt:
            out = sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **kwargs)[0].transpose(1, 2)
            self.store.ingest(index, PromptView(q, k, v, self._real, scaling), module)
        else:
            out = (self.store.decode if n == 1 else self.store.turn)(index, q, k, v, scaling)
        if index == self.geometry.layers - 1:
            self.store.end()
            self._real = None
        return out.transpose(1, 2).contiguous()

    @torch.no_grad()
    def load(self, index: int, q: Tensor, k: Tensor, v: Tensor, module: torch.nn.Module) -> None:
        """Store one layer of an unpadded prompt that was computed elsewhere, without attention; layers in order.

        q ``[B, H_q, T, d]``, k and v ``[B, H, T, d]``, all after RoPE; ``module`` is the layer's attention module.
        """
        if index == 0:
            self._begin(k.shape[-2], k, None, None)
        self.layers[index].seen += k.shape[-2]
        self.store.ingest(index, PromptView(q, k, v, self._real, module.scaling), module)
        if index == self.geometry.layers - 1:
            self.store.end()
            self._real = None

    def _begin(self, n: int, k: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
        self._in_prompt = self.store is None
        if self._in_prompt:
            real, shift = _prompt_grid(k.shape[0], n, mask, positions, k.device)
            common = (self.geometry, self.policy, self.budget, self.rope, real, shift)
            if isinstance(self.policy, Quantizer):
                self.store = History(*common, self.tables, self.decoder(k.device) == "cpu")
            else:
                self.store = Arena(*common, self.decoder(k.device))
            self._real = real
            self.turn_open = False
        elif len(k) != self.store.batch:
            raise ValueError(
                f"a batch of {len(k)} for a cache that holds {self.store.batch} sequences of {self.store.seen} tokens: make a new "
                "cache, or call cache.reset()"
            )
        elif n == 1:
            self.turn_open = True
            self.store.begin(1)
        else:
            if not self.turn_open and self.store.next_due is not None:
                raise ValueError(
                    "two multi-token calls in a row: chunked prefill is refused, because each chunk would be compressed before "
                    "the prompt is complete, which differs from compressing the prompt; send the prompt in one call, or, "
                    "if this is a new turn, call cache.new_turn() before it"
                )
            if mask is not None and not bool(_allowed(mask)[:, 0, -1, -n:].all()):
                raise ValueError(
                    "padding inside a later turn is not supported: send turns of equal length, or one sequence at a time"
                )
            self.store.begin(n)
            self.turn_open = False

    # -- batch changes (beam search, contrastive search) ---------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor):
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor):
        if self.store is not None:
            self.store.select_rows(indices)

    def batch_repeat_interleave(self, repeats: int):
        if self.store is not None:
            self.store.select_rows(torch.arange(self.store.batch).repeat_interleave(repeats))

    def crop(self, *args):
        self.layers[0].crop()


def _refusal(name: str, dim: int, device: torch.device) -> str | None:
    """Why a fused kernel cannot decode heads of ``dim`` channels on a device; None: it can."""
    kernel = cpu
    if name == "triton":
        if find_spec("triton") is None:
            return "triton is not installed"
        from qevict.engine import triton_kernel as kernel

        if device.type != "cuda" and not kernel.INTERPRETED:
            return f"it runs on CUDA, or with TRITON_INTERPRET=1 (slowly, for tests) on a CPU, not on {device}"
    return None if kernel.supports(dim, device) else f"head dimension {dim} on {device} is not supported"


def _allowed(mask: Tensor) -> Tensor:
    """A 4-D mask as bool, True where attention is allowed."""
    return mask if mask.dtype == torch.bool else mask == 0


def _prompt_grid(batch: int, n: int, mask: Tensor | None, positions: Tensor | None, device) -> tuple[Tensor, Tensor]:
    """Which prompt columns are real ``[B, n]``, and each sequence's position minus column ``[B]``."""
    real = torch.ones(batch, n, dtype=torch.bool, device=device)
    if mask is not None:
        real = _allowed(mask)[:, 0, -1, :n].expand(batch, n)
    if not bool(real.any(-1).all()):
        empty = (~real.any(-1)).nonzero().flatten().tolist()
        raise ValueError(f"the prompts {empty} of the batch are all padding: leave them out, or give them a token")
    if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError("the prompt is padded on the right or in the middle: pad on the left (tokenizer.padding_side='left')")
    column = torch.arange(n, device=device)
    if positions is None:
        return real, torch.zeros(batch, dtype=torch.int64, device=device)
    delta = (positions.to(device) - column).expand(batch, n)
    shift = delta[:, -1]
    if bool(((delta != shift.unsqueeze(-1)) & real).any()):
        raise ValueError("position ids of the prompt are not consecutive (packed sequences?): give each sequence its own row")
    return real, shift.contiguous()
