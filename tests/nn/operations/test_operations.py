"""`te.ops`: each operation is what its formula says, and `Sequential` runs them with extra inputs and outputs.

On a GPU they have every bit of the CPU's, over training steps, in 16 bits and in FP8.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared import training_pairs
from shared.bits import assert_same_bits
from shared.dry_gpu import DryGpu
from shared.operation_cases import BF16, FP16, RECIPES, numbers, run, same
from shared.training_pairs import train_both

import optimized
import reference as te
from reference.nn import operations
from reference.ops.library import twin

GATED = ("GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU")
PLAIN = ("GELU", "QGELU", "ReLU", "SReLU", "SiLU")
ACTIVATIONS = (*GATED, *PLAIN)
RECIPE_NAMES = ("16 bits", "delayed", "current")


def words(dtype: torch.dtype) -> torch.Tensor:
    """Every word of a 16-bit dtype that is no NaN, as `[rows, 64]`."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    return every[: len(every) // 64 * 64].view(-1, 64)


# --- each operation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PLAIN, *GATED])
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_an_activation_is_the_op_of_its_name(name: str, dtype: torch.dtype) -> None:
    module, x = getattr(te.ops, name)(), numbers(1, (3, 5, 32), dtype)
    y, dx = run(module, x)
    flat, kind = x.view(-1, 32), name.lower()
    expected = twin.activation(flat, kind)
    assert y.shape == (3, 5, 16 if name in GATED else 32)
    assert_same_bits(y.view(expected.shape), expected)
    grad = numbers(100, tuple(y.shape), dtype).view(expected.shape)
    assert_same_bits(dx.view(-1, 32), twin.activation_backward(grad, flat, kind))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_relu_and_its_relatives_are_pytorchs(dtype: torch.dtype) -> None:
    """Over every word; squares round from fp32."""
    x = words(dtype)
    wide, other = x.float(), numbers(3, (len(x), 64), dtype)
    positive = wide.clamp(min=0) + 0.0
    assert_same_bits(te.ops.ReLU()(x), positive.to(dtype))
    assert_same_bits(te.ops.SReLU()(x), positive.square().to(dtype))
    both = torch.cat([x, other], dim=1)
    assert_same_bits(te.ops.ReGLU()(both), (positive * other.float()).to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [0.5, 0.1, -3.0, 1e-3])
