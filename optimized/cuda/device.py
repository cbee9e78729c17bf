"""What the fast path needs of a machine, and the sentence for each thing that is missing.

A check takes the facts that it judges as arguments, so that its sentence can be tested on a machine without a GPU.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch

from optimized.cuda import compiler
from optimized.cuda.compiler import INSTALL, MissingDependency

CAPABILITY = (9, 0)


class UnsupportedDevice(RuntimeError):
    """The device cannot run the kernels; the message names it and says which devices can."""


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Refuse a GPU whose compute capability is not 9.0: code for sm_90a runs on no other."""
    if tuple(capability) != CAPABILITY:
        major, minor = capability
        raise UnsupportedDevice(
            f"the GPU {name!r} has compute capability {major}.{minor}; Twin Engine's kernels are built for "
            f"sm_90a and need 9.0 (Hopper: H100, H200, GH200). On this machine `twin_engine.reference` "
            "has the same layers on the CPU."
        )


@functools.cache
def check(index: int) -> None:
    """Refuse CUDA device `index` unless it is a Hopper GPU; each device is checked once."""
    if not torch.cuda.is_available():
        raise UnsupportedDevice(
            "torch sees no CUDA device; Twin Engine's kernels need a Hopper GPU (compute capability 9.0). "
            "On this machine `twin_engine.reference` has the same layers on the CPU."
        )
    check_capability(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))


def check_cupy(find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """Refuse to go on without CuPy, which loads and launches kernels."""
    if find("cupy") is None:
        raise MissingDependency(
            f"CuPy (cupy-cuda13x) is not installed, and Twin Engine's CUDA kernels need it: {INSTALL}."
        )


def problems() -> list[str]:
    """A sentence for each thing that keeps this machine from the fast path."""
    found = []
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 1
    checks: list[Callable[[], object]] = [check_cupy, compiler.nvrtc_library]
    checks += [functools.partial(check, index) for index in range(devices)]
    for judge in checks:
        try:
            judge()
        except (MissingDependency, UnsupportedDevice) as error:
            found.append(str(error))
    return found


def hopper() -> torch.device | None:
    """The current CUDA device if the kernels can run on it, otherwise None."""
    return None if problems() else torch.device("cuda", torch.cuda.current_device())
