"""Every kernel, compiled for sm_90a on a machine without a GPU: no spill, no warning, and the instructions meant."""

import importlib
import os
import pkgutil
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from shared import ptxas
from shared.sass import disassembly

import optimized.bench
import optimized.ops
from optimized.cuda import compiler
from optimized.ops.norms import norm

Configuration = tuple[str, dict[str, int | str]]


def configurations() -> Iterator[Configuration]:
    """Every configuration that an op or a benchmark launches."""
    for module in optimized.ops.MODULES:
        yield from module.CONFIGURATIONS
    for entry in pkgutil.walk_packages(optimized.bench.__path__, f"{optimized.bench.__name__}."):
        module = importlib.import_module(entry.name)
        yield from getattr(module, "CONFIGURATIONS", ())


ALL = list(configurations())
# They use all registers there are, and a dozen more.
SPILLING = [
    (kernel, defines)
    for kernel, defines in ALL
    if (kernel in ("attention", "attention_backward") and (defines["DROPOUT"], defines["D_CHUNKS"]) == (1, 1))
    or (kernel in ("attention", "attention_fp8") and defines["LENGTHS"])
    or (kernel == "attention_wide" and defines["PACKED"])
    or (kernel in ("attention", "attention_wide") and "SEGMENT" in defines)
    or (kernel == "attention_backward" and defines["LENGTHS"] and (defines["HEADS_APART"] or defines["PACKED"]))
]


# LayerNorm of fp16 in clusters; of bf16 nothing spills.
TWO_REGISTERS = [
    (kernel, defines)
    for kernel, defines in ALL
    if kernel == "norm_cast_transpose" and (defines["WIDE"], defines["KIND"], defines["TILE_WARPS"]) == (2, 0, 22)
]


