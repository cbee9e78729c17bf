"""`twin::tree_mean` on the GPU: kernels/optimizers/tree_mean.cu, in which the order of additions is compiled.

Semantics: `reference.ops.optimizers.tree_mean`.
"""

import functools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from optimized.ops.multi_tensor import ELEMENTS_PER_BLOCK, THREADS
from reference.ops.library import on_cuda
from reference.ops.optimizers.tree_mean import outputs


@functools.cache
def _kernel(dtype: torch.dtype, nodes: torch.dtype, additions: tuple[int, ...]) -> launch.Kernel:
    macros: dict[str, int | str] = {"WIDE": WIDE[dtype], "NODES": "float" if nodes is torch.float32 else "wide_t"}
    return launch.function("tree_mean", "tree_mean", {**macros, "ADDITIONS": ",".join(map(str, additions))})


# What the CPU suite compiles: one node, two to eight ranks with a node each, and other widths. Others are compiled when
# they are met.
ORDERS = ((0,), (0, 1), (0, 1, 1), (0, 0, 2), (0, 1, 0, 2), (0, 1, 0, 2, 0, 1, 0, 3), (0, 1, 0, 2, 0, 2))
CONFIGURATIONS = [
    _kernel(dtype, nodes, order).configuration
    for order in ORDERS
    for dtype, nodes in {(dtype, nodes): None for dtype in WIDE for nodes in (dtype, torch.float32)}
]


@on_cuda
def tree_mean(nodes: list[torch.Tensor], additions: list[int], factor: float, out: torch.Tensor) -> None:
    """Write to `out`, `[n]`; a thread reads all nodes before it writes."""
    outputs(nodes, additions, factor, out)
    count = out.numel()
    if count:
        addresses = np.array([node.data_ptr() for node in nodes], dtype=np.uint64)
        aligned = not any(address % 16 for address in (*addresses.tolist(), out.data_ptr()))
        args = [launch.by_value(addresses), out.data_ptr(), count, np.int32(aligned), np.float32(factor)]
        kernel, blocks = _kernel(out.dtype, nodes[0].dtype, tuple(additions)), -(-count // ELEMENTS_PER_BLOCK)
        launch.launch(kernel, (blocks,), (THREADS,), args, device=out.device.index)
