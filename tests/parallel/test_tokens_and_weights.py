"""Layers whose weights ranks share, and whose tokens other ranks share, have the words of one process."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.tensor_ranks import BF16, RECIPES, in_one, numbers, on_ranks, part, trained

import reference as te
from reference.parallel import context as context_room
from reference.parallel import tokens as tokens_room
from reference.parallel.styles import ColwiseParallel

TENSOR, HIDDEN = 2, 256
Groups = tuple[Any, Any]  # whose ranks share weights, and whose ranks share tokens


def groups_of(group: Any, count: int) -> Groups:
    """Ranks 0 and 1 share the weights, as do 2 and 3; the others of a rank's parts share tokens."""
    if group is None:
        return None, None
    ranks = torch.arange(count).view(-1, TENSOR)
    found: list[Any] = []
    for sets in (ranks, ranks.t()):
        made = [dist.new_group(members) for members in sets.tolist()]
        found.append(next(one for one in made if dist.get_rank(one) >= 0))
    return found[0], found[1]


def layer_of(kind: str, weights: Any, sequence: bool) -> Any:
    more: dict[str, Any] = {"params_dtype": BF16, "tp_group": weights, "sequence_parallel": sequence}
    more |= {"set_parallel_mode": True}
    if kind == "grouped":
        more |= {
            "num_gqa_groups": 2,
            "kv_channels": 128,
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "bias": False,
        }
    return te.TransformerLayer(HIDDEN, HIDDEN, 4, hidden_dropout=0.1, attention_dropout=0.1, **more)


