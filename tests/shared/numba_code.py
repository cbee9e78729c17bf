"""What numba makes of a function."""

import re
from typing import Any

import numba

from reference.support.numba_jit import OPTIONS


def assert_no_double(function: Any) -> None:
    """No operation of a compiled function is in double precision, for the types with which it was called."""
    compiled = numba.njit(**OPTIONS)(function.py_func)
    for signature in function.signatures:
        compiled.compile(signature)
    code = "".join(compiled.inspect_llvm().values())
    assert not re.search(r"= f(add|sub|mul|div|neg|cmp)\b.*\bdouble\b", code), function.__name__
