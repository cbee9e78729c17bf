"""examples/grpo.py: the trainer computes what the rollout computed, the model learns, and every device has one hash."""

import functools
import importlib.util
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimized import measure

PROGRAM = measure.ROOT / "examples" / "grpo.py"


@functools.cache
def program() -> Any:
    """The program. Where nothing is installed, as on a machine without a network, `twin_engine` is made here."""
    if importlib.util.find_spec("twin_engine") is None:
        file = measure.ROOT / ".wheel" / "checkout.py"
        spec = importlib.util.spec_from_file_location("twin_engine", file, submodule_search_locations=[])
        assert spec is not None
        assert spec.loader is not None
        sys.modules["twin_engine"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["twin_engine"])
    return SimpleNamespace(**runpy.run_path(str(PROGRAM)))


def run_of(warm: int, updates: int, rollout: str = "exact", device: str = "cpu") -> tuple[list[Any], str]:
    """What the updates have seen, and the hash after them."""
    with torch.random.fork_rng(devices=[]):
        run = program().Run(torch.device(device), rollout)
        run.warm_up(warm)
        return list(run.updates(updates)), run.digest()


def exact(updates: list[Any]) -> bool:
    return all(one.equal and one.kl == 0 and one.least == one.largest == 1 and one.clipped == 0 for one in updates)


def test_the_program_is_short() -> None:
    assert len(PROGRAM.read_text().splitlines()) <= 300


def test_rollout_and_trainer_agree_and_a_run_can_be_repeated() -> None:
    updates, digest = run_of(4, 3)
    assert exact(updates)
    assert len({one.reward for one in updates}) > 1
    assert run_of(4, 3) == (updates, digest)


@pytest.mark.parametrize("rollout", ["bf16", "other-order"])
def test_another_engine_does_not_agree(rollout: str) -> None:
    updates, digest = run_of(8, 4, rollout)
    assert not all(one.equal for one in updates)
    assert max(one.kl for one in updates) > 0
    assert digest != run_of(8, 4)[1]


def test_advantages_are_of_each_group() -> None:
    group = program().GROUP
    found = program().advantages([1.0] * group + [0.0, 1.0] * (group // 2))
    assert found[:group] == [0.0] * group
    assert found[group:] == [-found[group + 1], found[group + 1]] * (group // 2)
    assert 0.999 < found[group + 1] < 1


def test_an_unknown_rollout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^rollout='fp4'; one of \('exact', 'bf16', 'other-order'\) is accepted"):
        program().Run(torch.device("cpu"), "fp4")


@pytest.mark.slow
def test_fifty_updates_teach_it() -> None:
    updates, _ = run_of(program().WARM_START, 50)
    assert exact(updates)
    first, last = (sum(one.reward for one in part) / 10 for part in (updates[:10], updates[-10:]))
    assert last > first + 0.15


@pytest.mark.gpu
def test_a_gpu_has_the_same_hash() -> None:
    assert run_of(6, 6, device="cuda") == run_of(6, 6)
