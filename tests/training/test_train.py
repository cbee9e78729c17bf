"""Training to the bit: the trainer's hashes, its checkpoints, and what leaves no trace."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from shared.training_text import corpus

import reference as te
from optimized import measure
from optimized.training import checkpoint
from optimized.training.corpus import Corpus, read_files
from optimized.training.model import drawn
from optimized.training.settings import RECIPES, SIZES, Settings, falling
from optimized.training.trainer import Trainer
from reference.inspect.recorded_step import file
from reference.inspect.recorded_step.replay import replay
from reference.numbers import philox
from reference.support import files

GOLDEN = measure.ROOT / "tests" / "golden" / "training.json"
SHORT, LONG, EVERY = 20, 200, 20  # steps whose hashes are recorded: each of the first, then every `EVERY`-th
FIRST = 6  # of which the fast suite makes so many
ON_CPUS = ["mxfp8", "nvfp4"]  # alone
ON_GPUS = [*(name for name in RECIPES if name not in ON_CPUS), "mixed"]
RECORDED = [name for name in (*ON_GPUS, *ON_CPUS) if name != "bf16"]
MIXED = {  # of two layers; the others are in delayed scaling
    "0.self_attention.layernorm_qkv": te.recipe.Float8CurrentScaling(),
    "0.self_attention.proj": te.recipe.Float8BlockScaling(),
    "0.layernorm_mlp": te.recipe.Float8RowwiseScaling(),
    "1.self_attention.layernorm_qkv": te.recipe.Float8RowwiseScaling(weight_gradient="high_precision"),
    "1.self_attention.proj": None,
}
NANO = replace(SIZES["nano"], dropout=0.1)  # what the recorded hashes are of
TINY = Settings(
    sequence=16, hidden=32, layers=1, rows=2, steps=6, warmup=2, dropout=0.1, clip=1.0, weight_decay=0.1, accumulate=2
)


pytestmark = pytest.mark.usefixtures("one_thread")


def made(settings: Settings, precision: str, device: str = "cpu") -> Trainer:
    """A trainer in one recipe; "mixed": of two layers, each linear map in a recipe of its own (`MIXED`)."""
    if precision != "mixed":
        return Trainer(replace(settings, precision=precision), corpus(), device)
    trainer = Trainer(replace(settings, precision="delayed", layers=2), corpus(), device)
    te.recipe.by_layer(trainer.model.layers, MIXED)
    return trainer


def hashes(precision: str, steps: int, device: str = "cpu") -> dict[str, list[Any]]:
    """By number of the step, its loss and the SHA-256 of all state after it."""
    trainer = made(NANO, precision, device)
    found = {}
    for step in range(1, steps + 1):
        loss = trainer.train()
        if step <= SHORT or step % EVERY == 0:
            found[str(step)] = [float(loss[0]), trainer.digest()]
    return found


def recorded(precision: str, steps: int) -> dict[str, list[Any]]:
    known = json.loads(GOLDEN.read_text())[precision]
    return {step: one for step, one in known.items() if int(step) <= steps}


def trained(settings: Settings, steps: int | None = None) -> Trainer:
    """A trainer after some steps."""
    trainer = Trainer(settings, corpus())
    for _ in range(settings.steps if steps is None else steps):
        trainer.train()
    return trainer


# --- the recorded hashes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", RECORDED)
def test_the_first_steps_have_the_recorded_hashes(precision: str) -> None:
    assert hashes(precision, FIRST) == recorded(precision, FIRST)


@pytest.mark.parametrize("batches", [0, -1, 1.5, True])
def test_a_mean_of_no_batches_is_refused(batches: Any) -> None:
    with pytest.raises(ValueError, match=f"Trainer.evaluate: batches={batches}; an int from 1 is accepted"):
        Trainer(TINY, corpus()).evaluate(batches)


def test_an_evaluation_is_the_mean_of_its_batches() -> None:
    trainer = Trainer(TINY, corpus())
    with trainer._undisturbed():
        losses = [float(trainer.model.loss(trainer._windows(trainer.unseen, i), trainer.recipe)) for i in range(3)]
    assert len(set(losses)) == 3
    for count in (1, 2, 3):
        assert trainer.evaluate(count) == pytest.approx(math.fsum(losses[:count]) / count, rel=1e-12)


def assert_two_hundred_steps(precision: str, device: str) -> None:
    found = hashes(precision, LONG, device)
    assert found == recorded(precision, LONG)
    assert found[str(LONG)][0] < 2.5  # and it has learned: 5.5 at its start


@pytest.mark.slow
@pytest.mark.parametrize("precision", RECORDED)
def test_two_hundred_steps_have_the_recorded_hashes(precision: str) -> None:
    assert_two_hundred_steps(precision, "cpu")


@pytest.mark.slow
def test_a_gpt_learns_in_few_bits_as_in_bf16() -> None:
    """At its end it has learned at least nine tenths of what bf16 has."""
    settings = Settings(sequence=32, hidden=64, rows=4, steps=50, learning_rate=0.003)
    learned = {}
    for precision in ("bf16", "rowwise", "rowwise_with_gw_hp", *ON_CPUS):
        trainer = Trainer(replace(settings, precision=precision), corpus())
        losses = [float(trainer.train()[0]) for _ in range(settings.steps)]
        learned[precision] = losses[0] - sum(losses[-10:]) / 10
    assert learned["bf16"] > 1.5
    assert min(learned.values()) > 0.9 * learned["bf16"], learned


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [name for name in RECORDED if name not in ON_CPUS])
def test_two_hundred_steps_on_a_gpu_have_the_recorded_hashes(precision: str) -> None:
    assert_two_hundred_steps(precision, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ON_GPUS)
def test_eight_steps_on_a_gpu_are_those_of_a_cpu(precision: str) -> None:
    """The losses and all state, in microbatches; from the third step on the GPU replays CUDA graphs."""
    settings = replace(TINY, steps=8)
    here, there = (made(settings, precision, device) for device in ("cpu", "cuda"))
    for step in range(8):
        assert torch.equal(here.train(), there.train().cpu()), step
        assert here.digest() == there.digest(), step


def test_the_mixed_model_has_every_recipe() -> None:
    found = te.recipe.by_layer(made(NANO, "mixed").model.layers, {})
    assert list(found.values()) == [*MIXED.values(), te.recipe.AUTOCAST]


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ON_GPUS)
def test_microbatches_and_recomputation_have_the_same_hash_on_a_gpu(precision: str, recompute: bool) -> None:
    settings = replace(TINY, recompute=recompute)
    here, there = (made(settings, precision, device) for device in ("cpu", "cuda"))
    for step in range(4):
        for side in (here, there):
            side.train()
        assert here.digest() == there.digest(), step
    assert here.evaluate(2) == there.evaluate(2)
    assert here.sample(b"1 * ", 8) == there.sample(b"1 * ", 8)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ON_GPUS)
def test_captured_steps_are_those_of_python(precision: str, accumulate: int, tmp_path: Path) -> None:
    """Steps in CUDA graphs, with looks at the model, a step of Python's and a loaded checkpoint between them."""
    settings = replace(TINY, accumulate=accumulate, steps=8)
    graphs, plain = (made(settings, precision, "cuda") for _ in range(2))
    for step in range(8):
        losses = [graphs.train(capture=step != 5), plain.train(capture=False)]
        assert torch.equal(losses[0], losses[1]), step
        assert graphs.digest() == plain.digest(), step
        if step == 3:
            graphs.evaluate(1)
            graphs.sample(b"1", 2)
            graphs.save(tmp_path / "run.safetensors")
            graphs.train()
            graphs.load(tmp_path / "run.safetensors")
            assert graphs.digest() == plain.digest()