def program(group: Any, count: int, rank: int, ranks: int, kind: str, recipe: str, sequence: bool) -> Any:
    weights, tokens = groups_of(group, count)
    torch.manual_seed(5)
    layer = layer_of(kind, weights, sequence)
    te.parallel.share_tokens(layer, tokens)

    def mine(seed: int, scale: float) -> torch.Tensor:
        x = te.parallel.tokens_of_rank(numbers(seed, 256 * ranks // TENSOR, 1, HIDDEN, scale=scale), tokens)
        return part(x, 0 if sequence else None, rank % TENSOR, TENSOR) if group is not None else x

    return trained(layer, recipe, 2, lambda step: (mine(step, 2.0**-3), mine(10 + step, 2.0**-7)))


def vocabulary(group: Any, count: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """A table and a loss over classes and tokens that ranks share."""
    weights, tokens = groups_of(group, count)
    torch.manual_seed(5)
    ids = torch.randint(40, (256 * ranks // TENSOR, 2), generator=torch.Generator().manual_seed(3))
    mine, found = te.parallel.tokens_of_rank(ids, tokens), {}
    for sequence in (False, True):
        table = te.Embedding(40, 16, params_dtype=BF16, tp_group=weights, sequence_parallel=sequence)
        te.parallel.share_tokens(table, tokens)
        grad = te.parallel.tokens_of_rank(numbers(4, *ids.shape, 16), tokens)
        if group is not None:
            grad = part(grad, 0 if sequence else None, rank % TENSOR, TENSOR)
        rows = table(mine)
        rows.backward(grad)
        found |= {f"tokens{' sequence' * sequence} rows": rows.detach(), f"weight{sequence}": table.weight.grad}
    logits = te.parallel.tokens_of_rank(numbers(6, *ids.shape, 40), tokens)
    logits = (part(logits, 2, rank % TENSOR, TENSOR) if group is not None else logits).requires_grad_()
    loss = te.parallel_cross_entropy(
        logits, mine, reduce_loss=True, dist_process_group=weights, ignore_idx=7, cp_group=tokens
    )
    loss.backward()
    return found | {"loss": loss.detach(), "classes dlogits": logits.grad}  # type: ignore[dict-item, return-value]


def styled(group: Any, count: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """A whole layer whose weights are divided, before or after its tokens are shared, is one made with both groups."""
    from torch.distributed.device_mesh import DeviceMesh

    weights, tokens = groups_of(group, count)
    x = te.parallel.tokens_of_rank(numbers(3, 256 * ranks // TENSOR, 1, HIDDEN), tokens)
    found = []
    for order in (("weights", "tokens"), ("tokens", "weights"), ("tokens",)):
        more: dict[str, Any] = {} if "weights" in order else {"tp_group": weights, "parallel_mode": "column"}
        torch.manual_seed(5)
        layer = te.Linear(HIDDEN, 512, params_dtype=BF16, **more)
        for what in order:
            if what == "tokens":
                te.parallel.share_tokens(layer, tokens)
            else:
                ColwiseParallel()._apply(layer, DeviceMesh.from_group(weights, "cpu"))
        y = layer(x)
        y.float().square().sum().backward()
        found.append([y.detach(), layer.weight.grad, layer.bias.grad])
    for one in found[:2]:
        for a, b in zip(one, found[2], strict=True):
            assert_same_bits(a, b)
    return {}


def own_chunks(x: torch.Tensor, which: int, ranks: int) -> torch.Tensor:
    chunks = x.chunk(2 * ranks // TENSOR)
    return torch.cat([chunks[which], chunks[-1 - which]])


def expected(name: str, x: torch.Tensor, rank: int, ranks: int, sequence: bool, gated: bool) -> torch.Tensor:
    """A rank's part of one process's tensor."""
    which, of = divmod(rank, TENSOR)
    if name.startswith("tokens") or name.endswith((".y", ".dx")):
        return part(own_chunks(x, which, ranks), 0 if sequence or "sequence" in name else None, of, TENSOR)
    if name.startswith("classes"):
        return part(own_chunks(x, which, ranks), 2, of, TENSOR)
    whole = "layer_norm" in name or "proj.bias" in name or "fc2_bias" in name or "scaling" in name or name == "loss"
    dim = None if whole else 1 if "fc2_weight" in name or "proj.weight" in name else 0
    return part(x, dim, of, TENSOR, 2 if gated and "fc1" in name else 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("sharing", [1, 2, 3])
def test_the_rows_of_all_ranks_are_those_of_the_sequence(
    ranks: int, sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ranks` have some rows each of the same two chunks, `sharing` have chunks: each row is on one rank, in order."""
    place = {"rows": (0, ranks), "chunks": (0, sharing)}
    for module in (tokens_room, context_room):
        monkeypatch.setattr(module, "ranks_of", place.__getitem__)
    each, whole = 12, list(range(12 * ranks * sharing))
    found: list[int] = []
    for which, of in itertools.product(range(sharing), range(ranks)):
        place["rows"], place["chunks"] = (of, ranks), (which, sharing)
        pieces = tokens_room.Tokens("chunks", "rows" if ranks > 1 else None).pieces(each)
        assert sum(count for count, _ in pieces) == each
        chunks = [whole[i * len(whole) // (2 * sharing) :][: len(whole) // (2 * sharing)] for i in range(2 * sharing)]
        here = (chunks[which] + chunks[-1 - which])[of * each : (of + 1) * each]
        assert [first + i for count, first in pieces for i in range(count)] == here
        found += here
    assert sorted(found) == whole


def of_program(group: Any, count: int, rank: int, run: Any, *case: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = run(group, count, rank, *case)
    return found


def cases_of(ranks: int, fast: bool) -> dict[str, Any]:
    """Layers in recipes, with and without sequence parallelism, and a vocabulary."""
    kinds = [("usual", "delayed", True), ("grouped", "current", True), ("usual", "blocks", False)]
    if not fast:
        kinds = [(kind, recipe, on) for kind in ("usual", "grouped") for recipe in RECIPES for on in (False, True)]
    found: dict[str, Any] = {
        f"{kind} {recipe}{' sequence' * on}": (program, ranks, kind, recipe, on) for kind, recipe, on in kinds
    }
    return found | {"vocabulary": (vocabulary, ranks)}


@pytest.mark.parametrize(
    ("ranks", "fast"),
    [(4, True), pytest.param(4, False, marks=pytest.mark.slow), pytest.param(6, True, marks=pytest.mark.slow)],
)
def test_ranks_share_weights_and_tokens(ranks: int, fast: bool, tmp_path: Path) -> None:
    cases = cases_of(ranks, fast)
    found = on_ranks(ranks, tmp_path, of_program, cases | {"styled": (styled, ranks)})
    for what, whole in in_one(of_program, cases).items():
        sequence = what.endswith("sequence")
        for rank, of_rank in enumerate(found):
            assert of_rank[what].keys() == whole.keys()
            for name, x in of_rank[what].items():
                there = expected(name, whole[name], rank, ranks, sequence, what.startswith("grouped"))
                assert_same_bits(there, x, f"{what}, rank {rank}, {name}")
