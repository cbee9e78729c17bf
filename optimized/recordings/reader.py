"""Reads the files of data/: words that an H200 computed, with GPU, driver, versions and date."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from reference.support import files

DATA = Path(__file__).parent / "data"
RESTORED = ": install the package anew, or in a clone `git checkout -- optimized/recordings`"


NAMES = (
    "parity_h200",
    "wgmma_h200",
    "tensor_core_h200",
    "linear_h200",
    "transformer_engine_h200",
    "transformer_engine_recipes_h200",
)


def missing() -> list[str]:
    """The recordings that are not in data/."""
    return [f"{name}.npz" for name in NAMES if not (DATA / f"{name}.npz").is_file()]


class _Whole(dict[str, Any]):
    """The content of a recording by name; asking for a name that is not there raises `files.Damaged`."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        super().__init__(found)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise files.Damaged(f"{self.path} is damaged: it has no {name!r}{RESTORED}.")


@cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """Every array of data/<name>.npz.

    Raises:
        files.Damaged: it is not there, or not whole.
    """
    path = DATA / f"{name}.npz"
    if not path.is_file():
        raise files.Damaged(f"the recording {path} is missing{RESTORED}.")
    return _Whole(path, files.arrays(path, RESTORED))


def provenance(name: str) -> dict[str, Any]:
    """The GPU, driver, versions and date of a recording."""
    beside = DATA / f"{name}.json"
    if beside.is_file():
        return _Whole(beside, files.record(beside, RESTORED))
    path = DATA / f"{name}.npz"
    try:
        return _Whole(path, json.loads(str(arrays(name)["about"]))["provenance"])
    except (LookupError, TypeError, json.JSONDecodeError) as error:
        raise files.Damaged(f"{path} is damaged: {error!r}{RESTORED}.") from error
