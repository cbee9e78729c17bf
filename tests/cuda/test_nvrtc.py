"""Which NVRTC compiles, and what is said where there is none."""

import sys
from pathlib import Path

import pytest

from optimized.cuda import compiler, device


def test_the_key_knows_one_build_of_nvrtc_from_another(tmp_path: Path) -> None:
    assert compiler.nvrtc_build().startswith(f"{compiler.nvrtc_version()} ")
    assert len(compiler.nvrtc_build().split()) >= 3  # the compiler and its builtins
    library = tmp_path / "libnvrtc.so.13"
    builds = []
    for identity in (b"a" * 20, b"b" * 20):
        note = (4).to_bytes(4, "little") + (20).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"GNU\0"
        library.write_bytes(b"\x7fELF" + note + identity + b"code")
        builds.append(compiler._build_of(library))
        library.write_bytes(b"\x7fELF" + identity)
        builds.append(compiler._build_of(library))
    assert len(set(builds)) == 4
    assert builds[0] == (b"a" * 20).hex()


def test_nvrtc_missing_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(device.MissingDependency, match=r'NVRTC.*is not installed.*pip install "twin-engine\[gpu\]"'):
        compiler.nvrtc_library.__wrapped__()
