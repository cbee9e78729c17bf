"""Structs that kernels take by value: NVRTC finds each field where the op's dtype has it. Nothing is generated for it:
a program ends with an assertion that fails when all before it hold.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from optimized import defaults
from optimized.cuda import compiler
from optimized.ops.attentions import (
    attention,
    attention_backward,
    attention_decode,
    attention_fp8,
    rotary,
    rotary_append,
    softmax,
)
from optimized.ops.casts import (
    cat_cast_transpose,
    multi_cast_transpose,
    multi_current_scale,
    multi_transpose,
    scale_update,
)
from optimized.ops.digests import word_sums
from optimized.ops.gemms import gemm_fused, gemm_operands
from optimized.ops.optimizers import adafactor, adam, adam_states, clip_grads, grad_norm, sgd, tree_mean

GEMMS = (
    "gemm_fp8",
    "gemm_fp8_blocks",
    "gemm_fp8_blocks_part",
    "gemm_fp8_blocks_fused",
    "gemm_fp8_fused",
    "gemm_fp8_part",
    "gemm_fp8_rowwise",
    "gemm_fp8_split_k",
)
OPTIONS = ("BIAS", "SINK", "LENGTHS", "PACKED", "PAGED")  # that Arguments depends on
FIXED = {"attention_bias": {"BIAS": 1}, "attention_gaps": {"LENGTHS": 1, "PACKED": 1}}  # not given as macros
STRIDES = {"mask_strides": "mask_b", "out_strides": "out_b", "bias_strides": "bias_b", "slope_strides": "slope_b"}
LAST = "everything before holds"


class Case(NamedTuple):
    """A struct of a kernel file and its dtype; of a table also the struct of an element, whose dtype it is."""

    kernel: str
    struct: str
    dtype: np.dtype
    macros: dict[str, int | str] = {}  # that the configuration has among others  # noqa: RUF012
    names: dict[str, str] = {}  # of fields that the dtype names otherwise  # noqa: RUF012
    element: str = ""


def table(kernel: str, dtype: np.dtype, name: str = "Entry") -> Case:
    return Case(kernel, "Table", dtype, element=name)


def attentions() -> Iterator[Case]:
    """Arguments with what each macro adds; Scratch with and without what heads apart have."""
    for kernel in ("attention", "attention_wide", "attention_backward", "attention_backward_wide", "attention_fp8"):
        shown = set()
        for _, macros in configurations(kernel):
            options = {name: int(macros.get(name, 0)) for name in (*OPTIONS, "HEADS_APART")}
            if tuple(options.values()) in shown:
                continue
            shown.add(tuple(options.values()))
            *of_arguments, apart = map(bool, options.values())
            yield Case(kernel, "Arguments", attention.argument_type(*of_arguments), options, STRIDES)
            if "backward" in kernel:
                scratch = attention_backward.SCRATCH_APART if apart else attention_backward.SCRATCH
                yield Case(kernel, "Scratch", scratch, options)
    for kernel in ("attention_bias", "attention_backward_ends", "attention_gaps"):
        several = configurations(kernel)
        for macros in (several[0][1], several[-1][1]) if len(several) > 1 else (several[0][1],):
            options = {name: int(macros[name]) for name in OPTIONS if name in macros}
            has = options | FIXED.get(kernel, {})
            arguments = attention.argument_type(*(bool(has.get(name, 0)) for name in OPTIONS))
            yield Case(kernel, "Arguments", arguments, options, STRIDES)
    yield Case("attention_backward_ends", "Scratch", attention_backward.SCRATCH, {"HEADS_APART": 0})


@functools.cache
def _configurations() -> list[tuple[str, dict[str, int | str]]]:
    return defaults.configurations()


def configurations(kernel: str) -> list[tuple[str, dict[str, int | str]]]:
    return [one for one in _configurations() if one[0] == kernel]


CASES = [
    table("adam", adam._TENSOR),
    table("adam_states", adam_states._ROW),
    Case("adam_states", "Scalars", adam_states.SCALARS),
    Case("adafactor", "State", adafactor._STATE),
    Case("cat_cast_transpose", "Parts", cat_cast_transpose._PARTS),
    Case("cat_cast_transpose", "Part", cat_cast_transpose._PARTS["part"].base),
    Case("cat_cast_blocks", "Parts", cat_cast_transpose._PARTS),
    Case("cat_cast_blocks", "Part", cat_cast_transpose._PARTS["part"].base),
    table("clip_grads", clip_grads._ROW),
    table("grad_norm", grad_norm._ROW),
    table("multi_cast_transpose", multi_cast_transpose._MATRIX),
    table("multi_current_scale", multi_current_scale._MATRIX),
    table("multi_transpose", multi_transpose._MATRIX),
    table("scale_update", scale_update._MODULE, "Module"),
    table("sgd", sgd._ROW),
    *(
        Case("tree_mean", "Nodes", np.dtype([("node", "u8", len(order))]), {"ADDITIONS": ",".join(map(str, order))})
        for order in tree_mean.ORDERS
    ),
    table("word_sums", word_sums._ROW),
    Case("rotary", "Strides", rotary.STRIDES),
    Case("rotary_append", "Arguments", rotary_append.ARGUMENTS),
    Case("softmax", "Mask", softmax._MASK, names={"strides": "b"}),
    Case("attention_fp8", "KeyMaps", attention_fp8.KEY_MAPS, {"PACKED": 1}),
    *(Case(kernel, "OperandMaps", gemm_operands.MAPS) for kernel in GEMMS),
    *(
        Case("gemm_fp8_fused", "Epilogue::Arguments", gemm_fused.ARGUMENTS[name], {"EPILOGUE": name})
        for name in (gemm_fused.ACTIVATION, gemm_fused.DROPOUT)
    ),
    *attentions(),
    Case("attention_decode", "Arguments", attention_decode.ARGUMENTS, names=STRIDES | {"q_strides": "q_b"}),
]


def has(macros: dict[str, int | str], wanted: dict[str, int | str]) -> bool:
    return all(macros.get(name, 0) == value for name, value in wanted.items())


def assertions(case: Case, macros: dict[str, int | str]) -> Iterator[str]:
    struct, dtype = case.element or case.struct, case.dtype
    capacity = int(macros["CAPACITY"]) if case.element else 1
    yield f'static_assert(sizeof({case.struct}) == {capacity * dtype.itemsize}, "{case.struct}")'
    for name in dtype.names or ():
        field = case.names.get(name, name)
        if name == "unused" and case.struct == "Epilogue::Arguments":
            continue  # the end's alignment
        offset = (dtype.fields or {})[name][1]
        # How NVRTC's own offsetof is spelled.
        yield f'static_assert(__INTADDR__(&(({struct}*)0)->{field}) == {offset}, "{struct}.{field}")'


def failed(case: Case) -> list[str]:
    """The errors, among them the assertions that do not hold; the last one is LAST."""
    kernel, macros = next(one for one in configurations(case.kernel) if has(one[1], case.macros))
    texts = compiler.program(kernel)
    last = f'static_assert(sizeof(int) == 0, "{LAST}")'
    texts[next(iter(texts))] += "".join(f"\n{one};" for one in (*assertions(case, macros), last))
    with pytest.raises(compiler.CompileError) as found:
        compiler._compile(kernel, macros, texts)
    errors = re.findall(r"error: (.*)", str(found.value))
    return [re.sub(r'static assertion failed with "([^"]+)"', r"\1", error) for error in errors]


def label(case: Case) -> str:
    options = "-".join(name for name, value in case.macros.items() if value)
    return f"{case.kernel}-{case.struct}-{options}"


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_a_struct_is_where_its_dtype_says(case: Case) -> None:
    assert failed(case) == [LAST]


def test_a_field_that_has_moved_is_found() -> None:
    moved = np.dtype([("s", "i8"), ("h", "i8"), ("b", "i8")])
    assert failed(Case("rotary", "Strides", moved)) == ["Strides.h", "Strides.b", LAST]
    longer = np.dtype([("s", "i8"), ("b", "i8"), ("h", "i8"), ("d", "i8")])
    assert failed(Case("rotary", "Strides", longer))[0] == "Strides"


def test_every_struct_that_a_kernel_takes_is_among_them() -> None:
    found = set()
    for path in compiler.KERNELS.rglob("*.cu"):
        kernel = f"ladder/{path.stem}" if path.parent.name == "ladder" else path.stem
        for name in re.findall(r"__grid_constant__ ([\w:]+)", path.read_text("utf-8")):
            found.add((kernel, name))
    # A tensor map is the driver's.
    assert {one for one in found if one[1] != "CUtensorMap"} <= {(case.kernel, case.struct) for case in CASES}
