"""`twin::adam_states`: each rounding, scales and codes, remainders, and what is refused.

On an H200 it and `twin::adam_capturable` equal their definitions in every bit; so does training.
"""

import copy
import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.adam_parameters import BF16, RANGE, awkward, decoded, encoded, numbers
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from optimized.ops.optimizers.adam_states import CAPACITIES
from reference.float8.float8_tensor import Float8Tensor
from reference.ops.optimizers import adam_states
from reference.ops.optimizers.adam import correction

twin = torch.ops.twin
FP16, FP32, U8, I16 = torch.float16, torch.float32, torch.uint8, torch.int16
WIDE, MOMENTS = (FP32, BF16, FP16), (FP32, BF16, FP16, U8)

# Dtypes of gradients and of what is stepped, and whether that is a master with a copy.
PARAMS = {
    **{f"{wide}": (wide, wide, False) for wide in WIDE},
    **{f"{wide}, fp32 masters": (wide, FP32, True) for wide in (BF16, FP16)},
    **{f"{wide}, fp16 masters": (wide, FP16, True) for wide in WIDE},
    **{f"{wide}, remainders": (wide, I16, True) for wide in WIDE},
}


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(MOMENTS, repeat=2)))
@pytest.mark.parametrize(
    ("wide", "param"), [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16), (BF16, I16), (FP32, I16)]
)
def test_a_step_is_adams_between_reading_and_writing(
    wide: torch.dtype, param: torch.dtype, first: torch.dtype, second: torch.dtype, decoupled: bool
) -> None:
    own = param == wide and param != FP16
    grads = [numbers(i, (33, 5), wide) for i in range(2)]
    masters = [numbers(4 + i, (33, 5), param if own else FP32) for i in range(2)]
    moments = [[numbers(8 + i, (33, 5)) / 8 for i in range(2)], [numbers(9 + i, (33, 5)).square() for i in range(2)]]
    kept = [[encoded(x, dtype) for x in part] for part, dtype in zip(moments, (first, second), strict=True)]
    if param == I16:
        words = [x.view(torch.int32).numpy() for x in masters]
        params = [torch.from_numpy((w & 0xFFFF).astype(np.uint16).view(np.int16)) for w in words]
        rounded = [
            torch.from_numpy(((w >> 16) + (w >> 15 & 1)).astype(np.uint16).view(np.int16)).view(BF16) for w in words
        ]
        param_scales: list[Any] = []
    else:
        params, found = (list(part) for part in zip(*(encoded(x, param) for x in masters), strict=True))
        params = [x.clone() for x in params]
        param_scales = [] if found[0] is None else found
        rounded = [] if own else [torch.zeros(33, 5, dtype=wide) for _ in range(2)]
        masters = [decoded(*pair) for pair in zip(params, found, strict=True)]
    lists = [[pair[0].clone() for pair in part] for part in kept]
    scales = [[pair[1].clone() for pair in part if pair[1] is not None] for part in kept]
    scalars = (1e-2, 0.9, 0.999, 1e-8, 0.1, correction(0.9, 3), correction(0.999, 3), decoupled)

    plain = [[decoded(*pair).clone() for pair in part] for part in kept]
    wide_masters = [x.float().clone() for x in masters]
    twin.adam([x.float() for x in grads], wide_masters, *plain, [], *scalars)
    twin.adam_states(grads, params, *lists, rounded, param_scales, *scales, *scalars)
    for part, of, dtype, expected in zip(lists, scales, (first, second), plain, strict=True):
        for i, x in enumerate(part):
            codes, scale = encoded(expected[i], dtype)
            assert_same_bits(x, codes)
            if scale is not None:
                assert_same_bits(of[i], scale)
    for i, master in enumerate(wide_masters):
        if param == I16:
            assert_same_bits(adam_states.joined(rounded[i], params[i]), master)
            assert bool(((rounded[i].double() - master.double()).abs() <= (master.to(BF16) - master).abs()).all())
        else:
            codes, scale = encoded(master, param if param_scales or own else FP32)
            assert_same_bits(params[i], codes)
            if param_scales:
                assert scale is not None
                assert_same_bits(param_scales[i], scale)
            if rounded:
                assert_same_bits(rounded[i], master.to(wide))


