"""`twin::adam_states`: each rounding, scales and codes, remainders, and what is refused."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from shared.adam_parameters import BF16, RANGE, decoded, encoded, numbers
from shared.bits import assert_same_bits

import reference as te
from reference.ops.optimizers import adam_states
from reference.ops.optimizers.adam import correction

twin = torch.ops.twin
FP16, FP32, U8, I16 = torch.float16, torch.float32, torch.uint8, torch.int16
MOMENTS = (FP32, BF16, FP16, U8)


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
