"""Kernels compiled ahead: what a dry pass collects is what a pair launches, it leaves nothing, and threads share it."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.dry_gpu import DryGpu

import optimized
import reference as te
from optimized.cuda import compiler, launch, precompile
from reference.memory import recompute
from reference.nn.core import autograd
from reference.nn.core.context import BlockContext
from reference.nn.core.dropout import Generator
from reference.nn.layers import linear
from reference.nn.transformer import halves
from reference.support import notice

BF16 = torch.bfloat16
SMALL_KERNELS: list[precompile.Configuration] = [
    ("norm_total", {"WIDE": 1}),
    ("amax", {"WIDE": 1}),
    ("amax", {"WIDE": 2}),
]


@pytest.fixture
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_unstored", {})
    monkeypatch.setattr(compiler, "compiled", [])


def transformer(**options: Any) -> Any:
    return optimized.TransformerLayer(64, 128, 4, params_dtype=BF16, **options)


def step(layer: Any, tokens: int = 40, fp8: bool = True, enabled: bool = True, **given: Any) -> None:
    x = torch.empty(tokens, 2, 64, dtype=BF16, device="cuda").requires_grad_()
    with te.autocast(enabled=fp8), torch.set_grad_enabled(enabled):
        y = layer(x, **given)
    if enabled:
        y.backward(torch.empty_like(y))


def launched(gpu: DryGpu) -> set[launch.Kernel]:
    """By pairs of functions: the scales' update is nobody's."""
    return {one.kernel for one in gpu.launches if one.kernel.kernel != "scale_update"}


# --- what is collected ------------------------------------------------------------------------------------

LAYERS: dict[str, Callable[[], Any]] = {
    "layer": transformer,
    "dropout": lambda: transformer(hidden_dropout=0.1, attention_dropout=0.1),
    "no dropout": lambda: transformer(hidden_dropout=0.0, attention_dropout=0.0),
    "cudnn": lambda: transformer(attention_backend="cudnn"),
    "one qkv": lambda: transformer(fuse_qkv_params=True),
    "groups": lambda: transformer(num_gqa_groups=2),
    "llama": lambda: transformer(normalization="RMSNorm", activation="swiglu", bias=False),
    "Linear": lambda: optimized.Linear(64, 32, params_dtype=BF16),
    "LayerNormMLP": lambda: optimized.LayerNormMLP(64, 128, params_dtype=BF16),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two pairs", "one pair"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_first_dry_pass_collects_what_a_step_launches(
    kind: str, fp8: bool, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "SMALL", small)
    with DryGpu() as gpu:
        gpu.tapes()
        step(LAYERS[kind](), fp8=fp8)
        assert gpu.collected[0] == launched(gpu)
        assert gpu.collected[0] == set().union(*gpu.collected)


def test_without_gradients_no_backward_is_collected() -> None:
    with DryGpu() as gpu:
        gpu.tapes()
        step(transformer(), enabled=False)
        assert gpu.collected[0] == launched(gpu)
        assert not any("backward" in kernel.kernel for kernel in gpu.collected[0])


def test_frozen_parameters_want_no_gradient() -> None:
    with DryGpu() as gpu:
        gpu.tapes()
        layer = transformer()
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("norm" in name and name.endswith("norm_weight"))
        step(layer)
        assert gpu.collected[0] == launched(gpu)


def test_one_dry_pass_for_each_shape() -> None:
    with DryGpu() as gpu:
        gpu.tapes()
        layer = transformer()
        for tokens in (40, 40, 24, 40, 24):
            step(layer, tokens)
        assert len(gpu.collected) == 2


@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two pairs", "one pair"])
def test_microbatches(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never played, or not at first; a later one reads weights that the first has cast."""
    monkeypatch.setattr(halves, "SMALL", small)
    with DryGpu() as gpu:
        gpu.tapes()
        layer = transformer()
        for first in (True, False, False):
            step(layer, is_first_microbatch=first)
        assert gpu.collected[0] == launched(gpu)
        assert len(gpu.collected) == (2 if small else 4)


def masked(layer: Any) -> None:
    step(layer, attention_mask=torch.zeros(2, 1, 1, 40, dtype=torch.bool, device="cuda"), self_attn_mask_type="padding")


def adding(layer: Any, **given: Any) -> None:
    for parameter in layer.parameters():
        parameter.main_grad = torch.empty(parameter.shape, dtype=torch.float32, device="cuda")
    step(layer, **given)


def rotated(layer: Any) -> None:
    step(layer, rotary_pos_emb=torch.empty(40, 1, 1, 16, device="cuda"))


def calibrated(layer: Any) -> None:
    with te.autocast(enabled=False, calibrating=True):
        y = layer(torch.empty(40, 2, 64, dtype=BF16, device="cuda").requires_grad_())
    y.backward(torch.empty_like(y))


@pytest.mark.sample(3)
@pytest.mark.parametrize("run", [masked, adding, rotated, calibrated])
@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two pairs", "one pair"])
def test_calls_that_are_not_played(run: Any, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "SMALL", small)
    with DryGpu() as gpu:
        gpu.tapes()
        layer = transformer(fuse_wgrad_accumulation=run is adding, fuse_qkv_params=True)
        run(layer)
        assert set().union(*gpu.collected) == launched(gpu)
        before = len(gpu.collected)
        run(layer)
        assert len(gpu.collected) == before


