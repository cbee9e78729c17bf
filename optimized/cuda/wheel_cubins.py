"""Kernels' binaries that travel in a wheel: a second cache, read-only, where `compiler` looks before it compiles.

In a clone `python -m optimized.commands compile --wheel` writes it to .wheel/cubins, from where `pip wheel .` takes it
along. A wheel without it compiles what it launches, and so does a clone.

`cubins/<kernel>.tar.xz` holds entries of the cache, under the cache's names: what is found is what the NVRTC of this
machine would compile. A file's binaries are much alike. Compressed together the 1,093 binaries of one day took 2.1 MB,
one by one 8.5 MB; the largest archive takes 30 ms to unpack, once. `about.json` says how many there are and what
compiled them.
"""

import functools
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from reference.support import files, notice

_PACKAGE = Path(str(resources.files(__package__))).parent
FOLDER = _PACKAGE / "cubins"
_ABOUT = "about.json"


def _archive(kernel: str) -> str:
    return f"{kernel.replace('/', '-')}.tar.xz"


@functools.lru_cache(maxsize=4)  # archives: a step asks for several entries of each
def _entries(path: Path) -> dict[str, bytes]:
    """The entries of an archive by name; none if it is not there, or if it is damaged, which is logged."""
    try:
        whole = lzma.decompress(files.read(path))  # which compares checksums up to the end
        with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
            return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    except FileNotFoundError:
        return {}
    except (files.Damaged, tarfile.TarError, lzma.LZMAError) as error:
        notice.say_once(str(path), f"{path} is damaged ({error}): its kernels are compiled anew")
        return {}


def found(kernel: str, name: str) -> bytes | None:
    """The cache's entry `name` of a kernel file, if the wheel has it."""
    return _entries(FOLDER / _archive(kernel)).get(name)


def about() -> dict[str, Any] | None:
    """What was packed: `count` binaries, by `nvrtc`, of `kernels` (`digest`); the `first` one's file, defines and key.

    None if the wheel has no binaries.
    """
    try:
        return files.record(FOLDER / _ABOUT)
    except FileNotFoundError:
        return None


def digest() -> str:
    """A digest of the kernels and of what compiles them; .wheel/hook.py computes the same, and refuses old binaries."""
    found = hashlib.sha256((_PACKAGE / "cuda" / "compiler.py").read_bytes())
    for path in sorted(path for path in (_PACKAGE / "kernels").rglob("*.cu*") if path.is_file()):
        found.update(f"{path.relative_to(_PACKAGE).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()


def write(folder: Path, entries: Mapping[str, Mapping[str, bytes]], description: Mapping[str, Any]) -> int:
    """Replace what is packed in `folder` by `entries`, by kernel file and name; return the bytes of the archives.

    Raises:
        files.NotWritten: a file cannot be written.
    """
    wanted = {_archive(kernel): members for kernel, members in entries.items()}
    (folder / _ABOUT).unlink(missing_ok=True)  # without it, no wheel is built of a part
    for old in folder.glob("*.tar.xz"):
        if old.name not in wanted:
            old.unlink()
    total = 0
    for archive_name, members in wanted.items():
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:xz") as archive:
            for name, content in sorted(members.items()):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        total += len(out.getvalue())
        files.write(folder / archive_name, out.getvalue())
    count = sum(map(len, entries.values()))
    files.write(folder / _ABOUT, json.dumps({"count": count, "kernels": digest(), **description}, indent=1) + "\n")
    return total
