"""Layers whose tokens two GPUs share over NCCL have the words of one process, which is on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.device_ranks import start
from shared.processes import free_port, ranks

import reference as te

BF16, F16 = torch.bfloat16, torch.float16
RANKS, EACH, HIDDEN = 2, 256, 64
RECIPES: dict[str, Any] = {
    "bf16": lambda: None,
    "delayed": lambda: te.DelayedScaling(amax_history_len=2),
    "current": te.recipe.Float8CurrentScaling,
    "blocks": te.recipe.Float8BlockScaling,
}
CASES = [
    *(("layer", recipe) for recipe in RECIPES),
    ("attention", "current"),
    ("grouped", "delayed"),
    ("wide heads", "bf16"),
    ("halves", "blocks"),
]


def layer_of(kind: str, device: str) -> Any:
    more: dict[str, Any] = {"params_dtype": BF16, "device": device}
    if kind == "attention":
        return te.MultiheadAttention(
            HIDDEN, 2, attention_dropout=0.1, qk_norm_type="RMSNorm", input_layernorm=True, **more
        )
    if kind == "grouped":
        return te.MultiheadAttention(HIDDEN, 4, num_gqa_groups=2, attention_dropout=0.1, **more)
    if kind == "wide heads":
        more |= {"params_dtype": F16}
        return te.MultiheadAttention(HIDDEN, 2, kv_channels=160, attention_dropout=0.1, **more)
    if kind == "halves":
        more |= {"parallel_attention_mlp": True, "normalization": "RMSNorm", "activation": "swiglu"}
    return te.TransformerLayer(HIDDEN, 128, 2, hidden_dropout=0.1, attention_dropout=0.1, **more)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """With large and small numbers in different places, so that ranks have amaxes of their own."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * 2.0 ** torch.randint(-9, 4, (shape[0], 1, 1), generator=g)


def program(kind: str, recipe: str, device: str, group: Any) -> dict[str, torch.Tensor]:
    """Three steps: this rank's results, and `whole` ones, which each rank has."""
    torch.manual_seed(5)
    layer, by = layer_of(kind, "cpu").to(device), RECIPES[recipe]()
    te.parallel.share_tokens(layer, group)
    dtype = F16 if kind == "wide heads" else BF16
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        given, grad = (
            te.parallel.tokens_of_rank(numbers(10 * n + step, RANKS * EACH, 2, HIDDEN), group).to(device, dtype)
            for n in range(2)
        )
        given.requires_grad_()
        with te.autocast(enabled=by is not None, recipe=by):
            y = layer(given)
        y.backward(grad)
        found |= {f"y {step}": y.detach().cpu(), f"dx {step}": given.grad.cpu()}  # type: ignore[union-attr]
    found |= {f"whole {name}": p.grad.cpu() for name, p in layer.named_parameters()}
    for name, module in layer.named_modules():
        for key, meta in getattr(module, "fp8_meta", {}).items():
            if hasattr(meta, "scale") and recipe == "delayed":
                found |= {f"whole {name} {key}": meta.scale.cpu(), f"whole {name} {key} 2": meta.amax_history.cpu()}
    return found


def worker(rank: int, port: int, device: str, folder: str) -> None:
    start(rank, RANKS, port, device)
    where = f"cuda:{rank}" if device == "cuda" else device
    torch.save({case: program(*case, where, dist.group.WORLD) for case in CASES}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def mine(x: torch.Tensor, rank: int) -> torch.Tensor:
    chunks = x.chunk(2 * RANKS)
    return torch.cat([chunks[rank], chunks[2 * RANKS - 1 - rank]])


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.gpus(RANKS)]),
    ],
)
def test_two_gpus_share_the_tokens_of_layers(device: str, tmp_path: Path) -> None:
    ranks(worker, (free_port(), device, str(tmp_path)), RANKS)
    of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for case in CASES:
        for name, x in program(*case, "cpu", None).items():
            for rank in range(RANKS):
                expected = x if name.startswith("whole") else mine(x, rank)
                assert_same_bits(expected, of_ranks[rank][case][name], f"{case}, rank {rank}, {name}")
