"""PyTorch's transforms over every layer: a result, or a sentence that names the layer; nothing has changed then."""

import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import reference as te

BF16 = torch.bfloat16
HIDDEN = 64
CURRENT = te.recipe.Float8CurrentScaling()

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN),
    "Linear of parts": lambda: te.Linear(HIDDEN, HIDDEN, parameters_split=("a", "b")),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN, return_layernorm_output=True),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, HIDDEN),
    "LayerNorm": lambda: te.LayerNorm(HIDDEN),
    "RMSNorm": lambda: te.RMSNorm(HIDDEN),
    "MultiheadAttention": lambda: te.MultiheadAttention(
        HIDDEN, 4, input_layernorm=True, qk_norm_type="L2Normalization"
    ),
    "TransformerLayer": lambda: te.TransformerLayer(HIDDEN, 96, 4, num_gqa_groups=2),
    "TransformerLayer, fused": lambda: te.TransformerLayer(HIDDEN, 96, 4, fuse_qkv_params=True),
    "ops.Linear": lambda: te.ops.Linear(HIDDEN, HIDDEN),
    "ops.GELU": te.ops.GELU,
    "ops.SwiGLU": te.ops.SwiGLU,
    "ops.RMSNorm": lambda: te.ops.RMSNorm(HIDDEN),
    "ops.L2Normalization": te.ops.L2Normalization,
    "ops.Bias": lambda: te.ops.Bias(HIDDEN),
    "ops.Dropout": lambda: te.ops.Dropout(0.5),
    "ops.Quantize": lambda: te.ops.Quantize(True, True),
    "ops.Sequential": lambda: te.ops.Sequential(te.ops.LayerNorm(HIDDEN), te.ops.Linear(HIDDEN, HIDDEN)),
}
ATTENTION = te.DotProductAttention(4, 16)
ANGLES = te.RotaryPositionEmbedding(16)(16)
OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {  # what takes x otherwise
    "DotProductAttention": lambda x: ATTENTION(*[x.view(*x.shape[:-1], 4, 16).bfloat16()] * 3),
    "parallel_cross_entropy": lambda x: te.parallel_cross_entropy(x, torch.zeros(x.shape[:-1], dtype=torch.long)),
    "apply_rotary_pos_emb": lambda x: te.apply_rotary_pos_emb(x.view(*x.shape[:-1], 4, 16), ANGLES, fused=True),
    "fused_linear_cross_entropy": lambda x: te.fused_linear_cross_entropy(
        x.view(-1, HIDDEN), torch.zeros(96, HIDDEN), torch.zeros(x.numel() // HIDDEN, dtype=torch.long)
    ),
}


def first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def total(out: Any) -> torch.Tensor:
    return first(out).float().sum()


def forward_mode(f: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)))


def batched_gradients(f: Any, x: torch.Tensor) -> Any:
    y = first(f(x.requires_grad_()))
    return torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "grad": lambda f, x: torch.func.grad(lambda x: total(f(x)))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(lambda x: total(f(x)))(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: total(f(x)))(x),
    "forward mode": forward_mode,
    "batched gradients": batched_gradients,
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(lambda x: total(f(x)), x, vectorize=True),
    "jit.trace": lambda f, x: torch.jit.trace(f, (x,)),
}
NAMED = {"jit.trace": "torch.jit.trace", "onnx": "torch.jit.trace", "jit.script": "torch.jit.script", "fx": "torch.fx"}
BACKWARD = ("batched gradients", "jacobian")  # a forward runs before they are seen
MODULES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "jit.trace of a model": lambda f, x: torch.jit.trace(torch.nn.Sequential(torch.nn.Identity(), f), (x,)),
    "onnx": lambda f, x: torch.onnx.export(f, (x,), io.BytesIO(), dynamo=False),
    "jit.script": lambda f, x: torch.jit.script(f),
    "jit.script of a model": lambda f, x: torch.jit.script(torch.nn.Sequential(torch.nn.Identity(), f)),
    "fx": lambda f, x: torch.fx.symbolic_trace(f),
    "fx of a model": lambda f, x: torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Identity(), f)),
}


def state(module: Any) -> list[Any]:
    found = [torch.get_rng_state()]
    for part in module.modules() if isinstance(module, torch.nn.Module) else ():
        metas = getattr(part, "fp8_meta", {})
        found += [
            t.clone()
            for key in ("scaling_fwd", "scaling_bwd")
            if key in metas
            for t in (metas[key].scale, metas[key].amax_history)
        ]
        found += [len(metas), getattr(part, "_membership", None) is None]
    return found


