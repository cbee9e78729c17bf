"""Which seeds and states decide about dropout's masks."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint

import reference as te
from reference.nn.core.dropout import Generator
from reference.state import graph_seeds

BF16 = torch.bfloat16


def layer() -> te.TransformerLayer:
    torch.manual_seed(0)
    return te.TransformerLayer(32, 64, 2, params_dtype=BF16)


def data() -> torch.Tensor:
    return torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(1)).to(BF16)


def run(module: torch.nn.Module, seed: int | None = None) -> torch.Tensor:
    if seed is not None:
        torch.manual_seed(seed)
    out: torch.Tensor = module(data())
    return out.detach()


def test_the_seed_before_training_decides_not_the_one_before_construction() -> None:
    first = layer()
    second = copy.deepcopy(first)
    run(second)
    assert torch.equal(run(first, 5), run(second, 5))
    assert not torch.equal(run(first, 5), run(first, 6))
    assert not torch.equal(run(first, 5), run(first)), "and each forward draws anew"


def test_torchs_states_bring_masks_back() -> None:
    module = layer()
    run(module, 5)
    state = torch.get_rng_state()
    expected = run(module)
    torch.set_rng_state(state)
    assert torch.equal(run(module), expected), "get_rng_state"
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        run(module)
    assert torch.equal(run(module), expected), "fork_rng"


def test_no_seed_is_drawn_where_nothing_is_dropped() -> None:
    never = te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16)
    for module in (layer().eval(), never):
        before = torch.get_rng_state()
        run(module)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("checkpoint", [te.checkpoint, torch.utils.checkpoint.checkpoint])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_drops_the_same(checkpoint: Callable[..., torch.Tensor], use_reentrant: bool) -> None:
    results = []
    for recomputed in (False, True):
        module = layer()
        torch.manual_seed(3)
        for _ in range(2):
            x = data().requires_grad_()
            y = checkpoint(module, x, use_reentrant=use_reentrant) if recomputed else module(x)
            y.float().square().sum().backward()
        results.append((y, x.grad, module.layernorm_mlp.fc1_weight.grad, torch.get_rng_state()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def states(module: torch.nn.Module) -> list[torch.Tensor]:
    return [part.state for part in module.modules() if isinstance(part, Generator)]


def test_states_from_the_meta_device_are_seeds() -> None:
    module = te.TransformerLayer(32, 64, 2, params_dtype=BF16, device="meta")
    assert all(state.is_meta for state in states(module))
    module.to_empty(device="cpu")
    assert all(0 < int(state[0]) < 2**63 and state[1] == 0 for state in states(module))
    assert len({int(state[0]) for state in states(module)}) == 2
    torch.manual_seed(0)
    with torch.device("meta"):
        attention = te.DotProductAttention(2, 16, attention_dropout=0.1)
    assert attention.generator.state.dtype == torch.int64


def test_undrawn_goes_on_from_the_states_as_a_cuda_graph_does() -> None:
    module = layer()
    other = copy.deepcopy(module)
    with te.random.undrawn():
        first, second = run(module, 1), run(module, 2)
        assert not torch.equal(first, second)
        assert torch.equal(run(other, 8), first), "no seed of torch's is read"
    assert [int(state[1]) for state in states(module)] == [2, 4]


def test_seed_reaches_the_states_of_graphs() -> None:
    module, other = layer(), layer()
    run(other)
    for one in (module, other):
        te.random.seed(-7, one)
    assert torch.equal(torch.stack(states(module)), torch.stack(states(other)))
    with te.random.undrawn():
        assert torch.equal(run(module), run(other))
    assert torch.initial_seed() == torch.manual_seed(-7).initial_seed()
    assert len({int(state[0]) for state in states(module)}) == 2
    assert all(int(state[0]) >= 0 for state in states(module))


def placed() -> te.TransformerLayer:
    """A layer whose ranks have parts of a sequence, as this process sees it."""
    module = layer()
    for number, part in enumerate(part for part in module.modules() if isinstance(part, Generator)):
        part.at(192 + number)
    return module


def test_a_place_in_a_larger_tensor_is_no_random_state() -> None:
    """What masks follow from is that of a layer without places, and what is restored leaves them."""
    module = placed()
    places = [state[2:].clone() for state in states(module)]
    te.random.seed(7, module)
    saved, alone = te.random.get_state(module), layer()
    te.random.seed(7, alone)
    assert all(map(torch.equal, saved.values(), te.random.get_state(alone).values()))
    with te.random.fork(module):
        for part in module.modules():
            if isinstance(part, Generator):
                part.draw(torch.device("cpu"))
                part.state[1] += 1
        assert not torch.equal(states(module)[0][:2], saved["self_attention.core_attention.generator"])
    te.random.set_state(saved, layer())
    assert all(map(torch.equal, te.random.get_state(module).values(), saved.values()))
    assert [state.numel() for state in states(module)] == [3, 3]
    assert all(torch.equal(state[2:], place) for state, place in zip(states(module), places, strict=True))


def test_a_draw_at_replays_leaves_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = graph_seeds.Draws()
    monkeypatch.setattr(graph_seeds, "capturing", lambda device=None: True)
    monkeypatch.setattr(graph_seeds, "present", lambda: draws)
    generator = Generator(torch.device("cpu"))
    generator.at(192)
    there = generator.state.data_ptr()
    draws.slot(torch.device("cpu"))
    draws.blocks[0].fill_(9)
    generator.draw(torch.device("cpu"))
    assert generator.state.tolist() == [9, 0, 192]
    assert generator.state.data_ptr() == there


def test_state_and_fork_hold_all_that_masks_follow_from(tmp_path) -> None:  # type: ignore[no-untyped-def]
    module = layer()
    run(module, 4)
    torch.save(te.random.get_state(module), tmp_path / "random.pt")
    with te.random.fork(module):
        expected = [run(module)]
        with te.random.undrawn():
            expected.append(run(module))
    run(layer(), 9)
    other = layer()
    te.random.set_state(torch.load(tmp_path / "random.pt", weights_only=True), other)
    for found in (module, other):
        te.random.set_state(torch.load(tmp_path / "random.pt", weights_only=True), found)
        actual = [run(found)]
        with te.random.undrawn():
            actual.append(run(found))
        assert all(map(torch.equal, actual, expected))
    assert set(te.random.get_state()) == {"torch"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.pop("generator"), r"state lacks \['generator'\] and has unknown \[\]"),
        (lambda s: s.update(other=torch.ones(2)), r"state lacks \[\] and has unknown \['other'\]"),
        (
            lambda s: s.update(generator=torch.ones(2)),
            r"state\['generator'\]=tensor.*; the result of get_state is accepted",
        ),
        (lambda s: s.update(torch=[1]), r"state\['torch'\]=\[1\]; the result of get_state is accepted"),
    ],
)
def test_broken_states_are_refused_before_anything_changes(change, sentence: str) -> None:  # type: ignore[no-untyped-def]
    module = layer()
    state = te.random.get_state(module)
    change(state)
    run(module, 3)
    before = te.random.get_state(module)
    with pytest.raises(ValueError, match=sentence):
        te.random.set_state(state, module)
    after = te.random.get_state(module)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"te.random.seed: seed='1'; an int from"):
        te.random.seed("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"te.random: module=3; a torch.nn.Module or None"):
        te.random.get_state(3)  # type: ignore[arg-type]


class Tracker:
    """As Megatron's, of which each fork has a state of its own."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(77).get_state()

    def fork(self, name: str = "model"):  # type: ignore[no-untyped-def]
        tracker = self

        class Fork:
            def __enter__(self) -> None:
                self.outer = torch.get_rng_state()
                torch.set_rng_state(tracker.state)

            def __exit__(self, *_: object) -> None:
                tracker.state = torch.get_rng_state()
                torch.set_rng_state(self.outer)

        return Fork()


