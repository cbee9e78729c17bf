"""At the sizes of a real layer (hidden 4096, ffn 16384, 8192 tokens) kernels take other ways than on small ones.

The CPU computes what it can of them: random rows and columns of the products at full K, single heads of the attention,
and a whole layer on few tokens.
"""

import copy

import pytest
import torch
from shared.bits import assert_same_bits

import optimized
from optimized.bench.kernels.gemm import shapes

pytestmark = pytest.mark.gpu

twin = torch.ops.twin
SHAPES = shapes()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def some(count: int, size: int, seed: int) -> torch.Tensor:
    """Indices to look at, the first and the last among them."""
    inner = torch.randint(size, (count - 2,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.tensor([0, size - 1]), inner])


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("name", SHAPES)
def test_fp8_products(name: str, accumulate: str, out_dtype: torch.dtype) -> None:
    m, n, k = SHAPES[name]
    a, b, bias = draw(1, m, k).to(E4M3 if name.endswith("fprop") else E5M2), draw(2, n, k).to(E4M3), draw(3, n)
    scales = torch.tensor([0.7], device="cuda"), torch.tensor([1.3], device="cuda")
    out = twin.gemm_fp8(a, b, *scales, bias, out_dtype, accumulate)
    rows, columns = some(32, m, 4), some(32, n, 5)
    part = (t.cpu() for t in (a[rows], b[columns], *scales, bias[columns]))
    assert_same_bits(out.cpu()[rows][:, columns], twin.gemm_fp8(*part, out_dtype, accumulate), name)


def of_rows(scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Scales of blocks of a row, of some rows, as the products read them."""
    return torch.nn.functional.pad(scales[:, rows], (0, -len(rows) % 4)).contiguous()


@pytest.mark.parametrize("dialect", ["power_of_two", "fp32"])
@pytest.mark.parametrize("name", SHAPES)
def test_products_in_blocks(name: str, dialect: str) -> None:
    """As a layer has them: by the squares of a weight, and a weight's gradient by rows."""
    (m, n, k), square = SHAPES[name], not name.endswith("wgrad")
    a, sa = twin.cast_blocks(draw(1, m, k), E4M3, False, dialect, 0.0)
    b, sb = twin.cast_blocks(draw(2, n, k), E4M3, square, dialect, 0.0)
    out = twin.gemm_fp8_blocks(a, b, sa, sb, False, square, None, torch.bfloat16)
    rows = some(32, m, 4)
    columns = torch.cat([torch.arange(128), torch.arange(n - 128, n)]) if square else some(32, n, 5)
    of_b = sb[[0, -1]] if square else of_rows(sb, columns)
    part = (one.cpu() for one in (a[rows], b[columns], of_rows(sa, rows), of_b))
    expected = twin.gemm_fp8_blocks(*part, False, square, None, torch.bfloat16)
    assert_same_bits(out.cpu()[rows][:, columns], expected, name)


@pytest.mark.parametrize("accumulate", ["fast", "split"])
@pytest.mark.parametrize("name", SHAPES)
def test_products_by_row(name: str, accumulate: str) -> None:
    m, n, k = SHAPES[name]
    a, sa = twin.cast_rowwise(draw(1, m, k), E4M3, True, 0.0)
    b, sb = twin.cast_rowwise(draw(2, n, k), E4M3, True, 0.0)
    out = twin.gemm_fp8_rowwise(a, b, sa, sb, None, torch.bfloat16, accumulate)
    rows, columns = some(32, m, 4), some(32, n, 5)
    part = (one.cpu() for one in (a[rows], b[columns], sa[rows], sb[columns]))
    expected = twin.gemm_fp8_rowwise(*part, None, torch.bfloat16, accumulate)
    assert_same_bits(out.cpu()[rows][:, columns], expected, name)


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_products(name: str) -> None:
    m, n, k = SHAPES[name]
    a = draw(1, k, m).bfloat16().t() if name.endswith("wgrad") else draw(1, m, k).bfloat16()
    b = draw(2, n, k).bfloat16() if name.endswith("fprop") else draw(2, k, n).bfloat16().t()
    out = twin.gemm(a, b, None, torch.bfloat16)
    rows, columns = some(32, m, 4), some(32, n, 5)
    expected = twin.gemm(a[rows].cpu(), b[columns].cpu(), None, torch.bfloat16)
    assert_same_bits(out.cpu()[rows][:, columns], expected, name)


def test_heads_of_a_real_attention() -> None:
    q, k, v, grad = (draw(i, 4, 32, 2048, 128).bfloat16() for i in range(4))
    rest = (0.08838834764831845, "causal", -1, -1, None, 0.0, None)
    out, m, inv = twin.attention(q, k, v, *rest)
    grads = twin.attention_backward(grad, q, k, v, out, m, inv, *rest)
    for batch, head in ((0, 0), (2, 17), (3, 31)):
        here = (slice(batch, batch + 1), slice(head, head + 1))
        one = [t[here].cpu() for t in (q, k, v)]
        expected = twin.attention(*one, *rest)
        for name, a, b in zip(("out", "m", "inv"), (out, m, inv), expected, strict=True):
            assert_same_bits(a[here].cpu(), b, f"{name} of head {head} of {batch}")
        back = twin.attention_backward(grad[here].cpu(), *one, *expected, *rest)
        for name, a, b in zip(("dq", "dk", "dv"), grads, back, strict=True):
            assert_same_bits(a[here].cpu(), b, f"{name} of head {head} of {batch}")


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_real_layer_on_few_tokens(activation: str) -> None:
    cpu = optimized.TransformerLayer(
        4096, 16384, 32, activation=activation, params_dtype=torch.bfloat16, device="cpu", self_attn_mask_type="causal"
    )
    gpu = copy.deepcopy(cpu).cuda()
    recipe = optimized.DelayedScaling(amax_history_len=2)
    for step in range(2):
        x, grad = (draw(10 * step + i, 40, 1, 4096).bfloat16() for i in range(2))
        found = []
        for layer, device in ((cpu, "cpu"), (gpu, "cuda")):
            layer.zero_grad(set_to_none=True)
            inp = x.to(device, copy=True).requires_grad_()
            torch.manual_seed(step)  # of the masks
            with optimized.autocast(recipe=recipe):
                y = layer(inp)
            y.backward(grad.to(device))
            found.append({"y": y, "dx": inp.grad} | {name: p.grad for name, p in layer.named_parameters()})
        for name, value in found[0].items():
            assert_same_bits(found[1][name].cpu(), value, f"{name}, step {step}")
    for (name, one), other in zip(cpu.named_modules(), gpu.modules(), strict=True):
        for key, meta in getattr(one, "fp8_meta", {}).items():
            if key != "recipe":
                assert_same_bits(other.fp8_meta[key].scale.cpu(), meta.scale, f"{name}.{key}")
                assert_same_bits(other.fp8_meta[key].amax_history.cpu(), meta.amax_history, f"{name}.{key}")
