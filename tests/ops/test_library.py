"""The rules every op of namespace `twin` keeps: where it runs, no gradients, versions of what it mutates."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from reference.ops import library

ROOT = Path(__file__).parents[2]


def test_every_op_is_declared_whole() -> None:
    assert {"amax", "cast", "cast_transpose", "dbias", "gemm", "gemm_fp8", "scale_update"} <= set(vars(library.twin))
    for name in vars(library.twin):
        kernels = torch._C._dispatch_dump(f"twin::{name}")
        assert "CPU" in kernels, name
        assert "Autograd" in kernels, name
        assert "Meta" in kernels, name


def test_a_schema_is_the_signature() -> None:
    def op(
        x: torch.Tensor,
        bias: torch.Tensor | None,
        xs: list[torch.Tensor],
        columns: list[int],
        column: int,
        eps: float,
        backward: bool,
        kind: str,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    rest = "int[] columns, int column, float eps, bool backward, str kind, ScalarType dtype) -> (Tensor, Tensor)"
    assert library.schema(op) == f"(Tensor x, Tensor? bias, Tensor[] xs, {rest}"
    assert library.schema(op, ("xs", "bias")) == f"(Tensor x, Tensor(a!)? bias, Tensor(b!)[] xs, {rest}"
    with pytest.raises(ValueError, match=r"op: mutates names \['biases'\]; \['x', 'bias', .* are accepted"):
        library.schema(op, ("biases",))

    def one(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def nothing(x: torch.Tensor) -> None:
        raise NotImplementedError

    assert library.schema(one) == "(Tensor x) -> Tensor"
    assert library.schema(nothing, ("x",)) == "(Tensor(a!) x) -> ()"


def test_a_cuda_tensor_without_optimized_is_explained() -> None:
    sentence = library.no_implementation("cast", {torch.device("cuda:0")})
    assert sentence == (
        "twin::cast got tensors on cuda:0, and the CUDA kernels are not loaded: `import optimized` first "
        "(it needs a Hopper GPU and CuPy), or move the tensors to the CPU."
    )


def test_mixed_devices_are_explained() -> None:
    sentence = library.no_implementation("cast", {torch.device("cpu"), torch.device("cuda:1")})
    assert sentence.startswith("twin::cast got tensors on cpu, cuda:1; it runs on one device")


@pytest.mark.gpu
def test_a_cuda_tensor_without_optimized_is_refused_live() -> None:
    """In a process of its own: this one may have loaded the kernels."""
    program = (
        "import torch, reference as te\n"
        "layer = te.Linear(32, 16, device='cuda')\n"
        "with te.autocast():\n"
        "    layer(torch.ones(2, 32, device='cuda'))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "the CUDA kernels are not loaded: `import optimized` first" in run.stderr


def test_the_amax_history_gets_a_new_version() -> None:
    history = torch.zeros(2, 3)
    before = history._version
    torch.ops.twin.cast(torch.ones(2, 16), torch.ones(3), history, 1, torch.float8_e4m3fn)
    assert history._version > before
    assert history[0].tolist() == [0, 1, 0]


class Watch(TorchDispatchMode):
    """Notes the ops of namespace `twin` that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "twin":
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_way_past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take it where grad mode is off: same results and new versions; whoever looks at ops still sees them."""
    x, history = torch.ones(2, 16), torch.zeros(2, 3)
    arguments = (x, torch.ones(3), history, 1, torch.float8_e4m3fn)
    calls: list[str] = []
    cast = library._IMPLEMENTATIONS["CPU"]["cast"]
    monkeypatch.setitem(library._IMPLEMENTATIONS["CPU"], "cast", lambda *args: (calls.append("direct"), cast(*args))[1])
    with torch.no_grad():
        before = history._version
        q, scale_inv = library.twin.cast(*arguments)
        assert calls == ["direct"]
        assert history._version > before
        assert history[0].tolist() == [0, 1, 0]
        for ours, theirs in zip((q, scale_inv), torch.ops.twin.cast(*arguments), strict=True):
            assert torch.equal(ours.float(), theirs.float())
        with Watch() as watch:
            library.twin.cast(*arguments)
        assert watch.seen == ["twin.cast.default"]
        assert library.twin.dbias(torch.empty(2, 16, device="meta")).is_meta
        library.twin.cast(x.as_subclass(Subclass), *arguments[1:])
        assert calls == ["direct"]
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        library.twin.dbias(x.requires_grad_())


class Subclass(torch.Tensor):
    """One that wants to see calls."""


def test_gradients_are_refused_only_where_they_would_be_recorded() -> None:
    x = torch.ones(2, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="twin::dbias has no derivative of its own: call it inside"):
        torch.ops.twin.dbias(x)
    with torch.no_grad():
        assert torch.ops.twin.dbias(x).tolist() == [2.0] * 16
    with torch.inference_mode():
        torch.ops.twin.amax(torch.ones(2, 16), torch.zeros(2, 3), 0)


def test_optimized_offers_every_name_of_reference() -> None:
    import optimized

    assert set(optimized.__all__) == set(reference.__all__)
    assert optimized.Linear.default_device == "cuda"
    assert issubclass(optimized.Linear, reference.Linear)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is what this is about")
def test_optimized_without_a_gpu_is_a_sentence() -> None:
    import optimized

    with pytest.raises(RuntimeError, match="torch sees no CUDA device; Twin Engine's kernels need a Hopper GPU"):
        optimized.Linear(16, 16)
    assert optimized.Linear(16, 16, device="cpu").weight.device.type == "cpu"
