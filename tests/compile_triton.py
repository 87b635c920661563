"""Compiles the Triton kernels for a GPU that is not there, with the very arguments that decoding passes, and runs nothing.

``python tests/compile_triton.py METHOD ...`` prints for each launch in three layers: method, kernel, hash of what was compiled,
bytes of shared memory, tensor-core products, bytes of machine code. test_triton.py reads that.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

from conftest import METHODS, Stream, build
from qevict import TierCache

# type of the model, head dimension, query group
SHAPES = {
    "full": (torch.float16, 64, 3),
    "qevict": (torch.bfloat16, 128, 4),
    "heads": (torch.float32, 80, 7),
    "peaks": (torch.float16, 256, 1),
    "wide": (torch.bfloat16, 256, 8),
    "long-windows": (torch.float32, 96, 1),
    "streaming": (torch.bfloat16, 128, 8),
}


class Absent:
    """The part of Triton's driver that compiling asks."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


def main(names: list[str]) -> None:
    def compile_only(kernel, grid):
        def launch(*args, **kwargs):
            built = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            products, code = built.asm["ptx"].count("mma.sync"), len(built.asm["cubin"])
            print(name, built.name, built.hash, built.metadata.shared, products, code)

        return launch

    triton.runtime.driver.set_active(Absent())
    KernelInterface.__getitem__ = compile_only
    for name in names:
        (policy, budget), (given, dim, group) = METHODS[name.replace("-", " ")], SHAPES[name]
        heads = {"num_attention_heads": 2 * group, "hidden_size": 2 * group * dim, "head_dim": dim, "num_hidden_layers": 3}
        model = build("llama", **heads)
        cache = TierCache(model, policy, budget, torch.float16)
        cache.decoder = lambda device: "triton"
        stream = Stream(model, cache, [200], dtype=given)
        for n in (200, 1):
            stream.feed(n)


if __name__ == "__main__":
    main(sys.argv[1:])
