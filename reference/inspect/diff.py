"""`te.diff`: where two runs part, by their trails or by recordings of one step of each."""

import os
from pathlib import Path

from reference.inspect.parting import Comparison
from reference.inspect.recorded_step import compare as recordings
from reference.inspect.recorded_step import file as recording_file
from reference.inspect.trails import compare as trails
from reference.inspect.trails import file as trail_file
from reference.support import files


def diff(*paths: str | os.PathLike[str]) -> Comparison:
    """Compare two recordings (`te.record`), or two or more trails (`te.trail`): of runs, or of the ranks of one.

        print(te.diff("a.trail", "b.trail"))

    Of trails the first step that differs is found, the first tensor in it, and which run or rank differs from most of
    the others; of recordings the first op, what feeds it, and whether it computed other bits or read them.

    Returns:
        A `Comparison`: `equal`, `step`, `op`, `tensor`, `index` and `who`; `str()` of it is the verdict in sentences.

    Raises:
        TypeError, ValueError: files of two kinds, one path alone, more than two recordings, no step in common.
        FileNotFoundError: there is no such file.
        reference.support.files.Damaged: a file is neither, or damaged.
    """
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"diff: path={path!r}; a path is accepted.")
    if len(paths) < 2:
        raise ValueError(f"diff: {len(paths)} paths; two or more are accepted.")
    kinds = [_is_trail(Path(path)) for path in paths]
    if len(set(kinds)) > 1:
        one, other = (str(paths[kinds.index(kind)]) for kind in (True, False))
        raise ValueError(f"diff: {one} is a trail and {other} is none; files of one kind are accepted.")
    if kinds[0]:
        return trails.compare([trail_file.read(Path(path)) for path in paths])
    if len(paths) > 2:
        raise ValueError(f"diff: {len(paths)} recordings; two are accepted, or any number of trails.")
    a, b = (recording_file.read(Path(path)) for path in paths)
    return recordings.compare(a, b, _names(*map(str, paths)))


def _is_trail(path: Path) -> bool:
    with files.reading(path) as file:
        return trail_file.is_trail(file.read(64))


def _names(one: str, other: str) -> tuple[str, str]:
    """The files' names, where they differ, else their paths."""
    short = Path(one).name, Path(other).name
    return short if short[0] != short[1] else (one, other)
