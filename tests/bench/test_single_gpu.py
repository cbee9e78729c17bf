"""The benchmark that trains a BERT technique after technique: its model, its memory, and what its result must hold."""

import copy
import statistics
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from matplotlib.figure import Figure
from shared.bits import assert_same_bits

import reference as te
from optimized import measure
from optimized.bench.models import single_gpu, single_gpu_plot, single_gpu_tables
from optimized.bench.models.single_gpu_memory import Live, anatomy, size
from optimized.bench.models.single_gpu_models import (
    BITSANDBYTES,
    Setting,
    Sizes,
    Training,
    copy_weights,
    matmuls,
    missing,
)
from optimized.bench.models.single_gpu_models import optimizer as named_optimizer

SIZES = Sizes(hidden=128, ffn=256, heads=2, layers=1, sequence=32, vocabulary=200, masked=8)
BASE = Setting("base", 4)
HALF = replace(BASE, precision="bf16", weights="bf16", optimizer="FusedAdam, fp32 masters")
FP8 = replace(HALF, precision="fp8", layers="te", attention="exact")


def trained(setting: Setting, like: Any = None, steps: int = 1) -> tuple[Training, list[torch.Tensor]]:
    torch.manual_seed(0)
    training = Training(setting, SIZES, "cpu")
    if like is not None:
        copy_weights(training.model, like)
    return training, training.run(steps)


def gradients(training: Training) -> list[torch.Tensor]:
    return [p.grad for p in training.parameters if p.grad is not None]


@pytest.mark.parametrize("setting", [BASE, FP8], ids=["fp32", "FP8"])
def test_recomputed_gradients_have_the_same_bits(setting: Setting) -> None:
    (plain, losses), (again, others) = (trained(replace(setting, recompute=one), steps=1) for one in (False, True))
    for a, b in zip([*losses, *gradients(plain)], [*others, *gradients(again)], strict=True):
        assert_same_bits(a, b)


