"""What ptxas reports of a compiled kernel file (`compiler.Build.log`): its resources, and what means slow code."""

import re
from typing import NamedTuple

_FUNCTION = re.compile(
    r"Compiling entry function '(?P<function>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class Usage(NamedTuple):
    """Of one kernel function: registers a thread, bytes of stack and of spills."""

    function: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def usage(log: str) -> list[Usage]:
    """Resources of every kernel function in the file."""
    return [
        Usage(m["function"], int(m["registers"]), int(m["stack"]), int(m["stores"]), int(m["loads"]))
        for m in _FUNCTION.finditer(log)
    ]


def complaints(log: str) -> list[str]:
    """Lines about spills and warnings; ptxas serialises wgmma with no more than a C75xx line."""
    spills = re.compile(r"[1-9]\d* bytes (?:spill|stack frame)")
    return [
        line.strip()
        for line in log.splitlines()
        if spills.search(line) or "warning" in line.lower() or re.search(r"\bC75\d\d\b", line)
    ]
