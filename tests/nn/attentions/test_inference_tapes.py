"""Steps of one token on a pretended GPU: from the third on a layer's launches come from a tape."""

import contextlib
import re
from typing import Any

import pytest
import torch
from shared.dry_gpu import DryGpu

import optimized
import reference as te
from optimized.tapes import call_groups
from reference.nn.transformer import halves

BF16 = torch.bfloat16
LAUNCH = re.compile(r"(again )?(\w+\.\w+ \[|TorchO)")


@pytest.mark.sample(4)
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("small", [0, halves.SMALL], ids=["two nodes", "one node"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", ["bf16", "fp8 weights"])
def test_a_step_of_one_token_is_replayed(
    mode: str, batch: int, small: int, without_gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In inference mode an op such as `reshape`, which may copy, comes as it is and must be taken apart."""
    monkeypatch.setattr(halves, "SMALL", small)
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(DryGpu())
        gpu.tapes()
        stack.enter_context(without_gradients())
        with te.quantized_model_init(enabled=mode == "fp8 weights"):
            layer = optimized.TransformerLayer(64, 128, 4, num_gqa_groups=2, params_dtype=BF16, fuse_qkv_params=True)
        layer.eval()
        angles = torch.empty(300, 1, 1, 16, device="cuda")
        cache = optimized.InferenceParams(batch, 300, 2, 16, BF16)
        noted: list[list[str]] = []
        for length in (126, *[1] * 7):
            cache.pre_step(dict.fromkeys(range(batch), length))
            x = torch.empty(length, batch, 64, dtype=BF16, device="cuda")
            gpu.lines.clear()
            with te.autocast(enabled=mode != "bf16"):
                layer(x, rotary_pos_emb=angles, inference_params=cache)
            noted.append([line for line in gpu.lines if LAUNCH.match(line)])
        groups = list(call_groups._groups.values())
    # The prompt copies its keys in another way and runs; 127 and 128 tokens read one block of keys, 129 and more two.
    repeated = [all(line.startswith("again ") for line in lines) for lines in noted]
    assert repeated == [False] * 5 + [True] * 3
    assert [line.split(" [")[0] for line in noted[-1]] == [line.split(" [")[0] for line in noted[-2]]
    ops = [line.split()[-1] for line in noted[-1] if "TorchO" in line]
    assert ops.count("_copy") == 1  # of q, out of the groups
    assert ops.count("aten::index_copy_") == 2
    assert ops.count("index_select.out") + ops.count("aten::index_select") == 2
    assert [group.usable for group in groups].count(False) == 1
