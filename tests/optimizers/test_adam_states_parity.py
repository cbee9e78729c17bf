"""On an H200 `twin::adam_states` and `twin::adam_capturable` equal their definitions in every bit; so does training."""

import copy
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.adam_parameters import awkward
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from optimized.ops.optimizers.adam_states import CAPACITIES
from reference.float8.float8_tensor import Float8Tensor
from reference.ops.optimizers import adam_states
from reference.ops.optimizers.adam import correction

pytestmark = pytest.mark.gpu

twin = torch.ops.twin
BF16, FP16, FP32, U8, I16 = torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int16
WIDE, MOMENTS = (FP32, BF16, FP16), (FP32, BF16, FP16, U8)
# Dtypes of gradients and of what is stepped, and whether that is a master with a copy.
PARAMS = {
    **{f"{wide}": (wide, wide, False) for wide in WIDE},
    **{f"{wide}, fp32 masters": (wide, FP32, True) for wide in (BF16, FP16)},
    **{f"{wide}, fp16 masters": (wide, FP16, True) for wide in WIDE},
    **{f"{wide}, remainders": (wide, I16, True) for wide in WIDE},
}


def case(
    sizes: list[int], name: str, pair: tuple[torch.dtype, torch.dtype], offset: int, special: bool, seed: int
) -> list[list[torch.Tensor]]:
    """The op's lists on the CPU: views that begin `offset` elements after the start of their memory."""
    wide, param, master = PARAMS[name]

    def room(x: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros(x.numel() + offset, dtype=x.dtype)
        return memory[offset:].copy_(x)

    lists: list[list[torch.Tensor]] = [[] for _ in range(8)]
    for i, size in enumerate(sizes):
        values = [awkward(seed + 5 * i + j, size, FP32, special and j < 2) for j in range(4)]
        lists[0].append(room(values[0].to(wide)))
        if param == I16:
            high, low = adam_states.parted(values[1])
            lists[1].append(room(low))
            lists[4].append(room(high))
        elif master and param == FP16:
            scale = adam_states.scale_of(values[1], FP16)
            lists[1].append(room(adam_states.codes(values[1], scale, FP16)))
            lists[5].append(scale)
        else:
            lists[1].append(room(values[1].to(param)))
        if master and param != I16:
            lists[4].append(room(torch.zeros(size, dtype=wide)))
        for j, dtype in enumerate(pair):
            x = values[2] / 8 if j == 0 else values[3].abs()
            if dtype in adam_states.RANGES:
                scale = adam_states.scale_of(x, dtype)
                x = adam_states.codes(x, scale, dtype)
                lists[6 + j].append(scale)
            lists[2 + j].append(room(x.to(dtype)))
    return lists


def compare(
    sizes: list[int],
    name: str,
    pair: tuple[torch.dtype, torch.dtype],
    decoupled: bool = True,
    offset: int = 0,
    special: bool = False,
    seed: int = 0,
) -> None:
    """Three steps."""
    sides = []
    for device in ("cpu", "cuda"):
        found = case(sizes, name, pair, offset, special, seed)
        # Views keep their distance from the start of their memory.
        lists = [[x._base.to(device)[offset:] if x._base is not None else x.to(device) for x in part] for part in found]
        for step in (1, 2, 3):
            scalars = (1e-2, 0.9, 0.999, 1e-8, 0.1, correction(0.9, step), correction(0.999, step))
            twin.adam_states(*lists, *scalars, decoupled)
        sides.append(lists)
    for i, (ours, theirs) in enumerate(zip(*sides, strict=True)):
        for j, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(b, a, f"{name}, {pair}, tensor {j} of list {i}")


@pytest.mark.parametrize("pair", list(itertools.product(MOMENTS, repeat=2)), ids=str)
@pytest.mark.parametrize("name", PARAMS)
def test_every_kind(name: str, pair: tuple[torch.dtype, torch.dtype]) -> None:
    compare([1, 7, 8, 9, 2047, 2048, 2049, 0, 20001], name, pair)
    compare([2049, 3], name, pair, decoupled=False, special=True, offset=1)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    name=st.sampled_from(list(PARAMS)),
    pair=st.tuples(st.sampled_from(MOMENTS), st.sampled_from(MOMENTS)),
    decoupled=st.booleans(),
    offset=st.integers(0, 17),
    seed=st.integers(0, 2**20),
)
def test_any_list_at_any_address(
    sizes: list[int], name: str, pair: Any, decoupled: bool, offset: int, seed: int
) -> None:
    compare(sizes, name, pair, decoupled, offset, True, seed)


