"""From a kernel's source to a cubin for sm_90a, through NVRTC, cached on disk.

Needs neither a GPU nor a driver: the wheel nvidia-cuda-nvrtc (or a CUDA toolkit) is enough, so CI compiles
every kernel. NVRTC is called through ctypes, because CuPy's own compile path adds `-arch=sm_90` and
`-ftz=true`, and its binding drops the last byte of a cubin.

A cache entry is `<kernel>-<key>.cubin` with `<kernel>-<key>.json` beside it (the cubin's digest and ptxas's
log). The key hashes the source with every include of ours, the flags, the defines and the versions of NVRTC
and of the CUDA headers. Files are written aside and renamed into place, so processes may race; an entry whose
digest does not fit is built again.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from optimized import device

KERNELS = Path(__file__).parent / "kernels"
# The contract's arithmetic (docs/numerics.md): every operation rounded once, nothing flushed, fma only
# where written.
FLAGS = (
    "--gpu-architecture=sm_90a",
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ptxas-options=-v",
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_PATIENCE = 2.0  # seconds of silence before a compilation says that it is running
_locks: dict[Path, threading.Lock] = {}  # by cache entry, so that different kernels compile side by side

Defines = Mapping[str, int | str]


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message carries its log."""


@dataclass(frozen=True)
class Usage:
    """What ptxas reports about one kernel function: registers a thread, bytes of stack and of spills."""

    function: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Build:
    """A compiled kernel file: the cubin on disk, and the compiler's log."""

    path: Path
    log: str

    @property
    def usage(self) -> tuple[Usage, ...]:
        """Resources of every kernel function in the file."""
        return parse_usage(self.log)

    @property
    def complaints(self) -> tuple[str, ...]:
        """Lines of the log that mean slow code: spills, C75xx (wgmma serialised), any other warning."""
        return parse_complaints(self.log)


def parse_usage(log: str) -> tuple[Usage, ...]:
    """Read ptxas's `-v` report."""
    block = re.compile(
        r"Compiling entry function '(?P<function>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads"
        r".*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return tuple(
        Usage(m["function"], int(m["registers"]), int(m["stack"]), int(m["stores"]), int(m["loads"]))
        for m in block.finditer(log)
    )


def parse_complaints(log: str) -> tuple[str, ...]:
    """Lines about spills and warnings; ptxas serialises wgmma with no more than a C75xx line."""
    spills = re.compile(r"[1-9]\d* bytes (?:spill|stack frame)")
    return tuple(
        line.strip()
        for line in log.splitlines()
        if spills.search(line) or "warning" in line.lower() or re.search(r"\bC75\d\d\b", line)
    )


def _roots() -> Iterator[Path]:
    """Where CUDA's libraries and headers may be: NVIDIA's wheels, then a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for parent in (spec.submodule_search_locations or ()) if spec else ():
        for package in ("cu13", "cuda_nvrtc", "cuda_runtime"):
            yield Path(parent) / package
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    yield Path("/usr/local/cuda")


@functools.cache
def nvrtc_library() -> Path:
    """The NVRTC shared library.

    Raises:
        MissingDependency: neither the wheel nor a CUDA toolkit is installed.
    """
    for root in _roots():
        for folder in ("lib", "lib64"):
            for path in sorted((root / folder).glob("libnvrtc.so.1[3-9]*")):
                return path
    raise device.MissingDependency(
        "NVRTC, CUDA's run-time compiler (libnvrtc.so.13), is not installed, neither as the wheel "
        f"nvidia-cuda-nvrtc nor with a CUDA 13 toolkit: {device.INSTALL}."
    )


@functools.cache
def include_folder() -> Path | None:
    """The folder of CUDA's headers (`cuda_fp8.h`, `cuda_bf16.h`), or None where no CUDA is installed."""
    return next((r / "include" for r in _roots() if (r / "include" / "cuda_bf16.h").is_file()), None)


@functools.cache
def _headers_version() -> str:
    folder = include_folder()
    if folder is None or not (folder / "cuda_runtime_api.h").is_file():
        return "none"
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", (folder / "cuda_runtime_api.h").read_text("utf-8"))
    return found[1] if found else "unknown"


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    path = nvrtc_library()
    # NVRTC opens its builtins by bare name; the wheels' folder is not on the loader's path.
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *args: object) -> None:
    status = getattr(_nvrtc(), name)(*args)
    if status != 0:
        raise CompileError(f"{name} failed: {_nvrtc().nvrtcGetErrorString(status).decode()}")


