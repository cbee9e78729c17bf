"""Shared by every test: the `gpu` mark, `--require-gpu`, the comparison of bits, and what CI draws."""

import contextlib
import gc
import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import pytest
import shared.cores  # noqa: F401  (before torch)
import torch
from shared.bits import assert_same_bits, changed_sources, torch_threads
from shared.driver_stub import cuda  # noqa: F401  (a fixture)
from simulator import Simulator

from optimized import measure
from optimized.cuda import device
from reference.nn.core import autograd
from reference.state import scaling
from reference.support import files

# CI judges a change, so it draws the same examples each time; everybody else draws fresh ones. How long one takes is a
# matter of the machine and of what else it does.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("fresh", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "fresh")


QUICK = 4  # seeds of a fuzzer in the fast suite


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="turn every skip into an error: for the run on a Hopper GPU whose summary is committed",
    )

    parser.addoption(
        "--simulate",
        action="store_true",
        help="without a GPU, run the tests for one in the simulator (tests/simulator)",
    )
    parser.addoption(
        "--site",
        type=lambda path: Path(path).resolve(),
        help="tests/pages/test_site.py reads this folder, which `mkdocs build` has written",
    )
    parser.addoption("--fuzz-seconds", type=float, default=30.0, help="how long each fuzzer (a slow test) goes on")
    parser.addoption("--fuzz-seed", type=int, help="run a fuzzer for this seed alone: the one that a failure printed")


@pytest.fixture(autouse=True)
def no_module_of_another_test_is_updated() -> None:
    """An autocast updates every module that ran in its thread and is still alive: garbage too, until it is collected.

    So a test's steps would not be the same each time, and modules of a pretended GPU (`dry_gpu`) have no numbers.
    """
    for module in (reference() for reference in list(scaling._MODULES)):
        if module is not None:
            module._membership = None


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> float:
    """How long a fuzzer goes on."""
    return float(request.config.getoption("--fuzz-seconds"))


@pytest.fixture(params=["quick", pytest.param("long", marks=pytest.mark.slow)])
def fuzz(request: pytest.FixtureRequest, seconds: float) -> Iterator[int]:
    """Seeds. Quick: the same few each time. Long: new ones, until the time is over; the first is printed."""
    only = request.config.getoption("--fuzz-seed")
    if only is not None:
        return iter([only])
    if request.param == "quick":
        return iter(range(QUICK))
    first, end = random.SystemRandom().randrange(1 << 30), time.monotonic() + seconds
    print(f"seeds from {first} on")
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first))


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def draw_samples(items: list[pytest.Item], never: set[str]) -> None:
    """Of a test with the mark `sample(n)` n cases, always the same ones, run in the fast suite; all others are slow.

    A GPU runs all cases of the tests for it: whoever has the marks in `never` is no sample.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not (never | {"slow"}) & item.keywords.keys():
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, of_one_test in cases.items():
        (wanted,) = of_one_test[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        drawn = random.Random(name).sample(of_one_test, min(wanted, len(of_one_test)))
        for item in of_one_test:
            if item not in drawn:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb":  # among tests: the lesson that needs other libraries
            item.add_marker(pytest.mark.integration)
    on_gpu = config.getoption("--require-gpu") or has_hopper()
    draw_samples(items, {"gpu", "simulated"} if on_gpu else set())
    if on_gpu:
        few = [
            item
            for item in items
            if any(mark.args[0] > torch.cuda.device_count() for mark in item.iter_markers("gpus"))
        ]
        items[:] = [item for item in items if item not in few]
        config.hook.pytest_deselected(items=few)
        return
    skip, simulate = pytest.mark.skip(reason="needs a Hopper GPU"), config.getoption("--simulate")
    outside = pytest.mark.skip(reason="runs in the simulator, with --simulate")
    for item in items:
        if "gpu" in item.keywords and simulate:
            item.fixturenames.insert(0, "simulated")  # type: ignore[attr-defined]
        elif "gpu" in item.keywords:
            item.add_marker(skip)
        elif "simulated" in item.keywords and not simulate:
            item.add_marker(outside)


@pytest.hookimpl(tryfirst=True)  # before xdist, which would deal out tests one by one
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Workers take the list's halves and then from each other, so that a file's fixtures are seldom made twice."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_collection() -> None:
    """Nothing is garbage here, and to look for it took a quarter of the collection."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is there now stays to the end: tests that collect garbage need not look at it."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and item.config.getoption("--require-gpu") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under --require-gpu: {report.longrepr}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """When the GPU suite last ran, and what has changed since: CI has no GPU."""
    recorded = measure.RESULTS / "gpu_suite.json"
    if not recorded.is_file():
        return
    try:
        suite = measure.read_result(recorded.stem)
    except files.Damaged as error:
        terminalreporter.write_line(str(error))
        return
    where, when = suite["provenance"]["gpu"]["name"], suite["provenance"]["date"][:10]
    changed = changed_sources(suite["sources"])
    some = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    terminalreporter.write_line(
        f"The GPU suite: {suite['passed']} passed and {suite['failed']} failed on an {where} on {when}; source files "
        f"changed since: {some or 'none'}."
    )


@pytest.fixture(scope="session")
def same_bits():  # type: ignore[no-untyped-def]
    """`assert_same_bits(a, b, what)`."""
    return assert_same_bits


@pytest.fixture
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture
def same_runner() -> Iterator[None]:
    """Whatever a test does, the usual runner is back."""
    before = autograd.runner
    yield
    assert autograd.runner is before


@pytest.fixture
def simulated() -> Iterator[None]:
    """Tensors on "cuda" without a GPU: kernels run on the CPU. What needs streams or graphs is skipped."""

    def skip(*args: object, **kwargs: object) -> None:
        pytest.skip("streams, events and graphs are not simulated")

    with Simulator(cuda=True), contextlib.ExitStack() as stack:
        for name in ("Stream", "Event", "CUDAGraph", "graph", "current_stream", "set_sync_debug_mode"):
            stack.enter_context(mock.patch.object(torch.cuda, name, skip))
        yield


@pytest.fixture
def is_simulated(request: pytest.FixtureRequest) -> bool:
    """Whether a test for a GPU runs in the simulator."""
    return "simulated" in request.fixturenames


@pytest.fixture(name="device")
def where_kernels_run() -> torch.device:
    """Where kernels run: a Hopper GPU or, with `--simulate`, the simulator. For tests with the mark `gpu`."""
    return torch.device("cuda", 0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, wherever the tests run."""
    monkeypatch.setattr(device, "problems", lambda: ["torch sees no CUDA device."])
