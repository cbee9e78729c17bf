"""GEMMs, attention and norms: a file makes one `struct Config` of its macros, and types in headers take it as a
template's argument. No header reads a macro of the file that includes it, but for those that say what an element is.
"""

import re

import pytest

from optimized import defaults
from optimized.cuda import compiler

MACROS: dict[str, set[str]] = {}
for kernel, given in defaults.configurations():
    MACROS.setdefault(kernel, set()).update(given)
# No tiles, no stages: an element or a row at a time; or the tiles of casts/cast_blocks.cuh.
WITHOUT = {"attention_fp8_backward", "end_gemm", "rotary", "rotary_append", "softmax", "norm_cast_blocks", "norm_total"}
# By macro they say of which types elements are, and which function is computed of one.
OF_ELEMENTS = {
    *("activations/activation.cuh", "casts/block_scale.cuh", "casts/cast_stats.cuh"),
    *("common/quantize.cuh", "common/wide.cuh", "common/wide_store.cuh"),
}


def kernels(*families: str) -> list[str]:
    """Those that have macros, of some families or of all."""
    found = (path for path in compiler.KERNELS.rglob("*.cu") if not families or path.parent.name in families)
    return sorted(path.stem for path in found if MACROS.get(path.stem))


def code(kernel: str, suffix: str) -> dict[str, str]:
    """Of a kernel file, or of the headers that it includes, without comments."""
    found = compiler.sources(kernel).items()
    return {name: compiler.code_of(text) for name, text in found if name.endswith(suffix)}


def read_by(text: str, macros: set[str]) -> set[str]:
    return set(re.findall(r"\w+", text)) & macros


@pytest.mark.parametrize("kernel", kernels())
def test_headers_read_no_macro_of_the_file_that_includes_them(kernel: str) -> None:
    read = {name: read_by(text, MACROS[kernel]) for name, text in code(kernel, ".cuh").items()}
    assert {name: macros for name, macros in read.items() if macros and name not in OF_ELEMENTS} == {}


def test_gemms_attention_and_norms_have_configs() -> None:
    found = kernels("gemms", "attentions", "norms")
    assert {kernel for kernel in found if "struct Config " not in "".join(code(kernel, ".cu").values())} == WITHOUT


def test_a_macro_in_a_header_is_found() -> None:
    assert read_by("constexpr int kWords = QUERIES / 64;", {"QUERIES", "N_OUT"}) == {"QUERIES"}
