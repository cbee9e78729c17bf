"""A cache of keys and values on a Hopper GPU: the words of the CPU, step by step, and in a CUDA graph."""

import copy
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.inference_cases import OPTIONS, STEPS, Decoder, alone, fp8, mixed

import optimized  # noqa: F401  (registers the CUDA implementations)
import reference as te

pytestmark = pytest.mark.gpu


def pair(**options: Any) -> tuple[Decoder, Decoder]:
    """The same model on both sides."""
    here = Decoder(**options)
    return here, copy.deepcopy(here).cuda()


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps(name: str, in_fp8: bool) -> None:
    here, there = pair(**OPTIONS[name])
    x = here.numbers(9, sum(STEPS))
    with torch.no_grad(), fp8(in_fp8):
        expected, cache = here.stepped(x), there.params()
        for _ in range(3):  # the last time from tapes
            assert_same_bits(there.stepped(x.cuda(), cache=cache).cpu(), expected)
            cache.reset()


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("name", ["block", "window", "modules, batch first"])
def test_sequences_of_all_lengths(name: str, in_fp8: bool) -> None:
    here, there = pair(**OPTIONS[name])
    with torch.no_grad(), fp8(in_fp8):
        found = mixed(there, there.params())
        for one, words in mixed(here, here.params()).items():
            assert_same_bits(found[one].cpu(), words)
            assert_same_bits(found[one].cpu(), alone(here, one, len(words)))


def test_weights_kept_in_fp8() -> None:
    with te.quantized_model_init():
        here, there = pair()
    x = here.numbers(9, sum(STEPS))
    with torch.inference_mode(), fp8():
        assert_same_bits(there.stepped(x.cuda()).cpu(), here.stepped(x))


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_graph_of_one_step_is_replayed_for_all(in_fp8: bool) -> None:
    here, there = pair()
    x = here.numbers(9, 150)
    held = torch.empty_like(x[:1]).cuda()
    with torch.no_grad(), fp8(in_fp8):
        expected = here(x)
        cache = there.params()
        cache.pre_step({"a": 100, "b": 100})
        assert_same_bits(there(x[:100].cuda(), inference_params=cache).cpu(), expected[:100])
        cache.pre_step({"a": 1, "b": 1})
        held.copy_(x[100:101])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # the same step again and again
                there(held, inference_params=cache)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = there(held, inference_params=cache)
        for at in range(100, 150):
            if at > 100:
                cache.pre_step({"a": 1, "b": 1})
                held.copy_(x[at : at + 1])
            graph.replay()
            assert_same_bits(y.cpu(), expected[at : at + 1])
    assert cache.sequences == {"a": 150, "b": 150}
