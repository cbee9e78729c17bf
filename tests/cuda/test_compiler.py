"""The compiler and its cache, without a GPU: what a key depends on, damage, races, errors, reports."""

import errno
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from shared import ptxas

from optimized import measure
from optimized.cuda import compiler
from reference.support import files, notice

MAIN = '#include "half.cuh"\nextern "C" __global__ void f(float* x) { x[threadIdx.x] = half_of(x[threadIdx.x]); }\n'
HALF = '#pragma once\n#include "inner/factor.cuh"\n__device__ float half_of(float x) { return x * FACTOR; }\n'
FACTOR = "#define FACTOR 0.5f\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("reference.support.notice._said", set())
    monkeypatch.setattr(compiler, "_unstored", {})


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
    folder = files.cache_folder("cubin")
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_a_cubin_for_hopper_comes_out_without_a_gpu(root: Path) -> None:
    build = compiler.build("f", root=root)
    binary = build.cubin
    assert binary[:4] == b"\x7fELF"
    assert ptxas.complaints(build.log) == []
    (usage,) = ptxas.usage(build.log)
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


@pytest.mark.parametrize("name", ["f.cu", "half.cuh", "inner/factor.cuh"])
def test_the_source_hash_is_that_of_the_code_of_every_source(root: Path, name: str) -> None:
    before, text = compiler.source_hash("f", root), (root / name).read_text()
    (root / name).write_text(f"/* The file's\n   header */\n{text}  // a remark\n\n")
    assert compiler.source_hash("f", root) == before
    (root / name).write_text(text + "#define CHANGED\n")
    assert compiler.source_hash("f", root) != before


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
        patch.setattr(compiler, "nvrtc_build", lambda: "13.0 another build")
        keys.add(compiler.key("f", root=root))
    assert len(keys) == 5


