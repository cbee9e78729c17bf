"""The fused FP8 GEMMs on the CPU: each is the ops that it names, and refuses what they refuse.

On an H200 they have every bit of that definition, and at full size of the kernels they stand for.
"""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.cast_values import poison
from shared.determinism import assert_same_again
from shared.gemm_codes import E4M3, E5M2, draw, normal, one, random_codes

import reference  # noqa: F401  (declares the ops)
from optimized.ops.gemms import gemm_fused
from optimized.ops.gemms.gemm import gemm_tiled
from optimized.ops.gemms.gemm_fp8 import gemm_fp8_tiled
from optimized.ops.gemms.gemm_tile import TILES, Tile, select_tile
from reference.ops.activations.activation import GATED, KINDS

twin = torch.ops.twin
M, K, COLS = 37, 48, 32
# Not `test_schema`: it compares inputs with `allclose`, which FP8 has not.
SIXTEEN = (torch.bfloat16, torch.float16)

# Rows and columns of the activation, K: less than a piece, ragged tiles in each direction, columns of 16 and of 32.
RAGGED = ((1, 16, 16), (7, 48, 144), (65, 272, 400), (129, 160, 128), (330, 544, 272))


def state() -> tuple[torch.Tensor, torch.Tensor, int]:
    return torch.tensor([1.0, 3.0, 1.0]), torch.zeros(4, 3), 1


def forward(kind: str) -> tuple[Any, ...]:
    n = COLS * (2 if kind in GATED else 1)
    return draw(1, M, K, E4M3), draw(2, n, K, E4M3), one(0.3), one(1.7)


