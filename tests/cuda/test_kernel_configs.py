"""GEMMs and attention: a file makes one `struct Config` of its macros; types in headers take it as a template's
argument, and read no macro.
"""

import re

import pytest

from optimized import defaults
from optimized.cuda import compiler

MACROS: dict[str, set[str]] = {}
for kernel, given in defaults.configurations():
    MACROS.setdefault(kernel, set()).update(given)
# No tiles, no stages: an element or a row at a time.
WITHOUT = {"attention_fp8_backward", "end_gemm", "rotary", "rotary_append", "softmax"}
# By macro they say of which types elements are; the fused GEMM has them from the kernel that it replaces.
OF_ELEMENTS = {"activations/activation.cuh", "common/quantize.cuh", "common/wide.cuh"}


def kernels() -> list[str]:
    found = (path.stem for family in ("gemms", "attentions") for path in (compiler.KERNELS / family).glob("*.cu"))
    return sorted(kernel for kernel in found if MACROS[kernel])


def code(kernel: str, suffix: str) -> dict[str, str]:
    """Of a kernel file, or of the headers that it includes, without comments."""
    found = compiler.sources(kernel).items()
    return {name: compiler.code_of(text) for name, text in found if name.endswith(suffix)}


def read_by(text: str, macros: set[str]) -> set[str]:
    return set(re.findall(r"\w+", text)) & macros


@pytest.mark.parametrize("kernel", [kernel for kernel in kernels() if kernel not in WITHOUT])
def test_headers_read_no_macro_of_the_file_that_includes_them(kernel: str) -> None:
    read = {name: read_by(text, MACROS[kernel]) for name, text in code(kernel, ".cuh").items()}
    assert {name: macros for name, macros in read.items() if macros and name not in OF_ELEMENTS} == {}


def test_gemms_and_attention_have_configs() -> None:
    assert {kernel for kernel in kernels() if "struct Config " not in "".join(code(kernel, ".cu").values())} == WITHOUT


def test_a_macro_in_a_header_is_found() -> None:
    assert read_by("constexpr int kWords = QUERIES / 64;", {"QUERIES", "N_OUT"}) == {"QUERIES"}