def test_parts_of_a_step_see_the_batchs_samples() -> None:
    whole, parts = (Training(replace(BASE, batch=n, parts=4 // n), SIZES, "cpu") for n in (4, 1))
    for _ in range(2):
        words = next(whole.batches)[0]
        assert_same_bits(words, torch.cat([next(parts.batches)[0] for _ in range(4)]))


def test_a_sample_hides_words_and_keeps_the_answers() -> None:
    words, masked, answers = next(Training(BASE, SIZES, "cpu").batches)
    assert words.shape == (4, 32)
    assert masked.shape == answers.shape == (4, 8)
    assert (words.gather(1, masked) == 0).all()
    assert (words == 0).sum() == 32
    assert (answers > 0).all()


def test_weights_are_copied_between_kinds_of_layers() -> None:
    source = copy.deepcopy(trained(BASE)[0].model)
    model = Training(FP8, SIZES, "cpu").model
    copy_weights(model, source)
    numbers = dict(source.named_parameters())
    found = dict(model.named_parameters())
    assert len(found) == len(numbers)
    for name, path in (("fc1.weight", "layernorm_mlp.fc1_weight"), ("ln2.bias", "layernorm_mlp.layer_norm_bias")):
        assert_same_bits(found[f"layers.0.{path}"], numbers[f"layers.0.{name}"].bfloat16())
    qkv = "self_attention.layernorm_qkv"
    assert_same_bits(found[f"layers.0.{qkv}.layer_norm_weight"], numbers["layers.0.ln1.weight"].bfloat16())
    assert_same_bits(found["words.weight"], numbers["words.weight"].bfloat16())


def test_live_counts_storages_until_they_are_gone() -> None:
    x = torch.ones(256)
    with Live() as live:
        y = x + 1
        assert live.held() == 1024
        z = y.view(2, 128)  # the same storage
        z.add_(1)
        assert live.held() == live.peak == 1024
        del y
        assert live.held() == 1024
        w = z * 2
        del z
        assert live.held() == 1024
        assert live.peak == 2048
        live.reset()
        assert live.peak == 1024
        del w
        assert live.held() == 0


def test_bytes_a_parameter() -> None:
    adam = {"weights": 4, "gradients": 4, "optimizer": 8}
    for setting, expected in (
        (BASE, adam),
        (replace(BASE, optimizer="FusedAdam"), adam),
        (HALF, {"weights": 2, "gradients": 2, "optimizer": 12}),
    ):
        training, _ = trained(setting)
        found = anatomy(training)
        steps = 4 * len(training.parameters) if setting.optimizer == "AdamW" else 0  # its counters
        for part, size_of_one in expected.items():
            more = steps if part == "optimizer" else 0
            assert found[part] == size_of_one * found["parameters"] + more
        assert found["peak"] >= found["weights"] + found["optimizer"] + found["activations"]


def test_a_weight_in_fp8_counts_its_codes_twice() -> None:
    with te.quantized_model_init():
        linear = te.Linear(64, 32, params_dtype=torch.bfloat16)
    weight: Any = linear.weight
    before = size([weight])
    weight.operand(True)
    assert size([weight]) == before + 64 * 32
    assert size([weight, [weight], {"a": weight}]) == size([weight])


def test_fewer_activations_are_kept() -> None:
    kept = {
        one.name: anatomy(trained(one)[0])["activations"] for one in (BASE, replace(BASE, name="r", recompute=True))
    }
    assert kept["r"] < kept["base"]


def test_the_setting_of_fp32_products_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with matmuls("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        with matmuls("fp32"):
            assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == before


def test_what_is_missing_is_named() -> None:
    assert missing(BASE) is None
    assert missing(replace(BASE, optimizer=BITSANDBYTES)) in (None, "bitsandbytes")
    assert missing(replace(BASE, layers="Transformer Engine")) in (None, "transformer_engine")
    with pytest.raises(ValueError, match=r"name='SGD'; AdamW, .* and AdamW, 8 bits are accepted"):
        named_optimizer("SGD", [])


def test_names_and_expectations_fit() -> None:
    names = {group.name: [one.name for one in group.settings] for group in single_gpu.GROUPS}
    assert len(names) == len(single_gpu.GROUPS)
    for rows in names.values():
        assert len(set(rows)) == len(rows)
    for one in single_gpu.EXPECTED:
        assert {one.name, one.base} <= set(names[one.group])
        assert one.low < one.high
        assert one.quantity in ("speed", "memory")


def test_the_recorded_result_has_its_tables_and_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = measure.read_result("single_gpu")
    rungs, beside, expected, products = single_gpu.tables(payload)
    assert [row[0].strip("()") for row in rungs.rows] == [one.name for one in single_gpu.GROUPS[0].settings]
    assert len(beside.rows) + len(rungs.rows) == sum(len(group["rows"]) for group in payload["groups"])
    absent = {(group["group"], name) for group in payload["groups"] for name in group["not_installed"]}
    assert len(expected.rows) == sum((one.group, one.name) not in absent for one in single_gpu.EXPECTED)
    assert len(products.rows) > 10
    for _, ratio in single_gpu_tables.expectations(payload):
        assert ratio > 0
    drawn: list[Figure] = []
    monkeypatch.setattr(measure, "write_plot", lambda path, figure: drawn.append(figure))
    single_gpu_plot.plot(payload)
    left, right = drawn[0].axes
    assert len(left.get_yticks()) == len(rungs.rows)
    assert "GiB" in right.get_xlabel()
    for row in payload["groups"][0]["rows"]:
        parts = single_gpu_plot.shares(row)
        assert sum(parts.values()) == pytest.approx(single_gpu_tables.gib(row))


def test_a_block_of_steps_takes_about_a_fifth_of_a_second() -> None:
    """By the recorded milliseconds of a step; of settings that are measured by themselves there are no blocks."""
    groups = [group for group in measure.read_result("single_gpu")["groups"] if "measured" not in group]
    ms = [
        single_gpu.steps_of(Setting(**row["setting"])) * row["ms"]["median"]
        for group in groups
        for row in group["rows"]
    ]
    assert 150 < statistics.median(ms) < 270
    assert 50 < min(ms) < max(ms) < 1000


def test_what_is_measured_is_kept_group_by_group() -> None:
    """Of a run that is stopped the groups before are there; how far it is comes in order, and to 1 at its end."""
    asked, told, kept = list[tuple[str, str, Any]](), list[float](), list[int]()

    def found(how: str) -> Any:
        return lambda group, *rest: asked.append((how, group.name, rest)) or {"group": group.name}

    nothing = {"gemms": lambda repeats: [repeats], "batch_ms": lambda sizes: 0.5, "by_itself": found("alone")}
    with (
        mock.patch.multiple(single_gpu, **nothing, measured=found("in turn")),
        mock.patch.object(single_gpu.layer, "clear"),
        mock.patch.object(single_gpu.layer_models, "engine"),
        mock.patch.object(measure, "provenance", lambda kernels: {"kernels": list(kernels)}),
    ):
        payload = single_gpu.run(told.append, 3, SIZES, lambda part: kept.append(len(part["groups"])))
    count = len(single_gpu.GROUPS)
    assert kept == [*range(1, count + 1)]
    assert [group["group"] for group in payload["groups"]] == [group.name for group in single_gpu.GROUPS]
    assert asked == [
        ("alone", one.name, (SIZES,)) if one.alone else ("in turn", one.name, (SIZES, 3)) for one in single_gpu.GROUPS
    ]
    assert told == sorted(set(told))
    assert 0 < told[0] < told[-2] < told[-1] == 1
    assert (payload["gemms"], payload["batch_ms"], payload["repeats"]) == ([6], 0.5, 3)
    assert payload["provenance"]["kernels"] == list(single_gpu.KERNELS)
