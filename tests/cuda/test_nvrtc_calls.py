"""What NVRTC is asked for, over a pretended one: program, options, logs, errors; and where it is looked for."""

import ctypes
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shared import ptxas

from optimized.cuda import compiler, device
from reference.support import notice


class Nvrtc:
    """NVRTC's functions; `calls` is what they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.log, self.cubin = b"all went well\n\0", b"\x7fELF\0\1\2\0"
        self.status: dict[str, int] = {}

    def nvrtcGetErrorString(self, status: int) -> bytes:
        return f"ERROR_{status}".encode()

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 13, 7
        return self.status.get("version", 0)

    def nvrtcCreateProgram(self, handle: Any, text: bytes, name: bytes, count: int, texts: Any, names: Any) -> int:
        handle._obj.value = 77
        self.calls.append(("create", text, name, count, list(texts), list(names)))
        return self.status.get("create", 0)

    def nvrtcCompileProgram(self, handle: Any, count: int, options: Any) -> int:
        self.calls.append(("compile", handle.value, count, list(options)))
        return self.status.get("compile", 0)

    def nvrtcGetProgramLogSize(self, handle: Any, size: Any) -> int:
        size._obj.value = len(self.log)
        return 0

    def nvrtcGetProgramLog(self, handle: Any, buffer: Any) -> int:
        ctypes.memmove(buffer, self.log, len(self.log))
        return 0

    def nvrtcGetCUBINSize(self, handle: Any, size: Any) -> int:
        size._obj.value = len(self.cubin)
        return 0

    def nvrtcGetCUBIN(self, handle: Any, buffer: Any) -> int:
        assert len(buffer) == len(self.cubin)
        ctypes.memmove(buffer, self.cubin, len(self.cubin))
        return self.status.get("cubin", 0)

    def nvrtcDestroyProgram(self, handle: Any) -> int:
        self.calls.append(("destroy", handle._obj.value))
        return 0


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> Nvrtc:
    made = Nvrtc()
    monkeypatch.setattr(compiler, "_nvrtc", lambda: made)
    return made


TEXTS = {"f.cu": "main \N{GREEK SMALL LETTER MU}", "a.cuh": "first", "cuda:b.h": "second"}


def test_a_program_with_its_headers_and_options(nvrtc: Nvrtc) -> None:
    assert compiler._compile("f", {"B": "x", "A": 1}, TEXTS) == (nvrtc.cubin, "all went well\n")
    create, compiled, destroy = nvrtc.calls
    assert create == (
        *("create", "main \N{GREEK SMALL LETTER MU}".encode(), b"f.cu", 2),
        *([b"first", b"second"], [b"a.cuh", b"cuda:b.h"]),
    )
    options = [*compiler.FLAGS, "--define-macro=A=1", "--define-macro=B=x"]
    assert compiled == ("compile", 77, len(options), [option.encode() for option in options])
    assert destroy == ("destroy", 77)
    compiler._compile("f", None, {"f.cu": ""})
    assert nvrtc.calls[-2] == ("compile", 77, len(compiler.FLAGS), [flag.encode() for flag in compiler.FLAGS])
    assert nvrtc.calls[-3][3:] == (0, [], [])


@pytest.mark.parametrize("status", [6, -1])
def test_what_nvrtc_refuses(nvrtc: Nvrtc, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.status["compile"] = status
    nvrtc.log = b"f.cu(1): no\0"
    monkeypatch.setattr(compiler, "include_folder", lambda: Path("/cuda"))
    with pytest.raises(compiler.CompileError) as refusal:
        compiler._compile("f", None, TEXTS)
    assert str(refusal.value) == "kernels/f.cu does not compile for sm_90a:\nf.cu(1): no"
    assert nvrtc.calls[-1] == ("destroy", 77)
    monkeypatch.setattr(compiler, "include_folder", lambda: None)
    with pytest.raises(compiler.CompileError, match=re.escape(f"were not found: {device.INSTALL}.")):
        compiler._compile("f", None, TEXTS)
    for name in ("create", "cubin"):
        nvrtc.calls.clear()
        nvrtc.status = {name: status}
        with pytest.raises(compiler.CompileError, match=rf"^nvrtc\w+ failed: ERROR_{status}$"):
            compiler._compile("f", None, TEXTS)
        assert [call[0] for call in nvrtc.calls][-1] == ("create" if name == "create" else "destroy")


def test_the_version_has_two_numbers(nvrtc: Nvrtc) -> None:
    compiler.nvrtc_version.cache_clear()
    try:
        assert compiler.nvrtc_version() == "13.7"
        compiler.nvrtc_version.cache_clear()
        nvrtc.status["version"] = 3
        with pytest.raises(compiler.CompileError, match="nvrtcVersion failed: ERROR_3"):
            compiler.nvrtc_version()
    finally:
        compiler.nvrtc_version.cache_clear()


def test_a_key_is_32_digits_and_tells_texts_apart() -> None:
    keys = [compiler._key(texts, None) for texts in ({"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "b"}, {})]
    assert all(re.fullmatch(r"[0-9a-f]{32}", key) for key in keys)
    assert len(set(keys)) == len(keys)
    assert re.fullmatch(r"[0-9a-f]{64}", compiler.source_hash("cast"))


def test_where_cuda_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NVIDIA's pathfinder says; of CUDA 13 or later, and with the headers that kernels include."""
    found: dict[str, Any] = {"library": "/cuda/lib/libnvrtc.so.13", "headers": str(tmp_path)}
    fake = SimpleNamespace(
        load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path=found["library"]),
        find_nvidia_header_directory=lambda name: found["headers"],
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(pathfinder=fake))
    library, headers = compiler.nvrtc_library.__wrapped__, compiler.include_folder.__wrapped__
    assert library() == Path("/cuda/lib/libnvrtc.so.13")
    assert headers() is None
    (tmp_path / "cuda_bf16.h").touch()
    assert headers() == tmp_path
    found |= {"library": "/cuda/lib/libnvrtc.so.12.8", "headers": None}
    assert headers() is None
    with pytest.raises(compiler.MissingDependency, match=r"libnvrtc.so.12.8 is the NVRTC.*CUDA 13's is needed"):
        library()
    monkeypatch.setitem(sys.modules, "cuda", None)
    assert headers() is None