@pytest.mark.parametrize("count", [CAPACITIES[0], CAPACITIES[0] + 1, CAPACITIES[1] + 1])
def test_around_the_capacity_of_a_launch(count: int) -> None:
    compare([5 + i % 7 for i in range(count)], f"{BF16}, fp16 masters", (U8, FP16))


def test_every_code_is_read_and_written() -> None:
    """A step that changes nothing but the scale: all 65,536 words, and all 256."""
    sides = []
    for device in ("cpu", "cuda"):
        half = torch.arange(1 << 16, dtype=torch.int32).to(I16).view(FP16).to(device)
        codes = torch.arange(1 << 16).to(U8).to(device)
        zeros = torch.zeros(1 << 16, device=device)
        scales = [torch.full((1,), 0.37, device=device) for _ in range(2)]
        rest = (0.0, 0.9, 0.999, 1e-8, 0.0, 0.1, 0.001, True)
        params = zeros.clone()
        twin.adam_states([zeros], [params], [half], [codes], [], [], [scales[0]], [scales[1]], *rest)
        sides.append([params, half, codes, *scales])
    for a, b in zip(*sides, strict=True):
        assert_same_bits(b, a)


EDGES = (0.0, -0.0, 2.0**-149, 2.0**-126, 2.0**-100, 1.5 * 2.0**-100, 0.7, 2.0**24, 2.0**40, 3e38)


@pytest.mark.parametrize("c", [1.0, 0.1, 2.0**-24, 2.0**-26, 1.5])
@pytest.mark.parametrize("eps", [1e-8, 0.0, 2.0**-60, 2.0**-62, 2.0])
def test_where_the_kernel_changes_to_divisions_that_take_any_number(c: float, eps: float) -> None:
    """Each pair of a first and a second moment on both sides of every limit, alone among usual numbers."""
    pairs = [*itertools.product((*EDGES, *(-x for x in EDGES)), EDGES), (math.nan, 1.0), (1.0, math.nan), (1.0, -1.0)]
    moments = torch.full((8 * len(pairs), 2), 0.3)
    moments[::8] = torch.tensor(pairs)
    sides = []
    for device in ("cpu", "cuda"):
        m, v = (x.clone().to(device) for x in moments.T)
        # Betas of 1 leave the moments as they are.
        params, zeros = (torch.zeros(len(m), device=device) for _ in range(2))
        rest = (1.0, 1.0, 1.0, eps, 0.0, c, c, True)
        twin.adam_states([zeros], [params], [m], [v], [], [], [], [], *rest)
        sides.append([params, m, v])
    for a, b in zip(*sides, strict=True):
        assert_same_bits(b, a)


