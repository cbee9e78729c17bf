"""The ladder's kernels: each computes twin::gemm_fp8's words, and does what its rung is about."""

import re

import pytest
import torch
from shared.bits import assert_same_bits
from shared.sass import disassembly

import optimized.ops  # noqa: F401  (registers the ops)
from optimized.bench.layers import ladder
from optimized.bench.layers.ladder import RUNGS, Rung
from optimized.cuda import compiler

E4M3 = torch.float8_e4m3fn
twin = torch.ops.twin


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    return tuple(torch.randn(rows, k, generator=generator).to(E4M3) for rows in (m, n))  # type: ignore[return-value]


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=str)
def test_every_rung_equals_the_definition(rung: Rung) -> None:
    """The smallest problem of each, and one of a few tiles, against the CPU."""
    for rows, columns, blocks in ((1, 1, 1), (2, 3, 2)):
        m, n, k = (rows * rung.block_m * rung.cluster, columns * rung.block_n, blocks * rung.multiple_k)
        a, b = operands(m, n, k)
        one = torch.ones(1)
        expected = twin.gemm_fp8(a, b, one, one, None, torch.bfloat16, "fast")
        assert_same_bits(ladder.product(rung, a.cuda(), b.cuda()), expected, f"{rung}, {(m, n, k)}")


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=str)
def test_every_rung_equals_the_production_kernel(rung: Rung) -> None:
    """More tiles than multiprocessors, bands of tile rows that are not full, a long K."""
    for m, n, k in ((2304, 4864, 1024), (3328, 2560, 3072), (256, 256, 16384), (8192, 4096, 4096)):
        a, b = (x.cuda() for x in operands(m, n, k))
        one = torch.ones(1, device="cuda")
        expected = twin.gemm_fp8(a, b, one, one, None, torch.bfloat16, "fast")
        for _ in range(3):
            assert_same_bits(ladder.product(rung, a, b), expected, f"{rung}, {(m, n, k)}")


@pytest.mark.parametrize("rung", RUNGS, ids=str)
def test_every_rung_refuses_parts_of_tiles(rung: Rung) -> None:
    m, n, k = rung.block_m * rung.cluster, rung.block_n, rung.multiple_k
    ladder.check(rung, m, n, k)
    for name, sizes in (("M", (m + 64, n, k)), ("N", (m, n + 64, k)), ("K", (m, n, k + 64)), ("M", (0, n, k))):
        if rung.block_m == 64 and sizes[0] == m + 64:
            continue  # 64 more rows are one more tile
        with pytest.raises(ValueError, match=rf"^{name} = \d+; ladder kernel {rung.name} takes positive multiples of"):
            ladder.check(rung, *sizes)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rung", RUNGS, ids=str)
def test_the_machine_code_shows_the_idea(rung: Rung) -> None:
    text = disassembly(compiler.cubin(rung.kernel))
    assert "QGMMA" in text
    assert ("UTMALDG" in text) == rung.copy_engine
    assert ("USETMAXREG" in text) == (rung.threads == 384)
    assert bool(re.search(r"UTMALDG\S*MULTICAST", text)) == (rung.cluster > 1)
    assert bool(re.search(r"STG\S*\.128", text)) == rung.permuted
    assert bool(re.search(r"LDG\S*\.128", text)) == (not rung.copy_engine)
