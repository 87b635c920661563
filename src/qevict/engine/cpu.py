"""The fused CPU kernels (fused.cpp): built on first use with the system's compiler, called through ctypes."""

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
    from qevict.store.stream import Run

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
    "i:batch,kv_heads,query_heads,groups,window,sinks,origin,seen p:rows,write,sink_k,sink_v,full_k,full_v i:type P:full,coded "
    "p:k_code,v_code,k_scale,k_zero,v_scale,v_zero,super i:meta,key_bits,value_bits,value_group,k_bytes,v_bytes p:fine,coarse",
    P=PoolArgs,
)

RowsArgs = _struct("RowsArgs", "p:data i:batch,head")
RunArgs = _struct("RunArgs", "i:count,bits,type,shared R:rows,scale,zero,channel", R=RowsArgs)


class CompilerError(RuntimeError):
    """The kernel cannot be built. The message is one sentence."""


def build(dim: int, flags: tuple[str, ...] = FLAGS, compiler: str | None = None) -> Path:
    """Compile the kernel for heads of ``dim`` channels into the user's cache, unless it is there. Two processes may race: each
    result appears whole.

    Raises:
        CompilerError: no compiler, or it fails.
    """
    compiler = compiler or os.environ.get("CXX") or "c++"
    flags = (*flags, f"-DDIM={dim}")
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
def library(dim: int) -> ctypes.CDLL:
    """The kernel for heads of ``dim`` channels, built if need be.

    Raises:
        CompilerError: it cannot be built or loaded.
    """
    return load(build(dim))


def load(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"{path} cannot be loaded ({error}): delete it, it is then built again") from None
    size, pointer, runs = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(RunArgs)
    lib.qevict_decode.argtypes = [ctypes.POINTER(Args), size, *[pointer] * 5, ctypes.c_float, ctypes.c_bool]
    lib.qevict_attend.argtypes = [size, size, size, runs, runs, size, pointer, pointer, pointer, ctypes.c_float]
    lib.qevict_decode.restype = lib.qevict_attend.restype = None
    return lib


@functools.cache
def available(dim: int) -> bool:
    """Whether the kernel can be used; says once why not."""
    try:
        library(dim)
    except (CompilerError, OSError) as error:
        warnings.warn(f"the fused CPU kernel is not used: {error}", stacklevel=2)
        return False
    return True


def supports(dim: int, device: torch.device) -> bool:
    return device.type == "cpu" and dim in DIMS


class Decoder:
    """Decodes one layer after the other of an arena. What the kernel is told about the store lives for one step."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.args: Args | None = None
        self.tables: tuple[Tensor, Tensor] | None = None

    def begin(self) -> None:
        """Before the first layer of a step."""
        arena, g, full = self.arena, self.arena.geometry, self.arena.full
        pointers = (arena.rows, arena.write, *arena.sink, full.payload["k"], full.payload["v"])
        self.args = a = Args(
            arena.batch, g.kv_heads, g.query_heads, full.groups, arena.policy.window, arena.sink.shape[-2],
            arena.origin, arena.seen, *(t.data_ptr() for t in pointers), TYPES[g.dtype], _pool(full),
        )  # fmt: skip
        if arena.coded is not None and arena.coded.slots:
            codec, data = arena.codec, arena.coded.payload
            a.coded = _pool(arena.coded)
            for name, tensor in data.items():
                setattr(a, name, tensor.data_ptr())
            a.meta, a.key_bits, a.value_bits = TYPES[data["k_scale"].dtype], codec.key_bits, codec.value_bits
            a.value_group, a.k_bytes, a.v_bytes = codec.group, data["k_code"].shape[-1], data["v_code"].shape[-1]
            furthest = arena.seen + int(arena.rows[1].max())
            coarse = rotary_table(torch.arange(-1, furthest // COARSE + 1) * COARSE, arena.rope.inv_freq.double())
            self.tables = _fine(max(COARSE, codec.window), arena.rope.inv_freq.numpy().tobytes()), coarse
            a.fine, a.coarse = (t.data_ptr() for t in self.tables)

    def end(self) -> None:
        self.args = self.tables = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, collect: bool, sink_q: Tensor | None) -> Tensor:
        """As :meth:`qevict.store.arena.Arena.decode`: stores k, v, adds to the scores if ``collect``, returns the output."""
        held = [x.to(torch.float32).contiguous() for x in (q, q if sink_q is None else sink_q, k, v)]
        out = torch.empty_like(held[0])
        pointers = (x.data_ptr() for x in (*held, out))
        library(self.arena.geometry.head_dim).qevict_decode(self.args, layer, *pointers, scaling, collect)
        return out.to(q.dtype)


def _pool(pool: Pool) -> PoolArgs:
    record = pool.record
    pointers = (None if t is None else t.data_ptr() for t in (pool.ragged, record["unit"], record.get("score"), record.get("peak")))
    return PoolArgs(pool.slots, *pointers)


def attend(q: Tensor, keys: list[Run], values: list[Run], scaling: float, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Attention of one query per sequence, ``q [b, H_q, 1, d]``, over all tokens of equally many runs of keys and of values; and,
    if ``wanted``, ``[b, H, n]`` what they get, mean over each KV head's query group."""
    held, kv_heads = q.to(torch.float32).contiguous(), keys[0].rows.shape[1]
    out = torch.empty_like(held)
    mass = torch.empty(len(q), kv_heads, sum(run.count for run in keys)) if wanted else None
    sides = ((RunArgs * len(keys))(*map(_run, side)) for side in (keys, values))
    pointers = (held.data_ptr(), out.data_ptr(), mass.data_ptr() if wanted else None)
    library(q.shape[-1]).qevict_attend(len(q), kv_heads, q.shape[1], *sides, len(keys), *pointers, scaling)
    return out.to(q.dtype), mass


def _run(run: Run) -> RunArgs:
    kind = TYPES[(run.rows if run.scale is None else run.scale).dtype]
    return RunArgs(run.count, run.bits, kind, run.shared, *map(_rows, (run.rows, run.scale, run.zero, run.channel)))


def _rows(tensor: Tensor | None) -> RowsArgs:
    return RowsArgs() if tensor is None else RowsArgs(tensor.data_ptr(), *tensor.stride()[:2])


@functools.lru_cache(maxsize=8)
def _fine(rows: int, inv_freq: bytes) -> Tensor:
    """Rotary table of single positions: a constant of the model, whatever the cache holds."""
    return rotary_table(torch.arange(rows), torch.frombuffer(bytearray(inv_freq), dtype=torch.float32).double())


def rotary_table(position: Tensor, inv_freq: Tensor) -> Tensor:
    """``[positions, head_dim]`` fp32: cosines, then sines."""
    angle = position.double().unsqueeze(-1) * inv_freq
    return torch.cat((angle.cos(), angle.sin()), -1).float()