def test_a_bound_skips_no_largest_parameter() -> None:
    """Masters with a scale: many tiles of like magnitudes, whose largest the step makes or takes away."""
    sides = []
    for device in ("cpu", "cuda"):
        draw = torch.Generator().manual_seed(0)
        size = 3 * 4 * 2048 + 5
        near = 1 + torch.rand(size, generator=draw) * 2.0**-9
        grad, first, second = (torch.randn(size, generator=draw) for _ in range(3))
        scale = adam_states.scale_of(near, FP16)
        lists = [[grad.to(BF16)], [adam_states.codes(near, scale, FP16)], [first], [second.square()]]
        lists += [[torch.zeros(size, dtype=BF16)], [scale], [], []]
        lists = [[x.to(device) for x in part] for part in lists]
        for lr in (1e-3, 1e-5, 0.3, 0.0):
            twin.adam_states(*lists, lr, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, True)
        sides.append([x for part in lists for x in part])
    for a, b in zip(*sides, strict=True):
        assert_same_bits(b, a)


# --- on the device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 6, 999, 12345, 2**30])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("scale", [None, 3.0, 65536.0, math.inf])
def test_a_control_has_the_numbers_of_a_step(step: int, found_inf: float | None, scale: float | None) -> None:
    for betas, correct in itertools.product(((0.9, 0.999), (0.0, 0.95), (0.123456789, 1 - 1e-7)), (False, True)):
        sides = []
        for device in ("cpu", "cuda"):
            count = torch.tensor([step], dtype=torch.int32, device=device)
            given = [None if x is None else torch.tensor([x], device=device) for x in (scale, found_inf)]
            control = twin.adam_control(count, torch.tensor(0.3, device=device), *given, *betas, correct)
            sides.append((control, count))
        for a, b in zip(*sides, strict=True):
            assert_same_bits(b, a)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("moment", [FP32, BF16])
@pytest.mark.parametrize("name", [name for name in PARAMS if "fp16 m" not in name and "remainders" not in name])
def test_captured_steps(name: str, moment: torch.dtype, unscale: bool) -> None:
    for sizes, offset, special in (([1, 2049, 0, 20001], 0, False), ([2049, 3], 3, True)):
        sides = []
        for device in ("cpu", "cuda"):
            found = case(sizes, name, (moment, moment), offset, special, 0)
            lists = [[x._base.to(device)[offset:] for x in part] for part in found[:5]]  # type: ignore[union-attr]
            for step, skip in enumerate((0.0, 1.0, 0.0)):
                control = torch.tensor([0.01, correction(0.9, 1 + step), correction(0.999, 1 + step), 0.37, skip])
                rest = (0.9, 0.999, 1e-8, 0.1, bool(step), unscale)
                twin.adam_capturable(*lists, control.to(device), *rest)
            sides.append([x for part in lists for x in part])
        for i, (a, b) in enumerate(zip(*sides, strict=True)):
            assert_same_bits(b, a, f"{name}, result {i}")


def parameters(device: str, dtype: torch.dtype = BF16) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(awkward(i, size, dtype, False).to(device)) for i, size in enumerate((3000, 17))]


