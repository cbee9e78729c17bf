"""The commands in random folders, for as long as `--fuzz-seconds` says; a failure prints its seed.

A folder has files of ours, whole, damaged or of another kind, files of somebody else's, links, pipes and folders in
their places. A command gets random arguments, paths of that folder among them. It ends with a known exit code; where it
refuses, with one sentence; and no file that it has not written itself is another one afterwards.
"""

import os
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from shared.file_damage import cut, fill, flip, lengthen
from shared.recorded_steps import RECIPES, made, recorded
from shared.training_text import TEXT

from optimized.commands import main, outputs, walkthrough
from optimized.cuda import device
from optimized.training import checkpoint
from reference.inspect.recorded_step import file
from reference.support import files

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
SMALL = ["--sequence", "16", "--rows", "1", "--warmup", "1", "--device", "cpu"]
NAMES = ("checkpoint.safetensors", "metrics.jsonl", "loss.png", "step-1.safetensors", "page.html", "text", "mine.pt")
NUMBERS = ("0", "-1", "1", "2", "3", "16", "1e3", "nan", "inf", "x", "", "1000000000000", "9" * 40, "0.5")
KINDS = {
    "page.html": outputs.REPLAY,
    "metrics.jsonl": outputs.METRICS,
    "loss.png": outputs.PLOT,
    "step-1.safetensors": outputs.STEP,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A file of each kind, by name."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "text").write_bytes(TEXT[:2000])
    run = ["train", str(folder / "text"), *SMALL, "--steps", "2", "--save", "1", "--record", "1"]
    assert main([*run, "--output", str(folder)]) == 0
    recorded(folder / "step-1.safetensors", made("Linear"), RECIPES["delayed"])  # smaller
    assert main(["replay", str(folder / "step-1.safetensors"), "--output", str(folder / "page.html")]) == 0
    safetensors.torch.save_file({"a": torch.ones(3)}, folder / "mine.pt")
    return {name: (folder / name).read_bytes() for name in NAMES}


def scene(folder: Path, good: dict[str, bytes], draw: random.Random) -> None:
    """Fill a folder."""
    folder.mkdir()
    for name in NAMES:
        path = folder / name
        kind = draw.choice(("own", "own", "own", "damaged", "other", "none", "none", "link", "pipe", "folder"))
        if kind in ("own", "damaged", "other"):
            path.write_bytes(good[draw.choice(NAMES) if kind == "other" else name])
        if kind == "damaged":
            draw.choice((flip, cut, lengthen, fill))(path, draw)
        elif kind == "link":
            path.symlink_to(draw.choice((*NAMES, "nothing", name, "/dev/null")))
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()


def argv(folder: Path, draw: random.Random) -> list[str]:
    """A command line."""

    def path() -> str:
        places = [*(folder / name for name in NAMES), folder, folder / "new", folder / "no" / "new", "a" * 300]
        return str(draw.choice([*places, "/dev/zero", "/dev/null", "/proc/nothing", ""]))

    if draw.random() < 0.4:
        return ["replay", draw.choice((str(folder / "step-1.safetensors"), path())), "--output", path()]
    if draw.random() < 0.15:
        where = [
            ["walkthrough", "--output", path()],
            ["parity", "--record", path()],
            ["parity", "--op"],
            ["diff", path(), path()],
        ]
        return draw.choice([*where, ["bench", draw.choice(("gemm", "x")), "--write"], ["info", path()], [path()]])
    found = ["train", draw.choice((str(folder / "text"), str(folder / "text"), path())), *SMALL]
    found += ["--steps", draw.choice(("1", "2", "3"))]
    for option in draw.sample(("--rows", "--seed", "--rate", "--clip", "--dropout", "--record", "--log", "--save"), 2):
        if draw.random() < 0.4:
            found += [option, draw.choice(NUMBERS)]
    found += ["--resume"] * (draw.random() < 0.5)
    return [*found, "--output", draw.choice((str(folder), str(folder), path()))]


def contents(folder: Path) -> Iterator[tuple[Path, object]]:
    """What is in a folder: files with their bytes, links with their targets, other things with their modes."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            yield path, os.readlink(path)
        else:
            yield path, path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)


def may_change(path: Path, before: object, resumes: bool) -> bool:
    """Whether a command may write over what was there: its own output by that name, or a run that goes on."""
    if path.name == "checkpoint.safetensors":
        return True  # judged by `--resume`, below
    if not isinstance(before, bytes):
        return False
    if resumes and path.name == "loss.png" and outputs.PICTURE.made(before):
        return True
    return not before or any(kind.made(before[: 1 << 14]) for kind in (*KINDS.values(), outputs.WALKTHROUGH))


def test_commands_in_random_folders(
    good: dict[str, bytes], tmp_path: Path, fuzz: Iterator[int], capsys: pytest.CaptureFixture[str]
) -> None:
    counts: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "problems", lambda: ["torch sees no CUDA device."])
        patch.setattr(walkthrough, "_steps", lambda *given: [])
        (tmp_path / "here").mkdir()
        patch.chdir(tmp_path / "here")
        for seed in fuzz:
            draw = random.Random(seed)
            folder = tmp_path / "scene"
            scene(folder, good, draw)
            before, command = dict(contents(folder)), argv(folder, draw)
            code = main(command)
            error = capsys.readouterr().err
            assert code in (0, 1, 2), (seed, command)
            assert code != 2 or (error.count("\n") == 1 and error.strip()), (seed, command, error)
            assert code == 2 or "Traceback" not in error, (seed, command, error)
            after = dict(contents(folder))
            for path, what in before.items():
                assert path in after, (seed, command, path)
                assert after[path] == what or may_change(path, what, "--resume" in command), (seed, command, path)
            if code == 2 and "--resume" not in command:
                kept = folder / "checkpoint.safetensors"
                assert after.get(kept) == before.get(kept) or "broken" in error, (seed, command)
            assert not [path for path in after if path.name.endswith((".twin-tmp", ".lock"))], (seed, command)
            counts[code] = counts.get(code, 0) + 1
            shutil.rmtree(folder)
    with capsys.disabled():
        print(f"exit codes: {counts}")


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "step-1.safetensors"])
def test_damaged_runs_and_steps_are_refused(
    name: str, good: dict[str, bytes], tmp_path: Path, fuzz: Iterator[int]
) -> None:
    """Bits flipped, files cut, lengthened or filled: each is one sentence, never another run or another step."""
    path, read = tmp_path / name, checkpoint.read if name.startswith("check") else file.read
    for seed in fuzz:
        draw = random.Random(seed)
        path.write_bytes(good[name])
        draw.choice((flip, flip, flip, cut, lengthen, fill))(path, draw)
        if path.read_bytes() != good[name]:
            with pytest.raises(files.Damaged, match=r"is damaged|is no whole safetensors|and no ") as error:
                read(path)
            assert "\n" not in str(error.value), seed
