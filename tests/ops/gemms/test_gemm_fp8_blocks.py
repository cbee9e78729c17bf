"""twin::gemm_fp8_blocks: a loop over blocks that follows the contract, dialects that agree, what is fused, refusals."""

import functools
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from shared import sass, scaled_products
from shared.bits import assert_same_bits
from shared.determinism import assert_same_again

from optimized.cuda import compiler
from optimized.ops.gemms import gemm_fp8_blocks
from optimized.ops.gemms.gemm_tile import Tile
from reference.numbers import tensor_core
from reference.ops.casts.cast_blocks import scale_shape

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
SQUARES = [(False, False), (False, True), (True, False)]
twin = torch.ops.twin


def operand(rows: int, k: int, square: bool, seed: int, dtype: torch.dtype = E4M3, power: bool = False) -> Any:
    """Codes and scales; with `power` these are powers of two."""
    draw = torch.Generator().manual_seed(seed)
    scales = torch.randn(scale_shape(rows, k, square), generator=draw) * 4
    return torch.randn(rows, k, generator=draw).to(dtype), torch.exp2(scales.round() if power else scales)


def rounded(exact: Fraction) -> np.float32:
    """To fp32, nearest even; of a double beside it the half that is lost decides."""
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    even = {float(x): not int(np.float32(x).view(np.uint32)) & 1 for x in candidates}
    return min(candidates, key=lambda x: (abs(Fraction(float(x)) - exact), not even[float(x)]))


