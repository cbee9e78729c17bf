"""Compiles a kernel's source to a cubin for sm_90a, through NVRTC, and caches it on disk.

This needs neither a GPU nor a driver: the wheel nvidia-cuda-nvrtc (or a CUDA toolkit) is enough, so CI compiles every
kernel. NVRTC is called through ctypes, because CuPy's own compile path adds `-arch=sm_90` and `-ftz=true`, and its
binding drops the last byte of a cubin.

NVRTC reads no file. It knows each header that it was given by one name, whatever folder the including file is in, and
would look for others in the current directory. So the include lines are resolved here (`program`): a name is looked for
beside the including file, in the kernels' folder and among CUDA's headers, and the line is rewritten to the one name of
what was found. The key hashes exactly what is compiled.

A cache entry is one file, `~/.cache/twin-engine/cubin/<kernel>-<key>.bin`: a digest of what follows, ptxas's log, a
zero byte and the cubin. The key hashes every text that NVRTC gets, the flags, the defines and the build of NVRTC.
Processes may race. An entry whose digest does not fit is built again. A cubin that cannot be stored is used all the
same. What the cache lacks a wheel may have (`packaged`), under the same key.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from optimized.cuda import wheel_cubins
from reference.support import files, notice

KERNELS = Path(__file__).parents[1] / "kernels"
INSTALL = 'pip install "twin-engine[gpu]" (in a checkout: pip install -e ".[gpu]")'
# The contract's arithmetic (docs/numerics.md): every operation is rounded once, nothing is flushed, fma is used only
# where it is written.
FLAGS = (
    "--gpu-architecture=sm_90a",
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ptxas-options=-v",
    "--no-source-include",  # no header comes from a folder that is not named, such as the current one
)
_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)["<]([^">]+)[">]', re.MULTILINE)
_INCLUDED = re.compile(r'(?<=#include ")[^"]+')
# C++: what is kept as it stands (raw strings, literals, names, numbers: each may hold a quote or `//`), or a stretch of
# comments and blank space.
_KEPT_OR_BLANK = re.compile(
    r"""(R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*|\d(?:'?[\w.])*)"""
    r"""|(?:\s|//(?:\\.|[^\\\n])*|/\*.*?\*/)+""",
    re.DOTALL,
)
_BUILD_ID = re.compile(rb"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0(.{20})", re.DOTALL)  # an ELF note
_locks: dict[str, threading.Lock] = {}  # by cache entry, so that different kernels compile side by side
_unstored: dict[str, bytes] = {}  # entries that the cache could not take; this process keeps them
compiled: list[str] = []  # names of the entries that this process has compiled

Defines = Mapping[str, int | str]


class MissingDependency(ImportError):
    """A package that the fast path needs is not installed; the message says which and how to install it."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message carries its log."""


@dataclass(frozen=True)
class Build:
    """A compiled kernel file: the cubin, and the log of NVRTC and ptxas with registers and spills (`-v`)."""

    cubin: bytes = field(repr=False)
    log: str


@functools.cache
def nvrtc_library() -> Path:
    """The path of NVRTC's shared library: of NVIDIA's wheel, else of a toolkit (`cuda.pathfinder` looks for both).

    Raises:
        MissingDependency: neither is installed, or its CUDA is older than 13.
    """
    advice = f"is needed as the wheel nvidia-cuda-nvrtc or with a CUDA toolkit: {INSTALL}."
    try:
        from cuda import pathfinder

        found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, RuntimeError) as error:  # pathfinder's DynamicLibNotFoundError is a RuntimeError
        raise MissingDependency(
            f"NVRTC, CUDA's run-time compiler (libnvrtc.so.13), is not installed; it {advice}"
        ) from error
    version = re.search(r"\.so\.(\d+)", str(found))
    if version is None or int(version[1]) < 13:
        raise MissingDependency(f"{found} is the NVRTC that is installed; CUDA 13's {advice}")
    return Path(found)


@functools.cache
def include_folder() -> Path | None:
    """The folder of CUDA's headers (`cuda_fp8.h`, `cuda_bf16.h`), or None where no CUDA is installed."""
    try:
        from cuda import pathfinder
    except ImportError:
        return None
    folder = pathfinder.find_nvidia_header_directory("cudart")
    return Path(folder) if folder is not None and (Path(folder) / "cuda_bf16.h").is_file() else None


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


@functools.cache
def nvrtc_build() -> str:
    """What distinguishes this NVRTC from any other: its version, and the build of each of its libraries."""
    folder = nvrtc_library().parent
    libraries = [nvrtc_library(), *sorted(folder.glob("libnvrtc-builtins.so.*"))]
    return " ".join([nvrtc_version(), *map(_build_of, libraries)])