@pytest.mark.gpu
def test_a_run_changes_its_device_and_keeps_its_bits(tmp_path: Path) -> None:
    """Two steps on a GPU, two on a CPU, two on a GPU again, as six on a CPU."""
    settings, path = replace(TINY, precision="delayed"), tmp_path / "run.safetensors"
    for device in ("cuda", "cpu", "cuda"):
        trainer = Trainer(settings, corpus(), device)
        if path.exists():
            trainer.load(path)
        for _ in range(2):
            trainer.train()
        trainer.save(path)
    assert trainer.digest() == trained(settings).digest()


# --- what changes nothing ----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", RECIPES)
def test_looking_at_a_model_and_recomputing_leave_no_trace(precision: str, tmp_path: Path) -> None:
    settings = replace(TINY, precision=precision)
    wanted = trained(settings).digest()
    looked_at = Trainer(settings, corpus())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for step in range(settings.steps):
        looked_at.evaluate(1)
        path = tmp_path / "step.safetensors"
        if step == 2:
            with te.record(looked_at.model, path, looked_at.optimizer):
                looked_at.train()
        else:
            looked_at.train()
        looked_at.sample(b"7 * ", 2)
        looked_at.save(tmp_path / "run.safetensors")
    assert looked_at.digest() == wanted
    assert torch.equal(torch.get_rng_state(), before)
    assert trained(replace(settings, recompute=True)).digest() == wanted
    assert trained(replace(settings, dropout=0.0)).digest() != wanted
    result = replay(file.read(path))
    assert result.equal
    assert result.ops > 20