def test_a_checkpointed_layer_notes_its_scales_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its attention does not look ahead to its MLP, which would be a second call."""
    monkeypatch.setattr(halves, "SMALL", 0)
    noted: list[Any] = []
    recalled = recompute.recalled
    monkeypatch.setattr(recompute, "recalled", lambda module, scale: (noted.append(module), recalled(module, scale))[1])
    with DryGpu() as gpu:
        gpu.tapes()
        with te.autocast():
            te.checkpoint(transformer(), torch.empty(40, 2, 64, dtype=BF16, device="cuda").requires_grad_())
        assert launched(gpu) < set().union(*gpu.collected)  # of which the rest is backward's
        assert len(gpu.collected) == 2
    layers = [module for module in noted if not isinstance(module, Generator)]
    assert len(layers) == len(set(layers)) == 3


class Other(torch.Tensor):
    """What a sharded parameter is: a tensor that sees what is done with it."""


def test_calls_that_are_not_played_are_told_apart_by_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "MOST_PLAIN", 2)
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(precompile, "compile_pair", lambda *given: seen.append(given))
    with DryGpu() as gpu:
        gpu.tapes()
        monkeypatch.setattr(precompile._Passes, "plain", set())
        plan, context = linear.Plan(BF16, (True, True), ()), BlockContext()
        x, w, v = (torch.empty(n, 8, dtype=BF16, device="cuda") for n in (4, 5, 6))
        for tensors in ((x, w), (x, w), (x, v), (x, w), (x, None), (x, w)):
            precompile.compile_plain(step, step, plan, context, tensors)
        assert [given[4][1] for given in seen] == [w, v, None, w]
        precompile.compile_plain(step, step, plan, context, (None, w))
        precompile.compile_plain(step, step, plan, context, (x, w.as_subclass(Other)))
    precompile.compile_plain(step, step, plan, context, (torch.empty(4, 8), w))
    assert len(seen) == 4


# --- what a dry pass leaves: nothing ------------------------------------------------------------------------


def state_of(layer: Any) -> list[torch.Tensor]:
    metas = [m.fp8_meta.get(key) for m in layer.modules() if hasattr(m, "fp8_meta") for key in m.fp8_meta]
    tensors = [x for meta in metas if hasattr(meta, "scale") for x in (meta.scale, meta.amax_history)]
    tensors += [m.generator.state for m in layer.modules() if hasattr(m, "generator")]
    return tensors + [p.main_grad for p in layer.parameters() if hasattr(p, "main_grad")]


def cached(layer: Any) -> list[tuple[str, int]]:
    caches = [m._store.casts for m in layer.modules() if hasattr(m, "_store")]
    return [(name, id(one)) for cache in caches for name, one in cache.items()]


@pytest.mark.sample(8)
@pytest.mark.parametrize("adds", [False, True], ids=["returned", "added"])
@pytest.mark.parametrize("first", [None, True, False])
@pytest.mark.parametrize("backend", ["exact", "cudnn"])
@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two pairs", "one pair"])
def test_a_dry_pass_launches_and_changes_nothing(
    small: int, backend: str, first: bool | None, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "SMALL", small)
    looks: list[tuple[Any, ...]] = []
    collect = precompile.collect

    def look() -> None:
        versions = [x._version for x in state_of(layer)]
        looks.append((versions, cached(layer), len(gpu.launches), torch.get_rng_state().tolist()))

    def watched(*given: Any) -> None:
        look()
        collect(*given)
        look()

    monkeypatch.setattr(precompile, "collect", watched)
    with DryGpu() as gpu:
        gpu.tapes()
        options: Any = {"attention_backend": backend, "fuse_wgrad_accumulation": adds, "fuse_qkv_params": True}
        layer = transformer(hidden_dropout=0.1, attention_dropout=0.1, **options)
        (adding if adds else step)(layer, is_first_microbatch=first)
    assert len(looks) == (2 if small else 6)
    assert looks[0][0]
    assert looks[::2] == looks[1::2]
    assert launch._thread.collected is None


def test_of_pytorchs_ops_only_views_run_dry() -> None:
    x, generator = torch.arange(6.0).view(2, 3), torch.get_rng_state()
    before = x.clone()
    with precompile.Dry():
        assert x.t().data_ptr() == x.data_ptr()
        assert x.zero_() is x
        assert x[0].copy_(x[1]).data_ptr() == x.data_ptr()
        out = torch.empty(4, 3)
        assert torch.cat([x, x], out=out) is out
        made = (torch.rand(2), x.clone(), torch.empty(3, dtype=torch.int64), torch.cat([x, x]), x.to(BF16), x.max(0)[1])
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [(y.shape, y.dtype, y.device.type) for y in made] == [
        ((2,), torch.float32, "cpu"),
        ((2, 3), torch.float32, "cpu"),
        ((3,), torch.int64, "cpu"),
        ((4, 3), torch.float32, "cpu"),
        ((2, 3), BF16, "cpu"),
        ((3,), torch.int64, "cpu"),
    ]


def test_a_dry_pass_that_fails_leaves_the_word_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(precompile, "collect", fails)
    with DryGpu() as gpu:
        gpu.tapes()
        step(transformer())
        assert gpu.collected == [set()]
        assert launched(gpu)


def test_dry_passes_end_where_everything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "MOST_IDLE", 3)
    monkeypatch.setattr(compiler, "compiled", [])
    with DryGpu() as gpu:
        gpu.tapes()
        gpu.missing = 0
        layer = optimized.Linear(64, 64, params_dtype=BF16)
        for tokens in range(1, 8):
            step(layer, tokens)
        assert len(gpu.collected) == 3
        compiler.compiled.append("by a launch")
        step(layer, 10)
        assert len(gpu.collected) == 4


def test_plain_runs_have_no_use_for_the_other_function() -> None:
    x = torch.ones(1)
    out, saved, _ = autograd.Runner().forward(lambda plan, context, x: (x, (x,)), None, BlockContext(), (x,), None)  # type: ignore[arg-type]
    assert out is saved[0] is x


# --- compiling side by side -----------------------------------------------------------------------------------


def kernels(*configurations: precompile.Configuration) -> list[launch.Kernel]:
    return [launch.Kernel(kernel, "f", dict(macros), 0, -1) for kernel, macros in configurations]


def test_what_is_missing_is_compiled_once(own_cache: None) -> None:
    assert precompile.missing(SMALL_KERNELS) == SMALL_KERNELS
    assert precompile.compile_missing(kernels(*SMALL_KERNELS, *SMALL_KERNELS)) == 3
    assert len(compiler.compiled) == 3
    assert precompile.missing(SMALL_KERNELS) == []
    assert precompile.compile_missing(kernels(*SMALL_KERNELS)) == 0
    assert len(compiler.compiled) == 3


def test_one_kernel_is_left_to_its_launch_and_a_loaded_one_is_not_asked_for(own_cache: None) -> None:
    assert precompile.compile_missing(kernels(*SMALL_KERNELS[:1])) == 1
    assert compiler.compiled == []
    loaded = kernels(*SMALL_KERNELS)
    for one in loaded:
        one._handles[0] = 1
    assert precompile.compile_missing(loaded) == 0


def test_what_cannot_be_stored_is_not_missing(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.files, "keep", lambda *given: False)
    precompile.build(SMALL_KERNELS, 2, lambda: None)
    assert precompile.missing(SMALL_KERNELS) == []


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """NVRTC in a moment: the kernels that it was asked for."""
    asked: list[str] = []

    def build(kernel: str, macros: Any, *, announced: bool) -> None:
        assert not announced
        asked.append(kernel)
        time.sleep(0.001)  # so that a refusal is seen before a long list is done
        if kernel == "bad":
            raise compiler.CompileError("bad does not compile")

    monkeypatch.setattr(compiler, "build", build)
    monkeypatch.setattr(compiler, "is_built", lambda kernel, macros: kernel in asked)
    return asked


def test_they_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3, timeout=30)  # each waits until three run at once
    monkeypatch.setattr(compiler, "build", lambda *given, **more: together.wait())
    done: list[int] = []
    precompile.build([(str(i), {}) for i in range(6)], 3, lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()] * 6


def test_a_refusal_is_raised_and_the_rest_is_not_begun(compilations: list[str]) -> None:
    with pytest.raises(compiler.CompileError, match="bad does not compile"):
        precompile.build([("bad", {}), *[(str(i), {}) for i in range(500)]], 1, lambda: None)
    assert len(compilations) < 500


def test_the_longest_begin_first(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "cores", lambda: 1)
    precompile.compile_missing(
        kernels(("cast", {}), ("gemm_fp8", {}), ("amax", {}), ("gemm_fp8_fused", {}), ("gemm", {}))
    )
    assert compilations == ["gemm_fp8_fused", "gemm", "gemm_fp8", "cast", "amax"]


@pytest.mark.parametrize("terminal", [False, True])
def test_one_line_says_what_takes_long(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = threading.Event()
    monkeypatch.setattr(notice, "PATIENCE", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    flush = sys.stderr.flush
    monkeypatch.setattr(sys.stderr, "flush", lambda: (flush(), shown.set()))
    with precompile._announced(12, 4) as done:
        assert shown.wait(30)
        done()
        done()
    text = "twin-engine: compiling 12 kernels for sm_90a, 4 at a time (once; they are cached)"
    err = capsys.readouterr().err
    if terminal:
        assert err == f"\r{text}: 0 done\r{text}: 1 done\r{text}: 2 done\n"
    else:
        assert err == f"{text} ...\n"


def test_what_takes_a_moment_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with precompile._announced(12, 4) as done:
        done()
    assert capsys.readouterr().err == ""


def test_cores_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile.os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert precompile.cores() == 3
    monkeypatch.delattr(precompile.os, "sched_getaffinity")
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: None)
    assert precompile.cores() == 1