def test_a_changed_include_gives_another_binary(root: Path) -> None:
    first = compiler.build("f", root=root)
    (root / "inner" / "factor.cuh").write_text("#define FACTOR 0.25f\n")
    second = compiler.build("f", root=root)
    assert len(entries()) == 2
    assert first.cubin != second.cubin


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_log(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"spill", b"spoil", 1))
    assert path.read_bytes() != data


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_empty, damage_log])
def test_a_damaged_entry_is_said_and_built_again(root: Path, damage, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    good = compiler.build("f", root=root)
    (path,) = entries()
    damage(path)
    assert compiler.build("f", root=root).cubin == good.cubin
    assert compiler.build("f", root=root).cubin == good.cubin  # from the new entry, of which nothing is said
    assert caplog.messages == [f"{path} is damaged: it is compiled anew (said once)."]


def test_an_entry_that_is_gone_is_built_again_in_silence(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = compiler.build("f", root=root)
    entries()[0].unlink()
    assert compiler.build("f", root=root).cubin == good.cubin
    assert len(entries()) == 1
    assert caplog.messages == []


def test_a_folder_in_place_of_an_entry_is_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = compiler.build("f", root=root)
    (path,) = entries()
    path.unlink()
    path.mkdir()
    assert compiler.build("f", root=root).cubin == good.cubin
    unread, unwritten = caplog.messages
    assert unread == f"{path} cannot be read (Is a directory): it is compiled anew (said once)."
    assert f"every process compiles it: {path} was not written: it is there, and it is not a file" in unwritten


def test_threads_at_once(root: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.build("f", root=root).cubin)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.slow
def test_processes_at_once(root: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from optimized import compiler\n"
        "print(compiler.build('f', root=Path(sys.argv[1])).cubin.hex())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(root)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=measure.ROOT,
        )
        for _ in range(4)
    ]
    cubins = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert cubins == {compiler.build("f", root=root).cubin.hex()}
    assert len(entries()) == 1  # nothing half-written stays behind


def test_an_error_carries_the_log(root: Path) -> None:
    (root / "f.cu").write_text('extern "C" __global__ void f(float* x) { x[0] = undeclared; }\n')
    with pytest.raises(compiler.CompileError, match=r"kernels/f.cu does not compile for sm_90a(.|\n)*undeclared"):
        compiler.build("f", root=root)
    assert entries() == []


def test_an_unknown_kernel_names_those_there_are(root: Path) -> None:
    with pytest.raises(ValueError, match=r"kernel='g' is not one of the kernel files in .*: f\."):
        compiler.build("g", root=root)


# --- where nothing can be stored ---------------------------------------------------------------------------


def no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    return r"file/twin-engine/cubin/f-\w+\.bin was not written: Not a directory"


def no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    return r"f-\w+\.bin was not written: No space left on device"


def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    return r"this user has no home folder, and \$XDG_CACHE_HOME names no absolute path"


@pytest.mark.parametrize("lack", [no_folder, no_room, no_home])
def test_a_cubin_that_cannot_be_stored_is_used(
    root: Path, lack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # type: ignore[no-untyped-def]
    good = compiler.build("f", root=root).cubin
    cache = files.cache_folder("cubin")
    entries()[0].unlink()
    reason = lack(tmp_path, monkeypatch)
    build = compiler.build("f", root=root)
    assert build.cubin == good
    monkeypatch.setattr(compiler, "_compile", None)  # would raise if it were called
    assert compiler.build("f", root=root) == build  # a process compiles it once
    (said,) = caplog.messages
    assert said.startswith("What is compiled is not stored, and every process compiles it: ")
    assert re.search(reason, said), said
    assert not list(cache.iterdir())  # nothing half-written


def test_what_a_killed_process_left_goes_after_an_hour(root: Path) -> None:
    compiler.build("f", root=root)
    old, young = (files.cache_folder("cubin") / f".f.cubin.{name}.twin-tmp" for name in ("old", "young"))
    foreign = files.cache_folder("cubin") / "somebody's.tmp"
    for path in (old, young, foreign):
        path.write_bytes(b"half")
    for path in (old, foreign):
        os.utime(path, (time.time() - 4000,) * 2)
    compiler.build("f", {"A": 1}, root=root)
    assert not old.exists()
    assert young.exists()
    assert foreign.exists()


# --- what is compiled is what is hashed --------------------------------------------------------------------


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with headers of every name that the kernel and CUDA's headers include, and other contents."""
    folder = tmp_path / "hostile"
    (folder / "inner").mkdir(parents=True)
    (folder / "half.cuh").write_text("__device__ float half_of(float x) { return x * 666.0f; }\n")
    (folder / "inner" / "factor.cuh").write_text("#define FACTOR 667.0f\n")
    (folder / "factor.cuh").write_text("#define FACTOR 668.0f\n")
    for name in ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "vector_types.h"):
        (folder / name).write_text("#error hostile\n")
    return folder


@pytest.mark.parametrize("cuda", [False, True], ids=["ours", "cuda"])
def test_headers_come_from_the_kernels_folder_alone(
    root: Path, hostile: Path, cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda:
        (root / "half.cuh").write_text("#include <cuda_bf16.h>\n" + HALF)
    monkeypatch.chdir(root)
    good = compiler.build("f", root=root).cubin
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other cache"))
    monkeypatch.chdir(hostile)
    assert compiler.build("f", root=root).cubin == good
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, f"--include-path={hostile}"))
    assert compiler.build("f", root=root).cubin == good
    monkeypatch.setattr(compiler, "FLAGS", tuple(f for f in compiler.FLAGS if f != "--no-source-include"))
    assert compiler.build("f", root=root).cubin == good


def test_of_two_headers_with_one_name_each_file_gets_its_own(root: Path) -> None:
    """Beside the including file, then in the kernels' folder; where NVRTC knows one name, for whichever file."""
    kernel = '#include "inner/one.cuh"\n#include "factor.cuh"\n' + MAIN.split("\n", 1)[1]
    (root / "f.cu").write_text(kernel.replace("half_of(x[threadIdx.x])", "(x[threadIdx.x] * FACTOR) + one()"))
    (root / "factor.cuh").write_text("#undef FACTOR\n#define FACTOR 0.125f\n")
    (root / "inner" / "one.cuh").write_text('#include "factor.cuh"\n__device__ float one() { return FACTOR; }\n')
    apart = compiler.build("f", root=root)
    before = compiler.key("f", root=root)
    (root / "f.cu").write_text(
        "#define FACTOR 0.125f\n__device__ float one() { return 0.5f; }\n"
        + (root / "f.cu").read_text().split("\n", 2)[2]
    )
    assert compiler.build("f", root=root).cubin == apart.cubin
    assert compiler.key("f", root=root) != before


