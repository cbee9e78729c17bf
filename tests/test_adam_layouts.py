"""`twin::adam_states` and `FusedAdam` whose moments and masters are kept in fewer bits than fp32."""

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adams import BF16, FusedAdam, assert_unchanged, everything, numbers, parameter, parameters, through_a_file, train
from conftest import assert_same_bits

import reference as te
from reference.formats import E4M3, cast
from reference.ops import adam_states
from reference.ops.adam import correction

twin = torch.ops.twin
FP16, FP32, U8, I16 = torch.float16, torch.float32, torch.uint8, torch.int16
MOMENTS = (FP32, BF16, FP16, U8)
PARTS = ("exp_avg", "exp_avg_sq", "master_param")
RANGE = {FP16: np.float32(32752), U8: np.float32(448)}


def encoded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The docstring of reference/ops/adam_states.py, with NumPy and the definition of the cast to FP8."""
    if dtype not in RANGE:
        return x.to(dtype), None
    most = np.float32(np.nanmax(np.abs(x.numpy()), initial=0))
    scale = max(min(most, np.finfo(np.float32).max) / RANGE[dtype], np.float32(2.0**-100))
    inverse = np.float32(1) / scale
    if dtype == FP16:
        return torch.from_numpy(x.numpy() * inverse).to(FP16), torch.tensor([scale])
    return cast(x, E4M3, float(inverse)).view(U8), torch.tensor([scale])


def decoded(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    wide = x.view(torch.float8_e4m3fn).float() if x.dtype == U8 else x.float()
    return wide if scale is None else torch.from_numpy(wide.numpy() * scale.numpy())


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


# --- FusedAdam -------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "bf16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "fp16": {"exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
    "FP8": {"exp_avg_dtype": U8, "exp_avg_sq_dtype": U8},
    "FP8 and fp32": {"exp_avg_dtype": U8},
    "fp16 masters": {"master_weights": True, "master_weight_dtype": FP16},
    "FP8, fp16 masters": {
        **{"exp_avg_dtype": U8, "exp_avg_sq_dtype": FP16},
        **{"master_weights": True, "master_weight_dtype": FP16},
    },
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "bf16, remainders": {
        **{"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
        **{"master_weights": True, "store_param_remainders": True},
    },
    "bf16, masters": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16, "master_weights": True},
}


def steps_by_hand(params: list[torch.nn.Parameter], options: dict[str, Any], count: int) -> list[torch.Tensor]:
    """What the parameters are after `count` steps of `twin::adam` between reading and writing in each step."""
    found = [p.detach().clone() for p in params]
    kinds = (options.get("exp_avg_dtype", FP32), options.get("exp_avg_sq_dtype", FP32))
    masters = options.get("master_weight_dtype", FP32) if options.get("master_weights") else None
    moments: list[list[Any]] = [[encoded(torch.zeros(p.shape), kind) for p in params] for kind in kinds]
    kept: list[Any] = [encoded(p.float(), masters) if masters and p.dtype != FP32 else (p, None) for p in found]
    for step in range(count):
        for i, p in enumerate(found):
            grad = numbers(10 * step + i, tuple(p.shape), p.dtype).float()
            master = decoded(*kept[i]).clone()
            one, two = (decoded(*part[i]).clone() for part in moments)
            corrections = (correction(0.9, step + 1), correction(0.999, step + 1))
            twin.adam([grad], [master], [one], [two], [], 0.1, 0.9, 0.999, 1e-8, 0.0, *corrections, True)
            for part, kind, value in zip(moments, kinds, (one, two), strict=True):
                part[i] = encoded(value, kind)
            p.copy_(master)
            kept[i] = encoded(master, masters) if masters and p.dtype != FP32 else (p, None)
    return found


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "remainders" not in name])
def test_training_is_that_of_steps_by_hand(name: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    expected = steps_by_hand(params, LAYOUTS[name], 4)
    train(params, FusedAdam(params, lr=0.1, **LAYOUTS[name]), range(4))
    for p, q in zip(params, expected, strict=True):
        assert_same_bits(p, q)


@pytest.mark.parametrize("moments", [{}, LAYOUTS["bf16"], LAYOUTS["FP8"]], ids=["fp32", "bf16", "FP8"])
def test_remainders_train_as_masters(moments: dict[str, Any]) -> None:
    """In every bit of the fp32 master, for parameters that are read without rounding ties."""
    ours, theirs = parameters(BF16), parameters(BF16)
    halved = FusedAdam(ours, lr=0.1, master_weights=True, store_param_remainders=True, **moments)
    whole = FusedAdam(theirs, lr=0.1, master_weights=True, **moments)
    for params, optimizer in ((ours, halved), (theirs, whole)):
        train(params, optimizer, range(5))
    for p, q in zip(ours, theirs, strict=True):
        remainder = halved.get_unscaled_state(p, "master_param")
        assert remainder.dtype == I16
        assert_same_bits(adam_states.joined(p.detach(), remainder), whole.state[q]["master_param"])
        assert_same_bits(p, q)
    fp16 = parameters(FP16)
    optimizer = FusedAdam(fp16, lr=0.1, master_weights=True, store_param_remainders=True)
    train(fp16, optimizer, range(1))
    assert {optimizer.state[p]["master_param"].dtype for p in fp16} == {FP32}, "only bf16 parameters are halves of fp32"


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_near_adam_with_state_in_fp32(name: str) -> None:
    ours, theirs = parameters(BF16), parameters(BF16)
    options = LAYOUTS[name]
    pairs = ((ours, FusedAdam(ours, 0.01, **options)), (theirs, FusedAdam(theirs, 0.01, master_weights=True)))
    for params, optimizer in pairs:
        train(params, optimizer, range(5))
    for p, q, start in zip(ours, theirs, parameters(BF16), strict=True):
        moved = (q.float() - start.float()).abs().max()
        assert (p.float() - q.float()).abs().max() < 0.6 * moved, "moments of 4 bits move a parameter alike"


@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file], ids=["in memory", "weights_only file"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_state_keeps_every_bit(name: str, dtype: torch.dtype, way: Callable[[Any], Any]) -> None:
    params = parameters(dtype)
    optimizer = FusedAdam(params, lr=0.1, **LAYOUTS[name])
    train(params, optimizer, range(3))
    saved = way(optimizer.state_dict())
    for entry in saved["state"].values():
        assert {x.dtype for x in entry.values()} <= {FP32, I16}, "as Transformer Engine's"
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = FusedAdam(copies, lr=7.0, **LAYOUTS[name])
    other.load_state_dict(saved)
    for p, q in zip(params, copies, strict=True):
        assert optimizer.state[p].keys() == other.state[q].keys()
        for part, x in optimizer.state[p].items():
            assert_same_bits(other.state[q][part], x, part)
    for one, optim in ((params, optimizer), (copies, other)):
        train(one, optim, range(3, 5))
    for p, q in zip(params, copies, strict=True):
        assert_same_bits(p, q)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_steps_as_the_original(copied: Callable[[Any], Any], name: str) -> None:
    optimizer = FusedAdam([parameter(dtype=BF16)], lr=0.1, **LAYOUTS[name])
    optimizer.step()
    other = copied(optimizer)
    p, q = (one.param_groups[0]["params"][0] for one in (optimizer, other))
    q.grad = p.grad
    for one in (optimizer, other):
        one.step()
    assert_same_bits(p, q)


def test_state_of_transformer_engines_form_is_loaded_without_scales() -> None:
    params = parameters(BF16)
    optimizer = FusedAdam(params, lr=0.1, exp_avg_dtype=U8, exp_avg_sq_dtype=FP16)
    train(params, optimizer, range(2))
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry.pop("exp_avg_scale")
        entry.pop("exp_avg_sq_scale")
    other = FusedAdam(parameters(BF16), lr=0.1, exp_avg_dtype=U8, exp_avg_sq_dtype=FP16)
    other.load_state_dict(saved)
    for i, (q, p) in enumerate(zip(other.param_groups[0]["params"], params, strict=True)):
        codes, scale = encoded(saved["state"][i]["exp_avg"], U8)
        assert_same_bits(other.state[q]["exp_avg"], codes)
        assert_same_bits(other.state[q]["exp_avg"], optimizer.state[p]["exp_avg"], "its scale may differ")
        assert scale is not None
        assert_same_bits(other.state[q]["exp_avg_scale"], scale)
    wide = FusedAdam(parameters(BF16), lr=0.1)
    wide.load_state_dict(optimizer.state_dict())
    for q, p in zip(wide.param_groups[0]["params"], params, strict=True):
        assert_same_bits(wide.state[q]["exp_avg_sq"], optimizer.get_unscaled_state(p, "exp_avg_sq"))
        assert wide.state[q].keys() == {"exp_avg", "exp_avg_sq"}


def test_state_of_torchs_adam_is_kept_in_fewer_bits() -> None:
    params = parameters()
    theirs = torch.optim.AdamW(params, lr=0.1)
    train(params, theirs, range(2))
    ours = FusedAdam(parameters(), lr=0.1, exp_avg_dtype=U8, exp_avg_sq_dtype=BF16)
    ours.load_state_dict(theirs.state_dict())
    for q, p in zip(ours.param_groups[0]["params"], params, strict=True):
        codes, _ = encoded(theirs.state[p]["exp_avg"], U8)
        assert_same_bits(ours.state[q]["exp_avg"], codes)
        assert_same_bits(ours.state[q]["exp_avg_sq"], theirs.state[p]["exp_avg_sq"].to(BF16))


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda entry: entry.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (put("exp_avg_scale", torch.ones(1)), ValueError, r"\['exp_avg_scale'\]=1.0 is not the scale of the numbers"),
        (put("exp_avg_scale", -torch.ones(1)), ValueError, r"\['exp_avg_scale'\]=-1.0 is not the scale"),
        (put("exp_avg_scale", torch.zeros(1)), ValueError, r"\['exp_avg_scale'\]=0.0 is not the scale"),
        (put("exp_avg_scale", torch.ones(2)), TypeError, r"\['exp_avg_scale'\] is torch.float32 \[2\]; float32 \[1\]"),
        (put("exp_avg_scale", 1.0), TypeError, r"\['exp_avg_scale'\] is a float; float32 \[1\] is accepted"),
        (put("master_param", torch.ones(5)), ValueError, r"\['master_param'\] is torch.float32 \[5\]; int16 \[5\]"),
        (put("momentum", torch.ones(5)), ValueError, "has 'momentum'; exp_avg, exp_avg_sq, master_param are accepted"),
        (lambda entry: entry.pop("master_param"), ValueError, "has no 'master_param'"),
        (
            put("exp_avg", torch.ones(5, dtype=U8)),
            ValueError,
            r"\['exp_avg'\] is torch.uint8 \[5\]; float32 and bfloat",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_loaded(
    change: Callable[[Any], None], error: type[Exception], sentence: str
) -> None:
    options = {"exp_avg_dtype": U8, "master_weights": True, "store_param_remainders": True}
    params = parameters(BF16)
    optimizer = FusedAdam(params, lr=0.1, **options)
    train(params, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved["state"][1])
    before = everything(optimizer)
    with pytest.raises(error, match=rf"FusedAdam: state_dict\['state'\]\[1\].*{sentence}"):
        optimizer.load_state_dict(saved)
    assert_unchanged(before, optimizer)


def test_reading_and_writing_one_part() -> None:
    p = parameter(dtype=BF16)
    optimizer = FusedAdam([p], exp_avg_dtype=U8, exp_avg_sq_dtype=BF16, master_weights=True, master_weight_dtype=FP16)
    optimizer.initialize_state(p)
    assert not optimizer.get_unscaled_state(p, "exp_avg").any()
    codes, scale = encoded(p.detach().float(), FP16)
    assert_same_bits(optimizer.state[p]["master_param"], codes)
    assert_same_bits(optimizer.get_unscaled_state(p, "master_param"), decoded(codes, scale))
    values = numbers(5, (4, 3))
    for name, dtype in (("exp_avg", U8), ("exp_avg_sq", BF16), ("master_param", FP16)):
        optimizer.set_scaled_state(p, name, values)
        codes, scale = encoded(values, dtype)
        assert_same_bits(optimizer.state[p][name], codes)
        assert_same_bits(optimizer.get_unscaled_state(p, name), decoded(codes, scale))
    assert optimizer.get_unscaled_state(p, "exp_avg_sq", skip_unscale=True) is optimizer.state[p]["exp_avg_sq"]
    assert optimizer.get_unscaled_state(p, "exp_avg", skip_unscale=True).dtype == FP32
    with pytest.raises(ValueError, match="state_name='exp_avg_scale'; exp_avg, exp_avg_sq, master_param are accepted"):
        optimizer.set_scaled_state(p, "exp_avg_scale", values)
    with pytest.raises(ValueError, match=r"its unscaled_state is torch\.uint8"):
        optimizer.set_scaled_state(p, "exp_avg", values.to(U8))
    halved = FusedAdam([p], master_weights=True, store_param_remainders=True)
    halved.initialize_state(p, True)
    assert not halved.get_unscaled_state(p, "master_param").any()
    halved.set_scaled_state(p, "master_param", torch.full((4, 3), 7, dtype=I16))
    assert_same_bits(halved.get_unscaled_state(p, "master_param"), torch.full((4, 3), 7, dtype=I16))
    with pytest.raises(ValueError, match=r"store_param_remainders=False for a parameter in torch\.bfloat16; True"):
        halved.initialize_state(p, False)


def test_state_that_no_longer_fits_is_refused() -> None:
    p = parameter(dtype=BF16)
    optimizer = FusedAdam([p], exp_avg_dtype=U8)
    optimizer.step()
    for name, bad, sentence in (
        ("exp_avg", torch.zeros(4, 3), r"its exp_avg is torch.float32 .*; contiguous torch.uint8 \[4, 3\] on cpu"),
        ("exp_avg_scale", torch.zeros(2), r"its exp_avg_scale is .*; contiguous torch.float32 \[1\] on cpu"),
        ("exp_avg_scale", None, "its exp_avg_scale is a NoneType; a dense tensor"),
    ):
        kept, optimizer.state[p][name] = optimizer.state[p][name], bad
        before = p.detach().clone()
        with pytest.raises((TypeError, ValueError), match=f"FusedAdam: parameter 0 of group 0, {sentence}"):
            optimizer.step()
        assert_same_bits(p, before)
        optimizer.state[p][name] = kept
    optimizer.step()


@pytest.mark.parametrize("name", ["FP8", "FP8, fp16 masters", "bf16, masters"])
def test_weights_in_fp8_are_the_casts_of_what_their_masters_keep(name: str) -> None:
    options = {**LAYOUTS[name], "master_weights": True}
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=te.DelayedScaling()):
        layer: Any = te.Linear(32, 16, params_dtype=BF16)
    weight = layer.weight
    optimizer = FusedAdam([weight], lr=0.01, **options)
    optimizer.initialize_state(weight)
    for step in range(1, 4):
        weight.grad = numbers(step, (16, 32), BF16)
        m, v, master = (optimizer.get_unscaled_state(weight, part).clone() for part in PARTS)
        corrections = (correction(0.9, step), correction(0.999, step))
        twin.adam([weight.grad.float()], [master], [m], [v], [], 0.01, 0.9, 0.999, 1e-8, 0.0, *corrections, True)
        scale = weight._kept.state().scale.clone()
        optimizer.step()
        codes, _ = twin.cast(master, scale, None, weight._column, torch.float8_e4m3fn)
        assert_same_bits(weight._data, codes)
        kept = options.get("master_weight_dtype", FP32)
        assert_same_bits(optimizer.state[weight]["master_param"], encoded(master, kept)[0])


# --- decoupled gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [FP32, BF16, FP16])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", ["fp32", *LAYOUTS])
def test_decoupled_gradients_may_have_another_dtype(name: str, dtype: torch.dtype, wide: torch.dtype) -> None:
    options = LAYOUTS.get(name, {})
    grad = numbers(7, (4, 3), torch.float8_e5m2).float()  # which every dtype holds
    ours, theirs = parameter(dtype=dtype), parameter(dtype=dtype)
    ours.grad.fill_(math.nan)
    optimizer = FusedAdam([ours], lr=0.1, use_decoupled_grad=True, **options)
    optimizer.step()
    assert not optimizer.state, "there is no decoupled gradient yet"
    ours.decoupled_grad = grad.to(wide)
    theirs.grad = grad.to(dtype)
    optimizer.param_groups[0]["step"] = 0
    other = FusedAdam([theirs], lr=0.1, **options)
    for _ in range(2):
        optimizer.step()
        other.step()
    assert_same_bits(ours, theirs)
    for part, x in other.state[theirs].items():
        assert_same_bits(optimizer.state[ours][part], x, part)
    optimizer.zero_grad(False)
    assert not ours.decoupled_grad.any()
    optimizer.zero_grad()
    assert ours.decoupled_grad is None
    assert ours.grad is not None


def test_without_decoupled_gradients_dtypes_must_agree() -> None:
    p = parameter(dtype=BF16)
    optimizer = FusedAdam([p], use_decoupled_grad=True)
    p.decoupled_grad = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"its gradient is torch\.float64; float32, bfloat16 and float16 are"):
        optimizer.step()


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
