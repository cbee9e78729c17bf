"""Attention of a sequence whose tokens ranks share has the words of one process, and refuses what it does not take."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared.tensor_ranks import BF16, compare, in_one, numbers, on_ranks

import reference as te
from reference.nn.core.context_parallel import take_context_group

F16 = torch.float16
COMM = "all_gather"


def cut(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """The tokens in the order of the ranks that have them: chunks 0 and 2t - 1, then 1 and 2t - 2, and so on."""
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[i] for rank in range(ranks) for i in (rank, 2 * ranks - 1 - rank)], dim)


def attention(
    group: Any, count: int, rank: int, ranks: int, dtype: torch.dtype, layout: str, heads: int, more: Any
) -> dict[str, torch.Tensor]:
    """A step; of one process the tokens in the order of `ranks` ranks."""
    torch.manual_seed(3)
    given: dict[str, Any] = {"cp_group": group, "cp_comm_type": COMM} if heads == 4 else {}
    layer = te.DotProductAttention(4, (16, 24), heads, qkv_format=layout, **given, **dict(more))
    if heads != 4:
        layer.set_context_parallel_group(group, None if group is None else list(range(count)), None, COMM)
    dim, size = (0, 256 * ranks) if layout == "sbhd" else (1, 256 * ranks)
    shape = (size, 2) if layout == "sbhd" else (2, size)

    def mine(seed: int, *rest: int) -> torch.Tensor:
        x = numbers(seed, *shape, *rest, scale=2.0**-2).to(dtype)
        return x if group is None else cut(x, dim, ranks).chunk(ranks, dim)[rank].clone()

    q, k, v = (
        mine(n, count, width).requires_grad_() for n, (count, width) in enumerate(((4, 16), (heads, 16), (heads, 24)))
    )
    if layout == "bshd":  # no gradient of what does not want one
        k = k.detach()
    y = layer(q, k, v)
    y.backward(mine(3, 96))
    found = {"y": y.detach()} | {
        name: x.grad for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True) if x.requires_grad
    }
    return {name: x if group is not None else cut(x, dim, ranks) for name, x in found.items()}  # type: ignore[arg-type]


def cases(ranks: int) -> dict[str, tuple[Any, ...]]:
    return {
        "causal": (attention, ranks, BF16, "sbhd", 2, ()),
        "no mask": (attention, ranks, F16, "bshd", 4, (("attn_mask_type", "no_mask"),)),
        "dropout": (attention, ranks, BF16, "sbhd", 2, (("attention_dropout", 0.3),)),
        "dropout without a mask": (
            *(attention, ranks, BF16, "bshd", 4),
            (("attention_dropout", 0.1), ("attn_mask_type", "no_mask")),
        ),
        "window": (attention, ranks, BF16, "sbhd", 4, (("window_size", (200, 0)), ("softmax_scale", 0.3))),
    }


def refused(group: Any, count: int, rank: int) -> dict[str, torch.Tensor]:
    x = numbers(0, 256, 1, 4, 16)

    def core(**more: Any) -> te.DotProductAttention:
        return te.DotProductAttention(4, 16, cp_group=group, cp_comm_type=COMM, **more)

    on = te.autocast(recipe=te.DelayedScaling(fp8_dpa=True))
    for call, sentence in (
        (lambda: te.DotProductAttention(4, 16, cp_group=group), "cp_comm_type='p2p' with a cp_group of 2 ranks is not"),
        (lambda: core(cp_global_ranks=[0]), r"cp_global_ranks=\[0\]; None and a list of the ranks of cp_group, 2"),
        (lambda: core(softmax_type="learnable")(x, x, x), "softmax_type='learnable' with a cp_group"),
        (lambda: core(return_max_logit=True)(x, x, x), "return_max_logit=True with a cp_group"),
        (lambda: core()(x, x, x, checkpoint_core_attention=True), "checkpoint_core_attention=True with a cp_group"),
        (lambda: core()(x, x, x, core_attention_bias_type="alibi"), "a bias with a cp_group"),
        (lambda: core()(x.float(), x.float(), x.float()), "torch.float32 with a cp_group"),
        (
            lambda: core(attn_mask_type="arbitrary")(x, x, x, x[None, None, :, 0, 0, :1] > 9),
            "'arbitrary' and window_size=",
        ),
        (
            lambda: core(attn_mask_type="no_mask", window_size=(4, 4))(x, x, x),
            r"window_size=\(4, 4\) with a cp_group of",
        ),
        (
            lambda: core()(x[:128], x[:128], x[:128]),
            "many queries as keys, a multiple of 256 on each rank, are accepted",
        ),
        (lambda: core()(x, x.repeat(2, 1, 1, 1), x.repeat(2, 1, 1, 1)), "as many queries as keys"),
        (
            lambda: core()(*[x.repeat(1 + rank, 1, 1, 1)] * 3),
            r"query_layer has shape \[256, 1, 4, 16\] on the group's rank 0 and \[512, 1, 4, 16\] on rank 1",
        ),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=f"^DotProductAttention: .*{sentence}"):
            call()
    with pytest.raises(NotImplementedError, match="fp8_dpa=True with a cp_group"), on:
        core()(x, x, x)
    return {}


def of_program(group: Any, count: int, rank: int, program: Any, *case: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = program(group, count, rank, *case)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_share_the_tokens_of_a_sequence(ranks: int, tmp_path: Path) -> None:
    given = cases(ranks)
    found = on_ranks(ranks, tmp_path, of_program, given | ({"refused": (refused,)} if ranks == 2 else {}))
    for name, whole in in_one(of_program, given).items():
        dim = 0 if given[name][3] == "sbhd" else 1
        compare(name, whole, [one[name] for one in found], lambda _, dim=dim: dim)  # type: ignore[misc]


def test_a_group_of_one_rank_is_none() -> None:
    layer = te.DotProductAttention(4, 16)
    take_context_group(layer, None, None, "p2p")
    assert layer.cp_group is None