@functools.cache
def nvrtc_version() -> str:
    """NVRTC's version, such as "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def sources(kernel: str, root: Path = KERNELS) -> dict[str, str]:
    """The text of a kernel file and of every header of ours that it includes, by path relative to `root`.

    Raises:
        ValueError: there is no `<kernel>.cu` in `root`.
    """
    first = root / f"{kernel}.cu"
    if not first.is_file():
        names = ", ".join(sorted(path.stem for path in root.glob("*.cu")))
        raise ValueError(f"kernel={kernel!r} is not one of the kernel files in {root}: {names}.")
    found: dict[str, str] = {}
    waiting = [first]
    while waiting:
        path = waiting.pop()
        name = os.path.relpath(path, root)
        if name in found:
            continue
        found[name] = path.read_text("utf-8")
        for included in _INCLUDE.findall(found[name]):
            # Headers that are not ours (CUDA's) are covered by their version in the key.
            waiting += [p for p in (path.parent / included, root / included) if p.is_file()][:1]
    return dict(sorted(found.items()))


def source_hash(kernel: str, root: Path = KERNELS) -> str:
    """SHA-256 over a kernel's source and its includes: what a result file says that it measured."""
    digest = hashlib.sha256()
    for name, text in sources(kernel, root).items():
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()


def key(kernel: str, defines: Defines | None = None, root: Path = KERNELS) -> str:
    """The cache key of one configuration of a kernel file."""
    parts = [source_hash(kernel, root), *FLAGS, *_define_flags(defines), nvrtc_version(), _headers_version()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _define_flags(defines: Defines | None) -> list[str]:
    return [f"--define-macro={name}={value}" for name, value in sorted((defines or {}).items())]


def cache_folder() -> Path:
    """The user's cache folder for cubins, made if it is not there.

    Raises:
        CompileError: it cannot be made.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "twin-engine" / "cubin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompileError(f"the kernel cache {folder} cannot be made: {error.strerror or error}.") from error
    return folder


def _compile(kernel: str, defines: Defines | None, root: Path) -> tuple[bytes, str]:
    """Run NVRTC: (cubin, log)."""
    options = [*FLAGS, *_define_flags(defines), f"--include-path={root}"]
    folder = include_folder()
    if folder is not None:
        options.append(f"--include-path={folder}")
    program = ctypes.c_void_p()
    text = (root / f"{kernel}.cu").read_bytes()
    _call("nvrtcCreateProgram", ctypes.byref(program), text, f"{kernel}.cu".encode(), 0, None, None)
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = _nvrtc().nvrtcCompileProgram(program, len(options), array)
        log = _fetch(program, "Log").rstrip(b"\0").decode(errors="replace")
        if status != 0:
            hint = "" if folder else f"\nCUDA's headers (cuda_bf16.h) were not found: {device.INSTALL}."
            raise CompileError(f"kernels/{kernel}.cu does not compile for sm_90a:\n{log}{hint}")
        return _fetch(program, "CUBIN"), log
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


def _fetch(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    prefix = "nvrtcGetProgram" if what == "Log" else "nvrtcGet"
    _call(f"{prefix}{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"{prefix}{what}", program, buffer)
    return buffer.raw


@contextlib.contextmanager
def _announced(kernel: str) -> Iterator[None]:
    """Say so on stderr when a compilation takes longer than a moment."""
    message = f"twin-engine: compiling kernels/{kernel}.cu for sm_90a (once; it is cached) ..."
    timer = threading.Timer(_PATIENCE, lambda: print(message, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write(path: Path, data: bytes) -> None:
    """Write a file so that another process sees all of it or none."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _read(path: Path) -> Build | None:
    """The cache entry at `path`, or None where it is absent, incomplete or damaged."""
    try:
        record = json.loads(path.with_suffix(".json").read_text("utf-8"))
        if hashlib.sha256(path.read_bytes()).hexdigest() == record["sha256"]:
            return Build(path, record["log"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def build(kernel: str, defines: Defines | None = None, *, root: Path = KERNELS) -> Build:
    """Compile `<root>/<kernel>.cu` for sm_90a with `defines`, or take the cubin from the cache.

    Args:
        kernel: name of the file, without `.cu`, in a folder too (`ladder/2_tma`).
        defines: preprocessor macros, name to value.
        root: folder of the kernel and its headers.

    Raises:
        CompileError: NVRTC refused the source; the message carries the log.
        MissingDependency: NVRTC is not installed.
    """
    path = cache_folder() / f"{kernel.replace('/', '-')}-{key(kernel, defines, root)}.cubin"
    with _locks.setdefault(path, threading.Lock()):
        cached = _read(path)
        if cached is not None:
            return cached
        with _announced(kernel):
            cubin, log = _compile(kernel, defines, root)
        # The record last: an entry without one counts as absent.
        _write(path, cubin)
        record = {"sha256": hashlib.sha256(cubin).hexdigest(), "log": log, "nvrtc": nvrtc_version()}
        _write(path.with_suffix(".json"), json.dumps(record).encode())
        return Build(path, log)


def cubin(kernel: str, defines: Defines | None = None) -> Path:
    """Path of the cubin of `kernels/<kernel>.cu`; see `build`."""
    return build(kernel, defines).path
