"""Where the memory of a training step goes: weights, gradients, the optimizer's state, and what forward keeps.

The first three are counted from the tensors, each storage once. Activations are what is alive after forward and was not
before it; the peak is the most that was alive during a step. A GPU's allocator knows both; on a CPU `Live` counts every
storage that an op makes, until it is gone.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optimized.bench.models.single_gpu_models import Training
from reference.float8.kept_tensor import KeptTensor


class Live(TorchDispatchMode):
    """While it is open, the bytes of the storages that ops have made and that are still alive; `peak` is their most.

    A storage that was there before is not counted. An op of `twin` counts with its results, not with what its CPU
    definition needs inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, dict[int, tuple[StorageWeakRef, int]]()

    def held(self) -> int:
        """Bytes that are alive now."""
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        return sum(size for _, size in self._alive.values())

    def reset(self) -> None:
        """Forget the peak before now."""
        self.peak = self.held()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(x) for x in tree_leaves((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor) and id(x) not in known:
                    storage = x.untyped_storage()
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.peak = max(self.peak, self.held())
        return out


class Allocator:
    """The same, of torch's allocator on the GPU."""

    def __enter__(self) -> "Allocator":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def held(self) -> int:
        """Bytes that are alive now."""
        return torch.cuda.memory_allocated()

    def reset(self) -> None:
        """Forget the peak before now."""
        torch.cuda.reset_peak_memory_stats()

    @property
    def peak(self) -> int:
        """The most that was alive."""
        return torch.cuda.max_memory_allocated()


def tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every plain tensor in nested values: of a weight in FP8 its codes, transposed codes and scale_inv."""
    for value in values:
        if isinstance(value, KeptTensor):
            yield from (x for x in (value.codes, value.codes_t, value._scale_inv) if x is not None)
        elif isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def size(values: Iterable[Any]) -> int:
    """Bytes of the tensors in nested values, each once."""
    return sum(x.nbytes for x in {id(x): x for x in tensors(values)}.values())


def anatomy(training: Training) -> dict[str, int]:
    """Bytes of a step's parts, and the number of parameters.

    Args:
        training: that has made a step, so that everything is there. It makes another one.
    """
    meter: Any = Allocator() if training.device == "cuda" else Live()
    training.optimizer.zero_grad(set_to_none=True)
    with meter:
        meter.reset()
        before = meter.held()
        loss = training.forward()
        kept = meter.held() - before
        training.backward(loss)
        del loss
        for part in range(1, training.setting.parts):
            training.backward(training.forward(part))
        training.update()
        peak = meter.peak - before
    found = {
        "parameters": sum(x.numel() for x in training.parameters),
        "weights": size(training.parameters),
        "gradients": size(x.grad for x in training.parameters),
        "optimizer": size(training.optimizer.state.values()),
        "activations": kept,
    }
    return {**found, "peak": peak + found["weights"] + found["optimizer"]}
