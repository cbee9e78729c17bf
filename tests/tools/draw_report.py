"""Draw docs/report.png, the picture in README, from the report as it is now:

    PYTHONPATH=.:tests python tests/tools/draw_report.py

It runs `twin walkthrough` in an empty folder and photographs the top of its report in a Chromium.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shared import chromium

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 1000, 1220  # as far as the picture of all values


def main() -> int:
    program = chromium.found()
    if program is None:
        sys.exit(chromium.MISSING)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "twin_report.html"
        command = [sys.executable, "-m", "optimized.commands", "walkthrough", "--output", str(report)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        with chromium.page(program, Path(folder) / "profile") as page:
            page.look(WIDTH, HEIGHT)
            page.send("Emulation.setScrollbarsHidden", hidden=True)
            page.open(report.as_uri())
            page.picture(ROOT / "docs" / "report.png", HEIGHT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