def test_a_build_is_known_by_its_note_or_its_bytes(tmp_path: Path) -> None:
    note = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0" + bytes(range(20))
    library = tmp_path / "l.so"
    library.write_bytes(b"\x7fELF" + bytes(500) + note + bytes(100))
    assert compiler._build_of(library) == bytes(range(20)).hex()
    library.write_bytes(b"\x7fELF" + bytes(100))
    plain = compiler._build_of(library)
    assert re.fullmatch(r"[0-9a-f]{64}", plain)
    library.write_bytes(b"\x7fELF" + bytes(99) + b"\1")
    assert compiler._build_of(library) not in (plain, bytes(range(20)).hex())
    # A note lies near the start: what else looks like one is data.
    library.write_bytes(bytes(1 << 14) + note)
    assert len(compiler._build_of(library)) == 64
    library.write_bytes(bytes((1 << 14) - len(note)) + note)
    assert len(compiler._build_of(library)) == 40


def test_a_short_compilation_says_nothing_and_keeps_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert notice.PATIENCE == 2.0
    timers: list[threading.Timer] = []
    timer = threading.Timer

    def noted(patience: float, say: Any) -> threading.Timer:
        assert patience == notice.PATIENCE
        timers.append(timer(patience, say))
        return timers[-1]

    monkeypatch.setattr(threading, "Timer", noted)
    with notice.announced("f"):
        assert timers[0].daemon
    timers[0].join(1.0)
    assert not timers[0].is_alive()
    assert capsys.readouterr().err == ""


LOG = """ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers
ptxas info    : Compiling entry function 'two' for 'sm_90a'
    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
f.cu(3): Warning: no
"""


def test_what_ptxas_reports() -> None:
    assert ptxas.usage(LOG) == [ptxas.Usage("one", 12, 0, 0, 0), ptxas.Usage("two", 255, 24, 8, 16)]
    assert [line[:12] for line in ptxas.complaints(LOG)] == ["24 bytes sta", "ptxas info  ", "f.cu(3): War"]
    assert ptxas.complaints("0 bytes spill stores\n10 bytes spill loads") == ["10 bytes spill loads"]
