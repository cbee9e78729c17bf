"""Safetensors files of which every byte is checked: recorded steps and checkpoints of training runs.

    8 bytes     the header's length
    header      JSON: dtype, shape and place of each entry, and the metadata:
                    twin_engine, version     what the file is
                    crc32                    JSON: the CRC-32 of each entry's bytes
                    seal                     SHA-256 of the header, in which the seal itself is 64 zeros
    entries     their bytes, one after the other

A file without a seal is one of version 1, whose bytes are checked in part or not at all.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reference.checkpoints.flipped_bit import flipped_bit
from reference.support import files

FIRST = "1"  # the version without a seal
_UNSEALED = "0" * hashlib.sha256().digest_size * 2
_SEAL = re.compile(rb'"seal":"([0-9a-f]{%d})"' % len(_UNSEALED))
_LONGEST = 1 << 30  # bytes of a header


class CheckedFile(NamedTuple):
    """What is in a file: its tensors on the CPU, its metadata, and whether every byte of it has been checked."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    checked: bool


def _bytes(x: torch.Tensor) -> Any:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _sealed(header: bytes) -> str:
    """The seal of a header whose seal is zeros."""
    return hashlib.sha256(header).hexdigest()


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], dtype_name: Any) -> None:
    """Write tensors on the CPU, whole or not at all, without a second copy of them in memory.

    `dtype_name` gives safetensors' name of a torch dtype.
    """
    sums = {name: zlib.crc32(_bytes(x)) for name, x in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {**metadata, "crc32": json.dumps(sums), "seal": _UNSEALED}}
    end = 0
    for name, x in tensors.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": dtype_name(x.dtype), "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = text.replace(f'"seal":"{_UNSEALED}"'.encode(), f'"seal":"{_sealed(text)}"'.encode(), 1)
    with files.replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            file.write(_bytes(x))


def _header(path: Path) -> bytes:
    """The bytes of the header; none if the file ends before it does."""
    with files.reading(path) as file:
        size = int.from_bytes(file.read(8), "little")
        found = file.read(size) if size <= _LONGEST else b""
        return found if len(found) == size else b""


def metadata(path: Path, what: str, version: str, written_by: str) -> tuple[dict[str, str], bool]:
    """The metadata of a file that is a `what` (its `twin_engine`), and whether the header was checked.

    Raises:
        reference.support.files.Damaged: it is none, of another version, or damaged. One sentence says which.
    """
    import safetensors

    text = _header(path)
    found = _SEAL.search(text)
    if found is not None:
        plain = text[: found.start(1)] + _UNSEALED.encode() + text[found.end(1) :]
        if _sealed(plain) != found[1].decode():
            raise files.Damaged(f"{path} is damaged, at its header: it is not the one that was written.")
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            about = opened.metadata() or {}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise files.Damaged(f"{path} is no whole safetensors file ({str(error).rstrip('.')}).") from error
    if about.get("twin_engine") != what:
        raise files.Damaged(f"{path} is a safetensors file, and no {what}; {written_by} writes those.")
    older = [str(number) for number in range(int(FIRST), int(version))]
    if about.get("version") not in (*older, version):
        raise files.Damaged(
            f"{path} is a {what} of version {about.get('version')!r}; version {version!r} is accepted, and "
            f"{', '.join(map(repr, older))}: use the Twin Engine that wrote it."
        )
    if about["version"] != FIRST and found is None:
        raise files.Damaged(f"{path} is damaged, at its header: its seal is missing.")
    return about, found is not None


def _flip(x: torch.Tensor, written: int, found: int) -> str:
    """In words, the bit that has flipped, if that explains the sums."""
    bit = flipped_bit(x.nbytes, written, found)
    if bit is None:
        return ""
    element, byte = divmod(bit[0], x.element_size())
    index = [int(i) for i in np.unravel_index(element, tuple(x.shape))]
    return f"; one flipped bit explains it, bit {8 * byte + bit[1]} of the number at {index}"


def read(path: Path, what: str, version: str, written_by: str) -> CheckedFile:
    """Everything in a file; errors as in `metadata`, which name the entry that is damaged."""
    import safetensors

    about, checked = metadata(path, what, version, written_by)
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise files.Damaged(f"{path} is no whole safetensors file ({str(error).rstrip('.')}).") from error
    if checked:
        sums = json.loads(about["crc32"])
        for name, x in tensors.items():
            found = zlib.crc32(_bytes(x))
            if found != sums[name]:
                raise files.Damaged(
                    f"{path} is damaged, at {name!r}: its bytes are not those that were written"
                    f"{_flip(x, sums[name], found)}."
                )
    return CheckedFile(tensors, about, checked)