@pytest.mark.parametrize("squares", SQUARES)
def test_words_follow_the_contract(squares: tuple[bool, bool]) -> None:
    """In exact fractions, rounded where the contract says."""
    m, n, k = 5, 16, 272
    (a, sa), (b, sb) = operand(m, k, squares[0], 1), operand(n, k, squares[1], 2)
    found = twin.gemm_fp8_blocks(a, b, sa, sb, *squares, None, torch.float32)
    for i in range(m):
        for j in range(n):
            acc = np.float32(0)
            for block in range(3):
                part = slice(128 * block, 128 * (block + 1))
                p = tensor_core.gemm(a[i : i + 1, part].contiguous(), b[j : j + 1, part].contiguous()).item()
                of_a = sa[i // 128, block] if squares[0] else sa[block, i]
                of_b = sb[j // 128, block] if squares[1] else sb[block, j]
                p, of_a, of_b = np.float32(p), np.float32(of_a), np.float32(of_b)
                left, right = (p, of_a * of_b) if any(squares) else (p * of_a, of_b)
                acc = rounded(Fraction(float(left)) * Fraction(float(right)) + Fraction(float(acc)))
            assert np.float32(found[i, j]) == acc


@pytest.mark.parametrize("name", scaled_products.FORMS)
def test_words_are_those_of_cublaslt(name: str) -> None:
    squares = scaled_products.FORMS[name]
    (a, sa), (b, sb) = scaled_products.operands(squares)
    with np.load(scaled_products.PATH) as recorded:
        wanted = torch.from_numpy(recorded[name])
    assert_same_bits(twin.gemm_fp8_blocks(a, b, sa, sb, *squares, None, torch.float32), wanted)


@pytest.mark.parametrize("squares", SQUARES)
def test_with_powers_of_two_each_promotion_gives_the_same_words(squares: tuple[bool, bool]) -> None:
    """The scales' product first, then an addition."""
    m, n, k = 130, 144, 400
    (a, sa), (b, sb) = operand(m, k, squares[0], 3, power=True), operand(n, k, squares[1], 4, power=True)
    acc = torch.zeros(m, n)
    for block in range(4):
        part = slice(128 * block, 128 * (block + 1))
        p = tensor_core.gemm(a[:, part].contiguous(), b[:, part].contiguous())
        of_a = sa[:, block].repeat_interleave(128)[:m] if squares[0] else sa[block, :m]
        of_b = sb[:, block].repeat_interleave(128)[:n] if squares[1] else sb[block, :n]
        acc = acc + p * (of_a[:, None] * of_b)
    assert_same_bits(twin.gemm_fp8_blocks(a, b, sa, sb, *squares, None, torch.float32), acc)


def fma(x: Any, y: Any, z: Any) -> np.ndarray:
    """fp32(x · y + z), rounded once: fp64 holds the product; its sum is rounded to odd, which is as good as exact."""
    product, z = np.float64(x) * np.float64(y), np.float64(z)
    total = product + z
    of_z = total - product
    lost = (product - (total - of_z)) + (z - of_z)
    words = total.view(np.int64)
    even = np.isfinite(total) & (lost != 0) & (words & 1 == 0)
    words += np.where(even, np.where((lost > 0) == (total > 0), 1, -1), 0)
    return words.view(np.float64).astype(np.float32)


PROMOTIONS: dict[str, Callable[..., np.ndarray]] = {
    "fma(p, sa·sb, acc)": lambda p, sa, sb, acc: fma(p, sa * sb, acc),
    "fma(p·sa, sb, acc)": lambda p, sa, sb, acc: fma(p * sa, sb, acc),
    "fma(p·sb, sa, acc)": lambda p, sa, sb, acc: fma(p * sb, sa, acc),
    "(p·sa)·sb + acc": lambda p, sa, sb, acc: p * sa * sb + acc,
    "(sa·sb)·p + acc": lambda p, sa, sb, acc: sa * sb * p + acc,
}
"""Every published order: the contract's two, and Transformer Engine's and DeepGEMM's ways with and without an fma."""


def test_the_emulated_fma_is_rounded_once() -> None:
    """Against exact fractions, near ties and with results that are subnormal."""
    draw = np.random.default_rng(1)
    x, y, near = (draw.integers(1 << 23, 1 << 24, 300).astype(np.float32) for _ in range(3))
    for exponent in (0, -150, -190):
        a, b = np.ldexp(x, exponent // 2, dtype=np.float32), np.ldexp(y, exponent - exponent // 2, dtype=np.float32)
        z = np.float32(near * np.exp2(draw.integers(-30, 60, near.size) + exponent)) * draw.choice([-1, 1], near.size)
        z = z.astype(np.float32)
        z[::2] = -np.float32(np.float64(a) * np.float64(b))[::2]  # what is left are the product's last bits
        found = fma(a, b, z)
        for one in range(near.size):
            exact = Fraction(float(a[one])) * Fraction(float(b[one])) + Fraction(float(z[one]))
            assert found[one] == rounded(exact), (a[one], b[one], z[one])


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_promotion_gives_one_word_short_of_overflow_and_underflow(every: int) -> None:
    """p, sa and sb of all of fp32's exponents, the subnormal ones too; with `every`, each so manieth of the scales.

    Scales are powers of two. Where fp32 holds sa·sb, p·sa, p·sb and p·sa·sb exactly, the five orders are one word,
    whatever the accumulator. Beyond, any two of them differ somewhere.
    """
    draw, powers = np.random.default_rng(2), np.arange(-149, 128)
    significands = [1.0, 1 + 2.0**-23, 2 - 2.0**-10, 2 - 2.0**-23, *(1 + draw.integers(1, 1 << 23, 2) * 2.0**-23)]
    sb = np.exp2(powers[::-every].astype(np.float32))[:, None]
    beyond = dict.fromkeys(itertools.combinations(PROMOTIONS, 2), 0)
    for turn, exponent in enumerate(powers[::every]):
        sa = np.float32(2.0**exponent)
        for way in range(4) if every == 1 else [turn % 4]:
            significand = draw.choice(significands, (sb.size, powers.size)) * draw.choice([-1, 1], powers.size)
            p = np.ldexp(significand, powers).astype(np.float32)
            exact = np.float64(p) * np.float64(sa) * np.float64(sb)
            beside = draw.normal(size=p.shape) * np.exp2(draw.integers(-30, 31, p.shape))
            alone = np.ldexp(draw.normal(size=p.shape), draw.integers(-149, 127, p.shape))
            acc = (0 * exact, -exact, exact * beside, alone)[way]
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                acc = np.clip(acc, -np.finfo(np.float32).max, np.finfo(np.float32).max).astype(np.float32) + 0
                inside = np.float64(sa) * np.float64(sb) == sa * sb
                for scale in (sa, sb):
                    inside = inside & (np.float64(p) * np.float64(scale) == p * scale)
                inside = inside & (exact == exact.astype(np.float32))
                words = {name: run(p, sa, sb, acc).view(np.int32) for name, run in PROMOTIONS.items()}
            assert inside.any()
            for (one, other), count in beyond.items():
                differ = words[one] != words[other]
                at = np.argwhere(differ & inside)
                assert not at.size, f"{one} and {other}: p {p[*at[0]]}, sa {sa}, sb {sb[at[0][0]]}, acc {acc[*at[0]]}"
                beyond[one, other] = count + int(differ.sum())
    assert all(beyond.values()), beyond


def test_scales_of_one_are_split_accumulation() -> None:
    a, b = operand(40, 1040, False, 5)[0], operand(48, 1040, True, 6)[0]
    bias = torch.randn(48, generator=torch.Generator().manual_seed(7)).to(BF16)
    ones = torch.ones(scale_shape(40, 1040, False)), torch.ones(scale_shape(48, 1040, True))
    one = torch.ones(1)
    found = twin.gemm_fp8_blocks(a, b, *ones, False, True, bias, BF16)
    assert_same_bits(found, twin.gemm_fp8(a, b, one, one, bias, BF16, "split"))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_gradient_is_added_to(dtype: torch.dtype) -> None:
    (a, sa), (b, sb) = operand(24, 144, False, 8, E5M2), operand(32, 144, False, 9)
    out = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = (out.float() + twin.gemm_fp8_blocks(a, b, sa, sb, False, False, None, torch.float32)).to(dtype)
    twin.gemm_fp8_blocks_accumulate(a, b, sa, sb, False, False, out)
    assert_same_bits(out, wanted)


@pytest.mark.simulated
@pytest.mark.gpu
def test_tiles_that_leave_through_shared_memory() -> None:
    """Ragged, wide and narrow tiles, several a block; nothing is written outside the output."""
    (tile,) = (one for one, _ in gemm_fp8_blocks.costs((False, True)) if one.block_n == 256)
    for (m, n, k), dtype in itertools.product(
        ((300, 1072, 272), (700, 784, 128), (5, 256, 144)), (BF16, torch.float16)
    ):
        (a, sa), (b, sb) = operand(m, k, False, m), operand(n, k, True, n)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        memory = torch.full((m * n + 256,), -77.0, dtype=dtype, device="cuda")
        out = memory[128 : 128 + m * n].view(m, n)
        there = [x.cuda() for x in (a, b, sa, sb)]
        gemm_fp8_blocks.gemm_fp8_blocks_tiled(*there, False, True, bias.cuda(), dtype, tile, out)
        assert_same_bits(out, twin.gemm_fp8_blocks(a, b, sa, sb, False, True, bias, dtype), f"{(m, n, k)}")
        assert bool((memory[:128] == -77).all()), "written before the output"
        assert bool((memory[128 + m * n :] == -77).all()), "written after the output"


def fused_arguments(m: int, n: int, k: int, squares: tuple[bool, bool], dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    """Operands, a bias and a residual, some of which are -0, as are sums of +0 with them."""
    (a, sa), (b, sb) = operand(m, k, squares[0], m), operand(n, k, squares[1], n + 1)
    a[0] = 0
    draw = torch.Generator().manual_seed(k)
    bias, residual = torch.randn(n, generator=draw).to(dtype), torch.randn(m, n, generator=draw).to(dtype)
    bias[::3], residual[:, ::2] = -0.0, -0.0
    return a, b, sa, sb, *squares, bias, residual, dtype


def check_fused(given: tuple[Any, ...], p: float, parts: str, run: Any = None) -> None:
    """A fused product is the two ops, of the `parts` that there are: bias, residual. `run`: in place of the op."""
    *operands, bias, residual, dtype = given
    addends = bias if "b" in parts else None, residual if "r" in parts else None
    states = torch.tensor([[0x1234567890ABCDEF, 2**33], [0x1234567890ABCDEF, 2**33]])
    expected = twin.bias_dropout_add(twin.gemm_fp8_blocks(*operands, None, dtype), *addends, p, states[0])
    if run is None:
        found = twin.gemm_fp8_blocks_bias_dropout_add(*operands, *addends, dtype, p, states[1])
    else:
        there = [x.cuda() if isinstance(x, torch.Tensor) else x for x in (*operands, *addends, dtype, p, states[1])]
        found, states[1] = run(*there), there[-1].cpu()
    assert_same_bits(found, expected, f"{given[0].shape}, p = {p}, {parts}")
    assert states.tolist() == [[0x1234567890ABCDEF, 2**33 + (p > 0)]] * 2


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_bias_dropout_and_residual_after_a_product_are_the_two_ops(p: float, dtype: torch.dtype) -> None:
    for squares, parts in itertools.product(SQUARES, ("br", "b", "r", "")):
        check_fused(fused_arguments(37, 48, 144, squares, dtype), p, parts)


@pytest.mark.sample(6)
@pytest.mark.simulated
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("squares", "tile"), [(one, tile) for one in SQUARES for tile in gemm_fp8_blocks.fused_tiles(one)], ids=str
)
def test_every_tile_of_the_fused_product(squares: tuple[bool, bool], tile: Tile) -> None:
    """On ragged shapes, with several tiles a block where there are few blocks."""
    run = functools.partial(gemm_fp8_blocks.gemm_fp8_blocks_bias_dropout_add, tile=tile)
    for shape, (p, parts) in itertools.product(
        ((1, 16, 16), (130, 544, 272), (330, 288, 144)), ((0.3, "br"), (0.3, "r"), (0.0, "br"), (1.0, "br"))
    ):
        check_fused(fused_arguments(*shape, squares), p, parts, run)


@pytest.mark.gpu
@pytest.mark.parametrize("squares", SQUARES)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_the_layers_residuals_against_the_kernels_one_by_one(squares: tuple[bool, bool], p: float) -> None:
    """Large shapes and ragged ones, with several tiles a block; two runs, two streams and a graph."""
    for m, n, k in ((8192, 4096, 4096), (3001, 3136, 1040), (3001, 3120, 2064)):
        (a, sa), (b, sb) = operand(m, k, squares[0], 1), operand(n, k, squares[1], 2)
        bias, residual = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((n,), (m, n)))
        operands = [x.cuda() for x in (a, b, sa, sb)]
        states = torch.tensor([[7, 1], [7, 1]]).cuda()
        tile = gemm_fp8_blocks.fused_tiles(squares)[0]
        given = (*operands, *squares, bias, residual, BF16, p)
        found = gemm_fp8_blocks.gemm_fp8_blocks_bias_dropout_add(*given, states[0], tile=tile)
        x = twin.gemm_fp8_blocks(*operands, *squares, None, BF16)
        assert torch.equal(
            found.view(torch.int16), twin.bias_dropout_add(x, bias, residual, p, states[1]).view(torch.int16)
        )
        assert torch.equal(states[0], states[1])
    state = torch.tensor([7, 1]).cuda()
    assert_same_again(lambda: twin.gemm_fp8_blocks_bias_dropout_add(*given, state.clone()))


def check_released(squares: tuple[bool, bool], tiles: list[Tile], add: bool = False) -> None:
    """An arrival does not wait for a warp's loads, and after it the copy engine writes the stage again."""
    formats, out = (E4M3, E4M3), torch.float32 if add else BF16
    listed = [gemm_fp8_blocks.config(*formats, out, squares, tile, 32, add).listed for tile in tiles]
    if not add:  # without dropout, whose mask ordinary stores write
        fused = [tile for tile in tiles if tile in gemm_fp8_blocks.fused_tiles(squares)]
        listed += [gemm_fp8_blocks.fused_config(formats, BF16, squares, tile, 32, False).listed for tile in fused]
    for one in listed:
        cubin = compiler.build(*one).cubin
        opcodes = {instruction.opcode.split(".")[0] for instruction in sass.instructions(cubin)}
        assert opcodes >= {"LDS", "QGMMA", "SYNCS"}, one
        assert sass.unfinished_loads(cubin) == [], one


EVERY = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])  # a fourth of the tiles, or all


