"""FSDP2 on a pretended GPU: two ranks of which one is here, and nothing is sent.

    with DryShards() as gpu:
        gpu.shard(model, *model.layers, model)      # as fully_shard, module by module

Streams and events do nothing. Memory that FSDP2 frees loses its address, as on a GPU. What FSDP2 imports by private
names is replaced here and nowhere else.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shared.dry_gpu import DryGpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from reference.float8 import float8_shard
from reference.parallel import GradientOrder, peer_memory, tree_reduce_scatter

RANKS = 2


class _Event:
    def __init__(self, *args: Any, **options: Any) -> None: ...
    def record(self, *args: Any) -> "_Event":
        return self


class _Stream:
    def __init__(self, *args: Any, **options: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, *args: Any) -> _Event:
        return _Event()


class _Device:
    """In place of `torch.cuda`."""

    Stream, Event = _Stream, _Event

    def current_stream(self, *args: Any) -> _Stream:
        return _Stream()

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        yield


class _Nothing:
    """A collective of FSDP2's that sends nothing."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **options: Any) -> None: ...


def _frame(depth: int) -> Any:
    """The next frame of FSDP2 below, if there is one: this GPU's modes put many between."""
    here = frame = sys._getframe(depth + 1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            return frame
        frame = frame.f_back  # type: ignore[assignment]
    return here


class DryShards(DryGpu):
    """See the file."""

    def __enter__(self) -> "DryShards":
        super().__enter__()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)  # type: ignore[no-untyped-call]
        self.callback(dist.destroy_process_group)
        for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
            self.enter_context(mock.patch.object(module, "_get_device_handle", return_value=_Device()))
        for module in (_fully_shard, _fsdp_init):
            here = torch.device("cuda", 0)
            self.enter_context(mock.patch.object(module, "_get_device_from_mesh", return_value=here))
        hooks = ("_pre_backward", "_root_post_backward_final_callback")
        for owner, name in (
            *((_fsdp_state.FSDPState, one) for one in hooks),
            (_fsdp_param_group.FSDPParamGroup, "post_backward"),
        ):
            self._pretending(owner, name)
        self.enter_context(mock.patch.object(_fsdp_param, "free_storage", self._free_storage))
        self.enter_context(mock.patch.object(float8_shard, "sys", types.SimpleNamespace(_getframe=_frame)))
        self.enter_context(mock.patch.object(dist, "all_to_all_single", return_value=None))
        self.enter_context(mock.patch.object(peer_memory, "obstacle", return_value="no rank is there"))
        return self

    def _pretending(self, owner: type, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)  # called where PyTorch has put the mode aside

        def run(*args: Any, **options: Any) -> Any:
            with self._pretends:
                return method(*args, **options)

        self.enter_context(mock.patch.object(owner, name, run))

    def _free_storage(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        if storage.size():
            self.forget(storage)
            storage.resize_(0)

    def shard(self, *modules: torch.nn.Module, order: GradientOrder | None = None) -> None:
        """Apply `fully_shard` from the inside out; `order`: of the last one's gradients."""
        mesh = init_device_mesh("cpu", (RANKS,))
        mesh._device_type = "cuda"
        for module in modules:
            fully_shard(module, mesh=mesh)
        for one in modules:
            sharded: Any = one
            sharded.set_custom_all_gather(_Nothing())
            sharded.set_custom_reduce_scatter(_Nothing())
        if order is not None:
            tree_reduce_scatter(modules[-1], order)
