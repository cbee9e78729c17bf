"""Heads and tokens that are a part of a larger tensor have its dropout masks, in every kernel that draws."""

import pytest
import torch
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA ops)
from reference.ops.attentions.attention_options import Options
from reference.ops.library import twin

BF16, F16 = torch.bfloat16, torch.float16


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.contiguous().cuda() for x in tensors]


def same(found: tuple[torch.Tensor, ...], expected: list[torch.Tensor], what: str) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(other.contiguous(), one, f"{what}, result {number}")


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize(("d", "hkv", "dtype"), [(24, 6, BF16), (128, 2, F16), (136, 6, BF16)])
def test_some_heads(d: int, hkv: int, dtype: torch.dtype) -> None:
    q, grad = numbers(2, 6, 40, d, dtype=dtype), numbers(2, 6, 40, d, dtype=dtype)
    k, v = numbers(2, hkv, 150, d, dtype=dtype), numbers(2, hkv, 150, d, dtype=dtype)
    how = Options(0.25, "causal_bottom_right", -1, -1, None, 0.4)
    state = torch.tensor([3, 1])
    out, m, inv = twin.attention(q, k, v, *how._replace(rng_state=state.clone()))
    dq, dk, dv = twin.attention_backward(grad, q, k, v, out, m, inv, *how._replace(rng_state=state))
    for part in range(2):
        heads, theirs = slice(3 * part, 3 * part + 3), slice(hkv // 2 * part, hkv // 2 * (part + 1))
        options = how._replace(rng_state=torch.tensor([3, 1, 3, 6, 3 * part], device="cuda"))
        before = options._replace(rng_state=options.rng_state.clone())  # type: ignore[union-attr]
        own = on_gpu(q[:, heads], k[:, theirs], v[:, theirs])
        same(twin.attention(*own, *options), [x[:, heads] for x in (out, m, inv)], f"heads {heads}")
        assert options.rng_state.tolist() == [3, 2, 3, 6, 3 * part]  # type: ignore[union-attr]
        g, *rest = on_gpu(*(x[:, heads] for x in (grad, out, m, inv)))
        found = twin.attention_backward(g, *own, *rest, *before)
        same(found, [dq[:, heads], dk[:, theirs], dv[:, theirs]], f"heads {heads}, backward")


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("d", "hkv", "dtype"), [(16, 1, BF16), (128, 2, F16), (200, 2, BF16)])
def test_a_chunk_of_the_tokens(d: int, hkv: int, dtype: torch.dtype, causal: bool) -> None:
    """As `reference.parallel.context` calls them: a chunk of queries with its keys, and of keys with its queries."""
    size, chunk = 512, slice(128, 256)
    q, grad, k, v = (numbers(1, heads, size, d, dtype=dtype) for heads in (2, 2, hkv, hkv))
    how = Options(0.25, "causal" if causal else "none", -1, -1, None, 0.25)
    state = torch.tensor([3, 1])
    out, m, inv = twin.attention(q, k, v, *how._replace(rng_state=state.clone()))
    dq, dk, dv = twin.attention_backward(grad, q, k, v, out, m, inv, *how._replace(rng_state=state))

    def placed(mask_type: str, query: int, key: int) -> Options:
        place = [3, 1, 2, 2, 0, query, size, key, size]
        return how._replace(mask_type=mask_type, rng_state=torch.tensor(place, device="cuda"))

    last, first = (chunk.stop, chunk.start) if causal else (size, 0)
    options = placed("causal_bottom_right" if causal else "none", chunk.start, 0)
    own = on_gpu(q[:, :, chunk], k[:, :, :last], v[:, :, :last])
    same(twin.attention(*own, *options), [x[:, :, chunk] for x in (out, m, inv)], "forward")
    options = placed(options.mask_type, chunk.start, 0)
    g, *rest = on_gpu(*(x[:, :, chunk] for x in (grad, out, m, inv)))
    same(twin.attention_backward(g, *own, *rest, *options)[:1], [dq[:, :, chunk]], "dq")
    g, queries, *rest = on_gpu(*(x[:, :, first:] for x in (grad, q, out, m, inv)))
    mine = on_gpu(k[:, :, chunk], v[:, :, chunk])
    found = twin.attention_backward(g, queries, *mine, *rest, *placed(how.mask_type, first, chunk.start))
    same(found[1:], [x[:, :, chunk] for x in (dk, dv)], "dk and dv")


