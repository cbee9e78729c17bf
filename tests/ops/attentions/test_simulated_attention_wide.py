"""The kernels of heads of 129 to 256 channels, run on a CPU thread by thread: every bit is the definition's.

Copies and products happen at once, as late as the kernel allows, or at random, so that a missing wait shows.
"""

import pytest
import simulator
import torch
from hypothesis import HealthCheck, given, settings
from shared.attention_cases import CASES, Case, inputs, run
from shared.attention_packed_cases import packed_inputs, packed_run
from shared.bits import assert_same_bits
from simulator import Simulator

pytestmark = pytest.mark.simulated
WHEN = {"at once": simulator.AT_ONCE, "late": simulator.LATE, "at random": simulator.AT_RANDOM}


def compare(case: Case, when: int = simulator.LATE, processors: int = 4) -> list[str]:
    given = inputs(case)
    expected = run(case, {name: None if x is None else x.clone() for name, x in given.items()})
    with Simulator(processors, when) as gpu:
        found = run(case, given)
    for name, value in expected.items():
        assert_same_bits(value, found[name], f"{name} of {case}")
    return gpu.launches


@pytest.mark.sample(3)
@pytest.mark.parametrize("when", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize(
    "case",
    [
        Case(group=2, sq=197, skv=261, d=256, mask_type="causal"),  # more tiles than blocks
        Case(b=2, sq=140, skv=300, d=136, window=(130, 60), dropout=0.1, dtype=torch.float16),
        Case(group=2, sq=300, skv=261, d=256),  # in clusters, the last of which has one tile
    ],
    ids=["causal", "window and dropout", "clusters"],
)
def test_whenever_copies_and_products_happen(case: Case, when: int) -> None:
    launches = compare(case, when, processors=2)
    assert {"attention_wide.attention_ticket", "attention_wide.attention"} < set(launches)
    assert "attention_backward_wide.attention_backward" in launches


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "case",
    [
        Case(b=2, sq=70, skv=261, d=192, mask="arbitrary", bias="b1ss"),
        Case(b=2, group=2, sq=70, skv=140, d=200, mask="padding", bias="bh slopes", dropout=0.5, dtype=torch.float16),
        Case(sq=300, skv=130, d=256, sinks=True, window=(3, 3)),  # queries that see nothing
        Case(b=2, sq=130, skv=130, d=256, mask="everything", layout="interleaved", sinks=True, dropout=0.1),
        Case(hkv=2, sq=200, skv=70, d=160, mask="padding", bias="11ss", bias_is_fp32=True, dropout=0.1),
        Case(hkv=2, sq=1, skv=129, d=248, mask_type="causal_bottom_right", layout="sbhd"),
    ],
    ids=[
        "mask and bias",
        "ALiBi and dropout",
        "sinks and window",
        "everything hidden",
        "bias in clusters",
        "one query",
    ],
)
def test_options(case: Case) -> None:
    compare(case)


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", WHEN.values(), ids=WHEN)
def test_clusters_take_turns(when: int) -> None:
    """Three clusters, each with two works and three query tiles for two heads; up to three key blocks add to dq."""
    compare(Case(group=2, hkv=2, sq=150, skv=380, d=256, mask_type="causal_bottom_right"), when, processors=6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("when", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize(
    "case",
    [
        Case(3, hkv=1, group=2, sq=150, skv=270, d=256, mask_type="causal_bottom_right", lengths="both"),
        Case(4, sq=197, skv=140, d=192, dropout=0.1, bias="b1ss", lengths="both", dtype=torch.float16, seed=3),
        Case(3, sq=130, skv=261, d=136, e=256, window=(70, 20), sinks=True, lengths="both", seed=1),
    ],
    ids=["causal", "bias and dropout", "window and sinks"],
)
def test_packed_entries(case: Case, when: int) -> None:
    """NaN lies between them: what a tile brings of it has to be cleared in time, in the memory of both blocks."""
    cpu, _ = packed_inputs(case, [2, 0, 3, 1, 5][: case.b + 1], 1)
    again, _ = packed_inputs(case, [2, 0, 3, 1, 5][: case.b + 1], 1)
    expected = packed_run(case, cpu)
    with Simulator(4, when):
        found = packed_run(case, again)
    for name, value in expected.items():
        assert_same_bits(value, found[name], f"{name} of {case}")


@pytest.mark.slow
@given(case=CASES.filter(lambda case: case.d > 128))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_case(case: Case) -> None:
    compare(case, simulator.AT_RANDOM)
