"""Dropout's stream of seeds in CUDA graphs: whichever of eager steps and replays run, the masks are the same."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import reference as te
from reference.nn.core.dropout import Generator
from reference.numbers import philox
from reference.state import graph_seeds

# Warm-up runs on another stream than the capture, as in every program that captures.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")

BF16, HIDDEN = torch.bfloat16, 32
RECIPE = te.DelayedScaling(amax_history_len=4)
Step = Callable[[], list[torch.Tensor]]


class FakeGraph:
    """A CUDA graph on a CPU: a capture changes nothing that was there before, a replay makes the same calls again."""

    open = False

    def capture_begin(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.mode = Recording(self)
        self.mode.__enter__()
        FakeGraph.open = True

    def capture_end(self) -> None:
        FakeGraph.open = False
        self.mode.__exit__(None, None, None)
        for tensor, value in reversed(self.before):
            tensor.detach().copy_(value)

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, out in self.calls:
                again = function(*args, **kwargs)
                for old, new in zip(flat(out), flat(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)

    def reset(self) -> None:
        self.calls = []


class Recording(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = function._schema.arguments
        named = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
        for argument in schema:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.graph.before += [(one, one.clone()) for one in flat(named.get(argument.name))]
        out = function(*args, **kwargs)
        if not function.__name__.startswith(("empty", "new_empty")):
            self.graph.calls.append((function, args, kwargs, out))
        return out


def flat(out: Any) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]


graph_seeds.follow(FakeGraph)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    real = graph_seeds.capturing
    monkeypatch.setattr(graph_seeds, "capturing", lambda device=None: FakeGraph.open or real(device))


@contextlib.contextmanager
def faked(graph: Any) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def on(device: str) -> tuple[type, Callable[[Any], Any], Any]:
    """The graph's class, what captures one, and the package."""
    if device == "cpu":
        return FakeGraph, faked, te
    import optimized

    return torch.cuda.CUDAGraph, torch.cuda.graph, optimized


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextlib.contextmanager
def warming(device: str) -> Iterator[None]:
    """What runs before a capture runs on another stream."""
    if device == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def compare(device: str, make: Callable[[Any], Step], warm: int = 3, replays: int = 2) -> None:
    """Eager steps; then eager steps, a capture, and replays and eager steps by turns: one stream."""
    graph_of, captured, package = on(device)
    found = []
    for graphed in (False, True):
        torch.manual_seed(1)
        step, seen = make(package), []
        torch.manual_seed(1234)
        with warming(device):
            for _ in range(warm):
                seen.append([one.clone() for one in step()])
        graph = graph_of()
        if graphed:
            before = torch.get_rng_state()
            with captured(graph):
                results = step()
            assert torch.equal(torch.get_rng_state(), before), "a capture draws nothing"
        for i in range(2 * replays):
            if graphed and i % 3 != 2:
                graph.replay()
                seen.append([one.clone() for one in results])
            else:
                seen.append([one.clone() for one in step()])
        found.append((seen, torch.rand(1)))
        graph.reset()
    (eager, rest), (replayed, rest_replayed) = found
    assert_same_bits(rest, rest_replayed, "the stream after all steps")
    for i, (a, b) in enumerate(zip(eager, replayed, strict=True)):
        for j, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(one, other, f"step {i}, result {j}")
    assert not any(torch.equal(a[0], b[0]) for a, b in itertools.pairwise(eager)), "each step has its masks"


def data(device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(6, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()


def whole_step(layer: torch.nn.Module, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor], fp8: bool) -> Step:
    """A step that keeps its weights, so that only masks and scales differ from step to step."""
    parameters = [x, *layer.parameters()]
    for one in parameters:
        one.grad = torch.zeros_like(one)

    def step() -> list[torch.Tensor]:
        for one in parameters:
            assert one.grad is not None
            one.grad.zero_()
        with te.autocast(enabled=fp8, recipe=RECIPE):
            y = run(x)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(one.grad for one in parameters if one.grad is not None)]

    return step


def transformer(package: Any, device: str, dtype: torch.dtype = BF16, **options: Any) -> torch.nn.Module:
    made: torch.nn.Module = package.TransformerLayer(
        HIDDEN, 64, 2, self_attn_mask_type="causal", params_dtype=dtype, device=device, **options
    )
    return made


