"""Record what the ops of `optimized.ops` launch: tests/golden/launches, which tests/test_launches.py compares with.

    PYTHONPATH=. python tests/record_launches.py [name ...]     # of the files; all without names

Right after a launch was changed on purpose and the GPU suite has passed with it. Read the difference before it is
committed: a launch of an op that was not touched must not be in it.
"""

import sys
from pathlib import Path

from launch_cases import FILES, noted

from reference import files

FOLDER = Path(__file__).parent / "golden" / "launches"


def main(names: list[str]) -> None:
    """Write the files of those names."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or FILES:
        text, gpu = noted(name)
        files.write(FOLDER / f"{name}.txt", text)
        print(f"{name}.txt: {len(gpu.launches)} launches, {len(text)} characters")


if __name__ == "__main__":
    main(sys.argv[1:])
