"""Tensors that nobody writes for a while, such as a model's weights while a step of its text is captured.

    with unwritten.held(weights):
        ...

A GPU's kernel may read one of them before the kernel before it has ended (`GemmConfig.ahead`,
optimized/ops/gemms/gemm_config.py). That changes no word: it is what the block promises. A thread's blocks say nothing
about another's.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator

import torch


class _Thread(threading.local):
    def __init__(self) -> None:
        self.addresses: frozenset[int] = frozenset()


here = _Thread()


@contextlib.contextmanager
def held(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Nobody writes these in the block: no kernel that is launched in it, and none of another stream meanwhile."""
    outer = here.addresses
    # 0 is the address of what has no memory of its own: a DTensor, a wrapper, nothing.
    here.addresses = outer | {x.data_ptr() for x in tensors} - {0}
    try:
        yield
    finally:
        here.addresses = outer


def some() -> bool:
    """Whether this thread is in such a block."""
    return bool(here.addresses)


def holds(x: torch.Tensor) -> bool:
    """Whether the tensor begins where one of them does."""
    return x.data_ptr() in here.addresses
