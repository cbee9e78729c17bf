"""Subnormal numbers: alive here, and their absence noticed, whenever it begins and in whichever thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from shared import processes
from shared.bits import assert_same_bits

import reference as te
from optimized.recordings import cases
from reference.numbers import denormals, elementary, formats, philox, tensor_core
from reference.ops import library

SENTENCE = r"flushed to zero.*call torch\.set_flush_denormal\(False\)"


@contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_they_are_alive_here() -> None:
    assert denormals.denormals_are_alive()
    denormals.check_denormals()


def test_flushing_is_noticed_and_the_sentence_names_the_remedy() -> None:
    with flushing():
        assert not denormals.denormals_are_alive()
        with pytest.raises(RuntimeError, match=SENTENCE):
            denormals.check_denormals()
    denormals.check_denormals()


CASES = {case.op: case for case in cases.cases() if not case.live}


@pytest.mark.parametrize("op", CASES)
def test_every_op_and_layer_refuses(op: str) -> None:
    """The cases of ops, which call each (tests/recordings/test_parity.py sees to that), and of layers."""
    with flushing(), pytest.raises(RuntimeError, match=SENTENCE):
        CASES[op].run(torch.device("cpu"))


def arguments(name: str) -> list[object]:
    """Arguments of an op by their types alone: what refuses them must come before they are looked at."""
    made = []
    for argument in getattr(torch.ops.twin, name).default._schema.arguments:
        kind = str(argument.type)
        values = {"Tensor": torch.ones(16, 16), "List[Tensor]": [torch.ones(16, 16)], "List[int]": [0], "int": 0}
        values |= {"float": 1.0, "bool": False, "str": "", "Optional[Tensor]": None, "Optional[int]": None}
        made.append(torch.float32 if argument.name.endswith("dtype") else values[kind])
    return made


@pytest.mark.parametrize("name", vars(library.twin))
@pytest.mark.parametrize("way", ["dispatcher", "direct", "function"])
def test_every_way_to_an_op_refuses(name: str, way: str) -> None:
    call: Callable[..., object] = {
        "dispatcher": getattr(torch.ops.twin, name),
        "direct": getattr(library.twin, name),
        "function": library._IMPLEMENTATIONS["CPU"][name],
    }[way]
    given = arguments(name)
    with flushing(), torch.no_grad(), pytest.raises(RuntimeError, match=SENTENCE):
        call(*given)


X = torch.ones(16, 16)
PUBLIC = {
    "formats.cast": lambda: formats.cast(X, formats.E4M3),
    "formats.amax": lambda: formats.amax(X),
    "tensor_core.gemm": lambda: tensor_core.gemm(X.bfloat16(), X.bfloat16()),
    "tensor_core.step": lambda: tensor_core.step(X.bfloat16(), X.bfloat16()),
    "elementary.exp": lambda: elementary.exp(X),
    "elementary.gelu": lambda: elementary.gelu(X),
    "elementary.rsqrt": lambda: elementary.rsqrt(X),
    "elementary.evaluate": lambda: elementary.evaluate("exp", np.zeros(4, np.float32)),
    "philox.normal": lambda: philox.normal((4,)),
    "philox.uniform": lambda: philox.uniform((4,)),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_refuse(name: str) -> None:
    PUBLIC[name]()
    with flushing(), pytest.raises(RuntimeError, match=SENTENCE):
        PUBLIC[name]()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_layer_refuses_whenever_it_is_turned_on(fp8: bool) -> None:
    """Before forward, and between forward and backward; the next step is that of a layer that was never refused."""
    ends = []
    for refused in (False, True):
        torch.manual_seed(1)
        layer = te.Linear(16, 16, params_dtype=torch.bfloat16)
        x = torch.linspace(-1, 1, 256).view(16, 16).bfloat16().requires_grad_()
        with te.autocast(enabled=fp8):
            if refused:
                with flushing(), pytest.raises(RuntimeError, match=SENTENCE):
                    layer(x)
            out = layer(x)
        if refused:
            with flushing(), pytest.raises(RuntimeError, match=SENTENCE):
                out.sum().backward(retain_graph=True)
            assert layer.weight.grad is None
            assert x.grad is None
        out.sum().backward()
        with te.autocast(enabled=fp8):
            again = layer(x)
        ends.append((again, layer.weight.grad, x.grad))
    for one, other in zip(*ends, strict=True):
        assert_same_bits(one, other)


def test_the_switch_is_the_calling_threads() -> None:
    """A thread that flushes is refused; the one beside it, which does not, computes."""
    found: list[str] = []

    def flush() -> None:
        torch.set_flush_denormal(True)
        try:
            formats.cast(X, formats.E4M3)
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=flush)
    thread.start()
    thread.join()
    assert len(found) == 1
    assert "flushed to zero" in found[0]
    formats.cast(X, formats.E4M3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("threads", [3, 8])
def test_worker_threads_that_flush_alone_are_noticed(threads: int) -> None:
    """Threads take their maker's switch: these were made while the calling thread flushed, and it no longer does."""
    program = (
        "import torch\n"
        "from reference import formats\n"
        "x = torch.ones(4, 4)\n"
        "formats.cast(x, formats.E4M3)\n"
        "if not torch.set_flush_denormal(True):\n    raise SystemExit(77)\n"
        f"torch.set_num_threads({threads})\n"
        "torch.ones(1 << 20) + 1\n"
        "torch.set_flush_denormal(False)\n"
        "try:\n    formats.cast(x, formats.E4M3)\nexcept RuntimeError as error:\n    print(error)\n"
        "torch.set_num_threads(1)\n"
        "print(formats.cast(x, formats.E4M3).dtype)\n"
    )
    done = processes.run(program)
    if done.returncode == 77:
        pytest.skip("this CPU cannot flush denormals")
    assert done.returncode == 0, done.stderr
    sentence, dtype = done.stdout.splitlines()
    assert sentence.startswith("Subnormal numbers are flushed to zero in this process")
    assert dtype == "torch.float8_e4m3fn"


def test_it_is_asked_in_every_one_of_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives a thread no less than 32768 elements: with fewer than that for each, some would not be asked."""
    sizes = []
    full = torch.full
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "full", lambda size, *rest, **more: (sizes.append(size), full(size, *rest, **more))[1])
    denormals.denormals_are_alive()
    assert sizes == [(64 * 32768,)] * 2