@pytest.mark.sample(3)
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True], ids=["high", "fp8"])
@pytest.mark.parametrize(
    "options",
    [
        {"hidden_dropout": 0.0},
        {"attention_dropout": 0.0},
        {"drop_path_rate": 0.4},
        {"layer_type": "decoder", "hidden_dropout": 0.3},
    ],
    ids=["attention", "hidden", "all", "decoder"],
)
def test_a_whole_step_as_a_graph_goes_on_with_the_stream(device: str, fp8: bool, options: dict[str, Any]) -> None:
    def make(package: Any) -> Step:
        layer, x = transformer(package, device, **options), data(device)
        more = {"encoder_output": x} if "layer_type" in options else {}
        return whole_step(layer, x, lambda x: layer(x, **more), fp8)

    compare(device, make)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["high", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_dtype_goes_on_with_the_stream(dtype: torch.dtype, fp8: bool) -> None:
    def make(package: Any) -> Step:
        layer, x = transformer(package, "cuda", dtype), data("cuda", dtype)
        return whole_step(layer, x, layer, fp8)

    compare("cuda", make)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("device", DEVICES)
def test_layers_that_run_twice_draw_twice(device: str) -> None:
    """Whether in one graph or in two that run by turns, with more draws than a block of slots has."""

    def make(package: Any) -> Step:
        layer, x = package.ops.Dropout(0.5), data(device)
        layer.to(device)

        def run(x: torch.Tensor) -> torch.Tensor:
            for _ in range(graph_seeds.BLOCK + 3):
                x = x + layer(x) / 64
            return x

        return whole_step(layer, x, run, False)

    compare(device, make, warm=1)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("device", DEVICES)
def test_recomputation_repeats_the_masks_of_a_replay(device: str) -> None:
    def make(package: Any) -> Step:
        layer, x = transformer(package, device), data(device)
        return whole_step(layer, x, lambda x: te.checkpoint(layer, x), True)

    compare(device, make)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("device", DEVICES)
def test_trackers_fork_at_each_replay(device: str) -> None:
    """Given to a layer, around a layer, one in another, and `te.random.fork`."""

    def make(package: Any) -> Step:
        tracker = te.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 7)
        tracker.add("other", 8)
        layer = transformer(package, device, get_rng_state_tracker=lambda: tracker)
        x = data(device)

        def run(x: torch.Tensor) -> torch.Tensor:
            x = layer(x)
            with tracker.fork("other"):
                x = layer(x)
                with tracker.fork():
                    x = layer(x)
            with te.random.fork():
                x = layer(x)
            return layer(x)

        step = whole_step(layer, x, run, False)
        return lambda: [*step(), torch.stack([one.state for one in layer.modules() if isinstance(one, Generator)])]

    compare(device, make)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("device", DEVICES)
def test_fork_with_a_module_leaves_its_states_at_each_replay(device: str) -> None:
    def make(package: Any) -> Step:
        layer, x = transformer(package, device), data(device)

        def run(x: torch.Tensor) -> torch.Tensor:
            x = layer(x)
            with te.random.fork(layer):
                x = layer(x)
            return layer(x)

        return whole_step(layer, x, run, False)

    compare(device, make)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("device", DEVICES)
def test_a_capture_inside_undrawn_goes_on_from_the_state(device: str) -> None:
    graph_of, captured, package = on(device)
    layer, x = transformer(package, device), data(device).detach()
    layer(x)
    graph = graph_of()
    with te.random.undrawn(), captured(graph):
        y = layer(x)
    before = torch.get_rng_state()
    states = [one for one in layer.modules() if isinstance(one, Generator)]
    offsets = [int(one.state[1]) for one in states]
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(int(one.state[1]) > offset for one, offset in zip(states, offsets, strict=True))


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("device", DEVICES)
def test_seeds_set_between_replays_decide(device: str) -> None:
    graph_of, captured, package = on(device)
    layer, x = transformer(package, device), data(device).detach()
    with warming(device):
        layer(x)
    graph = graph_of()
    with captured(graph):
        y = layer(x)
    masks = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        graph.replay()
        masks.append(y.clone())
        torch.manual_seed(seed)
        assert_same_bits(layer(x), masks[-1], f"seed {seed}")
    assert_same_bits(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


def test_many_seeds_are_the_seeds_drawn_one_by_one() -> None:
    torch.manual_seed(5)
    expected = [philox.draw_seed() for _ in range(70)]
    torch.manual_seed(5)
    found = torch.empty(70, dtype=torch.int64)
    philox.draw_seeds(found[:1])
    philox.draw_seeds(found[1:])
    assert found.tolist() == expected


@pytest.mark.usefixtures("fake")
def test_a_failed_or_reset_capture_leaves_nothing() -> None:
    layer = te.ops.Dropout(0.5)
    graph = FakeGraph()
    with contextlib.suppress(ZeroDivisionError), faked(graph):
        layer(torch.ones(4, 8))
        raise ZeroDivisionError
    assert graph_seeds.present() is None
    graph.reset()
    assert "twin_draws" not in vars(graph)
    with faked(graph):
        pass
    assert "twin_draws" not in vars(graph), "a graph without dropout draws nothing"


def test_a_followed_graph_keeps_names_and_docstrings() -> None:
    class Graph:
        def capture_begin(self) -> None:
            """Begin."""

        def capture_end(self) -> None:
            """End."""

        def replay(self) -> None:
            """Launch again."""

        def reset(self) -> None:
            """Forget."""

    names = ("capture_begin", "capture_end", "replay", "reset")
    before = {name: getattr(Graph, name) for name in names}
    graph_seeds.follow(Graph)
    for name, old in before.items():
        new = getattr(Graph, name)
        assert new is not old
        assert (new.__name__, new.__doc__) == (old.__name__, old.__doc__)
