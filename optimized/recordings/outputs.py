"""data/parity_h200.npz: what an H200 computed for the cases of `twin parity`, small enough to be committed.

An output of up to `WHOLE` words is stored as it is. A larger one is stored as its first `SHOWN` words and a digest of
all words. To the digest every NaN of 16 and 32 bits is the same NaN. Two digests are equal if every word is, and
otherwise with a probability of 2⁻¹²⁸.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimized import measure
from optimized.compare import FLOAT8, INTEGERS, Tally, differing
from optimized.cuda import compiler
from optimized.recordings.case import Outputs
from optimized.recordings.reader import RESTORED
from reference.support import files

RECORDING = "parity_h200"
WHOLE, SHOWN = 96, 32


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's words as integers, flat, on the CPU; in 16 and 32 bits every NaN is the same word."""
    tensor = tensor.detach().cpu().contiguous().flatten()
    if tensor.dtype.is_floating_point and tensor.dtype not in FLOAT8:
        tensor = torch.where(torch.isnan(tensor), torch.full_like(tensor, float("nan")), tensor)
    return tensor.view(INTEGERS[tensor.element_size()])


def digest(tensor: torch.Tensor) -> str:
    """128 bits in hexadecimal that stand for every word, the dtype and the shape."""
    name = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return hashlib.blake2b(canonical(tensor).numpy().tobytes(), digest_size=16, key=name[:64]).hexdigest()


@dataclass(frozen=True)
class Recording:
    """`index` has for each output its dtype, its shape, where its stored words are in `data`, and its digest or None.

    `provenance` is as in `measure.provenance`.
    """

    index: dict[str, dict[str, Any]]
    data: np.ndarray
    provenance: dict[str, Any] = field(default_factory=lambda: {"kernels": {}})

    def compare(self, key: str, tensor: torch.Tensor) -> Tally:
        """Compare a tensor with the recorded output. If the digests differ, at least one word counts as different."""
        entry = self.index.get(key)
        if entry is None:
            raise files.Damaged(
                f"the recording {RECORDING}.npz has no {key!r}: it is older than this case; record it anew on a "
                f"Hopper machine with `twin parity --record optimized/recordings/data`."
            )
        if entry["dtype"] != str(tensor.dtype) or entry["shape"] != list(tensor.shape):
            raise files.Damaged(
                f"{key!r} was recorded as {entry['dtype']} {entry['shape']} and is {tensor.dtype} "
                f"{list(tensor.shape)} now; record it anew with `twin parity --record optimized/recordings/data`."
            )
        words = self.data[entry["at"] : entry["at"] + entry["bytes"]]
        stored = torch.from_numpy(words.copy().view(f"i{tensor.element_size()}")).view(tensor.dtype)
        different = differing(tensor.detach().cpu().flatten()[: len(stored)], stored)
        if entry["digest"] is not None and entry["digest"] != digest(tensor):
            different = max(different, 1)
        return Tally(tensor.numel(), different)


def write(folder: Path, outputs: Outputs, gpu: torch.device) -> Path:
    """Store the outputs that `gpu` computed in `folder`, and return the file's path."""
    index: dict[str, dict[str, Any]] = {}
    parts, at = [], 0
    for key, tensor in outputs.items():
        count = tensor.numel() if tensor.numel() <= WHOLE else SHOWN
        words = canonical(tensor)[:count].numpy().tobytes()
        index[key] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "at": at, "bytes": len(words)}
        index[key]["digest"] = digest(tensor) if count < tensor.numel() else None
        parts.append(words)
        at += len(words)
    kernels = compiler.names()
    about = {
        "what": f"outputs of this project's ops and layers on {gpu}; recorded by `twin parity --record`",
        **measure.provenance(kernels),
    }
    path = folder / f"{RECORDING}.npz"
    with files.replacing(path) as file:
        np.savez_compressed(
            file,
            about=np.array(json.dumps({"provenance": about})),
            index=np.frombuffer(json.dumps(index).encode(), np.uint8),
            data=np.frombuffer(b"".join(parts), np.uint8),
        )
    return path


def read(folder: Path) -> Recording:
    """The recording in `folder`.

    Raises:
        files.Damaged: it is not a whole recording.
    """
    path = folder / f"{RECORDING}.npz"
    found = files.arrays(path, RESTORED)
    try:
        about = json.loads(str(found["about"]))["provenance"]
        return Recording(json.loads(found["index"].tobytes()), found["data"], about)
    except (LookupError, TypeError, ValueError) as error:
        raise files.Damaged(f"{path} is damaged: {error!r}{RESTORED}.") from error