@EVERY
@pytest.mark.parametrize(
    ("squares", "add"), [((False, False), False), ((False, False), True), ((True, False), False)], ids=str
)
def test_a_stage_is_released_when_its_scales_have_been_read(squares: tuple[bool, bool], add: bool, every: int) -> None:
    check_released(squares, [tile for tile, _ in gemm_fp8_blocks.costs(squares)][::every], add)


@EVERY
def test_a_stage_is_released_when_its_squares_have_been_read(every: int) -> None:
    """Tiles of 256 columns are left out: there the loads on their way are those of the next stage's scales."""
    tiles = [tile for tile, _ in gemm_fp8_blocks.costs((False, True)) if tile.block_n < 256]
    check_released((False, True), tiles[::every])


def test_refusals_of_the_fused_product() -> None:
    op, (*operands, bias, residual, dtype) = (
        twin.gemm_fp8_blocks_bias_dropout_add,
        fused_arguments(8, 32, 16, (False, True)),
    )
    start = "^twin::gemm_fp8_blocks_bias_dropout_add: "
    with pytest.raises(ValueError, match=f"{start}residual must be .*bfloat16 .*; got torch.float32"):
        op(*operands, bias, residual.float(), dtype, 0.0, None)
    with pytest.raises(ValueError, match=f"{start}bias must be "):
        op(*operands, bias[:16], residual, dtype, 0.0, None)
    with pytest.raises(ValueError, match=f"{start}a dropout probability of 0.5 needs rng_state"):
        op(*operands, bias, residual, dtype, 0.5, None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"a": torch.zeros(8, 32)}, "a is torch.float32; gemm_fp8_blocks takes float8"),
        ({"a": torch.zeros(8, 48, dtype=E4M3)}, "a has K = 48 and b has K = 32"),
        ({"b": torch.zeros(8, 32, dtype=E4M3)}, "b has N = 8 rows; FP8 GEMMs need an N that is a multiple of 16"),
        (
            {"a_square": True, "a_scale_inv": torch.ones(1, 4), "b_square": True, "b_scale_inv": torch.ones(1, 4)},
            "square",
        ),
        ({"a_scale_inv": torch.ones(1)}, r"a_scale_inv is torch.float32 \(1,\), .* float32 \(1, 8\) is needed"),
        ({"b_square": True}, r"b_scale_inv is torch.float32 \(1, 16\), .* float32 \(1, 4\) is needed"),
        ({"bias": torch.zeros(8)}, r"bias has shape \(8,\)"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    given = {
        **{"a": torch.zeros(8, 32, dtype=E4M3), "b": torch.zeros(16, 32, dtype=E4M3)},
        **{"a_scale_inv": torch.ones(1, 8), "b_scale_inv": torch.ones(1, 16)},
        **{"a_square": False, "b_square": False, "bias": None, "out_dtype": BF16},
    }
    with pytest.raises((TypeError, ValueError), match=sentence):
        twin.gemm_fp8_blocks(*(given | arguments).values())


def test_staged_tiles_have_room_for_their_boxes() -> None:
    """Each of a group's four warps has four boxes of 16 rows of 64 bytes, from a multiple of 128 bytes on."""
    found = 0
    for tile, squares, out in itertools.product(gemm_fp8_blocks.COSTS, SQUARES, (BF16, torch.float16, torch.float32)):
        before = tile.shared_bytes + gemm_fp8_blocks.beside_bytes(tile, squares)
        config = gemm_fp8_blocks.config(E4M3, E4M3, out, squares, tile, 32)
        bytes_ = tile.shared_bytes + config.epilogue_bytes
        if "STAGED" in config.defines:
            found += 1
            assert bytes_ == -(-before // 128) * 128 + tile.warpgroups * 4 * 4 * 16 * 64
        else:
            assert bytes_ == before
        assert bytes_ <= 232448
    assert found