def test_remainders_hold_every_word() -> None:
    """All high halves with low halves around the tie; NaN as one word."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = torch.from_numpy((high | low).view(np.float32))
        parameter, remainder = adam_states.parted(master)
        nan = master.isnan()
        assert_same_bits(adam_states.joined(parameter, remainder)[~nan], master[~nan])
        assert bool(parameter[nan].isnan().all())
        assert not remainder[nan].any()
        even = master.to(BF16)
        if low != 0x8000:
            assert_same_bits(parameter[~nan], even[~nan])
        else:
            # Of two neighbours as near, the one away from zero.
            finite = ~nan & master.isfinite()
            assert bool((parameter[finite].float().abs() >= master[finite].abs()).all())


@pytest.mark.parametrize("dtype", [FP16, U8])
def test_codes_and_scales_of_unusual_tensors(dtype: torch.dtype) -> None:
    top = float(RANGE[dtype])
    zeros = torch.zeros(5)
    scale = adam_states.scale_of(zeros, dtype)
    assert scale.item() == 2.0**-100
    assert not adam_states.codes(zeros, scale, dtype).any(), "no NaN of a quotient of zeros"
    tiny = torch.tensor([1e-45, -1e-40, 0.0])
    scale = adam_states.scale_of(tiny, dtype)
    assert adam_states.read(adam_states.codes(tiny, scale, dtype), scale).isfinite().all()
    bad = torch.tensor([1.0, math.nan, -2.0])
    scale = adam_states.scale_of(bad, dtype)
    assert scale.item() == np.float32(2) / np.float32(top)
    read = adam_states.read(adam_states.codes(bad, scale, dtype), scale)
    assert read.isnan().tolist() == [False, True, False]
    huge = torch.tensor([math.inf, -3e38, 1.0])
    scale = adam_states.scale_of(huge, dtype)
    assert scale.item() == np.finfo(np.float32).max / np.float32(top)
    read = adam_states.read(adam_states.codes(huge, scale, dtype), scale)
    assert read[0] == (math.inf if dtype == FP16 else np.finfo(np.float32).max)


@pytest.mark.parametrize("dtype", [FP16, U8])
@pytest.mark.parametrize("amax", [2.0**-100, 1e-20, 0.1, 1.0, 3.14159, 7e30])
def test_every_code_is_read_and_written_again(dtype: torch.dtype, amax: float) -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(I16).view(FP16) if dtype == FP16 else torch.arange(256).to(U8)
    wide = decoded(words, None)
    words = words[wide.abs() <= float(RANGE[dtype])]
    scale = adam_states.scale_of(torch.tensor([amax]), dtype)
    values = adam_states.read(words, scale)
    assert_same_bits(adam_states.codes(values, scale, dtype), words)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"exp_avgs": [torch.ones(4, dtype=torch.int8)]}, TypeError, r"exp_avgs\[0\] is torch.int8; float32, bfloat16"),
        ({"exp_avg_scales": []}, ValueError, "exp_avg_scales has 0 entries for torch.uint8; float16 and uint8 have a"),
        ({"exp_avg_sq_scales": [torch.ones(1)]}, ValueError, "exp_avg_sq_scales has 1 entries for torch.float32"),
        (
            {"exp_avg_scales": [torch.ones(2)]},
            ValueError,
            r"exp_avg_scales\[0\] must be contiguous torch.float32 \[1\]",
        ),
        ({"params": [torch.ones(4)], "rounded": []}, None, ""),
        ({"params": [torch.ones(4, dtype=U8)]}, ValueError, "param_scales has 0 entries for torch.uint8"),
        ({"params": [torch.ones(4, dtype=torch.int32)]}, TypeError, r"params\[0\] is torch.int32; float32, float16"),
        ({"params": [torch.ones(4, dtype=I16)], "rounded": []}, ValueError, "rounded has 0 entries for torch.int16"),
        ({"rounded": [torch.ones(4, dtype=FP16)]}, ValueError, r"rounded\[0\] must be contiguous torch.bfloat16"),
        ({"grads": [torch.ones(4).double()]}, TypeError, r"grads\[0\] is torch.float64; float32, bfloat16 and float16"),
        ({"params": []}, ValueError, "params must have 1 entries, one for each of grads; got 0"),
    ],
)
def test_refusals_of_the_op(change: dict[str, Any], error: Any, sentence: str) -> None:
    lists: dict[str, Any] = {
        **{"grads": [torch.ones(4, dtype=BF16)], "params": [torch.ones(4)], "exp_avgs": [torch.zeros(4, dtype=U8)]},
        **{"exp_avg_sqs": [torch.zeros(4)], "rounded": [torch.zeros(4, dtype=BF16)], "param_scales": []},
        **{"exp_avg_scales": [torch.ones(1)], "exp_avg_sq_scales": []},
    }
    lists |= change
    call = lambda: twin.adam_states(*lists.values(), 1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 1.0, True)  # noqa: E731
    if error is None:
        call()
        return
    with pytest.raises(error, match=f"twin::adam_states: {sentence}"):
        call()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [torch.float16, torch.uint8, torch.bfloat16])
def test_a_parameter_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype, kept: torch.dtype) -> None:
    """A number without dimensions (CLIP's logit_scale) has the words of a vector of one number, and its own shape."""
    options: dict[str, Any] = {"exp_avg_dtype": kept, "exp_avg_sq_dtype": kept, "master_weights": True}
    if kept == torch.float16:
        options["master_weight_dtype"] = torch.float16
    found = []
    for size in (shape, (torch.Size(shape).numel(),)):
        p = torch.nn.Parameter(torch.full(size, 2.25, dtype=dtype))
        optimizer = te.optimizers.FusedAdam([p], lr=0.1, **options)
        for step in range(3):
            p.grad = torch.full(size, 0.5 + step, dtype=dtype)
            optimizer.step()
        saved = optimizer.state_dict()
        assert all(x.shape == size for name, x in saved["state"][0].items() if not name.endswith(("_scale", "step")))
        assert optimizer.get_unscaled_state(p, "exp_avg").shape == size
        again = te.optimizers.FusedAdam([p], lr=0.1, **options)
        again.load_state_dict(saved)
        for name, x in optimizer.state[p].items():
            assert torch.equal(x, again.state[p][name])
        found.append(p.detach().reshape(-1))
    assert torch.equal(*found)


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


@pytest.mark.gpu
@pytest.mark.parametrize("pair", list(itertools.product(MOMENTS, repeat=2)), ids=str)
@pytest.mark.parametrize("name", PARAMS)
def test_every_kind(name: str, pair: tuple[torch.dtype, torch.dtype]) -> None:
    compare([1, 7, 8, 9, 2047, 2048, 2049, 0, 20001], name, pair)
    compare([2049, 3], name, pair, decoupled=False, special=True, offset=1)


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("count", [CAPACITIES[0], CAPACITIES[0] + 1, CAPACITIES[1] + 1])
def test_around_the_capacity_of_a_launch(count: int) -> None:
    compare([5 + i % 7 for i in range(count)], f"{BF16}, fp16 masters", (U8, FP16))


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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
@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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
