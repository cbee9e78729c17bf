"""What holds of every launch of the ops, seen without a GPU: of the calls in their lists, and of any size."""

import collections
import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.dry_gpu import DryGpu, Launched, renumbered
from shared.op_calls import LISTS, SIZED, dry, dry_calls, dry_sized

import optimized
import reference as te
from optimized.cuda import launch
from optimized.ops import MODULES
from optimized.ops.attentions.attention import L2
from optimized.ops.digests import word_sums
from optimized.ops.gemms.gemm_tile import FP8_TILES, TILES
from optimized.ops.norms import norm, norm_backward, norm_cast_transpose
from optimized.recordings import cases
from optimized.recordings.calls import Call, Inputs
from optimized.recordings.case import HALVES
from reference.inspect.recorded_step.ops import tensors_of
from reference.ops.optimizers.grad_norm import CHUNK

SHARED_BYTES = 232448  # that a block of Hopper's can have
# These have more configurations than CI compiles: each macro must have a value that CI compiles somewhere.
SAMPLED = {"activation", "activation_cast_transpose", "activation_cast_blocks", "adam_states", "gemm"}
SAMPLED |= {"gemm_fp8", "gemm_fp8_blocks", "gemm_fp8_blocks_fused", "gemm_fp8_fused", "gemm_fp8_part"}
SAMPLED |= {"gemm_fp8_rowwise"}
# Widths at which another kernel or configuration begins.
WIDTHS = sorted(
    width
    for width in {
        width + more for width in (16, 256, *(1024 * n for n in norm.ROW_WARPS)) for more in (-16, -8, 0, 1, 8, 16)
    }
    | {256 * warps * vectors + more for warps, vectors in norm_backward.SHAPES for more in (-8, 0, 8)}
    | {512 * stripes * cluster + more for stripes, cluster in norm_cast_transpose.SHAPES for more in (-16, 0, 16)}
    if width > 0
)


def compiled() -> dict[str, list[dict[str, Any]]]:
    """The macros that the CPU suite compiles of each kernel."""
    found: dict[str, list[dict[str, Any]]] = {}
    for module in MODULES:
        for kernel, defines in module.CONFIGURATIONS:
            found.setdefault(kernel, []).append(defines)
    return found


COMPILED = compiled()


def check_limits(launched: Launched) -> None:
    """Those of the GPU."""
    kernel, grid, block, args, smem = launched
    what = f"{kernel.kernel}.{kernel.name} {kernel.defines} {grid} {block} {smem}"
    assert 0 < grid[0] < 2**31, what
    assert all(0 < extent <= 65535 for extent in grid[1:]), what
    assert len(block) == 1, what
    assert block[0] == 1 or block[0] % 32 == 0, what
    assert 0 < block[0] <= 1024, what
    assert isinstance(smem, int), what
    # Without being asked, the driver allows 48 KB.
    assert 0 <= smem <= max(kernel.max_dynamic_smem, 48 * 1024), what
    assert kernel.max_dynamic_smem <= SHARED_BYTES, what
    assert sum(8 if not hasattr(arg, "storage") else arg.storage.nbytes for arg in args) <= 32764, what


def check_compiled(launched: Launched) -> None:
    """The configuration is one that CI compiles."""
    kernel, defines = launched.kernel.kernel, launched.kernel.defines
    if kernel in SAMPLED:
        values = {name: {one.get(name) for one in COMPILED[kernel]} for name in defines}
        missing = [name for name, value in defines.items() if value not in values[name]]
        assert not missing, (kernel, missing, defines)
    else:
        assert defines in COMPILED[kernel], (kernel, defines)


# By kernel: rows of a tile, bytes of a row of it. The last two arguments, before three that say where packed sequences
# lie, are the matrix's extents.
CASTS = {"cast_transpose": (128, 256), "cat_cast_transpose": (128, 256), "activation_cast_transpose": (64, 256)}
BYTES = (4, 2, 2)  # of an element, by the macro WIDE