@pytest.mark.parametrize("precision", RECIPES)
def test_a_sample_is_what_the_whole_text_gives(precision: str) -> None:
    """From a cache as long as it holds the text, which is for 16 bytes, and byte by byte the same."""
    trainer = trained(replace(TINY, precision=precision), 3)
    model, read = trainer.model, list[int]()
    model.register_forward_pre_hook(lambda _, args: read.append(len(args[0])))
    found = trainer.sample(b"7 * ", 20)
    assert read == ([*range(4, 17)] if precision in ("current", "nvfp4") else [4, *[1] * 12]) + [16] * 7
    text = b"7 * "
    with torch.no_grad():
        model.eval()
        for u in philox.uniform((20,), seed=TINY.seed).tolist():
            window = torch.tensor(list(text[-16:]))[:, None]
            text += bytes([drawn(model(window, trainer.recipe)[-1, 0], u, 0.7)])
    assert found == text


@torch.no_grad()
def test_a_cache_has_room_for_one_text_of_the_longest_sequence() -> None:
    """Keys and values of each layer in 16 bits, and no byte more."""
    model = Trainer(replace(TINY, layers=2, hidden=64, heads=4), corpus()).model.eval()
    cache = model.cache()
    cache.pre_step({"text": 16})
    model(torch.zeros(16, 1, dtype=torch.int64), None, cache=cache)
    held = [x.nbytes for both in cache.cache.values() for x in both]
    assert held == [16 * 64 * 2] * 2 * 2


def test_each_part_of_a_state_is_in_the_hash() -> None:
    trainer = trained(replace(TINY, precision="delayed"), 2)
    seen = {trainer.digest()}
    kinds = {name.split("/")[0] for name in trainer.tensors()}
    assert kinds == {"model", "optimizer", "fp8", "random"}
    for name, x in trainer.tensors().items():
        word = x.view(torch.uint8).reshape(-1)
        word[-1] ^= 1
        seen.add(trainer.digest())
        word[-1] ^= 1
        assert len(seen) > 1, name
    assert len(seen) == 1 + len(trainer.tensors())
    trainer.updates += 1
    assert trainer.digest() not in seen


