"""The only place where numba compiles. `jit` compiles a function when it is first called, and keeps the machine code.

numba's own cache has three defects. It checks only the function's own file, although compiled code contains functions
of other files; it does not notice damage; and two processes that store two signatures of one function can exchange
their code. So compiled code is kept here instead:

    ~/.cache/twin-engine/numba/<function>-<hash>.bin = digest of what follows, stamp, numba's serialised code

There is one file for each file of source, function, signature, CPU and version of Python, numba and llvmlite (the
hash). The stamp is a digest of every file of this package that mentions `reference.support.numba_jit`, which covers all
that compiled code can contain; code with another stamp is replaced. A call is as fast as numba's own.

`fma`, `from_word` and `word_of` are for compiled code: operations that numba lacks.
"""

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import ir
from numba import types
from numba.core import compiler, serialize
from numba.extending import intrinsic as _intrinsic

from reference.support import files

# error_model: division by zero gives inf as in IEEE 754. fastmath stays off: every operation rounds once.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "boundscheck": False}
intrinsic: Any = _intrinsic  # numba types what it makes by the emitter, not by the call
_VERSIONS = (sys.version, numba.__version__, llvmlite.__version__)


def _sources() -> bytes:
    """The digest of all files of this package whose code may be compiled."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        with contextlib.suppress(OSError):  # such as an editor's lock, a dangling link
            text = path.read_bytes()
            if b"reference.support.numba_jit" in text:
                digest.update(hashlib.sha256(text).digest())
    return digest.digest()


_SOURCES = _sources()  # now, before the modules that use `jit` are imported: the sources may change later


@functools.cache
def _stamp(file: str) -> bytes:
    return hashlib.sha256(_SOURCES + Path(file).read_bytes()).digest()


class _Kept:
    """A numba dispatcher's cache of one function's code; an entry for each signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.stamp = _stamp(function.__code__.co_filename)

    @property
    def cache_path(self) -> str:
        """For numba's statistics."""
        return str(files.cache_folder("numba"))

    def _name(self, signature: Any, codegen: Any) -> str:
        code = self.function.__code__
        what = (code.co_filename, code.co_qualname, str(signature), codegen.magic_tuple(), _VERSIONS)
        return f"{self.function.__name__}-{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.bin"

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The code that is kept for a signature, or None."""
        target.refresh()
        content = files.kept("numba", self._name(signature, target.codegen()))
        if content is None or not content.startswith(self.stamp):
            return None
        return compiler.CompileResult._rebuild(target, *serialize.loads(content[len(self.stamp) :]))

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep the code compiled for a signature."""
        if not result.library.has_dynamic_globals:  # which are addresses in this process
            code = serialize.dumps(result._reduce())
            files.keep("numba", self._name(signature, result.codegen), self.stamp + code)

    def enable(self) -> None:
        """Part of numba's interface."""

    disable = flush = enable


def jit(function: Any) -> Any:
    """A function compiled by numba at its first call with arguments of certain types.

    Its code is not kept if it is a closure, which its code alone does not describe, or if its source is no file, so
    that changes would go unnoticed.
    """
    compiled = numba.njit(function, **OPTIONS)
    if function.__closure__ is None and Path(function.__code__.co_filename).is_file():
        compiled._cache = _Kept(function)
    return compiled


@intrinsic
def fma(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    """`a · b + c`, rounded once (LLVM's llvm.fma, which never becomes two operations)."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def from_word(typingctx, word):  # type: ignore[no-untyped-def]
    """The fp32 value whose bits are an int32."""
    signature = types.float32(types.int32)
    return signature, lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def word_of(typingctx, x):  # type: ignore[no-untyped-def]
    """The bits of an fp32 value, as an int32."""
    signature = types.int32(types.float32)
    return signature, lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))