def backward(kind: str, dtype: torch.dtype) -> tuple[Any, ...]:
    x = normal(5, M, COLS * (2 if kind in GATED else 1)).to(dtype)
    return draw(3, M, K, E5M2), draw(4, COLS, K, E4M3), one(0.3), one(1.7), x, kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_after_a_product_is_the_two_ops(kind: str, dtype: torch.dtype) -> None:
    product = forward(kind)
    for bias in (None, normal(6, product[1].shape[0]).to(dtype)):
        fused, apart = state(), state()
        found = twin.gemm_fp8_activation(*product, bias, dtype, kind, *fused, E4M3)
        h = twin.gemm_fp8(*product, bias, dtype, "fast")
        expected = (h, *twin.activation_cast_transpose(h, kind, *apart, E4M3))
        for a, b in zip((*found, fused[1]), (*expected, apart[1]), strict=True):
            assert_same_bits(a, b)
        assert bool(fused[1][0, 1] > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_an_activations_backward_after_a_product_is_the_two_ops(kind: str, dtype: torch.dtype) -> None:
    *product, x, _ = backward(kind, dtype)
    fused, apart = state(), state()
    found = twin.gemm_fp8_activation_backward(*product, x, kind, *fused, E5M2)
    dact = twin.gemm_fp8(*product, None, dtype, "split")
    expected = twin.activation_backward_cast_transpose_dbias(dact, x, kind, *apart, E5M2)
    for a, b in zip((*found, fused[1]), (*expected, apart[1]), strict=True):
        assert_same_bits(a, b)
    assert bool(fused[1][0, 1] > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_dropout_after_a_product_is_the_two_ops(p: float, dtype: torch.dtype) -> None:
    product = forward("gelu")
    bias, residual = normal(7, COLS).to(dtype), normal(8, M, COLS).to(dtype)
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        fused, apart = torch.tensor([5, 9]), torch.tensor([5, 9])
        found = twin.gemm_fp8_bias_dropout_add(*product, b, r, dtype, p, fused)
        expected = twin.bias_dropout_add(twin.gemm_fp8(*product, None, dtype, "fast"), b, r, p, apart)
        assert_same_bits(found, expected)
        assert fused.tolist() == apart.tolist() == [5, 10 if p else 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accumulation_is_one_addition_and_one_rounding(dtype: torch.dtype) -> None:
    product = forward("gelu")
    start = normal(9, M, COLS).to(dtype)
    out = start.clone()
    version = out._version
    twin.gemm_fp8_accumulate(*product, out)
    dw = twin.gemm_fp8(*product, None, torch.float32, "split")
    assert_same_bits(out, (start.float() + dw).to(dtype))
    assert out._version > version
    a, b = normal(10, M, K).bfloat16(), normal(11, COLS, K).bfloat16()
    out = start.clone()
    twin.gemm_accumulate(a, b, out)
    assert_same_bits(out, (start.float() + twin.gemm(a, b, None, torch.float32)).to(dtype))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refusals(device: str) -> None:
    def moved(*args: Any) -> list[Any]:
        return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]

    bf16 = torch.bfloat16
    a, b, *inverses = forward("gelu")
    with pytest.raises(ValueError, match=r"^a has K = 48 and b has K = 32; a \[M, K\] and b \[N, K\] share K\."):
        twin.gemm_fp8_activation(*moved(a, b[:, :32].contiguous(), *inverses, None, bf16, "gelu", *state(), E4M3))
    with pytest.raises(ValueError, match=r"^twin::gemm_fp8_activation: kind must be one of .*; got 'elu'\."):
        twin.gemm_fp8_activation(*moved(a, b, *inverses, None, bf16, "elu", *state(), E4M3))
    with pytest.raises(ValueError, match=r"the columns of the activation must be a multiple of 16.*; got 24"):
        twin.gemm_fp8_activation(*moved(a, draw(1, 48, K, E4M3), *inverses, None, bf16, "geglu", *state(), E4M3))
    *product, x, _ = backward("swiglu", bf16)
    with pytest.raises(
        ValueError, match=r"^twin::gemm_fp8_activation_backward: x must be the pre-activation .* is \(37, 32\)"
    ):
        twin.gemm_fp8_activation_backward(*moved(*product, x, "gelu", *state(), E5M2))
    residual = normal(1, M, COLS)
    with pytest.raises(
        ValueError, match=r"^twin::gemm_fp8_bias_dropout_add: residual must be .*bfloat16 .*; got torch.float32"
    ):
        twin.gemm_fp8_bias_dropout_add(*moved(a, b, *inverses, None, residual, bf16, 0.0, None))
    with pytest.raises(ValueError, match=r"^twin::gemm_fp8_bias_dropout_add: a dropout probability of 0.5 needs rng_"):
        twin.gemm_fp8_bias_dropout_add(*moved(a, b, *inverses, None, None, bf16, 0.5, None))
    with pytest.raises(ValueError, match=r"^out has shape \(37, 16\); that of a \* b\^T, \(37, 32\)\."):
        twin.gemm_fp8_accumulate(*moved(a, b, *inverses, residual[:, :16]))
    wide = normal(1, M, K).bfloat16(), normal(2, COLS, K).bfloat16()
    with pytest.raises(TypeError, match=r"^out is torch.float64; bfloat16, float16 or float32 is accepted\."):
        twin.gemm_accumulate(*moved(*wide, residual.double()))


def on(device: str, args: Any) -> list[Any]:
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]


def state_of(scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, int]:
    return torch.tensor([1.0, scale, 1.0]), torch.full((4, 3), 2.0**-20), 1


def chosen(a: torch.Tensor, b: torch.Tensor) -> Tile:
    """The tile that the kernel would get; naming it makes an op run the kernel, where it might choose two others."""
    return select_tile(a.shape[0], b.shape[0], a.shape[1], False, 132)


def compare(name: str, args: Any, mutated: int, tile: Tile | None, what: str) -> None:
    """An op on both sides, on CUDA its fused kernel if it has one: what it returns, and the argument that it writes."""
    there = on("cuda", args)
    here = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    expected = getattr(twin, name)(*here)
    poison(sum(t.numel() * t.element_size() for t in expected) if isinstance(expected, tuple) else 1 << 20)
    if "backward" in name:
        found = getattr(twin, name)(*there)
    else:
        found = getattr(gemm_fused, name)(*there, tile=tile or chosen(args[0], args[1]))
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    for i, (a, b) in enumerate(pairs):
        assert_same_bits(a, b, f"{name}, output {i}, {what}")
    assert_same_bits(there[mutated], here[mutated], f"{name}, what it writes, {what}")


def forward_of(shape: tuple[int, int, int], kind: str, dtype: torch.dtype, seed: int = 0) -> tuple[Any, ...]:
    m, cols, k = shape
    n = cols * (2 if kind in GATED else 1)
    bias = None if seed % 2 else normal(seed + 3, n).to(dtype)
    return draw(seed, m, k, E4M3), draw(seed + 1, n, k, E4M3), one(0.37), one(0.7), bias, dtype, kind


def backward_of(shape: tuple[int, int, int], kind: str, dtype: torch.dtype, seed: int = 0) -> tuple[Any, ...]:
    m, cols, k = shape
    x = normal(seed + 2, m, cols * (2 if kind in GATED else 1)).to(dtype)
    return draw(seed, m, k, E5M2), draw(seed + 1, cols, k, E4M3), one(0.37), one(0.7), x, kind


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_every_tile_on_ragged_shapes(kind: str, tile: Tile) -> None:
    for seed, shape in enumerate(RAGGED):
        args = (*forward_of(shape, kind, torch.bfloat16, seed), *state_of(), E4M3)
        compare("gemm_fp8_activation", args, 8, tile, f"{tile}, {shape}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_type(kind: str, dtype: torch.dtype) -> None:
    for (seed, shape), q in itertools.product(enumerate(((70, 96, 144), (200, 272, 272))), (E4M3, E5M2)):
        compare("gemm_fp8_activation", (*forward_of(shape, kind, dtype, seed), *state_of(), q), 8, None, f"{shape}")
        compare(
            "gemm_fp8_activation_backward",
            (*backward_of(shape, kind, dtype, seed), *state_of(), q),
            7,
            None,
            f"{shape}",
        )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_special_values(kind: str) -> None:
    """All codes at random, so NaN and infinity in the product; huge numbers; scales that are 0, infinite and NaN."""
    shape = m, cols, k = 70, 96, 272
    n = cols * (2 if kind in GATED else 1)
    for scale in (3.0, 2.0**40, 0.0, float("inf"), float("nan")):
        for spread in (None, 64.0):
            a, b, *rest = forward_of(shape, kind, torch.bfloat16)
            ga, gb, *grest = backward_of(shape, kind, torch.bfloat16)
            if spread is None:
                a, ga = a.clone(), ga.clone()
                for x, seed in ((a, 1), (ga, 2)):  # whole rows of specials; the rest stays finite
                    x[::3] = random_codes(seed, m, k, x.dtype)[::3]
            else:
                a, b, ga = draw(4, m, k, E4M3, spread), draw(5, n, k, E4M3, spread), draw(6, m, k, E5M2, spread)
            what = f"scale {scale}, spread {spread}"
            compare("gemm_fp8_activation", (a, b, *rest, *state_of(scale), E4M3), 8, None, what)
            compare("gemm_fp8_activation_backward", (ga, gb, *grest, *state_of(scale), E5M2), 7, None, what)


@pytest.mark.gpu
@pytest.mark.parametrize("inverse", [0.0, float("inf"), float("nan")])
def test_extreme_scales_of_the_product(inverse: float) -> None:
    """Rows that do not exist stay out of amax, codes and sums even where 0 · s is NaN."""
    shape = (70, 80, 144)
    for name, make, at in (("gemm_fp8_activation", forward_of, 8), ("gemm_fp8_activation_backward", backward_of, 7)):
        a, b, _, *rest = make(shape, "swiglu", torch.bfloat16)
        compare(name, (a, b, one(inverse), *rest, *state_of(), E5M2), at, None, f"{inverse}")


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_dropout_with_every_tile(dtype: torch.dtype, tile: Tile) -> None:
    for seed, (m, n, k) in enumerate(RAGGED):
        a, b = draw(seed, m, k, E4M3), draw(seed + 1, n, k, E4M3)
        bias, residual = normal(seed + 2, n).to(dtype), normal(seed + 3, m, n).to(dtype)
        for p, with_bias, with_residual in (
            (0.3, True, True),
            (0.3, False, True),
            (0.0, True, True),
            (1.0, True, False),
        ):
            rng_state = torch.tensor([0x1234567890ABCDEF, 2**33 + seed])
            args = (
                *(a, b, one(0.3), one(0.7), bias if with_bias else None, residual if with_residual else None),
                *(dtype, p, rng_state),
            )
            compare("gemm_fp8_bias_dropout_add", args, 8, tile, f"{(m, n, k)}, p = {p}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_accumulation_with_every_tile(tile: Tile, dtype: torch.dtype) -> None:
    for seed, (m, n, k) in enumerate(RAGGED):
        start = normal(seed, m, n).to(dtype)
        a, b, s, t = draw(seed, m, k, E5M2), draw(seed + 1, n, k, E4M3), one(0.3), one(0.7)
        found = start.cuda()
        gemm_fp8_tiled(*on("cuda", (a, b, s, t)), None, dtype, "split", tile, found, add=True)
        expected = start.clone()
        twin.gemm_fp8_accumulate(a, b, s, t, expected)
        assert_same_bits(found, expected, f"FP8, {(m, n, k)}")
        wide = [normal(seed + i, k, rows).bfloat16() for i, rows in ((4, m), (5, n))]
        found = start.cuda()
        gemm_tiled(*(t.cuda().t() for t in wide), None, dtype, tile, found, add=True)
        expected = start.clone()
        twin.gemm_accumulate(*(t.t() for t in wide), expected)
        assert_same_bits(found, expected, f"bf16, {(m, n, k)}")


@pytest.mark.gpu
def test_accumulation_into_any_view() -> None:
    """A gradient that no kernel writes in vectors, and products of nothing."""
    a, b, s = draw(1, 40, 64, E4M3), draw(2, 48, 64, E4M3), one(0.5)
    for make in (lambda: normal(3, 48, 40).t(), lambda: normal(3, 40 * 48 + 1)[1:].view(40, 48)):
        here, there = make().clone(memory_format=torch.preserve_format), make().cuda()
        twin.gemm_fp8_accumulate(a, b, s, s, here)
        twin.gemm_fp8_accumulate(*on("cuda", (a, b, s, s)), there)
        assert_same_bits(there, here)
    for k, m in ((0, 40), (16, 0)):
        here = normal(4, m, 48)
        there = here.cuda()
        empty = draw(1, m, k, E4M3), draw(2, 48, k, E4M3), s, s
        twin.gemm_fp8_accumulate(*empty, here)
        twin.gemm_fp8_accumulate(*on("cuda", empty), there)
        assert_same_bits(there, here)


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 300),
    cols=st.integers(1, 20).map(lambda i: 16 * i),
    k=st.integers(0, 40).map(lambda i: 16 * i),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(SIXTEEN),
    tile=st.sampled_from(TILES),
    seed=st.integers(0, 2**31),
)
def test_random_problems(m: int, cols: int, k: int, kind: str, dtype: torch.dtype, tile: Tile, seed: int) -> None:
    shape = (m, cols, k)
    compare("gemm_fp8_activation", (*forward_of(shape, kind, dtype, seed), *state_of(), E4M3), 8, tile, str(shape))
    compare(
        "gemm_fp8_activation_backward", (*backward_of(shape, kind, dtype, seed), *state_of(), E5M2), 7, None, str(shape)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_shapes_against_the_kernels_one_by_one(kind: str) -> None:
    """8192 tokens, hidden 4096, ffn 16384 (what comes out of fc1), in every word."""
    torch.manual_seed(0)
    tokens, hidden, ffn = 8192, 4096, 16384
    s = torch.full((1,), 0.01, device="cuda")

    def codes(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda").to(dtype)

    def cuda_state() -> list[Any]:
        return on("cuda", state_of())

    x, w1, bias = codes(tokens, hidden, E4M3), codes(ffn, hidden, E4M3), torch.randn(ffn, device="cuda").bfloat16()
    fused, apart = cuda_state(), cuda_state()
    found = twin.gemm_fp8_activation(x, w1, s, s, bias, torch.bfloat16, kind, *fused, E4M3)
    h = twin.gemm_fp8(x, w1, s, s, bias, torch.bfloat16, "fast")
    expected = (h, *twin.activation_cast_transpose(h, kind, *apart, E4M3))
    for name, a, b in zip(
        ("h", "q", "q_t", "scale_inv", "amax"), (*found, fused[1]), (*expected, apart[1]), strict=True
    ):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"fc1, {name}"


@pytest.mark.gpu
def test_the_layers_residuals_and_gradients_against_the_kernels_one_by_one() -> None:
    torch.manual_seed(0)
    s = torch.full((1,), 0.01, device="cuda")
    for m, n, k in ((8192, 4096, 4096), (8192, 4096, 16384)):
        a, b = (torch.randn(rows, k, device="cuda").to(E4M3) for rows in (m, n))
        bias, residual = torch.randn(n, device="cuda").bfloat16(), torch.randn(m, n, device="cuda").bfloat16()
        fused, apart = torch.tensor([7, 1]).cuda(), torch.tensor([7, 1]).cuda()
        rest = (bias, residual, torch.bfloat16, 0.1, fused)
        found = gemm_fused.gemm_fp8_bias_dropout_add(a, b, s, s, *rest, tile=chosen(a, b))
        x = twin.gemm_fp8(a, b, s, s, None, torch.bfloat16, "fast")
        expected = twin.bias_dropout_add(x, bias, residual, 0.1, apart)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), f"{(m, n, k)}"
        assert torch.equal(fused, apart)
    g, x = torch.randn(16384, 8192, device="cuda").to(E5M2), torch.randn(4096, 8192, device="cuda").to(E4M3)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.randn(16384, 4096, device="cuda").to(dtype)
        expected = (out.float() + twin.gemm_fp8(g, x, s, s, None, torch.float32, "split")).to(dtype)
        twin.gemm_fp8_accumulate(g, x, s, s, out)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), f"{dtype}"


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [3136, 3120])
@pytest.mark.parametrize("k", [400, 1040, 2064, 4112])
def test_steps_beside_other_tiles_at_ragged_edges(k: int, columns: int) -> None:
    """Several tiles a block, so that what follows one stands beside the next, in as many steps as K has room for."""
    torch.manual_seed(k)
    rows, s = 3001, one(0.01).cuda()
    a = torch.randn(rows, k, device="cuda").to(E4M3)
    for kind, tile in itertools.product(("gelu", "swiglu"), TILES[:2]):
        n = columns * (2 if kind in GATED else 1)
        b, bias = torch.randn(n, k, device="cuda").to(E4M3), torch.randn(n, device="cuda").bfloat16()
        fused, apart = on("cuda", state_of()), on("cuda", state_of())
        args = (a, b, s, s, bias, torch.bfloat16, kind)
        found = gemm_fused.gemm_fp8_activation(*args, *fused, E4M3, tile=tile)
        h = twin.gemm_fp8(*args[:-1], "fast")
        expected = (h, *twin.activation_cast_transpose(h, kind, *apart, E4M3))
        for name, x, y in zip(
            ("h", "q", "q_t", "scale_inv", "amax"), (*found, fused[1]), (*expected, apart[1]), strict=True
        ):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), f"{kind}, {tile}, {name}"
    b, bias = torch.randn(columns, k, device="cuda").to(E4M3), torch.randn(columns, device="cuda").bfloat16()
    residual = torch.randn(rows, columns, device="cuda").bfloat16()
    for p, tile in itertools.product((0.0, 0.1), TILES[:2]):
        fused, apart = torch.tensor([7, 1]).cuda(), torch.tensor([7, 1]).cuda()
        rest = (bias, residual, torch.bfloat16, p, fused)
        found = gemm_fused.gemm_fp8_bias_dropout_add(a, b, s, s, *rest, tile=tile)
        x = twin.gemm_fp8(a, b, s, s, None, torch.bfloat16, "fast")
        expected = twin.bias_dropout_add(x, bias, residual, p, apart)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), f"p = {p}, {tile}"