def _build_of(library: Path) -> str:
    """A shared library's build ID, or a digest of the file where the linker has left none."""
    with library.open("rb") as file:
        note = _BUILD_ID.search(file.read(1 << 14))
        file.seek(0)
        return note[1].hex() if note else hashlib.file_digest(file, "sha256").hexdigest()


def _gather(first: Path, root: Path, prefix: str = "") -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Read a file and the headers that it includes: beside the including file, in `root` or in the kernels' folder.

    Returns:
        The text of each, and the text with its includes rewritten, by name: `prefix` + path relative to `root`. And
        the names of CUDA's headers among the includes. Any other include is left to NVRTC, which has a few headers.
    """
    found: dict[str, tuple[str, str]] = {}
    theirs: set[str] = set()
    waiting = [first]

    def named(match: re.Match[str], beside: Path) -> str:
        for folder in (beside, root, KERNELS):
            if (folder / match[2]).is_file():
                waiting.append(folder / match[2])
                return f'{match[1]}"{prefix}{os.path.relpath(folder / match[2], root)}"'
        cuda = include_folder()
        if cuda is None or not (cuda / match[2]).is_file():
            return match[0]
        theirs.add(os.path.normpath(match[2]))
        return f'{match[1]}"cuda:{os.path.normpath(match[2])}"'

    while waiting:
        path = waiting.pop()
        name = prefix + os.path.relpath(path, root)
        if name not in found:
            text = path.read_text("utf-8", errors="surrogateescape")  # CUDA does not name the encoding of its headers
            found[name] = text, _INCLUDE.sub(functools.partial(named, beside=path.parent), text)
    return found, theirs


@functools.cache
def _cuda_texts(header: str) -> dict[str, str]:
    """The rewritten texts of one of CUDA's headers and of everything that it includes, by name: 1.7 MB."""
    folder = include_folder()
    assert folder is not None
    return {name: rewritten for name, (_, rewritten) in _gather(folder / header, folder, "cuda:")[0].items()}


def names(root: Path = KERNELS) -> list[str]:
    """The kernel files in `root` and in its families' folders; those of `ladder`, which a lesson runs, are left out."""
    found = [*root.glob("*.cu"), *(path for path in root.glob("*/*.cu") if path.parent.name != "ladder")]
    return sorted(path.stem for path in found)


def _kernel_file(kernel: str, root: Path) -> Path:
    for path in (root / f"{kernel}.cu", *root.glob(f"*/{kernel}.cu")):
        if path.is_file():
            return path
    raise ValueError(f"kernel={kernel!r} is not one of the kernel files in {root}: {', '.join(names(root))}.")


def program(kernel: str, root: Path = KERNELS) -> dict[str, str]:
    """Everything that NVRTC compiles for a kernel file: texts by name, the file itself first.

    Raises:
        ValueError: there is no `<kernel>.cu` in `root`.
    """
    ours, theirs = _gather(_kernel_file(kernel, root), root)
    texts = {name: rewritten for name, (_, rewritten) in ours.items()}
    for header in sorted(theirs):
        texts |= _cuda_texts(header)
    return texts


def sources(kernel: str, root: Path = KERNELS) -> dict[str, str]:
    """The text of a kernel file and of every header of ours that it includes, by path relative to `root`.

    Raises:
        ValueError: there is no `<kernel>.cu` in `root`.
    """
    ours, _ = _gather(_kernel_file(kernel, root), root)
    return {name: text for name, (text, _) in sorted(ours.items())}


