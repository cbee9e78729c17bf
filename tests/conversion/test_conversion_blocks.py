"""`te.convert(model, blocks=True)`: decoder layers of Hugging Face's become whole `te.TransformerLayer`s."""

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import optimized
import reference as te

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # of the libraries
RECIPE = te.DelayedScaling(amax_history_len=4)
BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.arange(32).reshape(2, 16) * 5 % 128
KINDS = {
    "llama": ("Llama", {}),
    "wide heads": ("Llama", {"head_dim": 32}),
    "llama 3": ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "a window": ("Mistral", {"sliding_window": 4}),
}  # fmt: skip


def library() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quiet() -> None:
    library().utils.logging.set_verbosity_error()


def plain(name: str = "llama", dtype: torch.dtype = BF16, **more: Any) -> Any:
    kind, changes = KINDS[name]
    kind = getattr(library(), f"{kind}ForCausalLM")
    torch.manual_seed(0)
    return kind._from_config(kind.config_class(**{**SIZES, **changes, **more}), dtype=dtype)


def converted(name: str = "llama", dtype: torch.dtype = BF16, recipe: Any = RECIPE) -> Any:
    model = plain(name, dtype)
    te.convert(model, recipe=recipe, blocks=True)
    return model


def trained(model: Any, steps: int = 3, **given: Any) -> list[torch.Tensor]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS, **given).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters())]


def blocks_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, te.TransformerLayer)]


@pytest.mark.parametrize("name", KINDS)
def test_a_model_computes_what_it_did(name: str) -> None:
    """In fp32 only orders of sums differ: 2 layers, sums of at most 128 terms, 2⁻²⁴ · 128 · 2 < 2e-5 of the norm."""
    model, original = plain(name, torch.float32).eval(), plain(name, torch.float32).eval()
    report = te.convert(model, blocks=True)
    assert list(report.converted.values()) == ["te.TransformerLayer"] * 2 + ["te.RMSNorm", "te.Linear"]
    assert {one.__class__.__name__ for one in blocks_of(model)} == {f"{KINDS[name][0]}DecoderLayer"}
    seen = torch.ones_like(IDS)
    seen[0, :5] = 0  # padding on the left, so that positions differ between rows
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    for given in ({}, {"attention_mask": seen}, {"attention_mask": seen, "position_ids": positions}):
        for cached in (False, True):
            with torch.no_grad():
                a, b = (one(input_ids=IDS, use_cache=cached, **given).logits for one in (model, original))
            kept = seen.bool() if given else torch.ones_like(seen).bool()
            assert (a - b)[kept].norm() < 2e-5 * b[kept].norm()


@pytest.mark.parametrize("recipe", [None, RECIPE, te.recipe.Float8CurrentScaling()], ids=["bf16", "delayed", "current"])
def test_it_is_the_layer_itself_in_every_bit(recipe: Any, same_bits: Any) -> None:
    model = converted(recipe=None)
    ours = [te.TransformerLayer(64, 128, 4, 2, layernorm_epsilon=1e-6, hidden_dropout=0.0, attention_dropout=0.0,
                                bias=False, normalization="RMSNorm", activation="swiglu", attn_input_format="bshd",
                                params_dtype=BF16) for _ in range(2)]  # fmt: skip
    for block, layer in zip(blocks_of(model), ours, strict=True):
        for (name, p), (other, q) in zip(block.named_parameters(), layer.named_parameters(), strict=True):
            assert name == other
            q.data.copy_(p.data)
    x = model.model.embed_tokens(IDS).detach()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    angles = torch.arange(16).float()[:, None] * model.model.rotary_emb.inv_freq
    angles = torch.cat([angles, angles], -1)[:, None, None]
    positions = torch.arange(16)[None]
    for _ in range(2):
        found = []
        for layers, given in ((blocks_of(model), {"position_ids": positions}), (ours, {"rotary_pos_emb": angles})):
            h = inputs[len(found)]
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                for layer in layers:
                    h = layer(h, **given)
            h.float().square().sum().backward()
            found.append(h)
        same_bits(*found)
        same_bits(inputs[0].grad, inputs[1].grad)
    for p, q in zip((p for one in blocks_of(model) for p in one.parameters()),
                    (q for one in ours for q in one.parameters()), strict=True):  # fmt: skip
        same_bits(p.grad, q.grad)


