"""The fused CPU kernel (fused.cpp): built on first use with the system's compiler, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qevict.artifact import cache_dir

if TYPE_CHECKING:
    from qevict.store.arena import Arena
    from qevict.store.pool import Pool

SOURCE = Path(__file__).with_name("fused.cpp")
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-ffinite-math-only",
    "-fassociative-math", "-fno-signed-zeros", "-w", "-shared", "-fPIC",
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
)  # fmt: skip
DIMS = (16, 32, 64, 80, 96, 128, 256)  # head dimensions that the source is instantiated for
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}
COARSE = 256  # positions per row of the coarse rotary table


def _struct(name: str, text: str, **nested: type) -> type:
    """A C structure from ``kind:name,name`` groups: i int64, p pointer, f float, or a nested structure."""
    kinds = {"i": ctypes.c_int64, "p": ctypes.c_void_p, "f": ctypes.c_float} | nested
    fields = [(n, kinds[k]) for k, names in (part.split(":") for part in text.split()) for n in names.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


PoolArgs = _struct("PoolArgs", "i:slots p:ragged,unit,score,peak")
Args = _struct(
    "Args",
    "i:layer,batch,kv_heads,query_heads,groups,dim,window,sinks,origin,seen f:scaling i:collect p:q,sink_q,k,v,out,rows,write "
    "p:sink_k,sink_v,full_k,full_v i:type P:full,coded p:k_code,v_code,k_scale,k_zero,v_scale,v_zero,super "
    "i:meta,key_bits,value_bits,value_group,k_bytes,v_bytes p:fine,coarse",
    P=PoolArgs,
)


class CompilerError(RuntimeError):
    """The kernel cannot be built. The message is one sentence."""


def build(flags: tuple[str, ...] = FLAGS, compiler: str | None = None) -> Path:
    """Compile the kernel into the user's cache, unless it is there. Two processes may race: each result appears whole.

    Raises:
        CompilerError: no compiler, or it fails.
    """
    compiler = compiler or os.environ.get("CXX") or "c++"
    machine = platform.machine() + _cpu_flags()
    key = hashlib.sha256("\x00".join((SOURCE.read_text(), compiler, *flags, machine)).encode()).hexdigest()[:16]
    target = cache_dir() / "kernels" / f"fused-{key}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / "fused.so"
        try:
            subprocess.run([compiler, *flags, "-o", fresh, SOURCE], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise CompilerError(f"no C++ compiler {compiler!r}: install one, or name it in CXX") from None
        except subprocess.CalledProcessError as error:
            first = next((line for line in error.stderr.splitlines() if "error" in line), "no message")
            raise CompilerError(f"{compiler} cannot build the kernel: {first}") from None
        with open(fresh, "rb") as file:
            os.fsync(file.fileno())  # a library cut short by a power failure would kill the process that loads it
        os.replace(fresh, target)
    return target


def _cpu_flags() -> str:
    """What ``-march=native`` depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), "")


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel, built if need be.

    Raises:
        CompilerError: it cannot be built or loaded.
    """
    return load(build())


def load(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"{path} cannot be loaded ({error}): delete it, it is then built again") from None
    lib.qevict_decode.argtypes = [ctypes.POINTER(Args)]
    return lib


@functools.cache
def available() -> bool:
    """Whether the kernel can be used; says once why not."""
    try:
        library()
    except (CompilerError, OSError) as error:
        warnings.warn(f"the fused CPU kernel is not used: {error}", stacklevel=2)
        return False
    return True


def supports(dim: int, device: torch.device) -> bool:
    return device.type == "cpu" and dim in DIMS


class Decoder:
    """Decodes one layer after the other of an arena. Rotary tables live for one step."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.tables: tuple[Tensor, Tensor] | None = None

    def begin(self) -> None:
        """Before the first layer of a step."""
        if self.arena.coded is not None:
            inv_freq = self.arena.rope.inv_freq.double()
            furthest = self.arena.seen + int(self.arena.rows[1].max())
            rows = torch.arange(COARSE), torch.arange(-1, furthest // COARSE + 1) * COARSE
            self.tables = tuple(_table(r, inv_freq) for r in rows)

    def end(self) -> None:
        self.tables = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, collect: bool, sink_q: Tensor | None) -> Tensor:
        """As :meth:`qevict.store.arena.Arena.decode`: stores k, v, adds to the scores if ``collect``, returns the output."""
        arena, g = self.arena, self.arena.geometry
        held = [None if x is None else x.to(torch.float32).contiguous() for x in (q, k, v, sink_q)]
        q32, k32, v32, sink_q = held
        out = torch.empty_like(q32)
        p = [0 if x is None else x.data_ptr() for x in (q32, sink_q, k32, v32, out, arena.rows, arena.write)]
        full = arena.full.payload
        a = Args(
            layer, arena.batch, g.kv_heads, g.query_heads, arena.full.groups, g.head_dim, arena.policy.window, arena.sink.shape[-2],
            arena.origin, arena.seen, scaling, collect, *p, arena.sink[0, layer].data_ptr(), arena.sink[1, layer].data_ptr(),
            full["k"].data_ptr(), full["v"].data_ptr(), TYPES[g.dtype], _pool(arena.full),
        )  # fmt: skip
        if arena.coded is not None and arena.coded.slots:
            codec, data = arena.codec, {n: t.data_ptr() for n, t in arena.coded.payload.items()}
            a.coded = _pool(arena.coded)
            a.k_code, a.v_code, a.k_scale, a.k_zero = data["k_code"], data["v_code"], data["k_scale"], data["k_zero"]
            a.v_scale, a.v_zero, a.super = data["v_scale"], data["v_zero"], data.get("super")
            a.meta, a.key_bits, a.value_bits = TYPES[arena.coded.payload["k_scale"].dtype], codec.key_bits, codec.value_bits
            a.value_group = codec.group
            a.k_bytes, a.v_bytes = (arena.coded.payload[n].shape[-1] for n in ("k_code", "v_code"))
            a.fine, a.coarse = (t.data_ptr() for t in self.tables)
        library().qevict_decode(ctypes.byref(a))
        return out.to(q.dtype)


def _pool(pool: Pool) -> PoolArgs:
    record = pool.record
    pointers = (None if t is None else t.data_ptr() for t in (pool.ragged, record["unit"], record.get("score"), record.get("peak")))
    return PoolArgs(pool.slots, *pointers)


def _table(position: Tensor, inv_freq: Tensor) -> Tensor:
    """``[positions, head_dim]`` fp32: cosines, then sines."""
    angle = position.double().unsqueeze(-1) * inv_freq
    return torch.cat((angle.cos(), angle.sin()), -1).float()
