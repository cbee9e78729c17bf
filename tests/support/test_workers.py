"""`reference.support.workers.each`, and attention, whose heads it shares out."""

import threading

import pytest
import torch
from shared.attention_cases import Case, inputs, run
from shared.bits import assert_same_bits, torch_threads

from reference.support.workers import each


@pytest.mark.parametrize("threads", [1, 3])
def test_every_task_runs_once_and_records_nothing(threads: int) -> None:
    x = torch.ones(20, requires_grad=True)
    found: list[tuple[int, bool]] = []
    with torch_threads(threads), torch.no_grad():
        each(lambda i: found.append((i, (x[i] * 2).requires_grad)), [(i,) for i in range(20)])
    assert sorted(found) == [(i, False) for i in range(20)]


def test_tasks_write_to_tensors_of_inference_mode() -> None:
    with torch_threads(2), torch.inference_mode():
        x = torch.zeros(4)
        each(lambda i: x[i].fill_(i), [(i,) for i in range(4)])
    assert x.tolist() == [0, 1, 2, 3]


def test_pieces_of_a_piece_stay_in_its_thread() -> None:
    """With fewer threads than tasks that wait, the pool would never be done."""
    found: list[tuple[int, str]] = []

    def outer(i: int) -> None:
        here = threading.current_thread().name
        each(lambda j: found.append((10 * i + j, here)), [(j,) for j in range(4)])

    with torch_threads(2):
        each(outer, [(i,) for i in range(8)])
    assert sorted(number for number, _ in found) == [10 * i + j for i in range(8) for j in range(4)]
    assert threading.current_thread().name not in {name for _, name in found}


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_reaches_the_caller(threads: int) -> None:
    def task(i: int) -> None:
        if i == 3:
            raise ValueError("the fourth")

    with torch_threads(threads), pytest.raises(ValueError, match="the fourth"):
        each(task, [(i,) for i in range(6)])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_has_the_same_bits_on_any_number_of_threads(dropout: float) -> None:
    case = Case(b=2, hkv=2, group=2, sq=140, skv=200, d=32, mask_type="causal_bottom_right", dropout=dropout)
    found = []
    for threads in (1, 2, 5):
        with torch_threads(threads):
            found.append(run(case, inputs(case)))
    for other in found[1:]:
        for name, value in found[0].items():
            assert_same_bits(value, other[name], name)
