"""KVQuant: keys coded before RoPE per channel, values per token, non-uniformly, 1 % outliers in full (arXiv 2401.18079).

``KVQuant`` takes thresholds and codebooks from an artifact that scripts/calibrate_kvquant.py made on other text, weighed by
Fisher information. ``KVQuantSelf`` takes them from the prompt itself, unweighed; they are then charged to the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qevict.artifact import load_artifact
from qevict.budget import Geometry
from qevict.hf.cache import geometry_of
from qevict.quantizer import Quantizer, Tables
from qevict.store.nuq import HALF, NuqCodec, kmeans_1d, outlier_slots, percentile, q_norm
from qevict.store.stream import Field

LONG = 256  # tokens from which a prompt has a meaningful 99.5th percentile
SAMPLES = 1 << 16  # values that a prompt's codebook is fitted to
GRID = 1024  # steps of 1, to which those of a short prompt are rounded first


@dataclass(frozen=True)
class KVQuantSelf(Quantizer):
    """Calibrated to the prompt.

    Args:
        bits: 2, 3 or 4.
        outliers: share of a token's values that is kept in full, half of them high and half low; 0: none.
        first: first tokens in full.
        q_norm: give decoded values the mean and deviation they had; None: at 2 bits, as the authors do.
    """

    bits: int = 2
    outliers: float = 0.01
    first: int = 1
    q_norm: bool | None = None

    plain_keys = True
    codes_first = True
    keeps_codes = True

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in (2, 3, 4):
            raise ValueError(f"method.bits={self.bits}: choose 2, 3 or 4")
        if not 0 <= self.outliers <= 0.2:
            raise ValueError(f"method.outliers={self.outliers:g} is outside [0, 0.2]")
        if self.first < 0:
            raise ValueError(f"method.first={self.first} is below 0: set method.first to 0 or more")

    @property
    def sink(self) -> int:
        return self.first

    @property
    def normed(self) -> bool:
        return self.bits == 2 if self.q_norm is None else self.q_norm

    def _common(self, g: Geometry) -> tuple[int, int, int, int]:
        width = g.head_dim * (g.kv_heads if self.evict is None else 1)
        return g.kv_heads, g.head_dim, self.bits, outlier_slots(width, self.outliers)

    def specs(self, g: Geometry) -> tuple[dict[str, Field], dict[str, Field]]:
        return tuple(NuqCodec.fields(*self._common(g), static, self.evict is None) for static in (True, False))

    def coded(self, base: int, n: int) -> tuple[int, int]:
        return (max(0, n - self.first),) * 2

    def table_bytes(self, g: Geometry) -> int:
        return 2 * (2 * g.kv_heads * g.head_dim + 2 * 2**self.bits + 4 * self.normed)

    def codecs(self, g: Geometry, k: Tensor, v: Tensor, tables: Tables | None) -> tuple[NuqCodec, NuqCodec]:
        own = tables is None
        if own:
            each = [self.calibrate(g, k[i], v[i]) for i in range(len(k))]
            tables = {name: torch.cat([t[name] for t in each]) for name in each[0]}
        common, t, joint = self._common(g), tables, self.evict is None
        keys = NuqCodec(*common, t["k_book"], t.get("k_norm"), t["k_middle"], t["k_half"], own, joint)
        return keys, NuqCodec(*common, t["v_book"], t.get("v_norm"), None, None, own, joint)

    def calibrate(
        self, g: Geometry, k: Tensor, v: Tensor, k_weight: Tensor | None = None, v_weight: Tensor | None = None
    ) -> Tables:
        """Thresholds, codebooks and Q-Norm scalars (fp16) from keys before RoPE and values ``[H, T, d]`` fp32; the weights are
        of their single values."""
        first = min(self.first, k.shape[1] - 1)
        k, v, k_weight, v_weight = (
            None if x is None else x[:, first:].transpose(0, 1).flatten(1) for x in (k, v, k_weight, v_weight)
        )
        tail = self.outliers / 2 if len(k) >= LONG else 0
        high, low = percentile(k, 1 - tail), percentile(k, tail)
        middle, half = ((high + low) / 2).to(HALF), ((high - low) / 2).to(HALF)
        if not half.any():  # a prompt of one token has no range; its largest value is better than none
            half = half + middle.abs().amax().clamp_min(torch.finfo(HALF).eps)
        out = {"k_middle": middle[None, None], "k_half": half[None, None]}
        side = self._common(g)[3] // 2
        if self.evict is not None:  # a row is one head's
            v, v_weight = (None if x is None else x.unflatten(1, (g.kv_heads, -1)).flatten(0, 1) for x in (v, v_weight))
        top, bottom = v.topk(side + 1).values[:, -1:], v.topk(side + 1, largest=False).values[:, -1:]
        for name, x, mid, wide, weight in (
            ("k", k, middle.float(), half.float(), k_weight),
            ("v", v, (top + bottom) / 2, (top - bottom) / 2, v_weight),
        ):
            y = (x - mid) / wide.clamp_min(torch.finfo(HALF).tiny)
            # among few values noise in the last place would move a centroid, or a value in or out
            y = (y * GRID).round() / GRID if len(k) < LONG else y
            inside = (y.abs() <= 1) & (wide > 0)
            y, weight = y[inside], None if weight is None else weight[inside]
            if not len(y):  # a constant prompt
                y = torch.linspace(-1, 1, 2**self.bits)
            y = y[:: -(-len(y) // SAMPLES)] if weight is None else y
            out[f"{name}_book"] = book = kmeans_1d(y, 2**self.bits, weight).to(HALF)[None]
            if self.normed:
                out[f"{name}_norm"] = q_norm(y, book[0].float()).to(HALF)[None]
        return out


@dataclass(frozen=True)
class KVQuant(KVQuantSelf):
    """Calibrated on other text, once per model.

    Args:
        calibration: an artifact of scripts/calibrate_kvquant.py, or ``auto``: the one in the user's cache for this model.
        length: tokens of the sequences that it was made from.
    """

    calibration: str = "auto"
    length: int = 2048

    def __post_init__(self):
        super().__post_init__()
        if self.length <= self.first:
            raise ValueError(f"method.length={self.length} must be above method.first={self.first}")

    def setting(self) -> dict[str, object]:
        """What an artifact must agree with."""
        return {"bits": self.bits, "outliers": self.outliers, "first": self.first, "q_norm": self.normed, "length": self.length}

    def tables(self, model: torch.nn.Module) -> list[Tables]:
        g = geometry_of(model.config.get_text_config(), model.dtype)
        width, book = g.kv_heads * g.head_dim, (1, 2**self.bits)
        shapes = {"k_middle": (1, 1, width), "k_half": (1, 1, width), "k_book": book, "v_book": book}
        shapes |= {"k_norm": (1, 2), "v_norm": (1, 2)} if self.normed else {}
        every = {f"{i}.{name}": shape for i in range(g.layers) for name, shape in shapes.items()}
        flat = load_artifact("kvquant", self.calibration, model, self.setting(), every, "scripts/calibrate_kvquant.py")
        return [{name: flat[f"{i}.{name}"] for name in shapes} for i in range(g.layers)]