def refused(transform: str, f: Any, x: torch.Tensor, fp8: bool) -> str:
    before = state(f)
    with te.autocast(enabled=fp8), pytest.raises(NotImplementedError) as raised:
        (TRANSFORMS | MODULES)[transform](f, x)
    if transform not in BACKWARD:
        for a, b in zip(before, state(f), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, "something changed"
    return str(raised.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("transform", [*TRANSFORMS, *MODULES])
@pytest.mark.parametrize("name", [*LAYERS, *OTHERS])
def test_a_transform_is_refused_in_a_sentence(name: str, transform: str, fp8: bool) -> None:
    if name in OTHERS and transform in MODULES:
        pytest.skip("no module")
    if name == "ops.Quantize" and not fp8 and transform in BACKWARD:
        pytest.skip("the identity")
    torch.manual_seed(0)
    x = torch.randn(16, 2, HIDDEN)
    f: Any = LAYERS[name]() if name in LAYERS else OTHERS[name]
    said = refused(transform, f, x, fp8)
    named = NAMED.get(transform.split()[0], "")
    assert named in said
    assert "is not offered" in said or "are not offered" in said, said
    assert said.endswith("."), said


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_made_and_run_in_a_fake_mode(name: str, fp8: bool, kept: bool) -> None:
    """Shapes and dtypes are those of a real run, and nothing is drawn from the random state."""
    x, before = torch.randn(16, 2, HIDDEN), torch.get_rng_state()
    with FakeTensorMode() as mode, te.autocast(enabled=fp8):
        with te.quantized_model_init(enabled=kept):
            module = LAYERS[name]()
        given = mode.from_tensor(x).requires_grad_()
        y = first(module(given))
        y.float().sum().backward()
        found = (y.shape, y.dtype, given.grad.shape, {n: p.grad.shape for n, p in module.named_parameters()})
    assert torch.equal(torch.get_rng_state(), before)
    module, x = LAYERS[name](), x.requires_grad_()
    with te.autocast(enabled=fp8):
        y = first(module(x))
    y.float().sum().backward()
    assert found == (y.shape, y.dtype, x.grad.shape, {n: p.grad.shape for n, p in module.named_parameters()})


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("autocast", [torch.float16, BF16])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("ops.Quantize", "ops.Dropout")])
def test_torch_autocast_means_its_dtype_and_nothing_else(
    name: str, dtype: torch.dtype, autocast: torch.dtype, fp8: bool, same_bits: Any
) -> None:
    """The bits of an input in that dtype, for weights of any; a definition's own arithmetic stays as it is."""
    torch.manual_seed(0)
    module, x, found = LAYERS[name]().eval().to(dtype), torch.randn(16, 2, HIDDEN), []
    for on in (True, False):
        given = x.clone().requires_grad_() if on else x.to(autocast).requires_grad_()
        with torch.autocast("cpu", dtype=autocast, enabled=on), te.autocast(enabled=fp8, recipe=CURRENT):
            y = first(module(given))
        if not on and name.startswith("ops."):  # it has the dtype of its parameters
            return
        assert y.dtype == autocast
        y.float().square().sum().backward()
        found.append((y.detach(), given.grad.to(autocast)))
    if fp8 and name.startswith("Linear"):  # it casts x to FP8 from x's own dtype
        return
    for a, b in zip(*found, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "name",
    ["LayerNormMLP", *(pytest.param(one, marks=pytest.mark.slow) for one in ("Linear of parts", "TransformerLayer"))],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_torch_export(name: str, fp8: bool, strict: bool, grad: bool, same_bits: Any) -> None:
    module, x = LAYERS[name]().eval().to(BF16), torch.randn(16, 2, HIDDEN).to(BF16)
    with torch.set_grad_enabled(grad), te.autocast(enabled=fp8, recipe=CURRENT):
        exported = torch.export.export(module, (x,), strict=strict).module()
        same_bits(first(exported(x)).detach(), first(module(x)).detach())


def test_layers_are_made_and_run_while_the_interpreter_shuts_down() -> None:
    """Its threads take nothing more then."""
    program = """
import atexit, torch, reference as te
torch.set_num_threads(2)
layer, x = te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16).eval(), torch.randn(140, 2, 64).bfloat16()
expected = layer(x)
def last():
    assert torch.equal(layer(x), expected)
    torch.manual_seed(0)
    drawn = te.Linear(2048, 2048).weight
    assert drawn.isfinite().all() and drawn[-1].any()
    print("done")
atexit.register(last)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout == "done\n", run.stderr