def test_a_kernel_in_a_folder_gets_the_header_beside_it(root: Path) -> None:
    """As the key says; NVRTC, which knows no folder of a text, took the one in the kernels' folder."""
    kernel = MAIN.replace("half.cuh", "factor.cuh").replace("half_of", "FACTOR *")
    (root / "inner" / "g.cu").write_text(kernel)
    alone = compiler.build("inner/g", root=root)
    (root / "factor.cuh").write_text("#define FACTOR 0.125f\n")
    assert list(compiler.sources("inner/g", root)) == ["inner/factor.cuh", "inner/g.cu"]
    for path in entries():
        path.unlink()
    assert compiler.build("inner/g", root=root).cubin == alone.cubin


def test_a_header_that_comes_to_lie_nearer_changes_the_key(root: Path) -> None:
    (root / "inner" / "factor.cuh").write_text('#include "unrelated.cuh"\n#define FACTOR 0.5f\n')
    before = compiler.key("f", root=root)
    (root / "inner" / "unrelated.cuh").write_text("")
    assert compiler.key("f", root=root) != before


def test_a_source_that_changes_meanwhile_is_not_stored_under_the_old_key(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = compiler.build("f", root=root).cubin
    for path in entries():
        path.unlink()
    find = compiler._key

    def edited(*given):  # type: ignore[no-untyped-def]
        (root / "inner" / "factor.cuh").write_text("#define FACTOR 0.25f\n")
        return find(*given)

    monkeypatch.setattr(compiler, "_key", edited)
    assert compiler.build("f", root=root).cubin == good


def test_the_key_depends_on_cudas_headers(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On their text, not on the version that one of them states."""
    cuda = tmp_path / "cuda"
    cuda.mkdir()
    (cuda / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13000\n")
    (cuda / "cuda_bf16.h").write_text('#include "deeper.h"\n')
    (cuda / "deeper.h").write_text("// a\n")
    (root / "half.cuh").write_text("#include <cuda_bf16.h>\n" + HALF)
    monkeypatch.setattr(compiler, "include_folder", lambda: cuda)
    keys = set()
    for text in ("// a\n", "// b\n"):
        (cuda / "deeper.h").write_text(text)
        compiler._cuda_texts.cache_clear()
        keys.add(compiler.key("f", root=root))
    compiler._cuda_texts.cache_clear()
    assert len(keys) == 2
    assert "cuda_bf16.h" not in "".join(compiler.sources("f", root))


def test_flags_from_the_environment_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVRTC_APPEND_FLAGS", "--use_fast_math")
    with pytest.raises(compiler.CompileError, match=r"^NVRTC_APPEND_FLAGS='--use_fast_math' is set, .*: unset it\.$"):
        compiler.build("f", root=root)


def test_a_long_compilation_says_so(root: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    import time

    monkeypatch.setattr(notice, "PATIENCE", 0.01)
    compile_at_once = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *a: (time.sleep(0.2), compile_at_once(*a))[1])
    compiler.build("f", root=root)
    assert "compiling kernels/f.cu for sm_90a" in capsys.readouterr().err


def test_a_kernel_that_spills_is_caught(root: Path) -> None:
    # Sixty-four live values under a cap of 32 registers cannot do without memory.
    (root / "f.cu").write_text(
        'extern "C" __global__ __launch_bounds__(1024, 2) void f(float* x) {\n'
        "  float v[64];\n#pragma unroll\n  for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[63 - i] * v[i];\n}\n"
    )
    build = compiler.build("f", root=root)
    assert ptxas.usage(build.log)[0].spill_stores > 0
    assert ptxas.complaints(build.log)
