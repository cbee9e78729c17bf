"""Converted Hugging Face models: trained, generated from, saved and loaded, by unmodified libraries."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.hugging_face_models import (
    BF16,
    FORMS,
    GPT2,
    IDS,
    MODELS,
    RECIPE,
    base_weights,
    converted,
    inputs,
    kind_of,
    library,
    logits,
    plain,
    quiet,  # noqa: F401  (a fixture)
    train,
)

import reference as te
from reference.float8.float8_tensor import Float8Tensor

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # of the libraries
GPT2 |= {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SAVED = ["llama", "gpt2"]


def converting(kind: Any, kept: bool = False) -> Any:
    """A model class that converts itself, for `from_pretrained`."""

    class Converting(kind):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            with te.quantized_model_init(enabled=kept, recipe=RECIPE):
                te.convert(self, recipe=RECIPE)

    return Converting


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_each_kind(name: str, same_bits: Any) -> None:
    _, _, _, count, kinds = MODELS[name]
    model, original = plain(name), plain(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    report = te.convert(model)
    assert len(report.converted) == count
    assert {report.entries[one].was for one in report.converted} == kinds
    for key, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is parameters.pop(key)
    assert not parameters
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}
    assert state.keys() == original.state_dict().keys()
    # Norms of ours round elsewhere than each architecture's own.
    torch.testing.assert_close(logits(model, name), logits(original, name), rtol=1e-4, atol=1e-4)
    with te.autocast(recipe=RECIPE):
        loss = model(**inputs(name)).logits.square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(layer.fp8 for layer in model.modules() if isinstance(layer, te.Linear))
    same_bits(logits(copy.deepcopy(model), name), logits(model, name))


def test_the_page_shows_the_report() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text("utf-8")
    shown = page.split("```\nmodule ")[1].split("```")[0].splitlines()[1:]
    report = str(te.convert(plain("llama"), filter={"lm_head": False})).splitlines()
    assert len(shown) == 5
    assert all(line in report for line in shown if line != "...")


@pytest.mark.parametrize("name", SAVED)
def test_generate_gives_the_same_tokens_each_time(name: str) -> None:
    model = converted(name)
    train(model, name=name)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.eval().generate(IDS[:, :4], **options)
    assert tokens.shape == (2, 12)
    assert all(layer.fp8 for layer in model.modules() if isinstance(layer, te.Linear))
    assert torch.equal(model.generate(IDS[:, :4], **options), tokens)
    assert torch.equal(model.generate(IDS[:, :4], use_cache=False, **options), tokens)
    assert torch.equal(copy.deepcopy(model).generate(IDS[:, :4], **options), tokens)


@pytest.mark.parametrize("name", SAVED)
def test_a_converted_model_is_saved_and_read_by_both(name: str, tmp_path: Path, same_bits: Any) -> None:
    model = converted(name)
    train(model, name=name)
    model.save_pretrained(tmp_path)
    expected = logits(model, name)

    unconverted, info = kind_of(name).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(key.endswith("_extra_state") for key in info["unexpected_keys"])
    for key, value in unconverted.state_dict().items():
        same_bits(value, model.state_dict()[key], key)
    te.convert(unconverted, recipe=RECIPE)
    te.load_fp8_state(unconverted, tmp_path)
    same_bits(logits(unconverted, name), expected)

    loaded, info = converting(kind_of(name)).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    same_bits(logits(loaded, name), expected)


@pytest.mark.parametrize("name", SAVED)
def test_a_converting_class_reads_the_checkpoint_of_an_unconverted_model(
    name: str, tmp_path: Path, same_bits: Any
) -> None:
    plain(name).save_pretrained(tmp_path)
    loaded, info = converting(kind_of(name)).from_pretrained(tmp_path, output_loading_info=True)
    assert all(key.endswith("_extra_state") for key in info["missing_keys"])
    same_bits(logits(loaded, name), logits(converted(name), name))


def test_a_weight_that_the_checkpoint_lacks_is_drawn_as_transformers_draws_it(tmp_path: Path) -> None:
    plain("llama").save_pretrained(tmp_path)
    kind = converting(library().LlamaForSequenceClassification)
    model, info = kind.from_pretrained(tmp_path, num_labels=64, pad_token_id=0, output_loading_info=True)
    assert "score.weight" in info["missing_keys"]
    assert isinstance(model.score, te.Linear)
    assert 0.015 < float(model.score.weight.std()) < 0.025  # initializer_range is 0.02


@pytest.mark.parametrize("name", SAVED)
def test_weights_kept_in_fp8_are_saved_and_loaded(name: str, tmp_path: Path, same_bits: Any) -> None:
    model = converted(name, kept=True, dtype=BF16)
    assert not isinstance(model.lm_head.weight, Float8Tensor)  # tied to the embedding
    assert sum(isinstance(p, Float8Tensor) for p in model.parameters()) == (14 if name == "llama" else 8)
    train(model, name=name)
    model.save_pretrained(tmp_path)
    loaded, info = converting(kind_of(name), kept=True).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    same_bits(logits(loaded, name), logits(model, name))


def test_a_weight_in_fp8_that_the_checkpoint_lacks_is_drawn(tmp_path: Path, same_bits: Any) -> None:
    model = converted("llama", kept=True, dtype=BF16)
    train(model)
    model.save_pretrained(tmp_path)
    kind = converting(library().LlamaForSequenceClassification, kept=True)
    loaded, info = kind.from_pretrained(tmp_path, num_labels=64, pad_token_id=0, output_loading_info=True)
    assert {key for key in info["missing_keys"] if "lm_head" not in key} == {"score.weight", "score._extra_state"}
    assert isinstance(loaded.score.weight, Float8Tensor)
    assert 0.015 < float(loaded.score.weight.std()) < 0.025  # initializer_range is 0.02
    assert 0 < float(loaded.score.fp8_meta["scaling_fwd"].amax_history.max()) < 0.2  # of no undefined numbers
    there = loaded.state_dict()
    for key, value in model.model.state_dict(prefix="model.").items():
        same_bits(there[key], value, key)


@pytest.mark.parametrize("state", [True, False])
def test_numbers_are_not_read_as_codes(state: bool, tmp_path: Path, same_bits: Any) -> None:
    """`from_pretrained` casts them to FP8 without a scale, since the model's `state_dict` has codes."""
    model = plain("llama", BF16)
    if state:
        te.convert(model, recipe=RECIPE)
        train(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^from_pretrained: in the checkpoint weight has no weight_scale_inv"):
        converting(kind_of("llama"), kept=True).from_pretrained(tmp_path)
    right = converted("llama", kept=True, dtype=BF16)
    right.load_state_dict(model.state_dict())
    assert sum(isinstance(p, Float8Tensor) for p in right.parameters()) == 14


def test_codes_are_not_read_as_numbers(tmp_path: Path, same_bits: Any) -> None:
    """`from_pretrained` converts them to the dtype of a plain layer's weight, and drops their scale_inv."""
    model = converted("llama", kept=True, dtype=BF16)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"keeps weight in FP8 .* in the model it does not: a loader of single entries"
    ):
        converting(kind_of("llama")).from_pretrained(tmp_path)
    unconverted, info = kind_of("llama").from_pretrained(tmp_path, output_loading_info=True)
    assert any(key.endswith("weight_scale_inv") for key in info["unexpected_keys"])  # as transformers warns
    te.convert(unconverted)
    with pytest.raises(ValueError, match=r"^load_fp8_state: in the checkpoint .* keeps weight in FP8"):
        te.load_fp8_state(unconverted, tmp_path)
    right = converted("llama", dtype=BF16)
    right.load_state_dict(model.state_dict())
    weight: Any = model.model.layers[0].mlp.up_proj.weight
    same_bits(right.model.layers[0].mlp.up_proj.weight.detach(), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_transformers_own_fp8_loader_reads_weights_kept_in_fp8(
    dtype: torch.dtype, tmp_path: Path, same_bits: Any
) -> None:
    pytest.importorskip("accelerate")
    model = converted("mistral", kept=True, dtype=dtype)
    train(model)
    model.save_pretrained(tmp_path)
    config = library().AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = library().FineGrainedFP8Config(dequantize=True).to_dict()
    loaded, info = kind_of("mistral").from_pretrained(tmp_path, config=config, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(key.endswith("_extra_state") for key in info["unexpected_keys"])
    kept = base_weights(model)
    for name, parameter in loaded.named_parameters():
        same_bits(parameter.detach(), kept[name], name)


@pytest.mark.parametrize("kept", FORMS)
def test_gradient_checkpointing_changes_no_bit(kept: bool, same_bits: Any) -> None:
    models = [converted("llama", kept, BF16).train() for _ in range(2)]
    models[1].gradient_checkpointing_enable()
    for a, b in zip(*(train(model, 3) for model in models), strict=True):
        same_bits(a, b)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        same_bits(a.grad, b.grad, name)


# --- the Trainer -----------------------------------------------------------------------------------------


def trained_by_trainer(folder: Path, steps: int, resume: bool = False, **options: Any) -> Any:
    model = converted("llama")
    arguments = library().TrainingArguments(
        folder, per_device_train_batch_size=1, max_steps=steps, learning_rate=1e-2, lr_scheduler_type="constant",
        save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, log_level="error",
        **options,
    )  # fmt: skip
    data = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]
    trainer = library().Trainer(model, arguments, train_dataset=data)
    trainer.remove_callback(library().PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_the_trainer_trains_in_fp8_and_resumes_with_the_same_bits(tmp_path: Path, same_bits: Any) -> None:
    pytest.importorskip("accelerate")
    whole = trained_by_trainer(tmp_path / "whole", 4)
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert all(layer.fp8 for layer in whole.model.modules() if isinstance(layer, te.Linear))
    trained_by_trainer(tmp_path / "parts", 2)
    resumed = trained_by_trainer(tmp_path / "parts", 4, resume=True)
    for (key, a), b in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        same_bits(a, b, key)


def test_the_trainer_decays_no_norm() -> None:
    """GPT-2's norms are found by their class alone."""
    pytest.importorskip("accelerate")
    model = converted("gpt2")
    names = library().Trainer.get_decay_parameter_names(None, model)
    assert "transformer.h.0.mlp.c_fc.weight" in names
    assert not any("ln_" in name or "bias" in name for name in names)


ACCELERATE = """
import json, torch, transformers
import reference as te
te.install_as_transformer_engine()
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, vocab_size=128)
accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[TERecipeKwargs(amax_history_len=8)])
ids = torch.arange(24).reshape(2, 12)
found = []
for recipe in (None, te.DelayedScaling(amax_history_len=4)):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    te.convert(model, recipe=recipe)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found.append([losses, model.lm_head.fp8, model.lm_head.fp8_meta["recipe"].amax_history_len])
print(json.dumps(found))
"""


def test_accelerate_opens_the_autocast_of_a_converted_model() -> None:
    """Its FP8 finds layers of Transformer Engine, converts nothing, and its recipe is the outer one."""
    pytest.importorskip("accelerate")
    done = subprocess.run([sys.executable, "-c", ACCELERATE], check=True, capture_output=True, text=True)
    (losses, fp8, rows), other = json.loads(done.stdout.splitlines()[-1])
    assert losses[-1] < losses[0]
    assert (fp8, rows) == (True, 8)
    assert other == [losses, fp8, rows]


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"bf16": True}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}])
def test_the_trainer_wraps_forward_in_turn(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = trained_by_trainer(tmp_path, 2, **options)
    assert all(layer.fp8 for layer in trainer.model.modules() if isinstance(layer, te.Linear))
    assert trainer.model.lm_head.fp8_meta["recipe"].fixed is RECIPE.fixed  # compiled, a layer keeps RECIPE itself
