"""Counting machine instructions: the disassembly of a cubin, one function at a time. Needs no GPU."""

import importlib.util
import itertools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from optimized.cuda import compiler, device

WORDS = Path(__file__).parents[1] / "golden"
# Opcodes of a range test with a subroutine behind it: what an IEEE division or square root compiles to.
SLOW_PATH = frozenset({"CALL", "BRA", "BSSY", "BSYNC", "RET"})
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)")


@cache
def nvdisasm() -> Path:
    """The disassembler, from the wheel nvidia-cuda-nvdisasm or a CUDA toolkit.

    Raises:
        MissingDependency: there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    for parent in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(parent).glob("*/bin/nvdisasm"):
            return path
    found = shutil.which("nvdisasm", path="/usr/local/cuda/bin") or shutil.which("nvdisasm")
    if found is None:
        raise device.MissingDependency(
            "nvdisasm, CUDA's disassembler, is not installed: pip install nvidia-cuda-nvdisasm."
        )
    return Path(found)


def disassembly(cubin: bytes, *options: str) -> str:
    """The text that nvdisasm, which reads files only, makes of a cubin; `options` as on its command line."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm(), *options, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def opcodes(cubin: bytes, function: str) -> Counter[str]:
    """How often each opcode (with its modifiers, such as "FMNMX.NAN") stands in a function of a cubin."""
    text = disassembly(cubin)
    _, found, body = text.partition(f".text.{function}:")
    if not found:
        raise ValueError(f"function={function!r} is not in the cubin.")
    return Counter(_LINE.findall(body.split("//-----", 1)[0].split(".section", 1)[0]))


class Instruction(NamedTuple):
    """One instruction, and what its control bits say of scoreboards (in the order of bits since sm_70)."""

    opcode: str
    text: str
    sets: int  # the scoreboard that its result releases; 7: none
    waits: int  # a mask of scoreboards that it waits for


@lru_cache(1)
def instructions(cubin: bytes) -> tuple[Instruction, ...]:
    """A cubin's instructions in their order."""
    lines = disassembly(cubin, "-hex").splitlines()
    found = []
    for line, after in itertools.pairwise(lines):  # the second half of an instruction's bits stands on the next line
        match, high = _LINE.search(line), re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", after)
        if match and high:
            control = int(high[1], 16) >> 41
            found.append(
                Instruction(match[1], line[match.start(1) :].split(";")[0], control >> 5 & 7, control >> 11 & 63)
            )
    return tuple(found)


def unfinished_loads(cubin: bytes) -> list[tuple[str, str]]:
    """Arrivals on barriers that do not wait for a load from shared memory before them in the text, each with the last
    such load. A warp's loads from shared memory finish in their order, so who waits for one waits for those before it.
    """
    found: list[tuple[str, str]] = []
    flying: list[Instruction] = []
    for one in instructions(cubin):
        done = [place for place, load in enumerate(flying) if load.sets < 7 and one.waits >> load.sets & 1]
        flying = flying[done[-1] + 1 :] if done else flying
        if one.opcode.startswith(("MEMBAR", "EXIT", "BRA")):  # after a branch the text goes on elsewhere
            flying = []
        elif one.opcode.startswith("LDS"):
            flying.append(one)
        elif one.opcode.startswith("SYNCS.ARRIVE") and flying:
            found.append((one.text, flying[-1].text))
    return found


@cache
def _of_eight(function: str) -> Counter[str]:
    """What 8 further elements add to a kernel of 4."""
    large, small = (
        opcodes(compiler.build("elementary_words", {"FUNCTION": function, "COUNT": count}, root=WORDS).cubin, "probe")
        for count in (12, 4)
    )
    large.subtract(small)
    return large


def per_element(function: str) -> Counter[str]:
    """Instructions of one evaluation of a device function of kernels/common/elementary.cuh.

    What 8 further elements add to a kernel of 4, less what they add where the function is the identity:
    constants that stay in registers, loads and stores cancel.
    """

    counts = _of_eight(function).copy()
    counts.subtract(_of_eight("identity"))
    # Padding is not work; a slow path shares code between elements, so round to the nearest count.
    return Counter({name: round(n / 8) for name, n in counts.items() if round(n / 8) > 0 and name != "NOP"})


def has_slow_path(counts: Counter[str]) -> bool:
    """Whether a branch or a call is among the opcodes."""
    return any(name.split(".")[0] in SLOW_PATH for name in counts)
