"""Models of the library transformers, without its messages."""

from typing import Any

import pytest
import torch

import reference as te
from reference.float8.float8_tensor import Float8Tensor

RECIPE = te.DelayedScaling(amax_history_len=4)
BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
GROUPED = {**SIZES, "num_key_value_heads": 2, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128, "bos_token_id": 1}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
IDS = torch.arange(24).reshape(2, 12) * 5 % 128
# name → class, config, what the forward gets, how many layers are converted, and of which classes
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int, set[str]]] = {
    "llama": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}, {}, 20, {"Linear", "LlamaRMSNorm"}),
    "mistral": ("MistralForCausalLM", GROUPED, {}, 20, {"Linear", "MistralRMSNorm"}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, {}, 20, {"Linear", "Qwen2RMSNorm"}),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}, {}, 24, {"Linear", "Qwen3RMSNorm"}),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 16}, {}, 20, {"Linear", "GemmaRMSNorm"}),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, {}, 14, {"Linear", "MixtralRMSNorm"}),
    "gpt2": ("GPT2LMHeadModel", GPT2, {}, 14, {"Conv1D", "Linear", "LayerNorm"}),
    "bert": ("BertForMaskedLM", {**SIZES, "vocab_size": 128}, {}, 20, {"Linear", "LayerNorm"}),
    "t5": ("T5ForConditionalGeneration", T5, {"decoder_input_ids": IDS}, 45, {"Linear", "T5LayerNorm"}),
    "vit": ("ViTForImageClassification", {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 10},
            {"pixel_values": torch.linspace(-1, 1, 6144).reshape(2, 3, 32, 32)}, 17, {"Linear", "LayerNorm"}),
}  # fmt: skip
FORMS = [pytest.param(False, id="16-bit weights"), pytest.param(True, id="FP8 weights")]


def library() -> Any:
    """transformers. It is not imported above, because a module that is skipped as a whole fails the GPU suite."""
    return pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quiet() -> None:
    library().utils.logging.set_verbosity_error()
    library().utils.logging.disable_progress_bar()


def kind_of(name: str) -> Any:
    return getattr(library(), MODELS[name][0])


def plain(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind = kind_of(name)
    torch.manual_seed(0)
    return kind._from_config(kind.config_class(**MODELS[name][1]), dtype=dtype).eval()


def converted(name: str, kept: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    model = plain(name, dtype)
    with te.quantized_model_init(enabled=kept, recipe=RECIPE):
        te.convert(model, recipe=RECIPE)
    return model


def inputs(name: str) -> dict[str, Any]:
    return MODELS[name][2] if name == "vit" else {"input_ids": IDS, **MODELS[name][2]}


@torch.no_grad()
def logits(model: Any, name: str = "llama") -> torch.Tensor:
    found: torch.Tensor = model.eval()(**inputs(name)).logits
    return found


def train(model: Any, steps: int = 2, name: str = "llama") -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(**inputs(name)).logits.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.detach() for name, p in model.named_parameters() if "lora_" not in name}
    return {name: (p.dequantize() if isinstance(p, Float8Tensor) else p).clone() for name, p in found.items()}
