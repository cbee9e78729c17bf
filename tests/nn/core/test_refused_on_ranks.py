"""What layers refuse of tensors that ranks share, at the edge of what they accept: the checks alone, without ranks."""

import re
import types
from typing import Any

import pytest
import torch

from reference.nn.attentions import context_parallel_attention
from reference.nn.attentions.exact_attention import Equation
from reference.nn.core import context_parallel, tensor_parallel
from reference.nn.core.tensor_parallel import TensorParallel
from reference.ops.attentions.attention import BLOCK

TWO = 2 * BLOCK


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A group of two ranks of which the other is not asked; names of what would be compared with it."""
    compared: list[str] = []
    monkeypatch.setattr(context_parallel_attention, "ranks_of", lambda group: (0, 2))
    monkeypatch.setattr(
        context_parallel_attention, "check_same_on_ranks", lambda layer, name, x, group: compared.append(name)
    )
    return compared


def attend(
    layout: str = "sbhd",
    shape: tuple[int, ...] = (TWO, 2, 4, 16),
    keys: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    softmax: str = "vanilla",
    others: dict[str, bool] | None = None,
    **equation: Any,
) -> None:
    module = types.SimpleNamespace(cp_name="cp", softmax_type=softmax)
    asked = Equation(
        **{"scale": 0.25, "mask_type": "causal", "window": (-1, -1), "p": 0.0, "backend": "exact", **equation}
    )
    q, k = torch.empty(shape, dtype=dtype), torch.empty(keys or shape, dtype=dtype)
    context_parallel_attention.check(module, asked, layout, others or {}, q, k, k)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"layout": "bshd", "shape": (3, 2 * TWO, 4, 16)},
        {"mask_type": "no_mask"},
        {"window": (8, 0)},
        {"mask_type": "causal_bottom_right", "dtype": torch.float16},
        {"keys": (TWO, 2, 1, 16)},
        {"others": {"a bias": False}},
    ],
    ids=str,
)
def test_attention_that_ranks_share_takes(given: dict[str, Any], alone: list[str]) -> None:
    attend(**given)
    assert alone == ["query_layer"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mask_type": "padding_causal"}, "attn_mask_type='padding_causal'"),
        ({"mask_type": "padding"}, "attn_mask_type='padding'"),
        ({"mask_type": "no_mask", "window": (8, -1)}, r"window_size=\(8, -1\)"),
        ({"layout": "thd"}, "qkv_format='thd'"),
        ({"dtype": torch.float32}, "torch.float32"),
        ({"softmax": "off-by-one"}, "softmax_type='off-by-one'"),
        ({"backend": "cudnn"}, "attention_backend='cudnn'"),
        ({"others": {"a bias": True}}, "a bias"),
        ({"shape": (BLOCK, 2, 4, 16)}, rf"query_layer has shape \[{BLOCK}, 2, 4, 16\]"),
        ({"shape": (TWO + 1, 2, 4, 16)}, rf"query_layer has shape \[{TWO + 1}"),
        ({"layout": "bshd", "shape": (TWO, 2, 4, 16)}, rf"query_layer has shape \[{TWO}, 2"),
        ({"keys": (2 * TWO, 2, 4, 16)}, rf"key_layer \[{2 * TWO}"),
        ({"keys": (TWO, 1, 4, 16)}, rf"key_layer \[{TWO}, 1"),
    ],
    ids=str,
)
def test_attention_that_ranks_share_refuses(given: dict[str, Any], named: str, alone: list[str]) -> None:
    """In a sentence that names it and the group; nothing is compared with the other rank then."""
    with pytest.raises(
        (NotImplementedError, ValueError), match=f"^DotProductAttention: .*{named}.*a cp_group of 2 ranks"
    ):
        attend(**given)
    assert alone == []


@pytest.mark.parametrize(
    ("shape", "least", "taken"),
    [
        ((TWO, 8), 2, True),
        ((0, 8), 2, True),
        ((3 * TWO, 2, 8), 2, True),
        ((TWO,), 1, True),
        ((TWO,), 2, False),
        ((BLOCK, 8), 2, False),
        ((TWO + 1, 8), 2, False),
        ((3 * BLOCK,), 1, False),
    ],
)
def test_tokens_that_ranks_share_are_two_chunks(shape: tuple[int, ...], least: int, taken: bool) -> None:
    x, check = torch.empty(shape), TensorParallel.check_whole_chunks
    if taken:
        check(None, "inp", x, "Linear", least)  # type: ignore[arg-type]
        return
    accepted = re.escape("[sequence, ..., features]" if least > 1 else "[sequence, ...]")
    said = rf"^Linear: inp has shape .*; {accepted} is accepted, the sequence a multiple of {TWO} on each rank\.$"
    with pytest.raises(ValueError, match=said):
        check(None, "inp", x, "Linear", least)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_ranks_share_tokens_by_gathering_alone(how: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one rank every way is none."""
    module: Any = types.SimpleNamespace()
    monkeypatch.setattr(context_parallel.dist, "get_world_size", lambda group: size)
    monkeypatch.setattr(context_parallel.groups, "name_of", lambda group: "its name")
    if size > 1 and how != "all_gather":
        with pytest.raises(NotImplementedError, match=rf"cp_comm_type='{re.escape(how)}' with a cp_group of 2 ranks"):
            context_parallel.take_context_group(module, "a group", None, how)
        assert vars(module) == {}
        return
    context_parallel.take_context_group(module, "a group", list(range(size)), how)
    assert vars(module) == {"cp_name": "its name" if size > 1 else None, "cp_comm_type": how}


class Group:
    """Stands for a process group."""


@pytest.mark.parametrize("on_gpu", [False, True])
def test_shapes_on_a_gpu_are_compared_when_they_are_new(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, always. Of more shapes than are kept in mind a known one may be compared again."""
    asked: list[int] = []
    group = Group()

    def shapes(group: str, shape: tuple[int, ...], device: torch.device) -> list[tuple[int, ...]]:
        asked.append(shape[0])
        return [shape, shape]

    monkeypatch.setattr(tensor_parallel, "shapes_on_ranks", shapes)
    monkeypatch.setattr(tensor_parallel.messages, "of_group", lambda group, device: None)
    monkeypatch.setattr(tensor_parallel.groups, "group_of", lambda name: group)
    monkeypatch.setattr(tensor_parallel, "MOST_SAME", 3)
    given = (1, 2, 3, 1, 2, 3, 4, 1)
    for length in given:
        x: Any = types.SimpleNamespace(
            shape=(length, 8), is_cuda=on_gpu, device=torch.device("cuda" if on_gpu else "cpu")
        )
        tensor_parallel.check_same_on_ranks("Linear", "inp", x, "ranks")
    assert asked == ([1, 2, 3, 4, 1] if on_gpu else list(given))
