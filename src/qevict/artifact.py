"""What a method was calibrated to, on disk: safetensors beside a JSON file that says for which model and setting."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


class ArtifactError(ValueError):
    """An artifact that is missing, damaged, or made for something else. The message is one sentence."""


def cache_dir() -> Path:
    """Folder for converted models and calibrations: ``$QEVICT_CACHE``, else ``qevict`` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QEVICT_CACHE") or Path(base) / "qevict")


_digests: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()


def model_digest(model: torch.nn.Module) -> str:
    """Identity of a model's keys and values: its sizes and its key and value projections, whatever type they are loaded in."""
    if model in _digests:
        return _digests[model]
    config = model.config.get_text_config()
    sizes = [
        config.model_type,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.hidden_size,
    ]
    sha = hashlib.sha256(json.dumps(sizes).encode())
    for layer in model.get_decoder().layers:
        for name in ("k_proj", "v_proj"):
            # a weight published in either half type gives the same here, whatever type it is loaded in
            weight = getattr(layer.self_attn, name).weight.detach().to("cpu", torch.float16).to(torch.bfloat16)
            sha.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    _digests[model] = sha.hexdigest()[:16]
    return _digests[model]


def artifact_path(kind: str, digest: str, setting: dict[str, object]) -> Path:
    """Where ``auto`` looks: the user's cache, by model and setting."""
    name = "-".join(f"{k}{v:g}" if isinstance(v, float) else f"{k}{v}" for k, v in setting.items())
    return cache_dir() / kind / f"{digest}-{name}.safetensors"


def save_artifact(path: Path, tensors: dict[str, Tensor], about: dict[str, object]) -> None:
    """Write both files; each appears whole or not at all, the tensors last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {k: t.contiguous() for k, t in tensors.items()}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder) / "new"
        fresh.write_text(json.dumps(about, indent=2) + "\n")
        os.replace(fresh, path.with_suffix(".json"))
        save_file(data, fresh)
        with fresh.open("rb+") as file:  # a name must not come to stand for half a file
            os.fsync(file.fileno())
        os.replace(fresh, path)


def load_artifact(
    kind: str, where: str, model: torch.nn.Module, setting: dict[str, object], shapes: dict[str, tuple[int, ...]], script: str
) -> dict[str, Tensor]:
    """Tensors of an artifact for this model and setting, of the given names and shapes.

    Raises:
        ArtifactError: it is missing (with the command that makes it), damaged, or was made for another model or setting.
    """
    digest = model_digest(model)
    path = artifact_path(kind, digest, setting) if where == "auto" else Path(where).expanduser()
    if not path.is_file():
        options = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in setting.items())
        raise ArtifactError(f"no calibration at {path}: make it with `python {script} {options}`")
    try:
        about = dict(json.loads(path.with_suffix(".json").read_text()))
        tensors = load_file(path)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ArtifactError(f"calibration {path} cannot be read ({error}): make it again with {script}") from error
    for name, want in {"model_digest": digest, **setting}.items():
        if about.get(name) != want:
            raise ArtifactError(
                f"calibration {path} was made for {name}={about.get(name)}, this run has {name}={want}: make one with {script}"
            )
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape or not tensor.isfinite().all():
            raise ArtifactError(
                f"calibration {path}: {name} is missing, not of shape {shape}, or not finite: make it again with {script}"
            )
    return {name: tensors[name].to(model.device) for name in shapes}
