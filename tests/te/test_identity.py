"""By what programs recognise layers beside calling them: classes, attributes, `__module__`."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from shared.stand_in_programs import INSTALL, printed
from tools.write_api_page import API

import optimized
import reference

MADE = {
    "Linear": lambda te: te.Linear(32, 32, device="cpu"),
    "LayerNormLinear": lambda te: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda te: te.LayerNormMLP(32, 64, device="cpu"),
    "LayerNorm": lambda te: te.LayerNorm(32, device="cpu"),
    "RMSNorm": lambda te: te.RMSNorm(32, device="cpu"),
    "MultiheadAttention": lambda te: te.MultiheadAttention(32, 2, input_layernorm=True, device="cpu"),
    "TransformerLayer": lambda te: te.TransformerLayer(
        32, 64, 2, layer_type="decoder", output_layernorm=True, device="cpu"
    ),
    "DotProductAttention": lambda te: te.DotProductAttention(2, 16),
    "RotaryPositionEmbedding": lambda te: te.RotaryPositionEmbedding(16),
    "InferenceParams": lambda te: te.InferenceParams(2, 16, 2, 16, torch.bfloat16, device="cpu"),
    "FusedAdam": lambda te: te.optimizers.FusedAdam([torch.nn.Parameter(torch.ones(2))]),
    "FusedSGD": lambda te: te.optimizers.FusedSGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
    "CudaRNGStatesTracker": lambda te: te.CudaRNGStatesTracker(),
}
# Parts that a layer has with other arguments.
OTHERS = {
    "qkv": lambda te: te.MultiheadAttention(32, 2),
    "query_layer": lambda te: te.MultiheadAttention(32, 2, attention_type="cross"),
    "key_value": lambda te: te.MultiheadAttention(32, 2, attention_type="cross"),
    "layernorm_query": lambda te: te.MultiheadAttention(32, 2, attention_type="cross", input_layernorm=True),
}


@pytest.mark.parametrize("side", [reference, optimized])
def test_what_a_layer_makes_is_of_the_classes_of_its_package(side: Any) -> None:
    for norm in ("RMSNorm", "LayerNorm"):
        layer = side.TransformerLayer(
            32, 32, 2, qk_norm_type=norm, layer_type="decoder", output_layernorm=True, normalization=norm, device="cpu"
        )
        for one in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            attention = one.self_attention
            assert type(attention) is type(one.inter_attention) is side.MultiheadAttention
            assert type(attention.q_norm) is type(one.layernorm) is getattr(side, norm)
            assert type(attention.proj) is type(attention.qkv) is side.Linear
            assert type(one.inter_attention.layernorm_query) is side.LayerNormLinear
            assert type(attention.core_attention) is side.DotProductAttention
            assert type(one.layernorm_mlp) is side.LayerNormMLP


@pytest.mark.parametrize("name", MADE)
def test_what_transformer_engines_constructor_sets_is_there(name: str) -> None:
    """With its value, or with a sentence that `getattr` with a default does not swallow."""
    layer = MADE[name](reference)
    based = hasattr(layer, "fp8_meta") and name not in ("LayerNorm", "RMSNorm")  # there they are te.ops
    for attribute in {*API["attributes"][name], *(API["attributes"]["TransformerEngineBaseModule"] if based else ())}:
        try:
            assert hasattr(OTHERS[attribute](reference) if attribute in OTHERS else layer, attribute), attribute
        except NotImplementedError as error:
            if f"{attribute} is not offered by Twin Engine: " not in str(error):
                raise


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "RMSNorm", "TransformerLayer", "InferenceParams"])
def test_a_class_of_either_package_is_the_same_class(name: str) -> None:
    here, there = getattr(optimized, name), getattr(reference, name)
    for made in (MADE[name](reference), MADE[name](optimized)):
        assert isinstance(made, here)
        assert isinstance(made, there)
        assert not isinstance(made, optimized.DotProductAttention)
    assert issubclass(here, there)
    assert issubclass(there, here)
    derived = type("Derived", (here,), {})
    assert issubclass(derived, here)
    assert not issubclass(here, derived)
    assert not isinstance(MADE[name](optimized), derived)


@pytest.mark.parametrize("name", MADE)
def test_all_attributes_that_dir_lists_can_be_read(name: str) -> None:
    """`inspect.getmembers` and torch.jit.trace read them; one that means nothing here is not listed."""
    made = MADE[name](reference)
    for part in made.modules() if isinstance(made, torch.nn.Module) else [made]:
        listed = dict(inspect.getmembers(part))
        assert not {"param_init_meta", "quantizers", "wgrad_store", "cache_manager"} & set(dir(part))
        assert set(getattr(part, "_parameters", {})) <= set(listed)


def test_attributes_tell_the_truth() -> None:
    te = reference
    plain = te.LayerNormLinear(32, 48, normalization="RMSNorm", parallel_mode="column", return_bias=True)
    assert not plain.primary_weights_in_fp8
    assert not plain.fp8_initialized
    assert not plain.apply_bias
    found = (plain.normalization, plain.parallel_mode, plain.parameter_split_sizes, plain.sequence_parallel)
    assert found == ("RMSNorm", "column", [48], False)
    with te.quantized_model_init():
        kept = te.Linear(32, 32)
    assert getattr(kept, "primary_weights_in_fp8", False)
    with te.autocast():
        kept(torch.ones(16, 32))
    assert kept.fp8_initialized
    assert kept.fp8_meta_tensors_initialized
    assert te.TransformerLayer(32, 32, 2, layer_number=3).layer_number == 3
    assert not hasattr(te.Linear(16, 16), "normalization")
    cache = te.InferenceParams(2, 16, 2, 16, torch.bfloat16)
    assert cache.max_ctx_len == 16
    cache.pre_step({"a": 3, "b": 5})
    cache.pre_step({"a": 2, "b": 1})
    assert cache.cu_seqlens_q.tolist() == [0, 2, 3]
    assert cache.cu_seqlens_kv.tolist() == [0, 5, 11]
    assert dict(cache.sequences_pre_step) == {"a": 3, "b": 5}
    assert (cache.output_qkv_format, cache.page_size) == ("bshd", None)
    tracker = te.CudaRNGStatesTracker()
    for make in (
        lambda get: te.Linear(16, 16, get_rng_state_tracker=get),
        lambda get: te.LayerNormMLP(16, 16, get_rng_state_tracker=get),
        lambda get: te.DotProductAttention(1, 16, get_rng_state_tracker=get),
        lambda get: te.MultiheadAttention(16, 1, get_rng_state_tracker=get),
        lambda get: te.TransformerLayer(16, 16, 1, get_rng_state_tracker=get),
    ):
        tracker.reset()
        tracker.add("model-parallel-rng", 1)
        for get in (None, lambda: tracker):
            assert make(get).get_rng_state_tracker is get
    assert te.Linear(16, 16, get_rng_state_tracker=get, rng_tracker_name="model-parallel-rng").rng_tracker_name
    assert te.LayerNormMLP(16, 48, activation="gelu").bias_gelu_nvfusion
    assert te.LayerNormMLP(16, 48, activation="gelu").size_per_partition == 48
    assert not hasattr(te.Linear(16, 16), "size_per_partition")
    adam = te.optimizers.FusedAdam([torch.nn.Parameter(torch.ones(2))], exp_avg_dtype=torch.uint8)
    assert adam.name_to_dtype_map["exp_avg"] is adam.exp_avg_dtype is torch.uint8
    for owner, name in ((kept, "quantizers"), (cache, "cache_manager")):
        with pytest.raises(NotImplementedError, match=f"{name} is not offered by Twin Engine: .*[.]$"):
            getattr(owner, name, False)


# As BioNeMo's models: their imports, and how they keep transformers from drawing these layers' weights anew.
MODEL = """
import json, torch, warnings
import transformer_engine.common.recipe
import transformer_engine.pytorch
from torch import nn
from transformer_engine.pytorch.attention import InferenceParams
from transformer_engine.pytorch.attention.dot_product_attention import utils as te_attention_utils
from transformer_engine.pytorch.attention.inference import PagedKVCacheManager
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding
from transformers import PreTrainedModel
te_attention_utils.get_attention_backend = torch.compiler.disable(te_attention_utils.get_attention_backend)
te = transformer_engine.pytorch