def test_a_step_is_captured_in_a_graph() -> None:
    ours, theirs = parameters("cuda"), parameters("cpu")
    options = {"capturable": True, "master_weights": True, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
    optimizers = [te.optimizers.FusedAdam(params, 0.1, **options) for params in (ours, theirs)]  # type: ignore[arg-type]
    for params in (ours, theirs):
        for i, p in enumerate(params):
            p.grad = awkward(10 + i, p.numel(), BF16, False).to(p.device)
    for optimizer in optimizers:  # makes the state
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    rate = optimizers[0].param_groups[0]["lr"]
    for step in range(3):
        for params in (ours, theirs):
            for i, p in enumerate(params):
                p.grad.copy_(awkward(20 + 10 * step + i, p.numel(), BF16, False))
        rate.fill_(0.1 * step)
        optimizers[1].param_groups[0]["lr"].fill_(0.1 * step)
        graph.replay()
        optimizers[1].step()
    for p, q in zip(ours, theirs, strict=True):
        assert_same_bits(p, q)
        for part, x in optimizers[1].state[q].items():
            assert_same_bits(optimizers[0].state[p][part], x, part)
    assert optimizers[0].param_groups[0]["step"].item() == optimizers[1].param_groups[0]["step"].item() == 4


LAYOUTS: dict[str, dict[str, Any]] = {
    "bf16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16, "master_weights": True},
    "FP8": {"exp_avg_dtype": U8, "exp_avg_sq_dtype": FP16, "master_weights": True},
    "FP8, fp16 masters": {
        "exp_avg_dtype": U8,
        "exp_avg_sq_dtype": U8,
        "master_weights": True,
        "master_weight_dtype": FP16,
    },
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "captured": {"master_weights": True, "capturable": True},
}


@pytest.mark.parametrize(
    ("name", "quantized"),
    [(name, quantized) for name in LAYOUTS for quantized in (False, True) if not (quantized and name == "captured")],
)
def test_training_has_the_bits_of_a_cpu(name: str, quantized: bool) -> None:
    recipe = te.DelayedScaling(amax_history_len=4)
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        layer = te.LayerNormMLP(64, 128, params_dtype=BF16)
    pair = (layer, copy.deepcopy(layer).to("cuda"))
    optimizers = [te.optimizers.FusedAdam(m.parameters(), 1e-2, weight_decay=0.1, **LAYOUTS[name]) for m in pair]
    for step in range(5):
        seen: list[dict[str, torch.Tensor]] = []
        for module, optimizer in zip(pair, optimizers, strict=True):
            x = awkward(step, 66 * 64, BF16, False).view(66, 64).to(next(module.parameters()).device)
            optimizer.zero_grad()
            with te.autocast(recipe=recipe):
                y = module(x)
            y.backward(torch.full_like(y, 0.01))
            te.optimizers.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            found = {"y": y}
            for key, p in module.named_parameters():
                parts = (p.codes, p._scale_inv) if isinstance(p, Float8Tensor) else (p,)
                found |= {f"{key}.{i}": part.detach().clone() for i, part in enumerate(parts)}
                found |= {f"{key}.{part}": value.clone() for part, value in optimizer.state[p].items()}
            seen.append(found)
        for key, value in seen[0].items():
            assert_same_bits(value, seen[1][key], f"step {step}, {key}")


@pytest.mark.parametrize("kind", ["FusedAdam", "FusedAdam, capturable", "FusedSGD"])
def test_training_in_fp16_under_a_scaler_has_the_bits_of_a_cpu(kind: str) -> None:
    recipe = te.DelayedScaling(amax_history_len=4)
    torch.manual_seed(0)
    layer = te.LayerNormMLP(64, 128, params_dtype=FP32)
    pair = (layer, copy.deepcopy(layer).to("cuda"))
    optimizers = [
        te.optimizers.FusedSGD(m.parameters(), 1e-2, momentum=0.9)
        if kind == "FusedSGD"
        else te.optimizers.FusedAdam(m.parameters(), 1e-2, capturable="capturable" in kind)
        for m in pair
    ]
    scalers = [torch.amp.GradScaler(device, init_scale=2.0**15, growth_interval=3) for device in ("cpu", "cuda")]
    for step in range(8):
        seen = []
        for module, optimizer, scaler in zip(pair, optimizers, scalers, strict=True):
            device = next(module.parameters()).device
            x, dy = (awkward(step + n, 66 * 64, BF16, False).float().view(66, 64).to(device) for n in (0, 100))
            optimizer.zero_grad()
            with torch.autocast(device.type, FP16), te.autocast(recipe=recipe):
                y = module(x)
            scaler.scale(y.float()).backward(dy / 64)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)
                scaler.step(optimizer)
            scaler.update()
            found = [y, *(p.grad for p in module.parameters()), *(p.detach().clone() for p in module.parameters())]
            seen.append((scaler.get_scale(), found))
        assert seen[0][0] == seen[1][0]
        for i, (a, b) in enumerate(zip(seen[0][1], seen[1][1], strict=True)):
            assert_same_bits(b, a, f"step {step}, result {i}")