def sampled(found: list[Configuration]) -> list[Any]:
    """Of each kernel the first, the middle and the last configuration; those between, which take minutes, are slow."""
    places: dict[str, list[int]] = {}
    for place, (kernel, _) in enumerate(found):
        places.setdefault(kernel, []).append(place)
    often = {several[n] for several in places.values() for n in (0, len(several) // 2, -1)}
    return [one if place in often else pytest.param(one, marks=pytest.mark.slow) for place, one in enumerate(found)]


def label(configuration: Configuration) -> str:
    kernel, defines = configuration
    return "-".join([kernel, *(f"{name}={value}" for name, value in defines.items())])


class Builds:
    """Each of them, compiled once, by label; NVRTC runs without the interpreter's lock.

    Those that tests will ask for (`wanted`) compile side by side, except in a worker of pytest-xdist: the other workers
    compile theirs at the same time.
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._configurations = {label(one): one for one in ALL}
        self._futures: dict[str, Future[compiler.Build]] = {}
        for name in wanted if "PYTEST_XDIST_WORKER" not in os.environ else ():
            self._begin(name)

    def _begin(self, name: str) -> None:
        self._futures[name] = self._pool.submit(compiler.build, *self._configurations[name])

    def __getitem__(self, name: str) -> compiler.Build:
        if name not in self._futures:
            self._begin(name)
        return self._futures[name].result()

    def named(self, start: str) -> list[str]:
        return [name for name in self._configurations if name.startswith(start)]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest) -> Iterator[Builds]:
    given = (getattr(item, "callspec", None) for item in request.session.items)
    found = Builds(label(one.params["configuration"]) for one in given if one and "configuration" in one.params)
    yield found
    found.close()


def test_every_kernel_file_has_a_configuration() -> None:
    ladder = {f"ladder/{path.stem}" for path in compiler.KERNELS.glob("ladder/*.cu")}
    assert {*compiler.names(), *ladder} == {kernel for kernel, _ in ALL}
    assert len(set(compiler.names())) == len(compiler.names()), "a kernel is found by its name, whatever its family"


def test_every_op_has_its_kernels() -> None:
    for module in optimized.ops.MODULES:
        assert module.CONFIGURATIONS, module.__name__


@pytest.mark.parametrize(
    "configuration", sampled([one for one in ALL if one not in [*SPILLING, *TWO_REGISTERS]]), ids=label
)
def test_it_compiles_without_spill_or_warning(configuration: Configuration, builds) -> None:  # type: ignore[no-untyped-def]
    build = builds[label(configuration)]
    assert ptxas.complaints(build.log) == []
    assert ptxas.usage(build.log), build.log
    for usage in ptxas.usage(build.log):
        assert usage.spill_stores == usage.spill_loads == 0


@pytest.mark.parametrize("warps", norm.ROW_WARPS)
def test_rows_of_a_norm_stay_in_registers(warps: int, builds) -> None:  # type: ignore[no-untyped-def]
    """However many warps have one: LayerNorm of bf16, which needs the most."""
    build = builds[builds.named(f"norm-WIDE=1-KIND=0-ROW_WARPS={warps}-")[0]]
    assert [(one.stack, one.spill_stores) for one in ptxas.usage(build.log)] == [(0, 0)]


@pytest.mark.parametrize("configuration", sampled(TWO_REGISTERS), ids=label)
def test_a_long_norm_of_fp16_spills_two_registers_at_most(configuration: Configuration, builds) -> None:  # type: ignore[no-untyped-def]
    build = builds[label(configuration)]
    assert max(max(usage.spill_stores, usage.spill_loads) for usage in ptxas.usage(build.log)) <= 8
    assert not [line for line in ptxas.complaints(build.log) if "spill" not in line and "stack" not in line]


SPILLED = 48  # bytes, by heads of 64 channels with dropout: docs/log/attention.md
WITH_LENGTHS = 96  # of the same, and of other heads with a bias
APART = 124  # of the backward's works that go on from sums, with both; 4 with lengths alone
SEGMENTED = (
    28  # more: O so far is in memory, and where that is; outside of the loop along keys (wide heads; 16 of others)
)
PACKED = 28  # more: the producer knows where sequences begin, and the consumers clear what lies behind them


@pytest.mark.parametrize("configuration", sampled(SPILLING), ids=label)
def test_what_spills_a_dozen_registers_spills_no_more(configuration: Configuration, builds) -> None:  # type: ignore[no-untyped-def]
    build = builds[label(configuration)]
    macros = configuration[1]
    most = APART if macros.get("HEADS_APART") else WITH_LENGTHS if macros["LENGTHS"] else SPILLED
    most += (PACKED if macros["PACKED"] else 0) + (SEGMENTED if macros.get("SEGMENT") else 0)
    assert max(max(usage.spill_stores, usage.spill_loads) for usage in ptxas.usage(build.log)) <= most
    assert not [line for line in ptxas.complaints(build.log) if "spill" not in line and "stack" not in line]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kernel", ["attention", "attention_backward", "attention_fp8", "attention_wide", "attention_backward_wide"]
)
def test_lanes_of_attention_stay_together(kernel: str, builds) -> None:  # type: ignore[no-untyped-def]
    """If ptxas takes lanes for apart, addresses leave the uniform registers: the backward takes a tenth longer."""
    found = builds.named(f"{kernel}-")
    for name in (found[0], found[-1]):
        assert "COLLECTIVE" not in disassembly(builds[name].cubin), name


def test_the_fp8_gemm_runs_on_the_tensor_cores_and_the_copy_engine(builds) -> None:  # type: ignore[no-untyped-def]
    found = builds.named("gemm_fp8")
    assert found
    for name in found[:2]:
        text = disassembly(builds[name].cubin)
        assert "QGMMA" in text, name
        assert "UTMALDG" in text, name


def test_the_16_bit_gemm_runs_on_the_tensor_cores(builds) -> None:  # type: ignore[no-untyped-def]
    name = builds.named("gemm-")[0]
    text = disassembly(builds[name].cubin)
    assert "HGMMA" in text
    assert "UTMALDG" in text


def test_the_casts_convert_two_values_at_a_time_and_load_16_bytes(builds) -> None:  # type: ignore[no-untyped-def]
    for name in ("cast-WIDE=1-FP8=0", "cast_transpose-WIDE=1-FP8=0-DBIAS=0"):
        text = disassembly(builds[name].cubin)
        assert re.search(r"F2FP\S*E4M3\S*", text), name
        assert re.search(r"LDG\S*\.128", text), name
        # Nothing goes through local memory.
        assert not re.search(r"\b(LDL|STL)\b", text), name


def test_no_arithmetic_is_approximate_or_flushed() -> None:
    # The flags are part of the contract with the CPU.
    assert {"--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"} <= set(compiler.FLAGS)
    for path in sorted(Path(compiler.KERNELS).rglob("*.cu*")):
        if path.stem in ("elementary", "approx"):
            continue  # whose words were compared with the reference, all of them (docs/elementary.md)
        text = path.read_text("utf-8")
        for forbidden in ("__expf", "__fdividef", "rsqrtf(", "tanh.approx", "ex2.approx", "rcp.approx", ".ftz"):
            assert forbidden not in text, f"{forbidden} in {path.name}"
