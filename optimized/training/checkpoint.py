"""A training run on disk: one safetensors file, from which the run goes on to the same bits.

    metadata          twin_engine = "training run", version, about (JSON: settings, step, ...), state, sha256
    model/...         parameters
    optimizer/...     moments of each parameter
    fp8/...           scales and amax histories of each layer
    random/...        torch's CPU generator, and each layer's state of dropout

The file is replaced whole (`reference.support.files`), so a killed process, or a full disk, leaves the one before.
Places in the text follow from the number of the step. `state` is the `digest` of the tensors, `sha256` that of `about`
and `state`; version 1 has these two checks alone, version 2 those of `reference.checkpoints.checked_safetensors`, too.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from reference.checkpoints import checked_safetensors
from reference.inspect.recorded_step.digest import with_one_nan
from reference.inspect.recorded_step.file import safe_name
from reference.support import files

FORMAT, VERSION = "training run", "2"


def digest(tensors: Mapping[str, torch.Tensor], step: int, updates: int) -> str:
    """SHA-256 of two counts and of every tensor's name, dtype, shape and words; a CPU and a GPU have the same.

    A NaN of 16 or 32 bits counts as one NaN, because devices make different words (docs/numerics.md).
    """
    found = hashlib.sha256(f"step {step} updates {updates}".encode())
    for name in sorted(tensors):
        x = tensors[name].detach()
        found.update(f"\n{name} {x.dtype} {list(x.shape)}\n".encode())
        words = with_one_nan(x.contiguous().reshape(-1)).view(torch.uint8)
        found.update(words.cpu().numpy().data)
    return found.hexdigest()


def _seal(about: str, state: str) -> str:
    return hashlib.sha256(f"{about}\n{state}".encode()).hexdigest()


def write(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> str:
    """Write the file, whole or not at all, and return its digest; `about` has step and updates.

    Raises:
        reference.support.files.NotWritten: what stood at `path` is unchanged.
    """
    here = {name: x.detach().cpu() for name, x in tensors.items()}
    text, state = json.dumps(about), digest(here, about["step"], about["updates"])
    metadata = {"twin_engine": FORMAT, "version": VERSION, "about": text, "state": state, "sha256": _seal(text, state)}
    checked_safetensors.write(path, here, metadata, safe_name)
    return state


def _about(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    text, state = metadata.get("about", ""), metadata.get("state", "")
    if metadata.get("sha256") != _seal(text, state):
        raise files.Damaged(f"{path} is damaged: what it says about itself is not what was written.")
    found: dict[str, Any] = json.loads(text)
    return found


def about(path: Path) -> dict[str, Any]:
    """What a file is about; errors as in `read`. Its tensors are not read."""
    return _about(path, checked_safetensors.metadata(path, FORMAT, VERSION, "`twin train`")[0])


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a file, on the CPU, and what it is about.

    Raises:
        reference.support.files.Damaged: it is no checkpoint of a training run, of another version, truncated, or
        changed.
    """
    tensors, metadata, _ = checked_safetensors.read(path, FORMAT, VERSION, "`twin train`")
    found = _about(path, metadata)
    if digest(tensors, found["step"], found["updates"]) != metadata["state"]:
        raise files.Damaged(f"{path} is damaged: its numbers are not those that were written.")
    return tensors, found
