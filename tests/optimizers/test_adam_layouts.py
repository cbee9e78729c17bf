"""`FusedAdam` whose moments and masters are kept in fewer bits than fp32, and decoupled gradients."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.adam_parameters import (
    BF16,
    FusedAdam,
    assert_unchanged,
    decoded,
    encoded,
    everything,
    numbers,
    parameter,
    parameters,
    through_a_file,
    train,
)
from shared.bits import assert_same_bits

import reference as te
from reference.ops.optimizers import adam_states
from reference.ops.optimizers.adam import correction

twin = torch.ops.twin
FP16, FP32, U8, I16 = torch.float16, torch.float32, torch.uint8, torch.int16
PARTS = ("exp_avg", "exp_avg_sq", "master_param")


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
        (
            lambda entry: entry["exp_avg_scale"].neg_(),
            ValueError,
            r"\['exp_avg_scale'\]=-.* is not the scale of the numbers",
        ),
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
        codes, _ = twin.cast(master, scale, None, weight._kept.column, torch.float8_e4m3fn)
        assert_same_bits(weight.codes, codes)
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
