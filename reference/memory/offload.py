"""`get_cpu_offload_context`: what layers save for backward waits in pinned memory of the CPU instead of the GPU's.

    context, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=2, model_layers=len(layers))
    for layer in layers:
        with context:
            x = layer(x)
        x = synchronize(x)

Of `model_layers` layers the first `num_layers` are offloaded. Copies run on a stream of their own, beside the layers; a
layer's tensors start their way back when backward reaches the layer after it. They are copied as they are, so no bit
changes. On a CPU there is nothing to move.

What stays: parameters, FP8 copies of weights, what `mark_not_offload` has marked, and tensors of less than 2^18
elements; where the environment has NVTE_CPU_OFFLOAD_V1=1, as Transformer Engine's older code needs it, of less than
2^8, whose memory is smaller than what the allocator gives. Layers in a context are not played from tapes
(`optimized.tapes`), whose memory cannot move. Source: Transformer Engine's `pytorch/cpu_offload.py`.
"""

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from reference.arguments import check_arguments
from reference.memory.offload_marks import is_marked, mark_not_offload
from reference.state.threads import here
from reference.support.notice import say_once

__all__ = ["get_cpu_offload_context", "mark_not_offload"]

Synchronize = Callable[[torch.Tensor], torch.Tensor]


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies from and to a GPU."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Copy on that stream, after what the present one has been given."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _least() -> int:
    """How many elements a tensor has at least that moves."""
    return 1 << (8 if os.environ.get("NVTE_CPU_OFFLOAD_V1", "0") == "1" else 18)


def _is_on_gpu(t: torch.Tensor) -> bool:
    return t.is_cuda


def _moves(t: torch.Tensor, least: int) -> bool:
    """Whether it is worth moving: a large activation on a GPU."""
    base = t if t._base is None else t._base
    weight = isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)
    plain = type(t) is torch.Tensor and t.layout is torch.strided
    return _is_on_gpu(t) and plain and t.numel() >= least and not (weight or is_marked(t) or is_marked(base))


class _Kept:
    """A tensor on the CPU, and on the GPU again from `fetch` to `take`."""

    def __init__(self, t: torch.Tensor) -> None:
        self.device = t.device
        self.back: torch.Tensor | None = None
        with _aside(t.device):
            self.copy = torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
            self.copy.copy_(t, non_blocking=True)
        if t.is_cuda:
            t.record_stream(_stream(t.device))

    def fetch(self) -> None:
        """Start to copy it back."""
        if self.back is None:
            with _aside(self.device):
                self.back = torch.empty_like(self.copy, device=self.device)
                self.back.copy_(self.copy, non_blocking=True)

    def take(self) -> torch.Tensor:
        """The tensor, for the present stream. A graph that goes backward twice copies it twice."""
        self.fetch()
        back, self.back = self.back, None
        assert back is not None
        if back.is_cuda:
            present = torch.cuda.current_stream(self.device)
            present.wait_stream(_stream(self.device))
            back.record_stream(present)
        return back


class _Layer:
    """What one layer has saved in one forward, as long as its graph lives.

    Attributes:
        before: the layer before it.
        least: the elements of what moves; None in a layer that is not offloaded.
    """

    def __init__(self, before: "_Layer | None", least: int | None) -> None:
        self.before, self.least = before, least
        self.kept: list[weakref.ref[_Kept]] = []

    def pack(self, t: torch.Tensor) -> torch.Tensor | _Kept:
        if self.least is None or not _moves(t, self.least):
            if t.device.type == "cpu":
                say_once("offload", "get_cpu_offload_context: on a CPU there is nothing to move; activations stay")
            return t
        kept = _Kept(t)
        self.kept.append(weakref.ref(kept))
        return kept

    def fetch(self) -> None:
        """Start to copy everything back that is still needed."""
        for one in self.kept:
            kept = one()
            if kept is not None:
                kept.fetch()
        self.kept = []


def _unpack(found: torch.Tensor | _Kept) -> torch.Tensor:
    return found.take() if isinstance(found, _Kept) else found


class _Offload(contextlib.AbstractContextManager["_Offload"]):
    """The context around each layer, and the function behind it."""

    def __init__(self, num_layers: int, model_layers: int) -> None:
        self.num_layers, self.model_layers = num_layers, model_layers
        self.least = _least()
        self.count = 0  # of layers in this forward
        self.layer: _Layer | None = None
        self.hooks: Any = None

    def __enter__(self) -> "_Offload":
        if self.hooks is not None:
            raise RuntimeError("get_cpu_offload_context: its context is open already; one layer at a time is accepted.")
        if self.count == self.model_layers:
            self.count, self.layer = 0, None
        layer = _Layer(self.layer, self.least if self.count < self.num_layers else None)
        hooks = torch.autograd.graph.saved_tensors_hooks(layer.pack, _unpack)
        hooks.__enter__()  # which may be refused
        self.layer, self.hooks = layer, hooks
        self.count += 1
        self.outer, here().offloading = here().offloading, True
        return self

    def __exit__(self, *error: Any) -> None:
        here().offloading = self.outer
        hooks, self.hooks = self.hooks, None
        hooks.__exit__(*error)
        if error[0] is not None:  # the forward ends here, and the next begins with the first layer
            self.count, self.layer = 0, None

    def synchronize(self, tensor: torch.Tensor) -> torch.Tensor:
        """The layer's output: when backward reaches it, the layer before starts to get its tensors back."""
        if self.layer is None or self.hooks is not None:
            raise RuntimeError(
                "get_cpu_offload_context: its function is called before its context has ended; the layer's output, "
                "after the context, is accepted."
            )
        if tensor.grad_fn is None:
            raise ValueError(
                f"get_cpu_offload_context: its function got a tensor of shape {list(tensor.shape)} without a graph; "
                f"the layer's output, with gradients on, is accepted."
            )
        before = self.layer.before
        if before is not None:
            tensor.grad_fn.register_prehook(lambda _: before.fetch())
        return tensor


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[contextlib.AbstractContextManager[Any], Synchronize]:
    """A context around each layer and a function for its output, which offload activations (see the module).

    Args:
        enabled: False gives a context and a function that do nothing.
        num_layers: how many layers are offloaded, the first ones; fewer than model_layers.
        model_layers: how many layers run in the context in each forward.
        offload_activations: False does nothing, and needs offload_weights=True with `enabled`.
        offload_weights: as in Transformer Engine without effect, which a DeprecationWarning says.
        double_buffering: as in Transformer Engine without effect.
        manual_synchronization, retain_pinned_cpu_buffers, offload_stream: only "off" is offered.
    """
    name = "get_cpu_offload_context"
    check_arguments(name, locals())
    if not enabled:
        return contextlib.nullcontext(), lambda x: x
    if not (offload_activations or offload_weights):
        raise ValueError(f"{name}: offload_activations=False with enabled=True; True is accepted.")
    if offload_weights:
        warnings.warn(f"{name}: offload_weights=True has no effect", DeprecationWarning, stacklevel=2)
        if not offload_activations:
            return contextlib.nullcontext(), lambda x: x
    layers = 1 if num_layers is None else num_layers
    if layers >= model_layers:
        raise ValueError(
            f"{name}: num_layers={num_layers} with model_layers={model_layers}; fewer are accepted: the last layer's "
            f"activations are needed at once."
        )
    made = _Offload(layers, model_layers)
    return made, made.synchronize
