"""What docs/megatron.md and docs/torchtitan.md show runs where those are installed, each program in its own process.

    pip install --no-deps megatron-core==0.16.1
    pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro torchdata einops torch_checkpointing triton \\
        docstring-parser shtab typeguard
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import reference as te

ROOT = Path(__file__).resolve().parents[2]


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"could not import {package}")


def shown(page: str) -> str:
    """The Python code of a page."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def printed(package: str, *programs: str) -> Any:
    """What programs, one after the other in one process, print last, as JSON."""
    spec = importlib.util.find_spec(package)
    folders = [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", "\n".join(map(textwrap.dedent, programs))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BEGIN = """
import dataclasses, json, os
import torch.distributed as dist
from megatron.core import parallel_state
os.environ.update(RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
torch.manual_seed(1)
"""
TRAIN = """
ids, positions, losses = torch.arange(32).view(2, 16), torch.arange(16).expand(2, 16), []
for step in range(4):
    loss = model(ids, positions, None, labels=ids).float().mean()
    model.zero_grad()
    loss.backward()
    losses.append(loss.item())
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
ours = [part for part in model.modules() if isinstance(part, (te.Linear, te.LayerNormLinear))]
cores = [part.kv_channels for part in model.modules() if isinstance(part, te.DotProductAttention)]
recipes = {str(part.fp8_meta.get("recipe")) for part in ours}
print(json.dumps([losses[-1] < losses[0], len(ours), all(part.fp8 for part in ours), cores, sorted(recipes)]))
"""
MLA = """
torch.cuda.current_device = lambda: "cpu"  # its rotary embedding asks
from megatron.core.transformer.transformer_config import MLATransformerConfig
spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True)
latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16}
latent |= {"rope_type": "rope", "apply_rope_fusion": False, "multi_latent_attention": True}
config = MLATransformerConfig(**sizes, **model_kind, **no_bias, **precision, **fp8, **latent)
"""


@pytest.mark.slow
@needs("megatron")
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", None])
def test_megatron_core_trains_as_shown(recipe: str | None) -> None:
    other = f"config = dataclasses.replace(config, fp8={recipe and 'hybrid'!r}, fp8_recipe={recipe or 'delayed'!r})"
    falls, layers, in_fp8, heads, recipes = printed(
        "megatron", shown("megatron.md"), BEGIN, other, "model = gpt()", TRAIN
    )
    assert (falls, layers, in_fp8, heads) == (True, 8, recipe is not None, [16, 16])
    name = {"delayed": "TEDelayedScaling", "tensorwise": "Float8CurrentScaling", None: "None"}[recipe]
    assert len(recipes) == 1
    assert recipes[0].startswith(name)
    assert recipe != "delayed" or "amax_history_len=16" in recipes[0]


@pytest.mark.slow
@needs("megatron")
def test_multi_latent_attention_has_heads_of_two_sizes() -> None:
    found = printed("megatron", shown("megatron.md"), BEGIN, MLA, "model = gpt()", TRAIN)
    assert found[0] is True
    assert found[2:4] == [True, [[32, 16], [32, 16]]]


@pytest.mark.slow
@needs("torchtitan")
def test_torchtitan_trains_as_shown() -> None:
    program = """
    import json, torch
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3 import model_registry

    def attention(q, k, v, scale=None, enable_gqa=False, **rest):
        how = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how), None

    FlexAttention._compiled_flex_attn = staticmethod(attention)
    plain = model_registry("debugmodel", attn_backend="flex")
    prepared = []
    spec = replace(plain, parallelize_fn=lambda model, **settings: prepared.append(settings) or model)
    spec = with_twin_engine(spec, te.DelayedScaling(amax_history_len=4))
    torch.manual_seed(1)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(model, parallel_dims=None)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.verify_module_protocol()
    ids, positions = torch.arange(64).view(2, 32), torch.arange(32).expand(2, 32)
    mask = torch.nn.attention.flex_attention.create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, "cpu")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(4):
        y = model(ids, positions, mask)
        loss = torch.nn.functional.cross_entropy(y.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ours = [part for part in model.modules() if isinstance(part, te.Linear)]
    deviation = model.layers["0"].feed_forward.w1.weight.std().item()
    print(json.dumps([losses[-1] < losses[0], len(ours), all(part.fp8 for part in ours), prepared, deviation]))
    """
    found = printed("torchtitan", shown("torchtitan.md"), program)
    assert found[:4] == [True, 30, True, [{"parallel_dims": None}]]
    assert 0.01 < found[4] < 0.03  # torchtitan's own first weights: normal, 0.02


def test_what_megatron_gives_a_recipe_without_effect() -> None:
    """In Transformer Engine, too: its wrapper hands every class the same two arguments."""
    recipe = te.DelayedScaling(params_dtype=te.DelayedScaling, device="cpu")
    assert recipe == te.DelayedScaling()
    assert repr(recipe) == repr(te.DelayedScaling())