def _digest(texts: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(f"{name}\0{len(text)}\0{text}".encode(errors="surrogateescape"))
    return digest.hexdigest()


@functools.lru_cache(512)  # every kernel includes the same headers
def code_of(text: str) -> str:
    """C++ without comments: a stretch of comments and blank space is one newline, or one space within a line."""
    return _KEPT_OR_BLANK.sub(lambda found: found[1] or ("\n" if "\n" in found[0] else " "), text).strip()


def source_hash(kernel: str, root: Path = KERNELS) -> str:
    """SHA-256 over a kernel's code and that of our includes: what a result file says that it measured.

    Comments are left out, and so are the names of families: a measurement is as good as before when only a comment has
    changed, or a file has moved to another family.
    """
    texts = {_without_family(name): code_of(text) for name, text in sources(kernel, root).items()}
    named = {name: _INCLUDED.sub(lambda found: _without_family(found[0]), texts[name]) for name in sorted(texts)}
    return _digest(named)


def _without_family(name: str) -> str:
    """A file's name without the folder of its family; `ptx` and `ladder` are no families, but parts of names."""
    family, _, rest = name.partition("/")
    return name if family in ("ptx", "ladder") else rest or name


def key(kernel: str, defines: Defines | None = None, root: Path = KERNELS) -> str:
    """The cache key of one configuration of a kernel file."""
    return _key(program(kernel, root), defines)


def _key(texts: Mapping[str, str], defines: Defines | None) -> str:
    parts = [_digest(texts), *FLAGS, *_define_flags(defines), nvrtc_build()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _define_flags(defines: Defines | None) -> list[str]:
    return [f"--define-macro={name}={value}" for name, value in sorted((defines or {}).items())]


def _compile(kernel: str, defines: Defines | None, texts: Mapping[str, str]) -> tuple[bytes, str]:
    """Run NVRTC on the texts of `program`: (cubin, log)."""
    added = os.environ.get("NVRTC_APPEND_FLAGS")
    if added:
        raise CompileError(
            f"NVRTC_APPEND_FLAGS={added!r} is set, with which NVRTC compiles something else than the contract says: "
            f"unset it."
        )
    options = [*FLAGS, *_define_flags(defines)]
    handle = ctypes.c_void_p()
    (name, text), *headers = ((n, t.encode(errors="surrogateescape")) for n, t in texts.items())
    strings = ctypes.c_char_p * len(headers)
    contents, names = strings(*(t for _, t in headers)), strings(*(n.encode() for n, _ in headers))
    _call("nvrtcCreateProgram", ctypes.byref(handle), text, name.encode(), len(headers), contents, names)
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = _nvrtc().nvrtcCompileProgram(handle, len(options), array)
        log = _fetch(handle, "Log").rstrip(b"\0").decode(errors="replace")
        if status != 0:
            hint = "" if include_folder() else f"\nCUDA's headers (cuda_bf16.h) were not found: {INSTALL}."
            raise CompileError(f"kernels/{kernel}.cu does not compile for sm_90a:\n{log}{hint}")
        return _fetch(handle, "CUBIN"), log
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(handle))


def _fetch(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    prefix = "nvrtcGetProgram" if what == "Log" else "nvrtcGet"
    _call(f"{prefix}{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"{prefix}{what}", program, buffer)
    return buffer.raw


def _entry(kernel: str, defines: Defines | None, texts: Mapping[str, str]) -> str:
    return f"{kernel.replace('/', '-')}-{_key(texts, defines)}.bin"


def is_built(kernel: str, defines: Defines | None = None, *, root: Path = KERNELS) -> bool:
    """Whether `build` need not compile: the cache, the wheel or this process holds the whole entry."""
    return _held(kernel, _entry(kernel, defines, program(kernel, root))) is not None


def _held(kernel: str, name: str) -> bytes | None:
    return _unstored.get(name) or files.kept("cubin", name) or wheel_cubins.found(kernel, name)


def build(kernel: str, defines: Defines | None = None, *, root: Path = KERNELS, announced: bool = True) -> Build:
    """Compile `<root>/<kernel>.cu` for sm_90a with `defines`, or take the cubin from the cache.

    Args:
        kernel: name of the file without `.cu`, with its folder if it has one (`ladder/2_tma`).
        defines: values of preprocessor macros by name.
        root: folder of the kernel and its headers.
        announced: say on stderr that it compiles, if that takes longer than a moment.

    Raises:
        CompileError: NVRTC refused the source; the message carries the log.
        MissingDependency: NVRTC is not installed.
    """
    text, _, binary = entry(kernel, defines, root=root, announced=announced)[1].partition(b"\0")
    return Build(binary, text.decode())


def entry(
    kernel: str, defines: Defines | None = None, *, root: Path = KERNELS, announced: bool = True
) -> tuple[str, bytes]:
    """The cache's entry for one configuration, its name and its content, compiled if need be; see `build`."""
    texts = program(kernel, root)
    name = _entry(kernel, defines, texts)
    with _locks.setdefault(name, threading.Lock()):
        content = _held(kernel, name)
        if content is None:
            said = f"compiling kernels/{kernel}.cu for sm_90a (once; it is cached) ..."
            with notice.announced(said) if announced else contextlib.nullcontext():
                made, log = _compile(kernel, defines, texts)
            content = log.encode() + b"\0" + made
            compiled.append(name)
            if not files.keep("cubin", name, content):
                _unstored[name] = content
    return name, content


def cubin(kernel: str, defines: Defines | None = None) -> bytes:
    """The cubin of `kernels/<kernel>.cu`; see `build`."""
    return build(kernel, defines).cubin
