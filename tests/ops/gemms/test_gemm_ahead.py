"""Products of weights that nobody writes start early, and only those."""

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from shared.dry_gpu import DryGpu

import optimized as te
from optimized.ops.gemms.gemm import gemm_tiled
from optimized.ops.gemms.gemm_tile import Tile
from optimized.tapes import runner
from reference.support import unwritten

twin = torch.ops.twin
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def rows(count: int, depth: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(count, depth, dtype=dtype, device="cuda")


def products(m: int, b: torch.Tensor, b_codes: torch.Tensor) -> None:
    """One of each kind that a decoder's step has."""
    one = torch.empty(1, device="cuda")
    a, history = rows(m, b.shape[1], E4M3), torch.empty(4, 2, device="cuda")
    twin.gemm(rows(m, b.shape[1]), b, None, BF16)
    twin.gemm_fp8(a, b_codes, one, one, None, BF16, "fast")
    twin.gemm_fp8_bias_dropout_add(a, b_codes, one, one, None, rows(m, len(b)), BF16, 0.0, None)
    scaling = (torch.empty(2, device="cuda"), history, 1, E4M3)
    twin.gemm_fp8_activation(a, b_codes, one, one, None, BF16, "swiglu", *scaling)


def early(gpu: DryGpu) -> list[bool]:
    return [" early " in line for line in gpu.taken() if line.startswith("gemm")]


def test_products_of_held_weights_start_early() -> None:
    with DryGpu() as gpu:
        b, codes = rows(512, 256), rows(512, 256, E4M3)
        products(1, b, codes)
        assert early(gpu) == [False] * 4
        with unwritten.held([b, codes]):
            products(1, b, codes)
        assert early(gpu) == [True] * 4
        with unwritten.held([b]):
            products(1, b, codes)
        assert early(gpu) == [True, False, False, False]
        products(1, b, codes)
        assert early(gpu) == [False] * 4


def test_what_is_copied_first_or_shared_in_a_cluster_starts_late() -> None:
    """A padded copy of weights is written by the kernel before; a cluster's blocks copy weights for each other."""
    with DryGpu() as gpu:
        b, codes = rows(512, 250), rows(512, 256, E4M3)
        with unwritten.held([b, codes]):
            twin.gemm(rows(1, 250), b, None, BF16)
            twin.gemm_accumulate(rows(1, 250), b, torch.empty(1, 512, device="cuda"))
            one = torch.empty(1, device="cuda")
            twin.gemm_fp8(rows(1, 256, E4M3), codes, one, one, None, BF16, "split")
        assert early(gpu) == [False] * 3


def test_whoever_names_the_tile_a_cluster_starts_late() -> None:
    with DryGpu() as gpu:
        a, b = rows(1, 256), rows(512, 256)
        with unwritten.held([b]):
            for cluster in (1, 2):
                gemm_tiled(a, b, None, BF16, Tile(2, 128, 4, cluster))
        assert early(gpu) == [True, False]


def test_few_rows_copy_no_more_than_there_are() -> None:
    """A row that does not exist would take the copy engine longer than one that does."""
    with DryGpu() as gpu:
        w = rows(512, 256)
        with unwritten.held([w]):
            for count in (3, 3000):
                twin.gemm(rows(count, 256), w, None, BF16)
        few, many = (line for line in gpu.taken() if line.startswith("gemm"))
    assert "(64,3)" in few
    assert "(64,3)" not in many
    assert "EARLY=1" in few
    assert "EARLY" not in many


@pytest.mark.parametrize("op", ["cast", "norm_cast", "norm"])
def test_what_comes_before_a_product_lets_it_start(op: str) -> None:
    x, scaling = (lambda: rows(1, 4096)), (lambda: (torch.empty(2, device="cuda"), None, 1, E4M3))

    def call() -> None:
        norm: Any = (x(), torch.empty(4096, dtype=BF16, device="cuda"), None, 1e-5, False, "rmsnorm")
        args: Any = {"cast": (x(), *scaling()), "norm_cast": (*norm, *scaling()), "norm": (*norm, BF16)}
        getattr(twin, op)(*args[op])

    with DryGpu() as gpu:
        call()
        with unwritten.held([rows(1, 1)]):
            call()
        outside, inside = gpu.launches
    assert "LEADS" not in outside.kernel.defines
    assert inside.kernel.defines == {**outside.kernel.defines, "LEADS": 1}


@torch.no_grad()
def test_no_tape_holds_an_early_start() -> None:
    """It would be played where an optimizer has just written the weights."""
    with DryGpu() as gpu:
        gpu.tapes()
        layer, x = te.LayerNormLinear(256, 512, params_dtype=BF16, device="cuda"), rows(2, 256)
        layer(x)
        with mock.patch.object(runner, "run_or_play", side_effect=AssertionError("a tape")):
            with unwritten.held(layer.parameters()):
                layer(x)
            with pytest.raises(AssertionError, match="a tape"):
                layer(x)
    assert early(gpu) == [False, True]


def test_a_block_is_one_threads_and_ends() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    elsewhere = []
    with unwritten.held([x]):
        with unwritten.held([y]):
            assert unwritten.holds(x)
            assert unwritten.holds(y)
        assert not unwritten.holds(y)
        thread = threading.Thread(target=lambda: elsewhere.append(unwritten.some()))
        thread.start()
        thread.join()
    assert elsewhere == [False]
    assert not unwritten.some()
