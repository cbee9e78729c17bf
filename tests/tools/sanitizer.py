"""Every call in the lists of the ops (optimized/recordings/cases), once, for NVIDIA's compute-sanitizer:

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/tools/sanitizer.py; done

Names after it select files: `python tests/tools/sanitizer.py cast dbias`. Inputs are filled by copies from the host, so
that initcheck sees every byte that a kernel reads as written. Blocks of persistent kernels are few, so that each has
several tiles, and what one is given is written over for the next. What is computed is checked elsewhere.
"""

import sys
from collections.abc import Iterator
from unittest import mock

import torch

import optimized  # noqa: F401  (registers the CUDA kernels)
from optimized.cuda import launch
from optimized.recordings import cases
from optimized.recordings.calls import Call, Inputs

PROCESSORS = 4


def calls(names: list[str], device: str = "cuda") -> Iterator[tuple[str, Call]]:
    """Of the files with those names, of all without any."""
    for name, module in cases.having("calls").items():
        if not names or name in names:
            yield from ((name, call) for call in module.calls(Inputs(device)))


def main(names: list[str]) -> None:
    """Make the calls, and say how many each file has."""
    if unknown := sorted(set(names) - set(cases.having("calls"))):
        raise SystemExit(f"{', '.join(unknown)}: no such list; {', '.join(cases.having('calls'))} are accepted.")
    made: dict[str, int] = {}
    with torch.no_grad(), mock.patch.object(launch, "processors", return_value=PROCESSORS):
        for name, call in calls(names):
            call.run()
            torch.cuda.synchronize()
            made[name] = made.get(name, 0) + 1
    for name, count in made.items():
        print(f"{name}: {count} calls launched")


if __name__ == "__main__":
    main(sys.argv[1:])
