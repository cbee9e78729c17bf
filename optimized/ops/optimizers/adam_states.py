"""`twin::adam_states` on the GPU: kernels/optimizers/adam_states.cu. Semantics: `reference.ops.optimizers.adam_states`.

Where something is scaled there are three launches: the largest magnitudes, the step, the new scales.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from optimized.ops.multi_tensor import ELEMENTS_PER_BLOCK, THREADS, Tensor, entries, tables
from reference.ops.library import on_cuda
from reference.ops.optimizers.adam_states import RANGES, outputs

CAPACITIES = (32, 256)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}  # of moments
OWN, MASTER, SCALED_MASTER, REMAINDER = range(4)
_POINTERS = ("grad", "param", "exp_avg", "exp_avg_sq", "rounded", "param_scale", "exp_avg_scale", "exp_avg_sq_scale")
_ROW = entries(_POINTERS, ("index",))
SCALARS = np.dtype(
    [
        *((name, "f4") for name in ("lr", "beta1", "rest1", "beta2", "rest2", "eps", "decay", "c1", "c2")),
        ("decoupled", "i4"),
    ]
)


def tiles(param: int, first: int, second: int) -> int:
    """Tiles of ELEMENTS_PER_BLOCK that a block takes: more where it has scales to invert and maxima to write."""
    if param == SCALED_MASTER:
        return 8
    return 4 if max(first, second) >= KINDS[torch.float16] else 1


def kernel(name: str, wide: int, param: int, first: int, second: int, capacity: int) -> launch.Kernel:
    """The function `name` of kernels/optimizers/adam_states.cu."""
    defines: dict[str, int | str] = {"WIDE": wide, "PARAM": param, "FIRST": first, "SECOND": second}
    return launch.function("adam_states", name, {**defines, "TILES": tiles(param, first, second), "CAPACITY": capacity})


# What CI compiles of them: every kind of parameter with moments of one kind, every pair of moments for one of them.
_SAME = itertools.product(WIDE.values(), range(4), range(4))
_COMPILED = [(wide, param, kind, kind, CAPACITIES[0]) for wide, param, kind in _SAME if (wide, param) != (0, MASTER)]
_COMPILED += [(1, MASTER, *pair, CAPACITIES[0]) for pair in itertools.permutations(range(4), 2)]
_COMPILED += [(1, MASTER, 3, 3, CAPACITIES[1])]
CONFIGURATIONS = [kernel("adam_states", *one).configuration for one in _COMPILED]


def scalars(
    lr: float, beta1: float, beta2: float, eps: float, decay: float, c1: float, c2: float, decoupled: bool
) -> launch.ByValue:
    """The step's numbers as a struct."""
    b1, b2, one = np.float32(beta1), np.float32(beta2), np.float32(1)
    return launch.by_value(np.array([(lr, b1, one - b1, b2, one - b2, eps, decay, c1, c2, decoupled)], SCALARS))


def rows(lists: Sequence[Sequence[torch.Tensor]]) -> Iterator[Tensor]:
    """Of each tensor with numbers its addresses, its count, and its place; a list may be empty."""
    filled = [i for i, grad in enumerate(lists[0]) if grad.numel()]
    for index, i in enumerate(filled):
        yield tuple(part[i].data_ptr() if part else 0 for part in lists), lists[0][i].numel(), (index,)


@on_cuda
def adam_states(
    grads: list[torch.Tensor],
    params: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    rounded: list[torch.Tensor],
    param_scales: list[torch.Tensor],
    exp_avg_scales: list[torch.Tensor],
    exp_avg_sq_scales: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    correction1: float,
    correction2: float,
    decoupled: bool,
) -> None:
    """Change all lists but `grads` in place."""
    lists = (grads, params, exp_avgs, exp_avg_sqs, rounded, param_scales, exp_avg_scales, exp_avg_sq_scales)
    outputs(*lists)
    found = list(rows(lists))
    if not found:
        return
    device, wide, param = grads[0].device, grads[0].dtype, params[0].dtype
    masters = {torch.int16: REMAINDER, wide: OWN, torch.float32: OWN if param == wide else MASTER}
    master = SCALED_MASTER if param_scales else masters[param]
    kinds = (master, KINDS[exp_avgs[0].dtype], KINDS[exp_avg_sqs[0].dtype])
    numbers = scalars(lr, beta1, beta2, eps, weight_decay, correction1, correction2, decoupled)
    scaled = bool(param_scales) or exp_avgs[0].dtype in RANGES or exp_avg_sqs[0].dtype in RANGES
    amaxes = torch.zeros(3 * len(found), dtype=torch.float32, device=device) if scaled else None
    address = 0 if amaxes is None else amaxes.data_ptr()
    for capacity, blocks, args in tables(_ROW, found, CAPACITIES, tiles(*kinds) * ELEMENTS_PER_BLOCK):

        def run(name: str, grid: int, *more: object) -> None:
            chosen = kernel(name, WIDE[wide], *kinds, capacity)  # noqa: B023  (called in the same turn)
            launch.launch(chosen, (grid,), (THREADS,), [*args, *more], device=device.index)  # noqa: B023

        if scaled:
            run("adam_states_amax", blocks, numbers, address)
        run("adam_states", blocks, numbers, address, 0, np.int32(0))
        if scaled:
            run("adam_states_scales", -(-int(args[1]) // THREADS), address)