def test_with_a_cache_every_bit_is_the_same(same_bits: Any) -> None:
    """Part by part or fused: losses, gradients and the FP8 state that follows from them."""
    for a, b in zip(trained(converted()), trained(converted(), use_cache=True), strict=True):
        same_bits(a, b)


def test_generate_reads_its_own_cache() -> None:
    model = converted()
    trained(model)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.eval().generate(IDS[:, :4], **options)
    assert tokens.shape == (2, 12)
    assert torch.equal(model.generate(IDS[:, :4], use_cache=False, **options), tokens)
    assert all(part.fp8 for one in blocks_of(model) for part in one.modules() if isinstance(part, te.Linear))


@pytest.mark.parametrize("name", KINDS)
def test_generate_writes_what_the_model_wrote(name: str) -> None:
    seen = torch.ones(2, 8, dtype=torch.long)
    seen[0, :3] = 0  # padding on the left of one row, so that positions differ between rows
    both = (converted(name, torch.float32, None), plain(name, torch.float32))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first, second = (one.eval().generate(IDS[:, :8], attention_mask=seen, **options) for one in both)
    assert torch.equal(first, second)


def test_gradient_checkpointing_changes_no_bit(same_bits: Any) -> None:
    model = converted()
    model.gradient_checkpointing_enable()
    for a, b in zip(trained(converted()), trained(model), strict=True):
        same_bits(a, b)