def test_a_constant_scale_rounds_once(dtype: torch.dtype, scale: float) -> None:
    x = words(dtype)
    x = x[x.isfinite().all(dim=1)]
    y, dx = run(te.ops.ConstantScale(scale), x)
    assert_same_bits(y, (x.float() * torch.tensor(scale)).to(dtype))
    assert_same_bits(dx, (numbers(100, tuple(x.shape), dtype).float() * torch.tensor(scale)).to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_a_bias_is_added_and_its_gradient_summed_in_our_order(dtype: torch.dtype) -> None:
    module = te.ops.Bias(48, dtype=dtype)
    assert not module.bias.detach().any()
    with torch.no_grad():
        module.bias.copy_(numbers(2, (48,), dtype))
    x = numbers(1, (7, 3, 48), dtype)
    y, dx, db = run(module, x)
    grad = numbers(100, (7, 3, 48), dtype)
    assert_same_bits(y, x + module.bias.detach())
    assert_same_bits(dx, grad)
    assert_same_bits(db, twin.dbias(grad.view(-1, 48)))


def test_linears_are_the_layer_and_start_as_transformer_engines() -> None:
    for recipe in RECIPES:
        torch.manual_seed(5)
        one, layer = te.ops.Linear(32, 48, dtype=BF16), te.Linear(32, 48, params_dtype=BF16)
        basic, plain = te.ops.BasicLinear(32, 48, dtype=BF16), te.Linear(32, 48, params_dtype=BF16, bias=False)
        layer.load_state_dict(one.state_dict())
        plain.load_state_dict(basic.state_dict())
        x = numbers(1, (16, 32))
        for _ in range(3):
            same(run(one, x, recipe=recipe), run(layer, x, recipe=recipe))
            same(run(basic, x, recipe=recipe), run(plain, x, recipe=recipe))
    torch.manual_seed(5)
    wide = te.ops.Linear(64, 512)
    bound = 1 / 8
    weight = wide.weight.detach()
    assert 0.99 * bound < weight.abs().max() <= bound
    assert weight.mean().abs() < 0.01 * bound  # of 2^15 numbers: 3 standard deviations
    assert not wide.bias.detach().any()
    torch.manual_seed(5)
    assert_same_bits(te.ops.Linear(64, 512).weight.detach(), wide.weight.detach())


def test_norms_are_the_layers() -> None:
    x = numbers(1, (6, 32))
    for kind, layer in ((te.ops.LayerNorm, te.LayerNorm), (te.ops.RMSNorm, te.RMSNorm)):
        one = kind((32,), eps=1e-3, dtype=BF16, zero_centered_gamma=True)
        same(run(one, x), run(layer(32, eps=1e-3, params_dtype=BF16, zero_centered_gamma=True), x))


def test_dropout_is_the_layers_and_off_in_evaluation() -> None:
    module, x = te.ops.Dropout(0.25), numbers(1, (8, 64))
    y, dx = run(module, x)
    dropped = y == 0
    assert 0.15 < dropped.float().mean() < 0.35
    assert_same_bits(dropped, dx == 0)
    assert_same_bits(y[~dropped], (x.float() * torch.tensor(4 / 3)).to(BF16)[~dropped])
    same([y, dx], run(module, x))
    assert module.eval()(x) is x
    assert te.ops.Dropout(0.0)(x) is x
    assert not te.ops.Dropout(1.0)(x).any()


def test_shapes_and_extras() -> None:
    x, other = numbers(1, (4, 6)), numbers(2, (4, 6))
    assert te.ops.Identity()(x) is x
    assert te.ops.Reshape((2, -1))(x).shape == (2, 12)
    assert te.ops.Reshape([24])(x).shape == (24,)
    y, dx, dother = run(te.ops.AddExtraInput(), x, other)
    same([y, dx, dother], [x + other, numbers(100, (4, 6)), numbers(100, (4, 6))])
    y, extra, dx = run(te.ops.MakeExtraOutput(), x)
    same([y, extra, dx], [x, x, numbers(100, (4, 6)) + numbers(101, (4, 6))])


@pytest.mark.parametrize("recipe", RECIPES)
def test_their_kernels_exist(recipe: Any) -> None:
    """What a GPU launches for the operations without parameters, forward and backward."""
    with DryGpu() as gpu:
        model = te.ops.Sequential(
            te.ops.Quantize(True, True), te.ops.ClampedSwiGLU(glu_interleave_size=8), te.ops.L2Normalization()
        )
        x = torch.empty(16, 64, dtype=BF16, device="cuda", requires_grad=True)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(torch.empty(16, 32, dtype=BF16, device="cuda"))
    files = [one.kernel.kernel for one in gpu.launches]
    assert files.count("cast") == (0 if recipe is None else 2), files
    for name in ("activation", "norm", "norm_backward"):
        assert any(one.startswith(name) for one in files), (name, files)


# --- Sequential -----------------------------------------------------------------------------------------------


def model(dtype: torch.dtype = BF16, side: Any = te, **on: Any) -> Any:
    """A gated MLP with its residual, as operations."""
    ops, on = side.ops, {"dtype": dtype, **on}
    return ops.Sequential(
        ops.MakeExtraOutput(),
        ops.LayerNorm(32, **on),
        ops.Linear(32, 96, **on),
        ops.SwiGLU(),
        ops.BasicLinear(48, 32, **on),
        ops.Bias(32, **on),
        ops.Dropout(0.1),
        ops.ConstantScale(0.7),
        ops.AddExtraInput(),
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sequential_is_its_operations_one_by_one(recipe: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    whole = model(dtype)
    parts = copy.deepcopy(whole)

    class ByHand(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, extra = self.parts[0](x)
            for one in self.parts[1:8]:
                x = one(x)
            return self.parts[8](x, other), extra

    by_hand = ByHand()
    x, other = numbers(1, (16, 32), dtype), numbers(2, (16, 32), dtype)
    for step in range(3):
        same(run(whole, x, other, recipe=recipe, seed=step), run(by_hand, x, other, recipe=recipe, seed=step))


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_a_linear_with_its_norm_differs_from_the_fused_layer_by_one_rounding(recipe: Any) -> None:
    """In current scaling by none: there the fused layer rounds the norm, too."""
    fused = te.LayerNormLinear(32, 48, params_dtype=BF16)
    apart = te.ops.Sequential(te.ops.LayerNorm(32, dtype=BF16), te.ops.Linear(32, 48, dtype=BF16))
    state = fused.state_dict()
    apart.load_state_dict(
        {
            **{f"0.{key.removeprefix('layer_norm_')}": x for key, x in state.items() if key.startswith("layer_norm")},
            **{f"1.{key}": x for key, x in state.items() if not key.startswith("layer_norm")},
        }
    )
    x = numbers(1, (64, 32))
    one, other = run(fused, x, recipe=recipe), run(apart, x, recipe=recipe)
    equal = torch.equal(one[0], other[0])
    assert equal == (not recipe.delayed())


def test_it_is_a_sequential_of_pytorchs() -> None:
    ops = te.ops
    one = ops.Sequential({"first": ops.Linear(32, 32), "then": torch.nn.ReLU()})
    assert isinstance(one, torch.nn.Sequential)
    assert [name for name, _ in one.named_children()] == ["first", "then"]
    one = ops.Sequential(ops.Linear(32, 32), torch.nn.ReLU())
    one.append(ops.GELU()).extend([ops.Identity()]).insert(0, ops.AddExtraInput())
    assert (one.num_extra_inputs, one.num_extra_outputs) == (1, 0)
    assert isinstance(one[:2], ops.Sequential)
    both = one + ops.Sequential(ops.GELU())
    assert isinstance(both, ops.Sequential)
    assert len(both) == 6
    nested = ops.Sequential(ops.Sequential(ops.MakeExtraOutput(), ops.AddExtraInput()), ops.MakeExtraOutput())
    x, other = numbers(1, (4, 6)), numbers(2, (4, 6))
    same(list(nested(x, other)), [x + other, x, x + other])


@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_pickles_checkpoints_and_recomputation(recipe: Any) -> None:
    torch.manual_seed(1)
    whole = model()
    x, other = numbers(1, (16, 32)), numbers(2, (16, 32))
    run(whole, x, other, recipe=recipe)
    others = [copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), model()]
    others[2].load_state_dict(whole.state_dict(), strict=True)

    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = copy.deepcopy(whole)

        def forward(self, *inputs: torch.Tensor) -> Any:
            return te.checkpoint(self.whole, *inputs)

    others.append(Again())
    expected = run(whole, x, other, recipe=recipe)
    for one in others:
        same(expected, run(one, x, other, recipe=recipe))


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own, as in test_compile.py
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_a_compiler_traces_it_in_one_graph(recipe: Any) -> None:
    torch.manual_seed(1)
    whole = model()
    x, other = numbers(1, (16, 32)), numbers(2, (16, 32))
    run(whole, x, other, recipe=recipe)
    copied = copy.deepcopy(whole)
    compiled: Any = torch.compile(copied, fullgraph=True, backend="aot_eager")
    same(run(whole, x, other, recipe=recipe), run(compiled, x, other, recipe=recipe))
    torch._dynamo.reset()


def test_both_sides_have_the_operations() -> None:
    for name in operations.__all__:
        found = getattr(optimized.ops, name)
        assert issubclass(found, getattr(te.ops, name))
        assert found.__name__ == name
        assert getattr(te.ops, name) is getattr(operations, name)
    on_cuda = {
        name for name in operations.__all__ if getattr(getattr(optimized.ops, name), "default_device", "") == "cuda"
    }
    assert on_cuda == set(operations.WITH_DEVICE)
    assert isinstance(pickle.loads(pickle.dumps(optimized.ops.Bias(16, device="cpu"))), optimized.ops.Bias)


# --- what is refused ------------------------------------------------------------------------------------------

X = torch.zeros(4, 6, dtype=BF16)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: te.ops.Linear(0, 16), ValueError, "^ops.Linear: in_features=0; an int from 1 to"),
    (
        lambda: te.ops.Linear(16, 16, dtype=torch.int8),
        TypeError,
        "^ops.Linear: dtype=torch.int8; float32, bfloat16",
    ),
    (lambda: te.ops.Linear(16, 16)(X), ValueError, r"^Linear: inp has shape \[4, 6\]; \[..., 16\] is accepted"),
    (lambda: te.ops.Bias(8)(X), ValueError, r"^Bias: input has shape \[4, 6\]; \[..., 8\] is accepted"),
    (lambda: te.ops.Reshape("ab"), TypeError, "^ops.Reshape: shape='ab'; ints are accepted"),
    (lambda: te.ops.Reshape(3), TypeError, "^ops.Reshape: shape=3; ints are accepted"),  # type: ignore[arg-type]
    (lambda: te.ops.Dropout(1.5), ValueError, "^ops.Dropout: p=1.5; a number from 0 to 1 is accepted"),
    (lambda: te.ops.ConstantScale(float("nan")), ValueError, "^ops.ConstantScale: scale=nan; a finite number of fp32"),
    (lambda: te.ops.ConstantScale(2)([1]), TypeError, r"^ops.ConstantScale: input=\[1\]; a tensor is accepted"),
    (lambda: te.ops.GELU()(X.int()), TypeError, "^ops.GELU: input has dtype torch.int32; float32, bfloat16 and"),
    (lambda: te.ops.GELU()(torch.ones(())), ValueError, r"^ops.GELU: input has shape \[\]; \[..., features\] is"),
    (lambda: te.ops.SwiGLU()(X[:, :5]), ValueError, r"^ops.SwiGLU: input has shape \[4, 5\]; \[..., an even number\]"),
    (
        lambda: te.ops.AddExtraInput()(X, X.float()),
        ValueError,
        r"^ops.AddExtraInput: extra_input is torch.float32 \[4, 6\]; that of the input, torch.bfloat16 \[4, 6\], is",
    ),
    (lambda: te.ops.AddExtraInput()(X, X[0]), ValueError, r"^ops.AddExtraInput: extra_input is torch.bfloat16 \[6\]"),
    (lambda: model()(X), ValueError, "^ops.Sequential: 0 extra_inputs; 1, as many as its operations take, is accepted"),
    (lambda: te.ops.ClampedSwiGLU(limit=0), ValueError, "^ops.ClampedSwiGLU: limit=0; a number between 1e-30 and 1e30"),
    (
        lambda: te.ops.ClampedSwiGLU(glu_linear_offset="1"),
        TypeError,
        "^ops.ClampedSwiGLU: glu_linear_offset='1'; a num",
    ),
    (lambda: te.ops.SwiGLU(glu_interleave_size=0), ValueError, "^ops.SwiGLU: glu_interleave_size=0; None or an int fr"),
    (
        lambda: te.ops.SwiGLU(glu_interleave_size=4)(X),
        ValueError,
        r"^ops.SwiGLU: input has shape \[4, 6\]; \[..., a multiple of 8\] is accepted",
    ),
    (lambda: te.ops.L2Normalization(eps=0.0), ValueError, "^ops.L2Normalization: eps=0.0; a positive finite number"),
    (lambda: te.ops.L2Normalization()(torch.ones(())), ValueError, r"^ops.L2Normalization: input has shape \[\]; "),
    (lambda: te.ops.Quantize(None), TypeError, "^ops.Quantize: forward=None; True and False are accepted"),
    (
        lambda: run(te.ops.Quantize(), X, recipe=RECIPES[1]),
        ValueError,
        r"^ops.Quantize: input has shape \[4, 6\]; .* a multiple of 16 under FP8 autocast",
    ),
    (lambda: te.ops.Sequential(te.ops.GELU())(X, X), ValueError, "^ops.Sequential: 1 extra_inputs; 0, as many as its"),
    (
        lambda: te.transformer_engine_state_dict(model()),
        NotImplementedError,
        "^transformer_engine_state_dict: model has '2', a te.ops.Linear, whose names are others in Transformer Engine",
    ),
]


@pytest.mark.parametrize(("call", "kind", "sentence"), BAD)
def test_what_is_not_accepted_says_so(call: Callable[[], Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()


def mlp(activation: str, dtype: torch.dtype) -> Any:
    ops = te.ops
    width = 48 if activation.endswith("GLU") else 96
    return ops.Sequential(
        ops.LayerNorm(64, dtype=dtype),
        ops.Linear(64, 96, dtype=dtype),
        getattr(ops, activation)(),
        ops.BasicLinear(width, 64, dtype=dtype),
        ops.Bias(64, dtype=dtype),
        ops.Dropout(0.1),
        ops.ConstantScale(0.7),
        ops.RMSNorm(64, dtype=dtype),
        ops.Reshape((-1, 32)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_NAMES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_of_operations(activation: str, dtype: torch.dtype, recipe: Any, same_bits: Any) -> None:
    train_both(mlp(activation, dtype), (24, 2, 64), dtype, recipe, same_bits, steps=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [0.7, -3.0, 1e-3])
def test_a_constant_scale_of_every_word(dtype: torch.dtype, scale: float) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    assert_same_bits(te.ops.ConstantScale(scale)(x), optimized.ops.ConstantScale(scale)(x.cuda()))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_NAMES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_operations_without_parameters(dtype: torch.dtype, recipe: Any, same_bits: Any) -> None:
    model = te.ops.Sequential(
        te.ops.Linear(64, 96, dtype=dtype),
        te.ops.Quantize(True, True),
        te.ops.ClampedSwiGLU(limit=1.5, glu_interleave_size=4),
        te.ops.L2Normalization(),
        te.ops.Quantize(False, True),
    )
    train_both(model, (24, 2, 64), dtype, recipe, same_bits, steps=4)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_in_fp32(activation: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        x = training_pairs.numbers(1, (33, 96), torch.float32).to(device).requires_grad_()
        y = getattr(te.ops, activation)()(x)
        y.backward(training_pairs.numbers(2, tuple(y.shape), torch.float32).to(device))
        results.append((y.detach(), x.grad))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_extra_inputs_and_outputs(dtype: torch.dtype) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = te.ops.Sequential(te.ops.MakeExtraOutput(), te.ops.SiLU(), te.ops.AddExtraInput())
        x, other = (training_pairs.numbers(seed, (33, 40), dtype).to(device).requires_grad_() for seed in (1, 2))
        y, extra = model(x, other)
        torch.autograd.backward(
            [y, extra], [training_pairs.numbers(seed, (33, 40), dtype).to(device) for seed in (3, 4)]
        )
        results.append((y.detach(), extra.detach(), x.grad, other.grad))
    for one, other_side in zip(*results, strict=True):
        assert_same_bits(one, other_side)


@pytest.mark.gpu
def test_the_gpus_side_starts_with_the_same_numbers_on_cuda() -> None:
    models = []
    for side in (te, optimized):
        torch.manual_seed(3)
        models.append(side.ops.Sequential(side.ops.LayerNorm(32), side.ops.Linear(32, 48), side.ops.Bias(48)))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert other.is_cuda
        assert_same_bits(one.detach(), other.detach())
