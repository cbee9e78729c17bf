"""The compiler and its cache, without a GPU: what a key depends on, damage, races, errors, reports."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from optimized import compiler, device

MAIN = '#include "half.cuh"\nextern "C" __global__ void f(float* x) { x[threadIdx.x] = half_of(x[threadIdx.x]); }\n'
HALF = '#pragma once\n#include "inner/factor.cuh"\n__device__ float half_of(float x) { return x * FACTOR; }\n'
FACTOR = "#define FACTOR 0.5f\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one kernel, a header and a header's header."""
    folder = tmp_path / "kernels"
    (folder / "inner").mkdir(parents=True)
    (folder / "f.cu").write_text(MAIN)
    (folder / "half.cuh").write_text(HALF)
    (folder / "inner" / "factor.cuh").write_text(FACTOR)
    (folder / "unrelated.cuh").write_text("")
    return folder


def entries() -> list[Path]:
    return sorted(compiler.cache_folder().iterdir())


def test_a_cubin_for_hopper_comes_out_without_a_gpu(root: Path) -> None:
    build = compiler.build("f", root=root)
    binary = build.path.read_bytes()
    assert binary[:4] == b"\x7fELF"
    assert build.complaints == ()
    (usage,) = build.usage
    assert usage.function == "f"
    assert 0 < usage.registers < 32
    assert usage.stack == usage.spill_stores == usage.spill_loads == 0
    # The last byte is there: the section header table ends with the file.
    assert int.from_bytes(binary[40:48], "little") + 64 * int.from_bytes(binary[60:62], "little") <= len(binary)


def test_the_second_build_comes_from_the_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.build("f", root=root)
    monkeypatch.setattr(compiler, "_compile", None)  # would raise if it were called
    assert compiler.build("f", root=root) == first


@pytest.mark.parametrize("name", ["f.cu", "half.cuh", "inner/factor.cuh"])
def test_the_key_depends_on_every_source(root: Path, name: str) -> None:
    before = compiler.key("f", root=root)
    (root / name).write_text((root / name).read_text() + "// changed\n")
    assert compiler.key("f", root=root) != before


def test_the_key_depends_on_nothing_else_in_the_folder(root: Path) -> None:
    before = compiler.key("f", root=root)
    (root / "unrelated.cuh").write_text("// changed\n")
    assert compiler.key("f", root=root) == before
    assert list(compiler.sources("f", root)) == ["f.cu", "half.cuh", "inner/factor.cuh"]


def test_the_key_depends_on_defines_flags_and_versions(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {compiler.key("f", root=root), compiler.key("f", {"A": 1}, root), compiler.key("f", {"A": 2}, root)}
    assert compiler.key("f", {"A": 1, "B": 2}, root) == compiler.key("f", {"B": 2, "A": 1}, root)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "--use_fast_math"))
        keys.add(compiler.key("f", root=root))
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "nvrtc_version", lambda: "99.9")
        keys.add(compiler.key("f", root=root))
    assert len(keys) == 5


def test_a_changed_include_gives_another_binary(root: Path) -> None:
    first = compiler.build("f", root=root)
    (root / "inner" / "factor.cuh").write_text("#define FACTOR 0.25f\n")
    second = compiler.build("f", root=root)
    assert first.path != second.path
    assert first.path.read_bytes() != second.path.read_bytes()


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_record(path: Path) -> None:
    path.with_suffix(".json").write_text('{"sha256": ')


def damage_no_record(path: Path) -> None:
    path.with_suffix(".json").unlink()


def damage_no_cubin(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_flip, damage_empty, damage_record, damage_no_record, damage_no_cubin]
)
def test_a_damaged_entry_is_built_again(root: Path, damage) -> None:  # type: ignore[no-untyped-def]
    path = compiler.build("f", root=root).path
    good = path.read_bytes()
    damage(path)
    again = compiler.build("f", root=root)
    assert again.path == path
    assert path.read_bytes() == good
    assert json.loads(path.with_suffix(".json").read_text())["log"] == again.log


def test_threads_at_once(root: Path) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(compiler.build("f", root=root).path.read_bytes()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_processes_at_once(root: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from optimized import compiler\n"
        "print(compiler.build('f', root=Path(sys.argv[1])).path)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(root)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(compiler.__file__).parent.parent,
        )
        for _ in range(2)
    ]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert paths == {str(compiler.build("f", root=root).path)}
    # Nothing half-written stays behind.
    assert [path.suffix for path in entries()] == [".cubin", ".json"]


def test_an_error_carries_the_log(root: Path) -> None:
    (root / "f.cu").write_text('extern "C" __global__ void f(float* x) { x[0] = undeclared; }\n')
    with pytest.raises(compiler.CompileError, match=r"kernels/f.cu does not compile for sm_90a(.|\n)*undeclared"):
        compiler.build("f", root=root)
    assert entries() == []


def test_an_unknown_kernel_names_those_there_are(root: Path) -> None:
    with pytest.raises(ValueError, match=r"kernel='g' is not one of the kernel files in .*: f\."):
        compiler.build("g", root=root)


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(compiler.CompileError, match=r"the kernel cache .*file/twin-engine/cubin cannot be made"):
        compiler.cache_folder()


def test_a_long_compilation_says_so(root: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    import time

    monkeypatch.setattr(compiler, "_PATIENCE", 0.01)
    compile_at_once = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *a: (time.sleep(0.2), compile_at_once(*a))[1])
    compiler.build("f", root=root)
    assert "compiling kernels/f.cu for sm_90a" in capsys.readouterr().err


def test_nvrtc_missing_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_roots", lambda: iter(()))
    with pytest.raises(device.MissingDependency, match=r'NVRTC.*is not installed.*pip install "twin-engine\[gpu\]"'):
        compiler.nvrtc_library.__wrapped__()


# --- the report of ptxas ----------------------------------------------------------------------------------

SPILL = """ptxas info    : Compiling entry function 'g' for 'sm_90a'
ptxas info    : Function properties for g
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size
"""
SERIAL = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"


def test_a_spill_is_reported() -> None:
    assert compiler.parse_usage(SPILL) == (compiler.Usage("g", 168, 16, 24, 32),)
    assert len(compiler.parse_complaints(SPILL)) == 1


def test_a_serialised_wgmma_is_reported() -> None:
    assert compiler.parse_complaints(SERIAL) == (SERIAL.strip(),)
    assert compiler.parse_complaints("ptxas warning : something\n") == ("ptxas warning : something",)


def test_a_kernel_that_spills_is_caught(root: Path) -> None:
    # Sixty-four live values under a cap of 32 registers cannot do without memory.
    (root / "f.cu").write_text(
        'extern "C" __global__ __launch_bounds__(1024, 2) void f(float* x) {\n'
        "  float v[64];\n#pragma unroll\n  for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[63 - i] * v[i];\n}\n"
    )
    build = compiler.build("f", root=root)
    assert build.usage[0].spill_stores > 0
    assert build.complaints