@pytest.mark.gpu
@pytest.mark.simulated
def test_some_heads_in_fp8() -> None:
    q, k, v_t = (numbers(1, 4, *shape).to(torch.float8_e4m3fn) for shape in ((70, 64), (130, 64), (64, 130)))
    scales = [torch.tensor([2.0**-n]) for n in (1, 2, 3)]
    how, state = (0.125, "none", -1, -1, None, 0.3), torch.tensor([7, 2])
    whole = twin.attention_fp8(q, k, v_t, *scales, *how, state.clone(), BF16)
    for heads in (slice(0, 2), slice(2, 4)):
        placed = torch.tensor([7, 2, 2, 4, heads.start], device="cuda")
        own = on_gpu(q[:, heads], k[:, heads], v_t[:, heads], *scales)
        same(twin.attention_fp8(*own, *how, placed, BF16), [x[:, heads] for x in whole], f"heads {heads}")


@pytest.mark.gpu
@pytest.mark.simulated
def test_a_bias_of_some_heads() -> None:
    q, k, v, grad = (numbers(2, 4, 40, 16) for _ in range(4))
    bias = numbers(2, 4, 40, 40)
    how, state = Options(0.25, "none", -1, -1, None, 0.4, bias=bias), torch.tensor([3, 1])
    out, m, inv = twin.attention(q, k, v, *how._replace(rng_state=state.clone()))
    whole = twin.attention_bias_backward(grad, q, k, v, out, m, inv, *how._replace(rng_state=state))
    for heads in (slice(0, 2), slice(2, 4)):
        placed, some = on_gpu(torch.tensor([3, 1, 2, 4, heads.start]), bias[:, heads])
        own = on_gpu(*(x[:, heads] for x in (grad, q, k, v, out, m, inv)))
        found = twin.attention_bias_backward(*own, *how._replace(bias=some, rng_state=placed))
        assert_same_bits(whole[:, heads].contiguous(), found, f"heads {heads}")


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("entries", [None, 3])
def test_some_rows(rows: int, entries: int | None, dtype: torch.dtype) -> None:
    """Of `bias_dropout_add`, from an element on that begins a group of eight, or does not."""
    x, residual = numbers(20, 13, dtype=dtype), numbers(20, 13, dtype=dtype)
    kept = None if entries is None else torch.tensor([2.0, 0.0, 1.5])
    state = torch.tensor([5 << 33, (1 << 32) - 1])
    placed = torch.cat([state, torch.tensor([rows * 13 + (1 << 36)])])
    part = slice(rows, rows + 12)
    expected = placed.clone()
    forward = twin.bias_dropout_add(x[part], None, residual[part], 0.4, expected, kept)
    backward = twin.dropout_backward(x[part], 0.4, placed, kept)
    if kept is None:  # and these are the whole tensor's
        near = torch.cat([state, torch.tensor([rows * 13])])
        whole = twin.dropout_backward(x, 0.4, state)
        assert_same_bits(whole[part], twin.dropout_backward(x[part].cuda(), 0.4, near.cuda()), "of the whole")
    own, other, there = on_gpu(x[part], residual[part], placed)
    m = None if kept is None else kept.cuda()
    assert_same_bits(backward, twin.dropout_backward(own, 0.4, there, m), "backward")
    assert_same_bits(forward, twin.bias_dropout_add(own, None, other, 0.4, there, m), "forward")
    assert_same_bits(expected, there, "state")
