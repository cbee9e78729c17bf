"""`CudaRNGStatesTracker`: what is drawn inside `fork`, and that a checkpoint's recomputation draws it again."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from shared.rng_trackers import RNG, tracker_of
from shared.transformer_layers import RECIPE, layer_of, numbers

import reference as te
from reference.memory import recompute
from reference.memory.rng_tracker import CPU_BYTES


def test_a_state_is_that_of_a_seed_and_goes_on() -> None:
    assert torch.get_rng_state().numel() == CPU_BYTES
    torch.manual_seed(3)
    tracker = tracker_of()
    tracker.add("other", 8)
    outside = torch.rand(4)
    with tracker.fork():
        first = torch.rand(4)
    with tracker.fork("other"), tracker.fork():
        second = torch.rand(4)
    rest = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.cat((outside, rest)), torch.cat((torch.rand(4), torch.rand(4)))), "forks leave no trace"
    torch.manual_seed(7)
    assert torch.equal(torch.cat((first, second)), torch.cat((torch.rand(4), torch.rand(4))))


def test_an_error_inside_restores_the_state_outside() -> None:
    tracker, before = tracker_of(), torch.get_rng_state()

    def fails() -> None:
        with tracker.fork():
            torch.rand(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.equal(torch.get_rng_state(), before)


def test_states_are_saved_and_set() -> None:
    tracker = tracker_of()
    saved = tracker.get_states()
    with tracker.fork():
        first = torch.rand(4)
    assert saved.keys() == {RNG}
    assert not torch.equal(saved[RNG], tracker.get_states()[RNG])
    other = te.CudaRNGStatesTracker()
    other.set_states(saved)
    with other.fork():
        assert torch.equal(torch.rand(4), first)
    other.reset()
    assert other.get_states() == {}


def test_refusals() -> None:
    tracker = tracker_of()
    for call, error, sentence in (
        (lambda: tracker.add("other", 7), RuntimeError, r"add: seed=7 already exists; a new seed is accepted\."),
        (lambda: tracker.add(RNG, 8), RuntimeError, r"add: name='model-parallel-rng' already exists; a new name"),
        (lambda: tracker.add("other", True), TypeError, r"add: seed=True; an int is accepted\."),
        (lambda: tracker.fork("other").__enter__(), KeyError, r"name='other'; one of \['model-parallel-rng'\] is"),
        (lambda: tracker.set_states({"a": 3}), ValueError, r"states\['a'\]=3; the result of get_states is accepted"),
    ):
        random = torch.get_rng_state()
        with pytest.raises(error, match=sentence):
            call()
        assert torch.equal(torch.get_rng_state(), random)
    assert tracker.get_states().keys() == {RNG}
    assert tracker.seeds_ == {7}


def test_weights_and_masks_are_drawn_from_it(same_bits) -> None:
    def made(seed: int) -> te.TransformerLayer:
        tracker = tracker_of(seed)
        return te.TransformerLayer(
            32, 32, 2, params_dtype=torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.5,
            get_rng_state_tracker=lambda: tracker,
        )  # fmt: skip

    one, again, other = made(1), made(1), made(2)
    for a, b in zip(one.parameters(), again.parameters(), strict=True):
        same_bits(a, b)
    assert not torch.equal(one.layernorm_mlp.fc1_weight, other.layernorm_mlp.fc1_weight)
    torch.manual_seed(1)
    weight = te.TransformerLayer(32, 32, 2, params_dtype=torch.bfloat16).self_attention.layernorm_qkv.query_weight
    same_bits(weight, one.self_attention.layernorm_qkv.query_weight, "the first weight is drawn from the seed itself")
    x, outside = numbers(1, 6, 2, 32).bfloat16(), torch.get_rng_state()
    y = one(x)
    assert torch.equal(outside, torch.get_rng_state())
    torch.manual_seed(77)
    same_bits(y, again(x), "a seed outside does not decide about masks")
    assert not torch.equal(y, one(x))


class Block(torch.nn.Module):
    """Dropout of ours and of torch's, inside and outside of a fork."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = tracker_of()
        self.layer = layer_of(attention_dropout=0.5, get_rng_state_tracker=lambda: self.tracker)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.dropout(self.layer(x), 0.5, True)
        with self.tracker.fork():
            x = torch.dropout(x, 0.5, True)
        return torch.dropout(self.layer(x), 0.5, True)


WAYS: dict[str, Callable[[Block, torch.Tensor], Any]] = {
    "not at all": lambda block, x: block(x),
    "te.checkpoint": lambda block, x: te.checkpoint(block, x),
    "te.checkpoint with the tracker": lambda block, x: te.checkpoint(
        block, x, get_rng_state_tracker=lambda: block.tracker
    ),
    "torch.utils.checkpoint": lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_recomputation_draws_the_same(fp8: bool, device: str, same_bits) -> None:
    found: dict[str, list[torch.Tensor]] = {}
    for name, run in WAYS.items():
        block = Block().to(device)
        for step in range(2):
            torch.manual_seed(step)
            block.zero_grad()
            x = numbers(1, 6, 2, 64).bfloat16().to(device).requires_grad_()
            with te.autocast(enabled=fp8, recipe=RECIPE):
                y = run(block, x)
            y.backward(numbers(2, 6, 2, 64).bfloat16().to(device))
            left = [torch.get_rng_state(), block.tracker.get_states()[RNG]]
            found.setdefault(name, []).extend([y, x.grad, *left, *(p.grad for p in block.parameters())])
    for name, results in found.items():
        for a, b in zip(found["not at all"], results, strict=True):
            same_bits(a, b, name)


def test_another_packages_tracker_is_left_as_a_recomputation_finds_it() -> None:
    class Other:
        forks = 0

        def fork(self, name: str = "") -> Any:
            self.forks += 1
            return tracker.fork()

    tracker, other = tracker_of(), Other()
    layer = te.DotProductAttention(2, 16, attention_dropout=0.5, get_rng_state_tracker=lambda: other)
    q = numbers(1, 6, 2, 2, 16).bfloat16().requires_grad_()
    y = te.checkpoint(layer, q, q, q)
    state = torch.get_rng_state()
    y.backward(torch.ones_like(y))
    assert other.forks == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert not recompute.active()


def test_a_copy_has_states_of_its_own() -> None:
    tracker = tracker_of()
    other = copy.deepcopy(tracker)
    with tracker.fork():
        first = torch.rand(3)
    with other.fork():
        assert torch.equal(torch.rand(3), first)


@pytest.mark.gpu
def test_masks_are_the_same_on_both_devices_and_torchs_own_repeat(same_bits) -> None:
    found = []
    for device in ("cpu", "cuda"):
        tracker = tracker_of(5)
        layer = te.DotProductAttention(2, 16, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)  # noqa: B023
        q = numbers(1, 40, 2, 2, 16).bfloat16().to(device)
        found.append([layer.to(device)(q, q, q) for _ in range(2)])
    for a, b in zip(*found, strict=True):
        same_bits(a, b)
    own = []
    for _ in range(2):
        tracker = tracker_of(5)
        torch.rand(3, device="cuda")
        with tracker.fork():
            own.append(torch.rand(3, device="cuda"))
    same_bits(*own)


def test_a_compiler_is_refused() -> None:
    tracker = tracker_of()
    layer = te.DotProductAttention(2, 16, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    q = numbers(1, 6, 2, 2, 16).bfloat16()
    with pytest.raises(Exception, match=r"get_rng_state_tracker with dropout under torch\.compile is not offered"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(q, q, q)
