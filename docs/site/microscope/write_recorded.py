"""Write recorded.js: the words of an H200 that the page has.

    PYTHONPATH=. python docs/site/microscope/write_recorded.py

They are what its puzzles are graded by (4, 5 and 7; the definition decides in 1 and 6, and of 2 and 3 the page computes
the words, which a test compares with the recorded ones), and a few steps of the tensor core of every kind of operands.
"""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import torch

from optimized.recordings import arrays, linear, outputs, provenance, tensor_core_cases
from optimized.recordings.case import numbers
from optimized.recordings.reader import DATA

HERE = Path(__file__).parent
KINDS = ("e4m3.e4m3", "e5m2.e4m3", "e4m3.e5m2", "e5m2.e5m2")
TILE = "e4m3.e4m3.k32"  # of puzzle 7
SAME_ROWS = (64, 63, 65, 1000)  # of puzzle 5
TENSORS = ("x", "w", "y")


def text(array: np.ndarray) -> str:
    """The bytes of an array, little-endian, in base64."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def scale_updates() -> list[dict]:
    """Puzzle 4: of each tensor in each step [scale, history…, new scale, new history…], fp32."""
    found = []
    for name in ("bf16_hybrid_max", "fp16_e4m3_max"):
        recorded, rows = arrays(linear.RECORDING), linear.CASES[name].history
        scale, history = np.ones(3, np.float32), np.zeros((rows, 3), np.float32)
        for step in range(linear.STEPS):
            after = [recorded[f"{name}.{step}.fwd_{part}"].view(np.float32) for part in ("scale", "history")]
            noted = history.copy()
            noted[0] = after[1][-1]  # what the step's cast noted
            for column, tensor in enumerate(TENSORS):
                words = np.concatenate(
                    [scale[column : column + 1], noted[:, column], after[0][column : column + 1], after[1][:, column]]
                )
                found.append({"where": f"{name}, step {step}, {tensor}", "words": text(words)})
            scale, history = after
    return found


def bias_gradients() -> list[dict]:
    """Puzzle 5: the words of `twin::dbias`, computed here and accepted if an H200's recording agrees."""
    recorded, found = outputs.read(DATA), []
    for rows in SAME_ROWS:
        words = torch.ops.twin.dbias(numbers((rows, 48), torch.float32, 31))
        tally = recorded.compare(f"dbias/fp32 [{rows}, 48]/dbias", words)
        if not tally.equal:
            raise RuntimeError(f"this machine does not give the recorded words of dbias, {rows} rows: {tally}.")
        found.append({"rows": rows, "words": text(words.numpy())})
    return found


def steps() -> list[dict]:
    """The first step of each tile of every recorded one-step case of FP8."""
    words, found = arrays("tensor_core_h200"), []
    for case in tensor_core_cases.cases():
        formats, name = case.name.rsplit(".", 1)
        if formats in KINDS and case.a.shape[2] == 32:
            for tile in range(len(case.a)):
                parts = (case.a[tile, 0], case.b[tile, 0], case.c[tile, 0, :1], words[case.name][tile, 0, :1])
                found.append({"formats": formats, "case": name, **dict(zip("abcd", map(text, parts), strict=True))})
    return found


def recorded() -> dict:
    """What the page has."""
    tile = {letter.lower(): text(arrays("wgmma_h200")[f"{TILE}.{letter}"]) for letter in "ABCD"}
    about = provenance("tensor_core_h200")
    return {
        "about": {key: about[key] for key in ("gpu", "cuda", "date")},
        "scale_update": scale_updates(),
        "bias_gradient": bias_gradients(),
        "instruction": {"tiles": len(arrays("wgmma_h200")[f"{TILE}.A"]), **tile},
        "steps": steps(),
    }


def script() -> str:
    """recorded.js."""
    about = "/* Words that an H200 gave, in base64; write_recorded.py writes this file from optimized/recordings. */\n"
    return f"{about}const recorded = {json.dumps(recorded(), separators=(',', ':'))};\n"


if __name__ == "__main__":
    target = HERE / "recorded.js"
    target.write_text(script(), "utf-8")
    sys.stdout.write(f"{target.stat().st_size:,} bytes\n")