def test_attention_draws_its_seed_from_a_tracker() -> None:
    results = []
    for seed in (1, 2):
        tracker = Tracker()
        attention = te.DotProductAttention(2, 16, attention_dropout=0.5, get_rng_state_tracker=lambda t=tracker: t)
        q = torch.ones(8, 1, 2, 16, dtype=BF16)
        torch.manual_seed(seed)
        results.append(attention(q, q, q))
    assert torch.equal(*results)


CALLS: dict[str, Callable[[te.CudaRNGStatesTracker, torch.nn.Module], object]] = {
    "te.random.seed": lambda tracker, module: te.random.seed(3, module),
    "te.random.get_state": lambda tracker, module: te.random.get_state(module),
    "te.random.set_state": lambda tracker, module: te.random.set_state(STATES["module"], module),
    "te.random.fork": lambda tracker, module: te.random.fork(module).__enter__(),
    "CudaRNGStatesTracker.add": lambda tracker, module: tracker.add("b", 2),
    "CudaRNGStatesTracker.fork": lambda tracker, module: tracker.fork("a").__enter__(),
}
STATES: dict[str, dict[str, torch.Tensor]] = {}


@pytest.mark.parametrize("name", CALLS)
def test_states_are_not_read_or_written_in_a_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture by other means than PyTorch's, which `present` does not see; on the CPU."""
    tracker, module = te.CudaRNGStatesTracker(), layer()
    tracker.add("a", 1)
    STATES["module"] = before = te.random.get_state(module)
    monkeypatch.setattr(graph_seeds, "capturing", lambda device=None: True)
    with pytest.raises(RuntimeError, match=f"^{name}: a CUDA graph is being captured, in which random states can be "):
        CALLS[name](tracker, module)
    monkeypatch.undo()
    after = te.random.get_state(module)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert list(tracker.states_) == ["a"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CALLS if not name.endswith("fork")])
def test_a_real_capture_goes_on_after_the_sentence(name: str) -> None:
    """Forks stand in a capture: each replay enters them (test_capture.py)."""
    import optimized

    module = optimized.TransformerLayer(32, 64, 2, params_dtype=BF16)
    tracker = te.CudaRNGStatesTracker()
    tracker.add("a", 1)
    STATES["module"] = te.random.get_state(module)
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=f"^{name}: a CUDA graph is being captured"):
            CALLS[name](tracker, module)
        y = x * 2
    graph.replay()
    assert y.tolist() == [2.0] * 4


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_tracker_refuses_a_seed_that_torch_has_not(seed: int) -> None:
    tracker = te.CudaRNGStatesTracker()
    with pytest.raises(ValueError, match=r"CudaRNGStatesTracker.add: seed=-?\d+; an int from -2\^63 to 2\^64 - 1 is"):
        tracker.add("a", seed)
    assert tracker.seeds_ == set()


def test_seeds_of_layers_have_63_bits() -> None:
    layers = torch.nn.ModuleList(te.TransformerLayer(16, 16, 1) for _ in range(24))
    te.random.seed(1, layers)
    seeds = [int(state[0]) for name, state in te.random.get_state(layers).items() if state.dtype == torch.int64]
    assert len(seeds) == len(set(seeds)) >= 24
    assert all(0 <= one < 2**63 for one in seeds)
    for bit in range(63):
        assert {one >> bit & 1 for one in seeds} == {0, 1}, bit