def test_microbatches_share_casts_and_add_up() -> None:
    """Two microbatches of two rows and one of four see the same text, and nearly the same gradient."""
    one, two = (trained(replace(TINY, dropout=0.0, rows=4 // n, accumulate=n), 1) for n in (1, 2))
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert float((a.grad - b.grad).norm()) <= 0.02 * float(a.grad.norm())  # products are rounded to 8 bits
    assert one.settings.tokens == two.settings.tokens == 64


def test_with_delayed_scaling_the_first_step_finds_scales_alone() -> None:
    start, after = trained(replace(TINY, precision="delayed"), 0), trained(replace(TINY, precision="delayed"), 1)
    assert (after.step, after.updates) == (1, 0)
    for a, b in zip(start.model.parameters(), after.model.parameters(), strict=True):
        assert torch.equal(a, b)
    name = "fp8/layers.0.layernorm_mlp.scaling_bwd.scale"
    assert float(after.tensors()[name][0]) > 1 == float(start.tensors()[name][0])
    assert trained(TINY, 1).updates == 1


def test_the_norm_is_clipped() -> None:
    loose, tight = (trained(replace(TINY, clip=clip), 1) for clip in (1e9, 0.1))
    assert loose.norm is not None
    assert tight.norm is not None
    assert float(loose.norm) == float(tight.norm) > 0.1
    length = math.sqrt(sum(float(p.grad.double().square().sum()) for p in tight.model.parameters()))
    assert length == pytest.approx(0.1, rel=1e-4)
    assert trained(replace(TINY, clip=0.0), 1).norm is None


# --- checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", RECIPES)
def test_a_run_goes_on_to_the_same_bits(precision: str, tmp_path: Path) -> None:
    settings = replace(TINY, precision=precision)
    path = tmp_path / "run.safetensors"
    wanted = trained(settings).digest()
    first = Trainer(settings, corpus())
    for stop in range(settings.steps):
        assert first.save(path) == first.digest()
        second = Trainer(settings, corpus())
        second.load(path)
        assert second.digest() == first.digest()
        for _ in range(settings.steps - stop if stop in (0, 1, 3) else 1):
            second.train()
        first.train()
        assert second.digest() == (wanted if second.step == settings.steps else first.digest()), stop


def test_a_damaged_or_foreign_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trainer = trained(TINY, 1)
    path, good = tmp_path / "run.safetensors", tmp_path / "good.safetensors"
    trainer.save(good)
    content = good.read_bytes()
    flipped, renamed = bytearray(content), content.replace(b'"training run"', b'"training sun"')
    flipped[-1] ^= 1
    rate = content.replace(b'learning_rate\\": 0.002', b'learning_rate\\": 0.003')
    assert rate != content
    later = safetensors.torch.save({"x": torch.zeros(1)}, {"twin_engine": "training run", "version": "7"})
    bad = [
        ("no whole safetensors file", content[: len(content) // 2]),
        ("no whole", b"hello"),
        ("its bytes are not those that were written", bytes(flipped)),
        ("at its header", renamed),
        ("of version '7'", later),
        ("at its header", rate),
        ("is no whole safetensors", b""),
    ]
    before = trainer.digest()
    for text, broken in bad:
        path.write_bytes(broken)
        with pytest.raises(files.Damaged, match=text):
            trainer.load(path)
        assert trainer.digest() == before
    safetensors.torch.save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(files.Damaged, match="and no training run"):
        trainer.load(path)
    with pytest.raises(ValueError, match=r"was written with rows=2; this run has rows=3\."):
        Trainer(replace(TINY, rows=3), corpus()).load(good)
    with pytest.raises(ValueError, match=r"trained on a text of"):
        Trainer(TINY, Corpus(corpus().data[1:], 1)).load(good)
    about = {**trainer.about()}
    tensors = trainer.tensors()
    tensors.pop("random/torch")
    checkpoint.write(path, tensors, about)
    with pytest.raises(files.Damaged, match="does not have the tensors of its settings"):
        trainer.load(path)


def test_a_checkpoint_of_version_1_is_read_by_its_own_checks(tmp_path: Path) -> None:
    """It has no checksum of every byte: a digest of its tensors, and one of what it says about itself."""
    trainer = trained(TINY, 1)
    path, newer = tmp_path / "run.safetensors", tmp_path / "newer.safetensors"
    trainer.save(newer)
    with safetensors.safe_open(newer, framework="pt") as opened:
        metadata = {name: text for name, text in opened.metadata().items() if name not in ("crc32", "seal")}
    content = safetensors.torch.save(safetensors.torch.load_file(newer), metadata | {"version": "1"})
    path.write_bytes(content)
    second = Trainer(TINY, corpus())
    second.load(path)
    assert second.digest() == trainer.digest()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    rate = content.replace(b'learning_rate\\": 0.002', b'learning_rate\\": 0.003')
    assert rate != content
    for text, broken in (("its numbers are not", bytes(flipped)), ("about itself", rate)):
        path.write_bytes(broken)
        with pytest.raises(files.Damaged, match=text):
            second.load(path)
        assert second.digest() == trainer.digest()


# --- settings and texts ------------------------------------------------------------------------------------


def test_the_rate_rises_and_falls_as_a_cosine() -> None:
    settings = replace(TINY, steps=50, warmup=10)
    rates = [settings.rate(step) / settings.learning_rate for step in range(50)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == pytest.approx([(1 + math.cos(math.pi * step / 40)) / 2 for step in range(40)])
    for t in torch.linspace(0, 1, 999, dtype=torch.float64).tolist():
        assert abs(falling(t) - (1 + math.cos(math.pi * t)) / 2) < 2**-51
    assert replace(TINY, steps=2, warmup=2).rate(1) == TINY.learning_rate


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"precision": "fp4"},
            r"precision='fp4'; bf16, delayed, current, block, rowwise, .*mxfp8, nvfp4 are accepted\.",
        ),
        ({"heads": 3}, r"hidden=32 with heads=3; a multiple"),
        ({"dropout": 1.0}, r"dropout=1\.0; a number from 0 to below 1"),
        ({"vocabulary": 255}, r"vocabulary=255; at least 256"),
        ({"rows": 0}, r"rows=0; a whole number, at least 1"),
        ({"learning_rate": math.inf}, r"learning_rate=inf; a finite number"),
        ({"clip": 1e39}, r"clip=1e\+39; a finite number of at least 0 is accepted, as fp32 has it"),
        ({"clip": -1.0}, r"clip=-1\.0; a finite number of at least 0"),
        ({"seed": -1}, r"seed=-1; 0 to"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(TINY, **changes)


def test_sizes_have_their_names_numbers() -> None:
    millions = {name: settings.numbers / 1e6 for name, settings in SIZES.items()}
    assert millions["124m"] == pytest.approx(124, rel=0.01)
    assert millions["350m"] == pytest.approx(354, rel=0.01)
    assert millions["1.3b"] == pytest.approx(1311, rel=0.01)


@pytest.mark.parametrize("settings", [TINY, *SIZES.values()], ids=["tiny", *SIZES])
def test_operations_are_those_of_products(settings: Settings) -> None:
    """Of each layer, of the head and of attention, in forward and twice in backward."""
    tokens, hidden = settings.tokens, settings.hidden
    layer = 2 * tokens * 12 * hidden**2 * 3
    head = 2 * tokens * settings.vocabulary * hidden * 3
    attention = tokens * settings.sequence // 2 * hidden * 2 * 2 * 3  # two products of a triangle
    assert settings.flops == settings.layers * (layer + attention) + head


@pytest.mark.parametrize("changes", [{"hidden": 64}, {"layers": 3, "rows": 16}], ids=["weights", "inputs"])
def test_a_step_holds_the_bytes_that_it_is_said_to_need(changes: dict[str, Any]) -> None:
    """All of matrices that multiply and of positions: numbers, moments, and the layers' inputs; the rest is small."""
    trainer, inputs = Trainer(replace(TINY, accumulate=1, **changes), corpus()), list[int]()
    for layer in trainer.model.layers:
        layer.register_forward_pre_hook(lambda layer, given: inputs.append(given[0].nbytes))
    trainer.train()
    matrices = [p for p in trainer.model.parameters() if p.dim() == 2]
    moments = [x for p in matrices for x in trainer.optimizer.state[p].values() if x.dim() == 2]
    held = sum(x.nbytes for x in (*matrices, *moments)) + sum(inputs)
    assert trainer.settings.least_bytes == held


def test_texts_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "no.txt").write_text("never")
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.txt").write_text("C")
    assert read_files([tmp_path]).data.tobytes() == b"CB"
    assert read_files([tmp_path / "b.txt", tmp_path]).data.tobytes() == b"BCB"
    assert read_files([tmp_path]).files == 2
    with pytest.raises(FileNotFoundError, match=r"the text '.*nowhere' is not there; a file, or a folder"):
        read_files([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"the text has 17 bytes, of which 0 are held out; more than 16"):
        Trainer(TINY, Corpus(corpus().data[:17], 1))


def record() -> None:
    """`PYTHONPATH=.:tests python tests/training/test_train.py` records the hashes anew, on a CPU, in a few minutes."""
    found = {precision: hashes(precision, LONG) for precision in RECORDED}
    files.write(GOLDEN, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    record()


def test_the_columns_of_the_layers_maps() -> None:
    """Amaxes of weights stand where `products` says that weights are, and no others do."""
    trainer = made(replace(TINY, dropout=0.0, accumulate=1), "delayed")
    weights = {name: p.abs().max().item() for name, p in trainer.model.layers[0].named_parameters() if p.dim() == 2}
    assert len(weights) == 4
    trainer.train()
    found = []
    for _, module, (of_input, of_weight, of_grad) in trainer.model.products():
        amaxes = module.fp8_meta["scaling_fwd"].amax_history.max(0).values.tolist()
        found.append(amaxes[of_weight])
        assert amaxes[of_input] > 0
        assert amaxes[of_input] not in weights.values()
        assert module.fp8_meta["scaling_bwd"].amax_history.max(0).values[of_grad] > 0
    assert sorted(found) == sorted(weights.values())