def test_names_in_files_are_hugging_faces(tmp_path: Path, same_bits: Any) -> None:
    model = converted()
    trained(model)
    model.save_pretrained(tmp_path)
    kind = type(model)
    read, info = kind.from_pretrained(tmp_path, dtype=BF16, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(key.endswith("_extra_state") for key in info["unexpected_keys"])
    for key, value in read.state_dict().items():
        same_bits(value, model.state_dict()[key], key)
    te.convert(read, recipe=RECIPE, blocks=True)
    te.load_fp8_state(read, tmp_path)
    other = converted()
    trained(other, 1)
    other.load_state_dict(model.state_dict())
    for one in (read, other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            same_bits(one.eval()(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


def test_a_class_that_converts_itself_into_blocks_cannot_be_read_into(tmp_path: Path) -> None:
    class Converting(library().LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            te.convert(self, blocks=True)

    plain().save_pretrained(tmp_path)
    with pytest.raises(AttributeError, match="has no attribute `input_layernorm`"):
        Converting.from_pretrained(tmp_path)


def test_the_trainer_trains_whole_blocks_and_resumes_with_the_same_bits(tmp_path: Path, same_bits: Any) -> None:
    pytest.importorskip("accelerate")
    data = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]

    def run(folder: str, steps: int, resume: bool = False) -> Any:
        arguments = library().TrainingArguments(
            tmp_path / folder, per_device_train_batch_size=1, max_steps=steps, learning_rate=1e-2, save_steps=2,
            lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, log_level="error",
        )  # fmt: skip
        trainer = library().Trainer(converted(), arguments, train_dataset=data)
        trainer.remove_callback(library().PrinterCallback)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    whole = run("whole", 4)
    run("parts", 2)
    resumed = run("parts", 4, resume=True)
    for (key, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        same_bits(a, b, key)


def test_nothing_is_left_on_the_meta_device() -> None:
    for part in converted().modules():
        for name, value in [*vars(part).items(), *part.named_buffers(), *part.named_parameters()]:
            assert not isinstance(value, torch.Tensor) or not value.is_meta, name


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = plain()
    assert len(te.convert(model, blocks=True).converted) == 4
    assert all(p.is_meta for p in model.parameters())


def test_a_second_call_changes_nothing() -> None:
    model = converted()
    before = {name: id(module) for name, module in model.named_modules()}
    assert te.convert(model, blocks=True).converted == {}
    assert {name: id(module) for name, module in model.named_modules()} == before


def with_more(model: Any) -> None:
    model.model.layers[0].adapter = torch.nn.Linear(64, 64)


def with_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def with_tie(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight


def with_frozen(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("changes", "change", "given", "why"),
    [
        ({"attention_bias": True}, None, {}, "projections have a bias"),
        ({"attention_dropout": 0.1}, None, {}, "attention_dropout=0.1"),
        ({"hidden_act": "gelu"}, None, {}, "its activation is GELUActivation"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, None, {}, "no rotary embedd"),
        ({"is_causal": False}, None, {}, "its attention is not causal"),
        ({}, with_more, {}, "it has adapter"),
        ({}, with_hook, {}, "hooks are registered on mlp"),
        ({}, with_tie, {}, "mlp.gate_proj, mlp.up_proj: a tied weight"),
        ({}, with_frozen, {}, "gate and up differ in requires_grad"),
        ({}, None, {"filter": {"*.layers.0.mlp.down_proj": False}}, "mlp.down_proj: filter leaves it out"),
    ],
)
def test_what_does_not_match_is_replaced_module_by_module(changes: Any, change: Any, given: Any, why: str) -> None:
    model = plain(**changes)
    if change is not None:
        change(model)
    report = te.convert(model, blocks=True, **given)
    assert why in report.skipped["model.layers.0"]
    assert report.skipped["model.layers.0"].startswith("module by module; ")
    assert report.converted["model.layers.0.self_attn.q_proj"] == "te.Linear"
    assert torch.isfinite(model(input_ids=IDS).logits).all()


def _of_class(part: str) -> Any:
    """Gives a part of the first layer a subclass whose result is twice as large."""

    def change(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        found = model.model.layers[0].get_submodule(part)
        kind = type(found)
        forward = lambda self, *args, **given: _twice(kind.forward(self, *args, **given))  # noqa: E731
        found.__class__ = type(kind.__name__, (kind,), {"forward": forward})

    return change


def _in_its_class(part: str) -> Any:
    """Replaces a method of the library's class."""

    def change(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kind: Any = type(model.get_submodule(part))
        was = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *args, **given: _twice(was(self, *args, **given)))

    return change


def _in_the_instance(part: str) -> Any:
    def change(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        found = model.get_submodule(part)
        was = found.forward
        found.forward = lambda *args, **given: _twice(was(*args, **given))

    return change


def _by_a_hook(part: str) -> Any:
    def change(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model.get_submodule(part).register_forward_hook(lambda module, given, out: _twice(out))

    return change


def _twice(out: Any) -> Any:
    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


def _by_a_function(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = sys.modules[type(model).__module__]
    monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda q, k, *others, **given: (q, k))


def _in_torch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = lambda self, x: 2 * torch.nn.functional.linear(x, self.weight, self.bias)  # noqa: E731
    monkeypatch.setattr(torch.nn.Linear, "forward", forward)


WHOLE, ATTENTION, MLP = "model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp"
MODIFIED: dict[str, Any] = {
    **{f"subclass of {part}": _of_class(part) for part in ("", "self_attn", "mlp", "mlp.act_fn", "mlp.up_proj")},
    **{f"method of {part}": _in_its_class(part) for part in (WHOLE, ATTENTION, MLP, f"{MLP}.act_fn")},
    **{
        f"{way.__name__} {part}": way(part)
        for way in (_in_the_instance, _by_a_hook)
        for part in (WHOLE, ATTENTION, MLP, f"{MLP}.act_fn", f"{MLP}.up_proj", "model.rotary_emb")
    },
    "function": _by_a_function,
    "torch's linear": _in_torch,
}


@pytest.mark.parametrize("how", MODIFIED)
def test_a_block_that_somebody_changed_goes_on_computing_what_it_did(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain()
    before = model(input_ids=IDS).logits
    MODIFIED[how](model, monkeypatch)
    changed = model(input_ids=IDS).logits
    assert not torch.allclose(changed.float(), before.float(), atol=1e-3), "the change changes something"
    te.convert(model, blocks=True)
    torch.testing.assert_close(model(input_ids=IDS).logits.float(), changed.float(), rtol=2e-2, atol=2e-2)
    assert type(model.model.layers[0]).__name__ != "TransformerLayer"


def test_weights_to_be_kept_in_fp8_and_other_kinds() -> None:
    model = plain()
    with te.quantized_model_init():
        assert "kept in FP8" in te.convert(model, blocks=True).skipped["model.layers.0"]
    other = torch.nn.Sequential(torch.nn.Linear(16, 16))
    assert te.convert(other, blocks=True).converted == {"0": "te.Linear"}


def test_each_side_makes_its_own_blocks() -> None:
    model = plain()
    optimized.convert(model, blocks=True)
    assert all(isinstance(one, optimized.TransformerLayer) for one in blocks_of(model))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert torch.isfinite(model(input_ids=IDS).logits).all()


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^convert: blocks=1; True and False are accepted\.$"):
        te.convert(plain(), blocks=1)  # type: ignore[arg-type]
    model = converted()
    block, x = blocks_of(model)[0], torch.zeros(1, 16, 64, dtype=BF16)
    for mask in (torch.zeros(1, 1, 16, 16), torch.ones(1, 16, dtype=torch.bool), "causal"):
        with pytest.raises(TypeError, match=r"^te\.convert's blocks: attention_mask is .*; None or a torch\.bool tens"):
            block(x, attention_mask=mask)
    with pytest.raises(NotImplementedError, match=r"^te\.convert's blocks: cu_seq_lens_q is not offered; attention_m"):
        block(x, cu_seq_lens_q=torch.zeros(2))
    with pytest.raises(
        NotImplementedError, match=r"^te\.convert's blocks: is_causal=False is not offered; True is acc"
    ):
        block(x, is_causal=False)
    model.set_attn_implementation("eager")
    with pytest.raises(NotImplementedError, match=r"attn_implementation='eager' is not offered; 'sdpa' is accepted\.$"):
        model(input_ids=IDS)


@pytest.mark.parametrize("name", ["llama", "llama 3", "wide heads", "a window"])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_generator_writes_what_the_forward_says(name: str, fp8: bool) -> None:
    """Prompts of several lengths at once: tokens and log-probabilities of a forward of the whole text."""
    model = converted(name, recipe=RECIPE if fp8 else None).eval()
    prompts = [IDS[0, :9].tolist(), IDS[1, :3].tolist(), IDS[0, :7].tolist()]
    made = te.Generator(model, max_batch_size=2, max_sequence_length=32, page_size=4, draft_tokens=2)
    for prompt, done in zip(prompts, made.generate(prompts, 6), strict=True):
        text = torch.tensor([[*prompt, *done.tokens]])
        with torch.no_grad():
            logits = model(input_ids=text[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        assert done.tokens == logits.argmax(-1).tolist()
        assert done.logprobs == (-te.cross_entropy(logits, text[0, len(prompt) :], reduction="none")).tolist()


def test_the_generator_refuses_a_recipe_that_the_model_brings() -> None:
    made = te.Generator(converted(recipe=te.recipe.Float8CurrentScaling()).eval())
    made.add([3])
    with pytest.raises(ValueError, match=r"^Generator: the recipe Float8CurrentScaling, in which"):
        made.step()