def check_cover(launched: Launched) -> None:
    """Blocks cover matrices, and no more."""
    kernel, grid, block, args, _ = launched
    size = BYTES[int(kernel.defines.get("WIDE", 0))]
    if kernel.kernel in CASTS:
        tile_rows, row_bytes = CASTS[kernel.kernel]
        rows, cols = map(int, (args[:-3] if "PACKED" in kernel.defines else args)[-2:])
        assert grid[0] == max(1, -(-cols * size // row_bytes)), (kernel.kernel, grid, rows, cols)
        tiles = max(1, -(-rows // tile_rows))
        assert tiles <= grid[1] * grid[2] < tiles + grid[1], (kernel.kernel, grid, rows, cols)
    elif kernel.kernel.startswith("attention") and kernel.name in ("attention", "attention_backward"):
        check_attention(launched)
    elif kernel.kernel == "cast":
        assert grid == (max(1, -(-int(args[5]) * size // (32 * block[0]))),)
    elif kernel.kernel == "dropout" and kernel.name != "advance":
        assert (grid[0] - 1) * 8 * block[0] < int(args[4]) <= grid[0] * 8 * block[0]
    elif kernel.kernel == "softmax":
        rows = int(args[2 if kernel.name == "softmax" else 3])
        assert (grid[0] - 1) * (block[0] // 32) < rows <= grid[0] * (block[0] // 32)
        groups, cols = int(kernel.defines["GROUPS"]), int(args[3 if kernel.name == "softmax" else 4])
        assert groups == 0 or cols <= 256 * groups
    elif kernel.name == "norm_any":
        assert kernel.defines["VECTOR"] == (int(args[7]) % 8 == 0)
    elif kernel.kernel == "activation":
        rows, cols = (int(arg) for arg in args if isinstance(arg, np.int32))
        assert grid == (-(-rows // 4) * -(-cols // (block[0] * (16 // size if kernel.defines["VECTOR"] else 1))),)
    elif kernel.name == "attention_fp8":
        shape = args[6].storage[()]
        b, h, sq, d = (int(shape[name]) for name in ("batches", "heads", "sq", "d"))
        assert grid == (min(-(-sq // 192) * b * h * -(-d // 128), 132),)
    elif kernel.kernel == "norm_cast_transpose":
        rows, cluster = int(args[-5]), int(kernel.defines.get("CLUSTER", 0))
        works = max(1, -(-rows // (32 if cluster else 64)))
        assert grid == (max(1, cluster) * min(works, 132 // cluster - 2 if cluster else 132),)


def check_attention(launched: Launched) -> None:
    """Its blocks are as many as run at once, or as there is work for."""
    kernel, grid, _, args, _ = launched
    shape = args[3 if kernel.name == "attention" else 4].storage[()]
    b, h, group, sq, skv, d = (int(shape[name]) for name in ("batches", "heads", "group", "sq", "skv", "d"))
    wide = kernel.kernel.endswith("_wide")
    # Those of v may be fewer than those of q and k, which took the kernel.
    assert d <= 256 if wide else d <= int(kernel.defines["N_OUT"]) == 64 * int(kernel.defines["D_CHUNKS"])
    cluster = int(kernel.defines.get("CLUSTER", 2 if wide else 1))
    if kernel.name == "attention":
        assert cluster == 1 or sq > 128, "a cluster's second block would have no queries"
        channels = 256 if wide else int(kernel.defines["N_OUT"])
        each = 2 * 2 * skv * channels  # bytes of a head's keys and values
        together = int(shape["together"]) // group
        assert together == 1 or together * each <= L2, "they are read again while they are there"
        assert (together + 1) * each > L2
        works = -(-sq // (128 * cluster if wide else 192)) * b * h
    else:
        works = -(-skv // 128) * b * h // group
    assert grid == (cluster * min(works, {1: 132, 2: 64}[cluster]),)  # the dry GPU's blocks, or clusters, at once


def check_table(launched: Launched) -> None:
    """Blocks are numbered through the tensors of a table, each tensor has as many as cover it, and no more run."""
    kernel, grid, block, args, _ = launched
    table = args[0].storage if args and hasattr(args[0], "storage") else np.zeros(())
    if "first_block" not in (table.dtype.names or ()):
        return
    listed = int(args[1])
    assert 0 < listed <= len(table) == kernel.defines["CAPACITY"]
    if kernel.name.endswith("_scales"):  # a thread of each tensor
        assert grid == (-(-listed // block[0]),)
        return
    each = {"grad_norm": CHUNK, "word_sums": word_sums.BYTES}.get(
        kernel.kernel, 8 * block[0] * int(kernel.defines.get("TILES", 1))
    )
    ends = list(itertools.accumulate(-(-int(one) // each) for one in table["count"][:listed]))
    assert [0, *ends[:-1]] == table["first_block"][:listed].tolist(), kernel.kernel
    assert grid == (ends[-1],), kernel.kernel
    addresses = [name for name in table.dtype.names or () if table.dtype[name] == np.uint64]
    aligned = [all(int(row[name]) % 16 == 0 for name in addresses) for row in table[:listed]]
    assert aligned == (table["aligned"][:listed] != 0).tolist(), kernel.kernel


def check(launches: list[Launched]) -> None:
    for launched in launches:
        check_limits(launched)
        check_compiled(launched)
        check_cover(launched)
        check_table(launched)


@pytest.mark.parametrize("name", LISTS)
def test_launches_of_the_calls(name: str) -> None:
    launches = dry(name)
    assert launches
    check(launches)


@pytest.mark.parametrize("name", SIZED)
@settings(max_examples=4, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 300), st.sampled_from((1023, 4097, 9000, 70000))),
    cols=st.one_of(st.integers(0, 40).map(lambda n: 16 * n), st.integers(1, 3000), st.sampled_from(WIDTHS)),
)
def test_launches_of_any_size(name: str, rows: int, cols: int) -> None:
    check(dry_sized(name, rows, cols))


def refused(calls: Iterable[Call]) -> list[str | None]:
    """Of each call the sentence that refuses it."""
    found: list[str | None] = []
    for call in calls:
        try:
            call.run()
            found.append(None)
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("name", SIZED)
def test_a_gpu_refuses_what_the_definition_refuses_whatever_is_empty(name: str) -> None:
    sized = cases.MODULES[name].sized
    for rows, cols in ((0, 64), (64, 0), (0, 0)):
        expected = refused(sized(Inputs("cpu"), rows, cols))
        with DryGpu(written=False):
            assert refused(sized(Inputs("cuda", filled=False), rows, cols)) == expected, (rows, cols)


@pytest.mark.parametrize("name", ["norm", "norm_cast_transpose"])
def test_rows_of_every_width_have_a_kernel(name: str) -> None:
    """One that CI compiles, with shared memory that a block can have."""
    for width in WIDTHS:
        launches = dry_sized(name, 7, width)
        assert launches or (name == "norm_cast_transpose" and width % 16), width
        check(launches)
    for x, kind, width in itertools.product((torch.bfloat16, torch.float32), ("layernorm", "rmsnorm"), WIDTHS):
        shape = norm_cast_transpose.tile_shape(x, kind, width)
        assert (shape is None) == (width > max(512 * a * b for a, b in norm_cast_transpose.SHAPES))
        if shape is not None:
            assert width <= shape.width
            assert shape.shared(x, kind) <= SHARED_BYTES


# By name: kernels whose arguments have a matrix's extents side by side, or how many numbers it has.
TOLD = {"amax", "cast", "cast_blocks", "cast_stats", "cast_stats_blocks", "current_scale", "dequantize"}
TOLD |= {"gemm", "gemm_fp8", "gemm_fp8_blocks", "gemm_fp8_blocks_fused", "gemm_fp8_blocks_part", "gemm_fp8_fused"}
TOLD |= {"gemm_fp8_part", "gemm_fp8_rowwise", "gemm_part", "norm_any", "norm_rows", "norm_backward", "norm_cast_blocks"}
TOLD |= {"norm_cast_transpose", "norm_statistics", "normal", "softmax", "softmax_backward"}


def test_kernels_are_told_how_large_the_matrices_of_their_calls_are() -> None:
    seen = set()
    for op, sizes, launches in itertools.chain.from_iterable(map(dry_calls, LISTS)):
        for kernel, _, _, args, _ in launches:
            if kernel.name in TOLD:
                told = [int(one) for one in args if isinstance(one, (np.int32, np.int64))]
                assert sizes & {*told, *(a * b for a, b in itertools.pairwise(told))}, (op, kernel, told)
                seen.add(kernel.name)
    assert seen == TOLD


def test_a_scale_is_of_all_parts_of_its_matrix() -> None:
    """Each block that looks for an amax leaves one, and the kernel that makes scales reads as many of each matrix."""
    seen = 0
    for before, after in itertools.pairwise(dry("current_scale")):
        if after.kernel.name == "total":
            assert int(after.args[2]) * after.grid[0] == math.prod(before.grid)
            seen += 1
    assert seen


def test_every_kernel_of_the_ops_is_launched_by_some_call() -> None:
    launched = {one.kernel.kernel for name in LISTS for one in dry(name)}
    assert set(COMPILED) <= launched


def test_every_value_of_a_macro_is_launched_by_some_call() -> None:
    """Of each kernel. What no call launches, no test on a GPU compares with the CPU."""
    launched = {
        (kernel.kernel, *macro) for name in LISTS for kernel, *_ in dry(name) for macro in kernel.defines.items()
    }
    compiled = {(kernel, *macro) for kernel, those in COMPILED.items() for one in those for macro in one.items()}
    assert not compiled - launched


def test_every_tile_is_launched_by_some_call() -> None:
    """Of the products, and of those fused with what follows."""
    for name, kernel, tiles in (("gemm", "gemm", TILES), ("gemm_fp8", "gemm_fp8", FP8_TILES)):
        shapes = {
            (one.kernel.defines["WARPGROUPS"], one.kernel.defines["BLOCK_N"])
            for one in dry(name)
            if one.kernel.kernel == kernel
        }
        assert shapes >= {(tile.warpgroups, tile.block_n) for tile in tiles}, kernel
    fused = {
        (one.kernel.defines["EPILOGUE"], one.kernel.defines["BLOCK_N"])
        for one in dry("gemm_fused")
        if one.kernel.kernel == "gemm_fp8_fused"
    }
    assert fused >= set(itertools.product(("BiasActivation", "BiasDropoutAdd"), {tile.block_n for tile in TILES}))


@pytest.mark.parametrize("tile", sorted({*TILES, *FP8_TILES}, key=str), ids=str)
def test_tiles_cover_an_output_once(tile: Any) -> None:
    """As kernels/gemms/gemm_tile.cuh spreads them: rows of clusters' tiles, some of a row's narrow where the cut is
    finer."""
    for m, n in ((1, 16), (300, 1808), (4096, 4096), (9000, 1808), (129, 12288)):
        rows, wide = tile.rows(m), tile.count(m, n)
        height = tile.block_m * tile.sharing_b
        assert (rows - 1) * height < m <= rows * height
        assert (wide // rows - 1) * tile.columns < n <= wide // rows * tile.columns
        for sms in (2, 114, 132):
            cut = tile.cut(m, n, sms)
            blocks = tile.blocks(cut, sms)
            assert 0 < blocks <= sms
            assert blocks % tile.cluster == 0
            clusters = sms // tile.cluster
            assert -(-cut // clusters) == -(-wide // clusters), "narrow tiles must not make another wave"
            # No row may have more tiles than narrow ones fit beside each other.
            assert cut == wide or -(-cut // rows) * tile.narrow <= n + tile.narrow


def names(lines: list[str]) -> list[str]:
    """Of the kernels' files, and of PyTorch's ops with the dtype of what they give."""
    found = []
    for line in lines:
        line = line.removeprefix("again ")
        torchs = re.match(r"(\w+)\(.*-> (\w+)\[", line)
        found.append(f"torch.{torchs[1]} {torchs[2]}" if torchs else line.split(".")[0])
    return found


@pytest.fixture(params=["bf16", "FP8"])
def passes(request: pytest.FixtureRequest) -> tuple[bool, list[list[list[str]]]]:
    """Whether in FP8, and what a TransformerLayer launches: the forward and the backward of two microbatches."""
    fp8, found = request.param == "FP8", []
    with DryGpu() as gpu:
        layer = optimized.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16, fuse_qkv_params=True)
        x = torch.empty(40, 2, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
        gpu.lines.clear()
        for first in (True, False):
            with te.autocast(enabled=fp8):
                out = layer(x, is_first_microbatch=first)
            forward = names(gpu.taken())
            out.backward(torch.empty_like(out))
            found.append([forward, names(gpu.taken())])
    return fp8, found


@pytest.fixture
def microbatches(passes: tuple[bool, list[list[list[str]]]]) -> tuple[bool, list[list[str]]]:
    """The same with a list for each microbatch."""
    fp8, found = passes
    return fp8, [forward + backward for forward, backward in found]


def test_a_layer_leaves_little_to_pytorch(microbatches: tuple[bool, list[list[str]]]) -> None:
    """Copies of dropout's state, the state of FP8 once, gradients added to those there are: nothing of activations."""
    fp8, (first, second) = microbatches
    once = {"torch.ones fp32", "torch.zeros fp32"} if fp8 else set()
    together = (
        set() if fp8 else {"torch.cat i64"}
    )  # the gradients of q, k and v, in words of eight bytes; FP8's cast reads them where they are
    of_state = {"torch.mul i64", "torch.clone i64"}
    assert {name for name in first if name.startswith("torch.")} == of_state | once | together
    assert {name for name in second if name.startswith("torch.")} == of_state | together | {"torch.add_ bf16"}
    assert second.count("torch.add_ bf16") == 13, "the input, and parameters"


@pytest.mark.parametrize(
    ("channels", "fp8", "fp8_dpa"),
    [(16, False, False), (128, True, False), (136, False, False), (16, True, True), (144, True, True)],
)
def test_packed_sequences_are_read_where_they_lie(channels: int, fp8: bool, fp8_dpa: bool) -> None:
    """No activation is gathered, whatever the heads' size. In FP8 q, k and v are copied out of their projection."""
    how: dict[str, Any] = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal", "fuse_qkv_params": True}
    with DryGpu() as gpu:
        layer = optimized.TransformerLayer(
            64, 128, 4, kv_channels=channels, hidden_dropout=0.0, params_dtype=torch.bfloat16, **how
        )
        x = torch.empty(48, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
        ends = torch.empty(4, dtype=torch.int32, device="cuda")
        with te.autocast(enabled=fp8, recipe=te.DelayedScaling(fp8_dpa=fp8_dpa)):
            gpu.lines.clear()
            out = layer(x, cu_seqlens_q=ends, max_seqlen_q=20)
        out.backward(torch.empty_like(out))
        launched = names(gpu.taken())
    of_pytorch = [name for name in launched if name.endswith((" bf16", " fp16"))]
    assert launched.count("attention_gaps") == 3
    assert of_pytorch == ["torch.clone bf16"] * (3 if fp8_dpa else 0)
    assert launched.count("torch.sub int32") == 3, "for the check of ends, and lengths"


def test_a_layer_casts_its_weights_once_a_step(microbatches: tuple[bool, list[list[str]]]) -> None:
    """All of attention's in one launch, all of the MLP's in another; none in a later microbatch."""
    fp8, (first, second) = microbatches
    casts = [[name for name in one if "cast" in name] for one in (first, second)]
    assert casts[0].count("multi_cast_transpose") == (2 if fp8 else 0)
    assert [name for name in casts[0] if name != "multi_cast_transpose"] == casts[1]
    assert len(casts[1]) == (7 if fp8 else 0), "of three inputs and four gradients; the fourth input is a GEMM's result"
    for one in (first, second):
        assert sum(name.startswith("gemm") for name in one) == 12, "three products of four weights"
        assert one.count("scale_update") == (2 if fp8 else 0), "one in each direction, at the autocast's end"


# By family, its kernels' files and how many of them a forward and a backward launch, in bf16 and in FP8.
FAMILIES = {
    "norm": ("norm|norm_cast_transpose|norm_backward|norm_total", (2, 4), (2, 4)),
    "attention": ("attention|attention_backward|attention_backward_ends", (1, 4), (1, 4)),
    "activation": ("activation|activation_cast_transpose", (1, 1), (0, 1)),  # FP8's product has it in its epilogue
    "dropout": ("dropout", (5, 2), (3, 2)),  # as it has what adds the residual; three launches advance states
    "gradients of biases": ("dbias", (0, 4), (0, 4)),
    "casts": ("cast_transpose|cat_cast_transpose", (0, 0), (1, 3)),
    "products": ("gemm|gemm_fp8|gemm_fp8_fused", (4, 8), (4, 8)),
    "scales": ("scale_update", (0, 0), (1, 1)),
}
OF_WEIGHTS = "multi_cast_transpose"


def test_a_layer_launches_so_many_kernels_of_each_family(passes: tuple[bool, list[list[list[str]]]]) -> None:
    """And none of any other. Weights are cast in the first microbatch, twice, in FP8."""
    fp8, found = passes
    for first, microbatch in zip((True, False), found, strict=True):
        for backward, launched in enumerate(microbatch):
            kernels = [name for name in launched if not name.startswith("torch.")]
            counted = {
                family: sum(re.fullmatch(files, name) is not None for name in kernels)
                for family, (files, *_) in FAMILIES.items()
            }
            assert counted == {family: counts[fp8][backward] for family, (_, *counts) in FAMILIES.items()}
            assert kernels.count(OF_WEIGHTS) == (2 if fp8 and first and not backward else 0)
            assert len(kernels) == sum(counted.values()) + kernels.count(OF_WEIGHTS), "some belong to no family"


def test_fp8_weights_are_not_cast() -> None:
    with DryGpu() as gpu, te.quantized_model_init(enabled=True):
        layer = optimized.LayerNormMLP(
            64, 128, params_dtype=torch.bfloat16, normalization="RMSNorm", activation="swiglu"
        )
        x = torch.empty(40, 2, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
        gpu.lines.clear()
        with te.autocast(enabled=True):
            out = layer(x)
        out.backward(torch.empty_like(out))
        launched = names(gpu.taken())
    assert "multi_cast_transpose" not in launched
    assert sum("cast" in name for name in launched) == 3, "x with its norm, and two gradients"


def test_fused_linear_cross_entropy_works_in_chunks() -> None:
    """Each chunk's logits, loss and gradients, so that the logits of all are never there."""
    with DryGpu() as gpu:
        hidden, weight = (
            torch.empty(rows, 64, dtype=torch.bfloat16, device="cuda").requires_grad_() for rows in (300, 96)
        )
        target = torch.empty(300, dtype=torch.int64, device="cuda")
        gpu.lines.clear()
        loss = optimized.fused_linear_cross_entropy(hidden, weight, target, chunk_size=128)
        loss.backward()
        launched = names(gpu.taken())
    assert sum(name == "gemm" for name in launched) == 9, "three products of three chunks"


def test_storages_are_numbered_in_the_order_of_a_text() -> None:
    assert renumbered("&7+4 &3 &7 &12") == "&0+4 &1 &0 &2"


def test_a_dry_gpu_leaves_nothing_behind() -> None:
    before = launch.launch
    with DryGpu() as gpu:
        assert launch.launch is not before
        x = torch.empty(3, 16, device="cuda")
        assert x.device == torch.device("cuda", 0)
        assert x.is_cuda
        torch.ops.twin.dbias(x)
        assert len(gpu.launches) == 1
        (line,) = gpu.taken()
        assert line.startswith("dbias.dbias [VECTOR=1 WIDE=0] (8,) (128,) (&0, &1, 3, 16)")
        assert gpu.taken() == []
    assert launch.launch is before
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize("name", ["gemm_fp8", "gemm_fp8_blocks", "gemm_fp8_rowwise", "gemm_fused"])
def test_threads_of_a_product_store_16_bytes_where_rows_and_tiles_allow_it(name: str) -> None:
    """Rows that begin at multiples of 16 bytes only, narrow tiles and fp32 have stores of 8 bytes, or 16 of four."""
    seen = set()
    with DryGpu(written=False) as gpu:
        for call in cases.MODULES[name].calls(Inputs("cuda", filled=False)):
            before = len(gpu.launches)
            call.run()
            for kernel in (launched.kernel for launched in gpu.launches[before:]):
                if "RUN" in kernel.defines and not call.name.startswith("gemm_fp8_activation"):
                    whole = call.args[1].shape[0] % 32 == int(kernel.defines["BLOCK_N"]) % 32 == 0
                    run = 8 if whole and kernel.defines["OUT"] != "FP32" else 4
                    assert kernel.defines["RUN"] == run, (call.name, kernel.defines)
                    seen.add(run)
    assert seen == {4, 8}


def test_packed_sequences_bring_how_many_rows_they_have() -> None:
    """All of them, those between sequences too: a kernel reads and writes no others."""
    module, seen = cases.MODULES["attention"], 0
    with DryGpu(written=False) as gpu:
        for drawn in module.packed(Inputs("cuda", filled=False)):
            before = len(gpu.launches)
            module.forward(drawn).run()
            for launched in gpu.launches[before:]:
                if launched.kernel.name == "attention":
                    found = launched.args[3].storage[()]
                    assert (int(found["q_rows"]), int(found["kv_rows"])) == (drawn.q.shape[0], drawn.k.shape[0])
                    seen += 1
    assert seen


def test_scratch_of_attentions_gradient_has_room_for_all_of_dq() -> None:
    """In fp32, of each head, and of the queries of whole tiles."""
    seen, of_attention = 0, [name for name in LISTS if name.startswith("attention")]
    with DryGpu(written=False) as gpu:
        for call in itertools.chain(
            *(cases.MODULES[name].calls(Inputs("cuda", filled=False)) for name in of_attention)
        ):
            before = len(gpu.launches)
            call.run()
            for launched in gpu.launches[before:]:
                if launched.kernel.name == "attention_backward":
                    shape = launched.args[4].storage[()]
                    b, h, sq, d = (int(shape[name]) for name in ("batches", "heads", "sq", "d"))
                    structs = (arg.storage for arg in launched.args if hasattr(arg, "storage"))
                    (scratch,) = (one for one in structs if "dq" in (one.dtype.names or ()))
                    assert gpu.bytes_at(int(scratch["dq"])) >= 4 * b * h * -(-sq // 128) * 128 * d
                    seen += 1
    assert seen


def test_scratch_of_attentions_segments_has_room_for_what_blocks_hold() -> None:
    """An fp32 number for each channel of each query of a tile, of each block that runs, and little beside."""
    seen = set()
    with DryGpu(written=False) as gpu:
        for call in cases.MODULES["attention"].calls(Inputs("cuda", filled=False)):
            before = len(gpu.launches)
            call.run()
            for kernel, grid, block, args, _ in gpu.launches[before:]:
                if kernel.name == "attention" and "SEGMENT" in kernel.defines:
                    channels = 64 * int(kernel.defines.get("D_CHUNKS", 4))
                    queries = (block[0] - 128) // 2  # two threads for each, beside those that copy
                    numbers = grid[0] * queries * channels
                    assert 4 * numbers < gpu.bytes_at(args[8]) <= 1.125 * 4 * numbers
                    seen.add(channels)
    assert seen == {64, 128, 256}


def rows_are_whole(x: torch.Tensor, numbers: int) -> bool:
    """Whether rows have whole runs of so many numbers, and begin at multiples of 16 bytes."""
    steps = [step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    aligned = all(step * x.element_size() % 16 == 0 for step in steps)
    return x.data_ptr() % 16 == 0 and aligned and x.shape[-1] % numbers == 0


def test_kernels_read_16_bytes_at_once_where_rows_allow_it() -> None:
    """Not elsewhere, where an address would be no multiple of 16; and of long rows of whole runs always."""
    others = {"cross_entropy_backward", "cross_entropy_mean", "total"}  # kernels that read numbers, whatever their rows
    others.add("activation_scale_cast_transpose")  # an op that copies what is not aligned
    history, seen = (4, 3), set[tuple[str, bool]]()
    for name in LISTS:
        if not any("VECTOR" in defines for defines in COMPILED.get(name, ())):
            continue
        with DryGpu(written=False) as gpu:
            for call in cases.MODULES[name].calls(Inputs("cuda", filled=False)):
                before = len(gpu.launches)
                results = call.run()
                matrices = [
                    x
                    for x in tensors_of([call.args, results])
                    if x.dim() > 1 and x.dtype in (torch.float32, *HALVES) and x.shape != history and x.numel()
                ]
                for kernel in (one.kernel for one in gpu.launches[before:]):
                    if kernel.name == "cross_entropy_backward":  # whose blocks begin where logits and dx are aligned
                        logits, dx = (x.data_ptr() for x in (call.args[2], results))
                        assert kernel.defines["VECTOR"] == ((logits - dx) % 16 == 0)
                    if "VECTOR" not in kernel.defines or {kernel.name, call.name} & others:
                        continue
                    vector = bool(kernel.defines["VECTOR"])
                    if vector:
                        assert all(rows_are_whole(x, 16 // x.element_size()) for x in matrices), (call.name, kernel)
                    else:
                        assert not all(rows_are_whole(x, 64) for x in matrices), (call.name, kernel)
                    seen.add((kernel.name, vector))
    assert {name for name, vector in seen if vector} == {name for name, vector in seen if not vector}


def lies_well(x: torch.Tensor) -> bool:
    """Whether a tensor is without gaps, and its rows, or its columns, are whole runs of 16 bytes."""
    strides = sorted((step, size) for size, step in zip(x.shape, x.stride(), strict=True) if size > 1)
    dense = all(step == math.prod(size for _, size in strides[:i]) for i, (step, _) in enumerate(strides))
    row = strides[0][1] * x.element_size() if strides and x.dim() > 1 else 16
    return dense and x.data_ptr() % 16 == 0 == row % 16


def test_what_lies_well_is_not_copied() -> None:
    """A call of such tensors launches kernels, and no op of PyTorch's moves numbers."""
    joins = {"activation_backward_cast_blocks_transpose_dbias", "cat_cast_blocks_transpose_dbias"}  # of fp32, first
    seen, most = collections.Counter[str](), 10
    with DryGpu() as gpu:
        for call in itertools.chain(*(cases.MODULES[name].calls(Inputs("cuda", filled=False)) for name in LISTS)):
            given = list(tensors_of(call.args))
            wide = call.name in joins and given[0].dtype == torch.float32
            if wide or seen[call.name] == most or not all(x.numel() and lies_well(x) for x in given):
                continue
            gpu.lines.clear()
            call.run()
            moved = [line for line in gpu.lines if re.match(r"(copy_|clone|cat|contiguous|_to_copy)\(", line)]
            assert not moved, (call.name, moved)
            seen[call.name] += 1
    assert {"gemm", "gemm_fp8", "norm", "cast_blocks", "attention", "attention_backward"} <= seen.keys()
