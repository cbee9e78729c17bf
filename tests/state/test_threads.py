"""Contexts that overlap: in threads each has its own, in one thread they end in reverse order or raise."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from reference.float8.float8_tensor import Float8Tensor
from reference.state.threads import Thread, here

RECIPE = te.DelayedScaling(amax_history_len=4)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    thread = here()
    assert [thread.autocasts, thread.inits, thread.first_runs, thread.recomputations] == [[], [], [], []]


def test_a_new_thread_has_nothing_open() -> None:
    thread = Thread()
    assert not [name for name, value in vars(thread).items() if value and name not in ("number", "name")]
    assert Thread().number > thread.number


def layer(seed: int = 0) -> te.Linear:
    torch.manual_seed(seed)
    return te.Linear(32, 16, params_dtype=BF16)


def data(i: int = 0) -> torch.Tensor:
    return ((torch.arange(8 * 32).reshape(8, 32) * (3 + i)).remainder(7) - 3).to(BF16)


def in_thread(function: Callable[[], Any]) -> Any:
    """What `function` gives or raises in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((function(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value


def train(module: te.Linear, steps: int = 4, pause: Callable[[], Any] = lambda: None) -> list[torch.Tensor]:
    seen = []
    for i in range(steps):
        x = data(i).requires_grad_()
        with te.autocast(recipe=RECIPE):
            y = module(x)
            pause()
        y.backward(data(i)[:, :16] * 2.0**-i)
        pause()
        forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
        seen += [y.detach(), x.grad, module.weight.grad.clone(), forward.scale.clone(), backward.scale.clone()]
    return seen


def test_threads_train_side_by_side_with_the_bits_of_one_after_the_other() -> None:
    """Each autocast's end updates the modules of its own thread, at whatever point the other is."""
    expected = [train(layer(seed)) for seed in (1, 2)]
    barrier = threading.Barrier(2)
    found: dict[int, list[torch.Tensor]] = {}

    def run(seed: int) -> None:
        module = modules[seed]
        found[seed] = train(module, pause=barrier.wait)

    modules = {seed: layer(seed) for seed in (1, 2)}
    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, results in zip((1, 2), expected, strict=True):
        for a, b in zip(results, found[seed], strict=True):
            assert_same_bits(a, b)


def test_an_autocast_is_its_threads_own() -> None:
    module, x = layer(), data()
    plain = module(x)
    with te.autocast(recipe=RECIPE):
        assert torch.equal(in_thread(lambda: module(x)), plain), "a thread of its own does not inherit it"
        assert not torch.equal(module(x), plain)

        def other() -> torch.Tensor:
            with te.autocast(enabled=False):
                return module(x)

        in_thread(other)
        assert not torch.equal(module(x), plain), "and does not end it"


def test_a_module_is_trained_by_one_thread_at_a_time() -> None:
    module = layer()

    def run() -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            return module(data())

    with te.autocast(recipe=RECIPE):
        module(data())
        with pytest.raises(RuntimeError, match="Linear: runs in FP8 in this thread while MainThread, in which it ran"):
            in_thread(run)
        with torch.no_grad():
            pass
    in_thread(run)
    assert module.fp8_meta["scaling_fwd"].amax_history[0].tolist() == [0, 0, 0], "one after the other is fine"


def test_the_gradients_scales_are_updated_by_a_backward_in_another_thread() -> None:
    first, second = layer(), layer()
    with te.autocast(recipe=RECIPE):
        y, z = first(data().requires_grad_()), second(data().requires_grad_())
    z.sum().backward()
    in_thread(lambda: y.sum().backward())
    for module in (first, second):
        assert module.fp8_meta["scaling_bwd"].amax_history[-1, 0] in (0.0, 1.0)
    assert first.fp8_meta["scaling_bwd"].scale[0] == 57344


def overlapping(open_one: Callable[[], Any]) -> tuple[Any, Any]:
    """Two generators, each in a context, of which the first one ends first."""

    def body() -> Iterator[None]:
        with open_one():
            yield

    first, second = body(), body()
    next(first)
    next(second)
    return first, second


@pytest.mark.parametrize(
    ("what", "open_one"),
    [("autocast", lambda: te.autocast(recipe=RECIPE)), ("quantized_model_init", te.quantized_model_init)],
)
def test_contexts_that_do_not_nest_raise_and_none_stays_on(what: str, open_one: Callable[[], Any]) -> None:
    first, second = overlapping(open_one)
    with pytest.raises(RuntimeError, match=f"{what}: a context ended while one that was opened after it"):
        next(first, None)
    assert next(second, "ended") == "ended"
    assert not isinstance(te.Linear(16, 16).weight, Float8Tensor)
    module = layer()
    module(data())
    assert not module.fp8
    first, second = overlapping(open_one)
    with pytest.raises(RuntimeError, match="opened after it"):
        first.close()
    second.close()


def test_an_error_inside_is_the_one_that_is_raised() -> None:
    outer, inner = te.autocast(recipe=RECIPE), te.autocast(recipe=RECIPE)
    outer.__enter__()
    inner.__enter__()
    assert outer.__exit__(KeyError, KeyError(), None) is None
    inner.__exit__(None, None, None)


def test_the_same_autocast_may_be_open_more_than_once() -> None:
    module = layer()
    context = te.autocast(recipe=RECIPE)
    with context:
        with context:
            module(data())
        assert module.fp8_meta["scaling_fwd"].scale[0] == 1
        assert in_thread(lambda: [context.__enter__(), context.__exit__(None, None, None)]) is not None
    assert module.fp8_meta["scaling_fwd"].scale[0] != 1


def test_an_autocast_that_ends_in_another_thread_raises_and_is_off() -> None:
    context = te.autocast(recipe=RECIPE)
    context.__enter__()
    with pytest.raises(RuntimeError, match="or in another thread than it was opened in"):
        in_thread(lambda: context.__exit__(None, None, None))
    module = layer()
    module(data())
    assert not module.fp8


def test_it_decorates_no_generator() -> None:
    def generator() -> Iterator[None]:
        yield

    async def coroutine() -> None: ...

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match="a generator or coroutine, it would end before the body runs"):
            te.autocast()(function)


def test_an_unfinished_step_updates_no_scale() -> None:
    module = layer()

    def fail() -> None:
        module(data())
        raise KeyError

    with pytest.raises(KeyError), te.autocast(recipe=RECIPE):
        fail()
    assert module.fp8_meta["scaling_fwd"].scale.tolist() == [1, 1, 1]
    assert module.fp8_meta["scaling_fwd"].amax_history[0, 0] == 3, "the amax stays for the next step"


def test_replicas_of_data_parallel_are_refused_under_fp8() -> None:
    """Its threads have no autocast, so they would run in 16 bits."""
    module = layer()
    assert module._replicate_for_data_parallel() is not module
    with (
        te.autocast(),
        pytest.raises(RuntimeError, match=r"torch.nn.DataParallel.*DistributedDataParallel is accepted"),
    ):
        module._replicate_for_data_parallel()
