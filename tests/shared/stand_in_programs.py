"""Programs that import `transformer_engine`, run in processes of their own."""

import json
import textwrap
from typing import Any

from shared import processes

INSTALL = "import reference; reference.install_as_transformer_engine()\n"


def printed(program: str) -> Any:
    """What a program prints last, as JSON."""
    done = processes.run(textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
