"""Layers whose tokens ranks share have the words of one process, in forward and backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from shared.tensor_ranks import BF16, RECIPES, compare, in_one, numbers, on_ranks

import reference as te


def cut(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """The tokens in the order of the ranks that have them: chunks 0 and 2t - 1, then 1 and 2t - 2, and so on."""
    chunks = x.chunk(2 * ranks)
    return torch.cat([chunks[i] for rank in range(ranks) for i in (rank, 2 * ranks - 1 - rank)])


def layer_of(kind: str) -> Any:
    common: dict[str, Any] = {"params_dtype": BF16}
    if kind == "attention":
        return te.MultiheadAttention(
            32, 2, attention_dropout=0.1, qk_norm_type="RMSNorm", input_layernorm=True, **common
        )
    if kind == "layer":
        return te.TransformerLayer(32, 64, 2, hidden_dropout=0.1, attention_dropout=0.1, **common)
    if kind == "parallel halves":
        more: dict[str, Any] = {"parallel_attention_mlp": True, "normalization": "RMSNorm", "activation": "swiglu"}
        return te.TransformerLayer(32, 128, 2, num_gqa_groups=1, hidden_dropout=0.1, attention_dropout=0.0, **more)
    if kind == "accumulated":
        return te.TransformerLayer(
            32,
            128,
            2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,
            output_layernorm=True,
            fuse_wgrad_accumulation=True,
            **common,
        )
    return torch.nn.Sequential(te.LayerNorm(32, **common), te.Linear(32, 48, **common), te.RMSNorm(48, **common))


def program(group: Any, count: int, rank: int, ranks: int, kind: str, recipe: str) -> dict[str, torch.Tensor]:
    """Two microbatches and a third after the scales' update; of one process the tokens in the order of the ranks."""
    torch.manual_seed(5)
    layer = layer_of(kind)
    if kind in ("attention", "layer", "accumulated"):
        layer.set_context_parallel_group(group, None if group is None else list(range(count)), None, "all_gather")
    else:
        te.parallel.share_tokens(layer, group)
    for p in layer.parameters():
        p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
    angles = numbers(9, 256 * ranks + 8, 1, 1, 16).float()
    more = {"rotary_pos_emb": angles} if "halves" in kind or kind == "attention" else {}
    found: dict[str, torch.Tensor] = {}

    def mine(seed: int, width: int) -> torch.Tensor:
        x = numbers(seed, 256 * ranks, 2, width, scale=2.0**-3)
        return te.parallel.tokens_of_rank(x, group)

    dtype = layer.proj.weight.dtype if kind == "attention" else BF16
    for step in range(3):
        x = mine(step, 32).to(dtype).requires_grad_()
        with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]), torch.autocast("cpu", BF16):
            y = layer(x, **more)
        y.backward(mine(10 + step, y.shape[-1]).to(y.dtype))
        assert x.grad is not None
        found |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
    if group is None:
        found = {name: cut(x, ranks) for name, x in found.items()}
    for name, p in layer.named_parameters():
        found[f"whole {name}"] = p.main_grad if p.grad is None else p.grad  # type: ignore[attr-defined]
    for name, module in layer.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            meta = getattr(module, "fp8_meta", {}).get(key)
            if meta is not None and recipe == "delayed":
                found |= {f"whole {name} {key} scale": meta.scale, f"whole {name} {key}": meta.amax_history}
    return found


