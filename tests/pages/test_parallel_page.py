"""The program of docs/parallel.md trains the same weights on any number of ranks that it names."""

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.processes import ranks

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


def worker(rank: int, world: int, port: int, program: str, folder: str) -> None:
    """The program as torchrun starts it; it leaves the weights."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    names: dict[str, Any] = {}
    exec(program, names)
    torch.save(list(names["model"].parameters()), f"{folder}/{world}.{rank}")
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("worlds", [(1, 2), pytest.param((1, 3), marks=pytest.mark.slow)])
def test_the_program_has_one_result(worlds: tuple[int, ...], tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    found = []
    for world in worlds:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        ranks(worker, (world, port, program, str(tmp_path)), world)
        found += [torch.load(tmp_path / f"{world}.{rank}") for rank in range(world)]
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert_same_bits(one, same)
