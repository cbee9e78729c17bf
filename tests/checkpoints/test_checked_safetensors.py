"""reference.checkpoints.checked_safetensors: a flipped bit anywhere in a file is found and named."""

import json
from pathlib import Path

import pytest
import torch

from reference.checkpoints import checked_safetensors
from reference.inspect.recorded_step.file import safe_name
from reference.support import files

TENSORS = {
    "weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "random": torch.arange(9, dtype=torch.uint8),
    "count": torch.tensor(3),
    "none": torch.zeros(0, 4),
}


def write(path: Path, version: str = "2") -> bytes:
    checked_safetensors.write(path, TENSORS, {"twin_engine": "toy", "version": version}, safe_name)
    return path.read_bytes()


def read(path: Path) -> checked_safetensors.CheckedFile:
    return checked_safetensors.read(path, "toy", "2", "the test")


def test_a_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path)
    found = read(path)
    assert found.checked
    assert all(
        torch.equal(found.tensors[name], x) and found.tensors[name].dtype == x.dtype for name, x in TENSORS.items()
    )


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_refused_by_name(every: int, tmp_path: Path) -> None:
    """The whole file; one bit or two of each byte, or all of them."""
    path = tmp_path / "a"
    good = write(path)
    start = 8 + int.from_bytes(good[:8], "little")
    places = json.loads(good[8:start])
    for number in range(0, 8 * len(good), every):
        at, bit = divmod(number, 8)
        where = [
            name
            for name, entry in places.items()
            if name != "__metadata__" and entry["data_offsets"][0] <= at - start < entry["data_offsets"][1]
        ]
        bent = bytearray(good)
        bent[at] ^= 1 << bit
        path.write_bytes(bent)
        with pytest.raises(files.Damaged, match=r"damaged|no whole safetensors file") as error:
            read(path)
        if where:
            assert f"is damaged, at {where[0]!r}: its bytes are not those that were written; one flipped" in str(
                error.value
            )


@pytest.mark.parametrize(
    "change", [lambda good: good[:-1], lambda good: good + b"\0", lambda good: b"", lambda good: b"{}"]
)
def test_another_length_is_refused(tmp_path: Path, change: object) -> None:
    path = tmp_path / "a"
    path.write_bytes(change(write(path)))  # type: ignore[operator]
    with pytest.raises(files.Damaged, match="no whole safetensors file"):
        read(path)


def test_another_version_and_no_seal(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, "3")
    with pytest.raises(files.Damaged, match=r"is a toy of version '3'; version '2' is accepted, and '1'"):
        read(path)
    with pytest.raises(files.Damaged, match=r"is a safetensors file, and no other; it writes those\.$"):
        checked_safetensors.read(path, "other", "2", "it")
    path.write_bytes(write(path).replace(b'"seal"', b'"sea1"'))
    with pytest.raises(files.Damaged, match=r"is damaged, at its header: its seal is missing\.$"):
        read(path)