def model(group: Any, count: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """From numbers to the mean loss, as a GPT."""
    torch.manual_seed(5)
    table, norm, head = te.Embedding(40, 32), te.LayerNorm(32), te.Linear(32, 40)
    te.parallel.share_tokens(torch.nn.ModuleList([table, norm, head]), group)
    ids = torch.randint(40, (256 * ranks + 1, 2), generator=torch.Generator().manual_seed(3))
    given, target = (te.parallel.tokens_of_rank(x, group) for x in (ids[:-1], ids[1:]))
    found = {}
    for reduction in ("mean", "sum"):
        for p in (table.weight, norm.weight, norm.bias, head.weight, head.bias):
            p.grad = None
        with torch.autocast("cpu", BF16):
            logits = head(norm(table(given).to(BF16)))
        loss = te.cross_entropy(logits, target, ignore_index=7, reduction=reduction, cp_group=group)
        loss.backward()
        found |= {f"whole {reduction}": loss.detach(), f"whole {reduction} E": table.weight.grad}
        found |= {
            f"whole {reduction} {n}": p.grad for n, p in enumerate((norm.weight, norm.bias, head.weight, head.bias))
        }
    return found  # type: ignore[return-value]


def refused(group: Any, count: int, rank: int) -> dict[str, torch.Tensor]:
    def given(layer: Any, comm: str = "all_gather") -> None:
        layer.set_context_parallel_group(group, [0, 1], None, comm)

    def layer(**more: Any) -> te.TransformerLayer:
        return te.TransformerLayer(32, 64, 2, **more)

    for call, sentence in (
        (lambda: given(layer(), "p2p"), "TransformerLayer: cp_comm_type='p2p' with a cp_group of 2 ranks is not"),
        (lambda: given(layer(attn_input_format="bshd")), "TransformerLayer: attn_input_format='bshd' with a cp_group"),
        (lambda: given(layer(drop_path_rate=0.1)), "TransformerLayer: drop_path_rate=0.1 with a cp_group of 2"),
        (
            lambda: given(te.MultiheadAttention(32, 2, qkv_format="thd")),
            "MultiheadAttention: qkv_format='thd' with a cp_group of 2 ranks",
        ),
    ):
        with pytest.raises(NotImplementedError, match=f"^{sentence}"):
            call()
    for operation in (te.ops.Bias(32), te.ops.Dropout(0.1), te.ops.Quantize()):
        model = te.ops.Sequential(te.ops.Linear(32, 32), operation)
        with pytest.raises(
            NotImplementedError, match=rf"^share_tokens: ops.{type(operation).__name__} with a group of"
        ):
            te.parallel.share_tokens(model, group)
        assert model[0].tokens is None
        te.parallel.share_tokens(model, None)
    with pytest.raises(ValueError, match=r"^tokens_of_rank: x has shape \[10, 3\], for a group of 2 ranks; "):
        te.parallel.tokens_of_rank(torch.zeros(10, 3), group)
    table = te.Embedding(8, 4)
    te.parallel.share_tokens(table, group)
    with pytest.raises(
        ValueError, match=r"^Embedding: input has shape \[128, 2\] with a group that shares tokens; \[s"
    ):
        table(torch.zeros(128, 2, dtype=torch.int64))
    one = te.Linear(32, 32)
    te.parallel.share_tokens(one, group)
    # Each rank refuses, also the one whose own shape is accepted.
    with pytest.raises(ValueError, match=r"^Linear: inp has shape \[256, 2, 32\] on the group's rank 0 and \[128, 2,"):
        one(torch.zeros(256 - 128 * rank, 2, 32, dtype=BF16))
    with pytest.raises(ValueError, match=r"^cross_entropy: logits has shape \[4, 8\] on the group's rank 0 and \[3, 8"):
        te.cross_entropy(torch.zeros(4 - rank, 8), torch.zeros(4 - rank, dtype=torch.int64), cp_group=group)
    with pytest.raises(ValueError, match=r"^Linear: inp has shape \[128, 2, 32\] with a group that shares tokens; "):
        one(torch.zeros(128, 2, 32, dtype=BF16))
    whole = layer(params_dtype=BF16)
    given(whole)
    with pytest.raises(
        ValueError, match=r"^TransformerLayer: hidden_states has shape \[128, 2, 32\] with a group that"
    ):
        whole(torch.zeros(128, 2, 32, dtype=BF16))
    with pytest.raises(ValueError, match=r"^Linear: inp has shape \[256, 1, 32\] on the group's rank 0 and \[256, 2,"):
        one(torch.zeros(256, 1 + rank, 32, dtype=BF16))
    recipe, of_two = te.recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), "a group of 2 ranks"
    with (
        pytest.raises(NotImplementedError, match=rf"^Linear: square blocks of tokens with {of_two} that share"),
        te.autocast(recipe=recipe),
    ):
        one(torch.zeros(256, 1, 32, dtype=BF16))
    with (
        pytest.raises(NotImplementedError, match=r"^ranks that share tensors with quantizers of InBlocksOf32"),
        te.autocast(recipe=te.recipe.MXFP8BlockScaling()),
    ):
        one(torch.zeros(256, 1, 32, dtype=BF16))
    te.parallel.share_tokens(one, None)
    assert one.tokens is None
    one(torch.zeros(3, 32, dtype=BF16))
    return {}


def of_program(group: Any, count: int, rank: int, run: Any, *case: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = run(group, count, rank, *case)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_share_the_tokens_of_layers(ranks: int, tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        f"{kind} {recipe}": (program, ranks, kind, recipe)
        for kind, recipes in (
            ("layer", tuple(RECIPES)),
            ("attention", ("current",)),
            ("parallel halves", ("blocks",)),
            ("accumulated", ("delayed",)),
            ("others", ("bf16", "delayed")),
        )
        for recipe in recipes
    }
    cases["model"] = (model, ranks)
    found = on_ranks(ranks, tmp_path, of_program, cases | ({"refused": (refused,)} if ranks == 2 else {}))
    for name, whole in in_one(of_program, cases).items():
        compare(name, whole, [one[name] for one in found], lambda what: None if what.startswith("whole") else 0)
