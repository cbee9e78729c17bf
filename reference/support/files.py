"""The only place that writes files: each is written whole or not at all, except for lines that are added to a log.

`replacing` writes beside the file, waits until the disk has it, and renames it into place: a reader, or a process that
is killed, sees the old file or the new one. Remains of killed processes are removed by a later write to that folder,
after an hour or more. Reading a damaged file raises an error that names it.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from reference.support.notice import say_once

_SUFFIX = ".twin-tmp"  # of a file that is being written; no other file is ever removed
_STALE = 3600.0  # seconds
_DIGEST = hashlib.sha256().digest_size


class NotWritten(OSError):
    """A file could not be written; the text names it. Its former content is unchanged."""


class Locked(OSError):
    """Another process holds a lock; the text says which."""


class Damaged(ValueError):
    """A file does not hold what it should; the text names it."""


def _sweep(folder: Path) -> None:
    """Remove the remains of killed processes from a folder."""
    with contextlib.suppress(OSError):
        for left in folder.glob(f".*{_SUFFIX}"):
            if time.time() - left.stat().st_mtime > _STALE:
                left.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write to, which replaces `path` when the block ends without an exception.

    The folder is made if it is missing, a link is followed, and a replaced file's permissions are kept.

    Raises:
        NotWritten: the folder is not writable, the disk is full, `path` exists and is no file, ...
    """
    target = Path(os.path.realpath(path))
    aside = target.with_name(f".{target.name}.{secrets.token_hex(6)}{_SUFFIX}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        before = target.stat() if target.exists() else None
        if before is not None and not target.is_file():
            raise NotWritten(f"{path} was not written: it is there, and it is not a file.")
        with open(aside, "xb") as file:
            if before is not None:
                with contextlib.suppress(OSError):  # not every file system has permissions
                    os.chmod(aside, before.st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        if isinstance(error, OSError) and not isinstance(error, NotWritten):
            raise NotWritten(f"{path} was not written: {error.strerror or error}.") from error
        raise


def write(path: Path, content: bytes | str) -> None:
    """Write a whole file, text as UTF-8; see `replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def append(path: Path, text: str) -> None:
    """Add `text` to the end of a file, in one write, without waiting for the disk: for logs.

    A process that is killed may leave a part of its last line.

    Raises:
        NotWritten: the disk is full, the folder is not writable, ...
    """
    try:
        with open(path, "ab", buffering=0) as file:
            content = text.encode()
            if file.write(content) != len(content):
                raise NotWritten(f"{path} was not written to its end: only a part of a line has fit.")
    except NotWritten:
        raise
    except OSError as error:
        raise NotWritten(f"{path} was not written: {error.strerror or error}.") from error


_held: set[int] = set()  # descriptors of locks


def _release_in_child() -> None:
    """A forked process does not hold its parent's locks, which end with the parent."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock `folder/name` until the block ends, or the process, however it ends.

    The folder is made; it is removed again if nothing was written to it.

    Raises:
        Locked: another process has it; the text says which.
        NotWritten: the folder cannot be made or written to.
    """
    path = folder / name
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquired(path)
    except OSError as error:
        if isinstance(error, Locked):
            raise
        raise NotWritten(f"{path} was not written: {error.strerror or error}.") from error
    _held.add(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        if descriptor in _held:  # not in a child
            _held.discard(descriptor)
            os.close(descriptor)
        with contextlib.suppress(OSError):
            for one in missing:
                one.rmdir()


def _acquired(path: Path) -> int:
    """The descriptor of a lock file that this process holds, with its number and machine inside."""
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.fstat(descriptor)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(here, os.stat(path)):  # and not one that its holder has removed meanwhile
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                    return descriptor
        except BlockingIOError as error:
            who = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise Locked(f"{path.parent} is in use by {who}.") from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def cache_folder(folder: str) -> Path:
    """The user's folder for what can be made again, `~/.cache/twin-engine/<folder>`.

    Raises:
        NotWritten: there is neither a home folder nor an absolute $XDG_CACHE_HOME.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "twin-engine" / folder
    try:
        return Path.home() / ".cache" / "twin-engine" / folder
    except RuntimeError as error:
        raise NotWritten("this user has no home folder, and $XDG_CACHE_HOME names no absolute path.") from error


def _digest(name: str, content: bytes) -> bytes:
    """A digest of name and content: an entry under another's name is damaged, too."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def keep(folder: str, name: str, content: bytes) -> bool:
    """Put a file into a cache; return False if it cannot be written, which is logged once."""
    try:
        write(cache_folder(folder) / name, _digest(name, content) + content)
    except NotWritten as error:
        reason = str(error).removesuffix(".")
        say_once(f"unkept {folder}", f"What is compiled is not stored, and every process compiles it: {reason}")
        return False
    return True


def kept(folder: str, name: str) -> bytes | None:
    """The content of a cached file; None if there is none, or if it is damaged, which is logged."""
    try:
        path = cache_folder(folder) / name
        found = read(path)
        digest, content = found[:_DIGEST], found[_DIGEST:]
        if _digest(name, content) != digest:
            raise Damaged(f"{path} is damaged.")
        return content
    except (FileNotFoundError, NotWritten):
        return None
    except Damaged as error:
        say_once(str(error), f"{str(error).removesuffix('.')}: it is compiled anew")
        return None


_KINDS = {
    stat.S_IFDIR: "Is a directory",
    stat.S_IFIFO: "it is a pipe",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
    stat.S_IFSOCK: "it is a socket",
}


def is_there(path: Path, remedy: str = "") -> bool:
    """Whether there is a file at `path`; False where there is nothing.

    Raises:
        Damaged: there is something else: a link to nothing, a folder, a pipe, a path that cannot be looked at.
    """
    try:
        mode = os.stat(path).st_mode  # Path.exists answers False to some errors, which depends on Python's version
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.islink(path):
            return False
        raise Damaged(f"{path} is a link to {os.readlink(path)}, which is not there{remedy}.") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}){remedy}.") from error
    if not stat.S_ISREG(mode):
        raise Damaged(f"{path} cannot be read ({_KINDS.get(stat.S_IFMT(mode), 'it is no file')}){remedy}.")
    return True


@contextlib.contextmanager
def reading(path: Path, remedy: str = "") -> Iterator[BinaryIO]:
    """A file to read from; errors as in `read`."""
    if not is_there(path, remedy):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror or error}){remedy}.") from error


def read(path: Path, remedy: str = "") -> bytes:
    """The content of a file; `remedy` ends the error's sentence.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: it cannot be read, or it is a folder, a pipe or a device, which may have no end.
    """
    with reading(path, remedy) as file:
        return file.read()


def record(path: Path, remedy: str = "") -> dict[str, Any]:
    """The object in a JSON file; errors as in `read`. A file without one is `Damaged`."""
    try:
        found = json.loads(read(path, remedy).decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({error}){remedy}.") from error
    if not isinstance(found, dict):
        raise Damaged(f"{path} is damaged: it holds a {type(found).__name__} in place of an object{remedy}.")
    return found


def arrays(path: Path, remedy: str = "") -> dict[str, np.ndarray]:
    """Every array of an npz file, by name; errors as in `read`.

    A file that is not whole (its members carry checksums) is `Damaged`, too.
    """
    content = read(path, remedy)
    try:
        if not content.startswith(b"PK"):
            raise ValueError("it is no npz file")
        with np.load(io.BytesIO(content)) as found:
            end = content.rindex(b"PK\x05\x06")  # the record that says how many members there are
            if int.from_bytes(content[end + 10 : end + 12], "little") != len(found.files):
                raise ValueError("its list of members is not whole")
            # Of a member whose header says less than it holds, NumPy reads no end, where zipfile looks at the checksum.
            if (member := found.zip.testzip()) is not None:
                raise ValueError(f"the checksum of {member} is another one")
            return {name: found[name] for name in found.files}
    except Exception as error:  # zipfile, zlib, struct and NumPy's parser of headers raise different ones
        raise Damaged(f"{path} is damaged ({error}){remedy}.") from error