class Small(PreTrainedModel):
    config_class = Config
    def __init__(self, config):
        super().__init__(config)
        draw = lambda x: torch.nn.init.normal_(x, mean=0.0, std=config.initializer_range)
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList([
            te.TransformerLayer(64, 128, 4, layer_number=i + 1, fuse_qkv_params=True, qkv_weight_interleaved=True,
                                attn_input_format="bshd", hidden_dropout=0, attention_dropout=0, init_method=draw,
                                output_layer_init_method=draw, device="cpu", params_dtype=torch.bfloat16, **kinds)
            for i in range(2)])
        self.norm = te.RMSNorm(64, dtype=torch.bfloat16, device="cpu")
        self.rotary_emb = RotaryPositionEmbedding(16)
        self.head = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cpu", init_method=draw)
        self.before = {name: value.detach().clone() for name, value in self.layers.state_dict().items()
                       if not name.endswith("_extra_state")}
        self.post_init()

    def _init_weights(self, module):
        if module.__module__.startswith("transformer_engine.pytorch"):
            if hasattr(module, "reset_parameters") and not getattr(module, "primary_weights_in_fp8", False):
                again.append(type(module).__name__)
            return
        super()._init_weights(module)

    def forward(self, ids):
        x, rope = self.embed(ids).bfloat16(), self.rotary_emb(max_seq_len=ids.shape[1])
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=rope)
        return self.head(self.norm(x)).float()

again = []
torch.manual_seed(0)
model = Small(Config(initializer_range=0.02))
kept = all(torch.equal(value, model.layers.state_dict()[name]) for name, value in model.before.items())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids, losses = torch.arange(32).reshape(2, 16), []
for _ in range(4):
    with te.fp8_autocast(fp8_recipe=transformer_engine.common.recipe.DelayedScaling()):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
fp8 = all(layer.layernorm_mlp.fp8 for layer in model.layers)
print(json.dumps([kept, losses[-1] < losses[0], fp8, sorted(set(again)), isinstance(3, PagedKVCacheManager)]))
"""
KINDS = {
    "esm2": ("EsmConfig", 'activation="gelu", self_attn_mask_type="no_mask"'),
    "llama": (
        "LlamaConfig",
        'activation="swiglu", normalization="RMSNorm", bias=False, self_attn_mask_type="causal", num_gqa_groups=2',
    ),
    "qwen": (
        "Qwen3Config",
        'activation="swiglu", normalization="RMSNorm", bias=False, qk_norm_type="RMSNorm", qk_norm_before_rope=True, '
        "num_gqa_groups=2",
    ),
}


@pytest.mark.integration
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_bionemos_kind_keeps_its_weights_and_trains(name: str) -> None:
    pytest.importorskip("transformers")
    config, kinds = KINDS[name]
    start = f"from transformers import {config} as Config\nkinds = dict({kinds})\n"
    kept, fell, fp8, again, paged = printed(INSTALL + start + MODEL)
    assert kept
    assert fell
    assert fp8
    assert {"LayerNormLinear", "LayerNormMLP", "Linear"} <= set(again)
    assert not paged
