"""What holds for every layer's checkpoint: its keys never change, and a fresh layer goes on with the same bits."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from shared.bits import assert_same_bits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import reference as te

BF16 = torch.bfloat16
H = 32
RECIPES: dict[str, te.recipe.Recipe | None] = {
    "16 bits": None,
    "delayed": te.DelayedScaling(amax_history_len=4),
    "delayed, attention too": te.DelayedScaling(amax_history_len=3, fp8_dpa=True),
    "delayed, E4M3 with a margin": te.DelayedScaling(fp8_format=te.recipe.Format.E4M3, margin=2, amax_history_len=1),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
}


class Attention(torch.nn.Module):
    """Attention of x with itself."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.core = te.DotProductAttention(2, 16, **more)

    def forward(self, x: torch.Tensor) -> Any:
        return self.core(*[x.view(*x.shape[:-1], 2, 16)] * 3)


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = te.Embedding(50, H, dtype=BF16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.embedding(torch.arange(x.shape[0], dtype=torch.int64)) + x[:, 0]


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(H, H, params_dtype=BF16),
    "Linear of parts": lambda: te.Linear(H, H, params_dtype=BF16, parameters_split=("a", "b")),
    "LayerNormLinear": lambda: te.LayerNormLinear(H, H, params_dtype=BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(H, 64, params_dtype=BF16),
    "LayerNorm": lambda: te.LayerNorm(H, params_dtype=BF16),
    "RMSNorm": lambda: te.RMSNorm(H, params_dtype=BF16),
    "Embedding": Words,
    "DotProductAttention": Attention,
    "DotProductAttention, learnable": lambda: Attention(softmax_type="learnable"),
    "MultiheadAttention": lambda: te.MultiheadAttention(H, 2, params_dtype=BF16, qk_norm_type="RMSNorm"),
    "TransformerLayer": lambda: te.TransformerLayer(H, 64, 2, params_dtype=BF16),
    "TransformerLayer, fused": lambda: te.TransformerLayer(H, 64, 2, params_dtype=BF16, fuse_qkv_params=True),
    "ops.Linear": lambda: te.ops.Linear(H, H, dtype=BF16),
    "ops.BasicLinear": lambda: te.ops.BasicLinear(H, H, dtype=BF16),
    "ops.Bias": lambda: te.ops.Bias(H, dtype=BF16),
    "ops.LayerNorm": lambda: te.ops.LayerNorm(H, dtype=BF16),
    "ops.RMSNorm": lambda: te.ops.RMSNorm(H, dtype=BF16),
    "ops.Quantize": lambda: te.ops.Quantize(True, True),
    "ops.Dropout": lambda: te.ops.Dropout(0.5),
    "ops.SwiGLU": te.ops.SwiGLU,
    "ops.Sequential": lambda: te.ops.Sequential(
        te.ops.LayerNorm(H, dtype=BF16), te.ops.Quantize(True, False), te.ops.Linear(H, H, dtype=BF16)
    ),
}
NOT_OFFERED = {
    ("DotProductAttention, learnable", "delayed, attention too"),
    ("ops.Quantize", "block"),
    ("ops.Sequential", "block"),
}
CASES = [case for case in itertools.product(LAYERS, RECIPES) if case not in NOT_OFFERED]
CARRIED = [case for case in CASES if case[1] in ("delayed, attention too", "block")]
CARRIED += [("DotProductAttention, learnable", "delayed, E4M3 with a margin")]


def made(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return LAYERS[name]()


def step(module: Any, recipe: te.recipe.Recipe | None, n: int) -> list[torch.Tensor]:
    """y, x's gradient and the parameters' of a step."""
    x = torch.randn(16, 2, H, generator=torch.Generator().manual_seed(n)).to(BF16).requires_grad_()
    module.zero_grad()
    torch.manual_seed(n)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    (y.float() * (n + 1)).square().sum().backward()
    found = [y, x.grad, *(p.grad for p in module.parameters())]
    return [t.detach().clone() for t in found if t is not None]


def goes_on(trained: Any, fresh: Any, recipe: te.recipe.Recipe | None) -> None:
    for a, b in zip(step(trained, recipe, 7), step(fresh, recipe, 7), strict=True):
        assert_same_bits(a, b)


def load_by_api(there: Any, here: Any, folder: Path) -> None:
    set_model_state_dict(here, get_model_state_dict(there))


def load_whole(there: Any, here: Any, folder: Path) -> None:
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(here, get_model_state_dict(there, options=whole), options=whole)


def load_into_wrapped(there: Any, here: Any, folder: Path) -> None:
    """A wrapper's keys have a prefix: of these PyTorch asks for every one that a model can have."""
    wrap = DistributedDataParallel if any(p.requires_grad for p in here.parameters()) else torch.nn.Sequential
    set_model_state_dict(wrap(here), get_model_state_dict(wrap(there)))


def load_distributed(there: Any, here: Any, folder: Path) -> None:
    dcp.save({"model": get_model_state_dict(there)}, checkpoint_id=folder)
    state = {"model": get_model_state_dict(here)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(here, state["model"])


@pytest.fixture
def group() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.sample(54)
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_fresh_layer_has_the_keys_of_a_trained_one(name: str, recipe: str) -> None:
    fresh = made(name, 0)
    before = list(fresh.state_dict())
    step(fresh, RECIPES[recipe], 0)
    assert list(fresh.state_dict()) == before


@pytest.mark.sample(28)
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:TypedStorage", "ignore:.*_get_pg_default_device", "ignore:Multiple backends"
)
@pytest.mark.parametrize("how", [load_by_api, load_whole, load_into_wrapped, load_distributed])
@pytest.mark.parametrize(("name", "recipe"), CARRIED)
def test_a_fresh_layer_goes_on_with_the_same_bits(
    name: str, recipe: str, how: Any, group: None, tmp_path: Path
) -> None:
    trained, fresh = made(name, 0), made(name, 1)
    for i in range(2):
        step(trained, RECIPES[recipe], i)
    if list(trained.state_dict()):
        how(trained, fresh, tmp_path)
    goes_on(trained, fresh, RECIPES[recipe])


def test_every_public_layer_is_here() -> None:
    public = {
        name for name in te.__all__ if isinstance(x := getattr(te, name), type) and issubclass(x, torch.nn.Module)
    }
    assert public - {name.split(",")[0].split(" ")[0] for name in LAYERS} == {"RotaryPositionEmbedding"}
    for name in dir(te.ops):  # of the other operations none has a state
        if isinstance(x := getattr(te.ops, name), type) and f"ops.{name}" not in LAYERS:
            assert not hasattr(x, "fp8_weights") or not x.fp8_weights, name
            assert not getattr(x, "keeps_scales", False), name
