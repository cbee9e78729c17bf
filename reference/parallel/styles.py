"""Styles for PyTorch's `parallelize_module`: layers that are whole on each rank become layers that ranks share.

    from torch.distributed.tensor.parallel import parallelize_module
    from reference.parallel.styles import ColwiseParallel, LayerParallel, RowwiseParallel

    plan = {"table": RowwiseParallel(), "layers.*": LayerParallel(), "head": ColwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)

The result is what constructors make with `tp_group`: the words of one process (`reference.parallel.tensor`), and
parameters that are plain tensors, a rank's part. PyTorch's styles of the same names make DTensors of `torch.nn.Linear`,
whose sums have no order. Inputs and outputs are plain tensors, as the layers have them: of a column-parallel map y
`[..., out / t]`, which a row-parallel one takes.

It is a module of its own because importing DTensor takes a second.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from reference.parallel.tensor import part_of
from reference.support.groups import bytes_of

__all__ = ["ColwiseParallel", "LayerParallel", "RowwiseParallel"]


class LayerParallel(ParallelStyle):
    """`LayerNormMLP`, `MultiheadAttention`, `TransformerLayer` (set_parallel_mode=True) or `DotProductAttention`.

    Args:
        sequence_parallel: whether each rank has its own tokens outside of the maps (PyTorch's SequenceParallel).
    """

    parallel_mode: str | None = None

    def __init__(self, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        """Give the group and cut the parameters, which are those of rank `src_data_rank` (None: of this rank).

        Raises:
            TypeError: the layer does not take this style.
            ValueError: a size that the ranks cannot divide, or a mesh of several dimensions.
            NotImplementedError: ranks share the layer's tokens.
        """
        name, style = type(module).__name__, type(self).__name__
        if device_mesh.ndim != 1:
            raise ValueError(f"{style}: a mesh of {device_mesh.ndim} dimensions; one of one dimension is accepted.")
        if self.parallel_mode not in getattr(module, "parallel_modes", ()):
            raise TypeError(
                f"{style}: {name}; ColwiseParallel takes Linear and LayerNormLinear, RowwiseParallel Linear and "
                f"Embedding, LayerParallel layers of several maps and attention."
            )
        share(module, device_mesh.get_group(), self.parallel_mode, self.sequence_parallel, self.src_data_rank)
        return module


class ColwiseParallel(LayerParallel):
    """`Linear` or `LayerNormLinear` with parallel_mode="column"."""

    parallel_mode = "column"


class RowwiseParallel(LayerParallel):
    """`Linear` with parallel_mode="row", or `Embedding`, whose rows are divided."""

    parallel_mode = "row"


def share(module: Any, group: Any, mode: str | None, sequence_parallel: bool, source: int | None) -> None:
    """Let the ranks of a group share a layer. One that is refused is as it was."""
    parts: list[tuple[Any, str | None]] = list(module.parts_to_share(mode))
    before = [dict(vars(layer)) for layer, _ in parts]
    try:
        for layer, own_mode in parts:
            if layer.tp_size > 1:
                raise ValueError(f"{type(layer).__name__}: tp_size={layer.tp_size}; a layer that is whole is accepted.")
            layer.take_tensor_group(group, 1, sequence_parallel)
            if layer.tp_size > 1:
                layer.divide(own_mode)
    except Exception:
        for (layer, _), attributes in zip(parts, before, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)
        raise
    if dist.get_world_size(group) == 1:
        return
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    for layer in dict.fromkeys(layer for layer, _ in parts):
        partitions = layer.partitions()
        for name, p in layer._parameters.items():
            dim, sizes = partitions.get(name, (0, None))
            if p is None or (sizes is not None and p.shape[dim] == sum(sizes)):  # of two layers, and cut with the first
                continue
            if source is not None and not p.is_meta:
                whole = p.detach().contiguous()
                dist.broadcast(bytes_of(whole), group=group, group_src=source)
                p.data = whole
            if sizes is not None:
                p.data = part_of(p.detach(), dim, sizes, rank, count)
        layer.mark_parameters()