@pytest.mark.gpu
def test_two_runs_two_streams_and_a_graph_give_the_same_bits() -> None:
    args = on("cuda", (*forward_of((1111, 1040, 2064), "geglu", torch.bfloat16), *state_of(), E4M3))

    assert_same_again(lambda: gemm_fused.gemm_fp8_activation(*args, tile=TILES[2]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_ops_themselves(kind: str) -> None:
    """Whichever kernels they choose."""
    shape, bf16 = (200, 272, 144), torch.bfloat16
    a, b = draw(1, 200, 144, E4M3), draw(2, 272, 144, E4M3)
    for name, args in (
        ("gemm_fp8_activation", (*forward_of(shape, kind, bf16), *state_of(), E4M3)),
        ("gemm_fp8_activation_backward", (*backward_of(shape, kind, bf16), *state_of(), E5M2)),
        ("gemm_fp8_bias_dropout_add", (a, b, one(0.3), one(0.7), None, normal(3, 200, 272).to(bf16), bf16, 0.0, None)),
        ("gemm_fp8_bias_dropout_add", (a, b, one(0.3), one(0.7), None, None, bf16, 0.5, torch.tensor([3, 4]))),
    ):
        there = on("cuda", args)
        found, expected = getattr(twin, name)(*there), getattr(twin, name)(*args)
        pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
        for x, y in pairs:
            assert_same_bits(x, y, name)
        for x, y in zip(there, args, strict=True):
            if isinstance(x, torch.Tensor) and x.element_size() > 1:
                assert_same_bits(x, y, f"{name}, what it writes")


@pytest.mark.parametrize(
    ("epilogue", "kind", "columns"),
    [("BiasDropoutAdd", None, 16), ("BiasActivation", "gelu", 8), ("BiasActivation", "swiglu", 16)],
)
@pytest.mark.parametrize("blocks", [1, 2, 3, 9, 40])
def test_an_epilogues_steps_are_whole_and_no_more_than_k_blocks(
    epilogue: str, kind: str | None, columns: int, blocks: int
) -> None:
    """A step takes some of a tile's columns, so many at least, and runs beside a k-block of the next tile."""
    for tile in TILES:
        most = tile.block_n // columns
        steps = gemm_fused.select_steps(epilogue, tile, 128 * blocks, kind)
        assert most % steps == 0
        assert steps <= blocks
        assert steps == gemm_fused.select_steps(epilogue, tile, 128 * blocks - 127, kind)  # a k-block may be ragged
        if blocks >= most:
            assert steps == most


def test_an_epilogues_shared_memory_has_room() -> None:
    for tile in TILES:
        assert gemm_fused.epilogue_bytes("BiasActivation", tile) >= 4 * tile.block_n
        bits, boxes = tile.block_m * tile.block_n, tile.warpgroups * 4 * 2
        found = gemm_fused.epilogue_bytes("BiasDropoutAdd", tile)
        assert isinstance(found, int)
        assert found >= 2 * tile.block_n + bits // 8 + boxes * 16 * 32 * 2 + 8 * (2 + 2 + boxes)
        for epilogue in ("BiasActivation", "BiasDropoutAdd"):
            fused = gemm_fused.fused_tile(epilogue, tile)
            assert 1 <= fused.stages <= tile.stages
            assert fused.shared_bytes + gemm_fused.epilogue_bytes(epilogue, fused) <= 232448
