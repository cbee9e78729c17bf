"""The only place where numba compiles. `jit` compiles a function when it is first called, and keeps the machine code.

numba's own cache asks only whether the function's own file has changed, while compiled code holds what it calls from
other files; it notices no damage; and two processes that store two signatures of one function can leave either with
the other's code. So what is kept here is

    ~/.cache/twin-engine/numba/<function>-<hash>.bin = digest of what follows, stamp, numba's serialised code

one file for each file of source, function, signature, CPU and version of Python, numba and llvmlite (the hash). The
stamp is a digest of every file of this package that says `reference.numba_jit`, that is, of all that compiled code can
hold: code with another stamp is stale, and is replaced. A call costs what numba's own does.
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
from numba.core import compiler, serialize

from reference import files

# error_model: division by zero gives inf as in IEEE 754. fastmath stays off: every operation rounds once.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "boundscheck": False}
_VERSIONS = (sys.version, numba.__version__, llvmlite.__version__)


def _sources() -> bytes:
    """The digest of all files of this package that take part in compiled code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        with contextlib.suppress(OSError):  # an editor's lock, which is a link to nowhere; a module would not import
            text = path.read_bytes()
            if b"reference.numba_jit" in text:
                digest.update(hashlib.sha256(text).digest())
    return digest.digest()


_SOURCES = _sources()  # at import, before the modules that use `jit` are: the sources may change while this runs


@functools.cache
def _stamp(file: str) -> bytes:
    return hashlib.sha256(_SOURCES + Path(file).read_bytes()).digest()


class _Kept:
    """What a numba dispatcher asks for code that it has not in memory, one signature at a time."""

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
        """Keep what has been compiled for a signature."""
        if not result.library.has_dynamic_globals:  # those are addresses in this process
            code = serialize.dumps(result._reduce())
            files.keep("numba", self._name(signature, result.codegen), self.stamp + code)

    def enable(self) -> None:
        """Part of numba's interface."""

    disable = flush = enable


def jit(function: Any) -> Any:
    """A function compiled by numba at its first call with arguments of certain types.

    It is compiled anew in each process if its code alone does not describe it (it was made in another function), or
    if its source is not at hand, so that a change of it would go unnoticed.
    """
    compiled = numba.njit(function, **OPTIONS)
    if function.__closure__ is None and Path(function.__code__.co_filename).is_file():
        compiled._cache = _Kept(function)
    return compiled
