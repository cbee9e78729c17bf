"""`te.record`: a recorded step replays with the same bits, and recording changes none.

A step recorded on a GPU replays on the CPU with the same bits, whatever the GPU had replayed before.
"""

import copy
import json
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from shared import recorded_steps as steps
from shared.graph_cases import Captured, pretended
from shared.recorded_steps import BF16, MODELS, RECIPES, given, made, recorded, replayed, step

import optimized
import reference as te
from reference.graphs.graphed_module import GraphedModule
from reference.inspect.recorded_step import digest, file, statistics
from reference.inspect.recorded_step.replay import replay
from reference.inspect.recorded_step.statistics import Statistics
from reference.nn.core import autograd

__all__ = ["pretended"]  # a fixture


def optimizer_of(model: torch.nn.Module) -> Any:
    return te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_step_has_the_same_bits(name: str, recipe: str, tmp_path: Path, same_bits) -> None:
    """As it ran, and as it runs again; nothing of the step depends on the recording."""
    model, path = made(name), tmp_path / "step.safetensors"
    alone = copy.deepcopy(model)
    torch.manual_seed(1)
    y = recorded(path, model, RECIPES[recipe], optimizer_of(model))

    torch.manual_seed(1)
    optimizer = optimizer_of(alone)
    step(alone, given(), RECIPES[recipe], optimizer)
    alone.zero_grad()
    same_bits(step(alone, given(), RECIPES[recipe], optimizer), y, "y")
    for (key, one), two in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        same_bits(one, two, key)

    recording, result = replayed(path)
    assert result.equal
    assert result.ended is None
    assert result.ops == sum(op.kind != "fed" for op in recording.ops) >= 6
    assert result.fed == sum(op.kind == "fed" for op in recording.ops)
    ends = {recording.names[access.region[:2]] for access in recording.end}
    assert {f"{key}.grad" for key, p in model.named_parameters() if name != "list" or "embedding" not in key} <= ends
    assert any(key.endswith(".exp_avg") for key in ends)


def test_whole_outputs_replay_too(tmp_path: Path) -> None:
    recorded(tmp_path / "a", made("TransformerLayer"), RECIPES["delayed"], ops="outputs")
    recording, result = replayed(tmp_path / "a")
    assert result.equal
    kept = [access for op in recording.ops if op.kind == "twin" for access in op.writes]
    assert len(kept) > 20
    assert all(access.whole is not None or not access.region.words for access in kept)


@pytest.mark.parametrize(
    "recipe", [te.DelayedScaling(), te.recipe.Float8CurrentScaling(), te.recipe.Float8BlockScaling()]
)
def test_a_weight_kept_in_fp8_and_a_gradient_that_is_added(recipe: Any, tmp_path: Path) -> None:
    with te.quantized_model_init(recipe=recipe):
        kept = made("LayerNormMLP")
    recorded(tmp_path / "a", kept, recipe, optimizer_of(kept))
    recording, result = replayed(tmp_path / "a")
    assert result.equal
    assert {"model/fc1_weight", "model/fc1_weight_scale_inv"} <= set(recording.tensors)

    adds = te.Linear(32, 32, fuse_wgrad_accumulation=True, params_dtype=BF16)
    adds.weight.main_grad = torch.randn(32, 32)
    before = adds.weight.main_grad.clone()
    recorded(tmp_path / "b", adds, RECIPES["current"])
    recording, result = replayed(tmp_path / "b")
    assert result.equal
    assert "weight.main_grad" in {recording.names[access.region[:2]] for access in recording.end}
    assert not torch.equal(before, adds.weight.main_grad)


def test_microbatches_and_recomputation(tmp_path: Path) -> None:
    """Two microbatches with one cast of the weights; the second part of the model is recomputed in backward."""
    model = torch.nn.Sequential(made("Linear"), te.LayerNormMLP(48, 64, params_dtype=BF16))
    with te.record(model, tmp_path / "a"):
        for first in (True, False):
            with te.autocast():
                h = model[0](given(), is_first_microbatch=first)
                y = te.checkpoint(model[1], h, is_first_microbatch=first)
            y.sum().backward()
    _, result = replayed(tmp_path / "a")
    assert result.equal


def test_an_expanded_gradient(tmp_path: Path) -> None:
    """Of a sum that torch has scaled: one number in memory, which our op reads as a matrix."""
    model = made("LayerNormMLP")
    with te.record(model, tmp_path / "a"), te.autocast():
        (model(given()).sum() * 1.5).backward()
    recording, result = replayed(tmp_path / "a")
    assert any(access.whole and 0 in access.region.stride for op in recording.ops for access in op.reads)
    assert result.equal


def test_nan_is_nan_whatever_its_bits(tmp_path: Path) -> None:
    x = given()
    with torch.no_grad():
        x[0, 0, 0], x[1, 0, 0] = float("nan"), float("inf")
    model = made("LayerNormMLP")
    with te.record(model, tmp_path / "a"), te.autocast():
        model(x)
    recording = file.read(tmp_path / "a")
    # A GPU's NaN: other bits than this CPU's, the same digest.
    fed = next(one for one in recording.tensors.values() if one.shape == (24, 32))
    fed.view(torch.int16)[0, 0] = 0x7FFF
    statistics = Statistics(recording)
    assert replay(recording, statistics).equal
    first, op, what = statistics.first["NaN"]
    assert (recording.ops[first].name, what) == ("twin::norm_cast_transpose", "read it in its argument x")
    assert statistics.first["infinity"][1] is op
    assert any(row.nan for row in statistics.rows)


def test_sparse_and_foreign_tensors_are_left_alone(tmp_path: Path) -> None:
    """A sparse gradient, complex numbers, the meta device: other ops of torch's, whose results nobody records."""
    model = torch.nn.ModuleList([torch.nn.Embedding(8, 32, sparse=True), made("Linear")])
    with te.record(model, tmp_path / "a"), te.autocast():
        x = model[0](torch.arange(8)) + torch.view_as_real(torch.ones(8, 16, dtype=torch.complex64)).reshape(8, 32)
        torch.empty(3, device="meta").add(1)
        model[1](x.bfloat16()).sum().backward()
    assert model[0].weight.grad.is_sparse
    assert replayed(tmp_path / "a")[1].equal


def test_another_default_dtype(tmp_path: Path) -> None:
    model = made("Linear")
    torch.set_default_dtype(torch.float64)
    try:
        with te.record(model, tmp_path / "a"):
            model((given() + torch.ones(32).bfloat16() + torch.full((32,), 0.25).bfloat16()).bfloat16())
    finally:
        torch.set_default_dtype(torch.float32)
    assert replayed(tmp_path / "a")[1].equal


# --- what is in the file ---------------------------------------------------------------------------------


def test_what_the_step_read_is_in_the_file_by_name(tmp_path: Path, same_bits) -> None:
    model, path = made("TransformerLayer"), tmp_path / "step.safetensors"
    step(model, given(), RECIPES["delayed"])
    state, torch_state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    scale = model.layernorm_mlp.fp8_meta["scaling_fwd"].scale.clone()
    with te.record(model, path):
        step(model, given(), RECIPES["delayed"])
    tensors = safetensors.torch.load_file(path)  # the library reads what `file.write` wrote
    weights = {f"model/{key}": value for key, value in state.items() if not key.endswith("_extra_state")}
    assert weights.keys() <= tensors.keys()
    for key, value in weights.items():
        same_bits(tensors[key], value, key)
    same_bits(tensors["model/layernorm_mlp.scaling_fwd.scale"], scale)
    same_bits(tensors["random/torch"], torch_state)
    about = json.loads(tensors["program"].numpy().tobytes())["about"]
    mlp = about["modules"]["layernorm_mlp"]
    assert mlp["class"] == "reference.nn.layers.layernorm_mlp.LayerNormMLP"
    assert mlp["recipe"]["class"] == "DelayedScaling"
    assert (mlp["recipe"]["fp8_format"], mlp["recipe"]["amax_history_len"]) == ("HYBRID", 4)
    assert b"pickle" not in path.read_bytes()


def test_ops_name_their_module_and_phase(tmp_path: Path) -> None:
    """By the weights and states that they read, and where they read none, by the pair that runs them."""
    model = torch.nn.Sequential(made("TransformerLayer"), made("LayerNormMLP"))
    recorded(tmp_path / "a", model, RECIPES["delayed"])
    found = [(op.name.removeprefix("twin::"), op.at, op.phase) for op in file.read(tmp_path / "a").ops]
    assert ("norm_cast_transpose", "0.self_attention.layernorm_qkv", "forward") in found
    assert ("attention", "0.self_attention.core_attention", "forward") in found
    assert ("attention_backward", "0.self_attention.core_attention", "backward") in found
    assert ("gemm_fp8_activation_backward", "0.layernorm_mlp", "backward") in found or (
        "gemm_fp8", "1", "backward",
    ) in found  # fmt: skip
    assert all(at for name, at, _ in found if name.startswith(("gemm", "norm", "cast", "attention")))
    core = te.DotProductAttention(2, 16)
    q = torch.randn(8, 2, 2, 16, dtype=BF16, requires_grad=True)
    outer = torch.nn.ModuleDict({"core": core})
    with te.record(outer, tmp_path / "b"):
        core(q, q, q).sum().backward()
    assert {op.at for op in file.read(tmp_path / "b").ops if op.kind == "twin"} == {"core"}


def test_statistics_against_float64(tmp_path: Path) -> None:
    """Casts to E4M3 give 31 dB of numbers that fill the format, E5M2 25 dB, bf16 about 55 dB."""
    recorded(tmp_path / "a", made("grouped queries, rotary"), RECIPES["delayed"])
    recording = file.read(tmp_path / "a")
    statistics = Statistics(recording)
    assert replay(recording, statistics).equal
    limits = {"float8_e4m3fn": (30, 34), "float8_e5m2": (24, 28), "bfloat16": (45, 62)}
    measured = [row for row in statistics.rows if row.sqnr is not None]
    assert len(measured) > 20
    for row in measured:
        low, high = limits[row.dtype]
        assert low < row.sqnr < high, row
    # Scales come from the step before, whose dropout was another: of a hundred numbers at most one is beyond.
    assert all(row.saturated is not None and row.saturated < 0.01 for row in measured if row.scale is not None)


def test_a_row_of_an_empty_result_has_no_shares() -> None:
    op, none = file.Op("twin", "twin::cast"), torch.empty(0, 16, dtype=torch.float64)
    row = statistics._row(0, op, "codes", none.to(torch.float8_e4m3fn), torch.ones(1), none)
    assert (row.amax, row.saturated, row.underflowed, row.sqnr, row.nan) == (0.0, 0.0, 0.0, None, 0)


def test_statistics_count_what_is_clipped_and_what_is_lost(tmp_path: Path) -> None:
    model = te.Linear(32, 32, bias=False, params_dtype=BF16)
    x = torch.full((16, 32), 4.0, dtype=BF16)
    x[0], x[1], x[2] = 500.0, 2.0**-12, 0.0  # the scale is 1: 464 and more is clipped, 2^-10 and less is lost
    with te.record(model, tmp_path / "a"), te.autocast():
        model(x)
    recording = file.read(tmp_path / "a")
    statistics = Statistics(recording)
    replay(recording, statistics)
    row = statistics.rows[0]
    assert (row.saturated, row.underflowed, row.scale, row.amax) == (1 / 16, 1 / 16, 1.0, 500.0)


# --- digests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float8_e5m2, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 5, 65537, 3 * 65536 + 8])
def test_a_digest_is_what_its_definition_says(dtype: torch.dtype, count: int) -> None:
    x = torch.randint(0, 2 if dtype == torch.bool else 120, (count * dtype.itemsize,)).to(torch.uint8).view(dtype)
    data = x.view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), "<i4").astype(object)
    row = digest.splitmix64(np.arange(65536, dtype=np.uint64)) | np.uint64(1)
    block = digest.splitmix64(np.arange(2**32, 2**32 + 8, dtype=np.uint64)) | np.uint64(1)
    weighted = sum(int(w) * int(row[i % 65536]) * int(block[i // 65536]) for i, w in enumerate(words))
    assert [n % 2**64 for n in digest.digest(x).tolist()] == [sum(map(int, words)) % 2**64, weighted % 2**64]


def test_splitmix64_is_the_published_generator() -> None:
    assert [hex(n) for n in digest.splitmix64(np.arange(2))] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_a_digest_is_of_the_numbers_and_not_of_their_layout() -> None:
    x = torch.randn(40, 24, dtype=BF16)
    assert torch.equal(digest.digest(x.t().contiguous().t()), digest.digest(x))
    assert torch.equal(
        digest.digest(x.view(torch.uint8)[:, 1:].contiguous()), digest.digest(x.view(torch.uint8)[:, 1:])
    )
    odd = torch.arange(9, dtype=torch.uint8)[1:]  # words that do not start at a multiple of four bytes
    assert torch.equal(digest.digest(odd), digest.digest(odd.clone()))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float8_e4m3fn])
def test_one_changed_word_is_found_from_the_digest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 100, (70001 * dtype.itemsize,), generator=generator).to(torch.uint8).view(dtype)
    for byte in torch.randint(0, x.nbytes, (20,), generator=generator).tolist():
        other = x.clone()
        other.view(torch.uint8)[byte] ^= 1 << byte % 6
        word = digest.locate(x, tuple(digest.digest(other).tolist()))
        assert word is not None
        assert word.position == byte // 4
        assert torch.equal(digest.with_word(x, word).view(torch.uint8), other.view(torch.uint8))
    assert digest.locate(x, tuple(digest.digest(x).tolist())) is None
    other.view(torch.uint8)[:64] ^= 1
    assert digest.locate(x, tuple(digest.digest(other).tolist())) is None


@pytest.mark.parametrize("word", [2**31 - 1, -(2**31)])
def test_a_word_beyond_32_bits_is_none(word: int) -> None:
    """The digest of one more than the largest word, or one less than the smallest, is that of no tensor."""
    x, away = torch.tensor([5, word, 7], dtype=torch.int32), 1 if word > 0 else -1
    for change, is_a_word in ((away, False), (-away, True)):
        total, weighted = (int(part) for part in digest.digest(x))
        other = total + change, weighted + change * int(digest.factors(3)[1])
        found = digest.locate(x, other)
        assert (found == digest.Word(1, word + change)) if is_a_word else found is None


@pytest.mark.parametrize("count", [1, 4, 5, 8, 9, 11])
def test_a_digest_in_pieces_is_the_written_sum(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that are longer than a piece, and end in one, in a row or inside of a row."""
    monkeypatch.setattr(digest, "PIECE", 4 * digest.ROW)
    words = torch.randint(-(2**31), 2**31, (count * digest.ROW,), generator=torch.Generator().manual_seed(count))
    for x in (words.int(), words.int()[:-5], words.int()[: -digest.ROW + 3]):
        with np.errstate(over="ignore"):
            weighted = (x.numpy().astype(np.int64).view(np.uint64) * digest.factors(len(x))).sum(dtype=np.uint64)
        assert digest.digest(x).tolist() == [int(x.sum(dtype=torch.int64)), int(weighted.view(np.int64))]


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"model": 3}, TypeError, r"record: model=3; a torch.nn.Module is accepted"),
        ({"path": 3}, TypeError, r"record: path=3; a path is accepted"),
        ({"path": "/"}, ValueError, r"record: path='/' is there and is not a file"),
        ({"optimizer": 3}, TypeError, r"record: optimizer=3; a torch.optim.Optimizer or None"),
        ({"ops": "inputs"}, ValueError, r"record: ops='inputs'; 'digests' and 'outputs' are accepted"),
        ({"ops": None}, ValueError, r"record: ops=None; 'digests' and 'outputs' are accepted"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=sentence):
        te.record(**{"model": made("Linear"), "path": tmp_path / "a", **change})


def test_one_step_at_a_time_and_of_ours(tmp_path: Path) -> None:
    model, runner = made("Linear"), autograd.runner
    with te.record(model, tmp_path / "a"):
        with pytest.raises(RuntimeError, match=r"another step is being recorded"), te.record(model, tmp_path / "b"):
            pass
        step(model, given(), None)
    with pytest.raises(RuntimeError, match=r"record: no op ran in this thread's"), te.record(model, tmp_path / "b"):
        pass
    with pytest.raises(ValueError, match=r"inp"), te.record(model, tmp_path / "c"):
        step(model, given()[..., :7], None)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert autograd.runner is runner
    recorded(tmp_path / "d", model, None)  # after an error, too
    recorder = te.record(model, tmp_path / "e")
    with recorder:
        step(model, given(), None)
    with pytest.raises(RuntimeError, match=r"this recording has been made"), recorder:
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_compiled_runs_in_eager_mode(tmp_path: Path) -> None:
    model = made("Linear")
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, given(), RECIPES["delayed"])
    with te.record(model, tmp_path / "a"):
        step(compiled, given(), RECIPES["delayed"])
    recording, result = replayed(tmp_path / "a")
    assert result.equal
    assert {"twin::cast_transpose", "twin::gemm_fp8"} <= {op.name for op in recording.ops}


def test_a_cuda_graph_is_refused(tmp_path: Path) -> None:
    """Its forward, as `make_graphed_callables` leaves it."""
    model = torch.nn.Sequential(made("Linear"))
    model[0].forward = types.MethodType(GraphedModule.forward, object.__new__(GraphedModule))
    with pytest.raises(RuntimeError, match=r"record: 0 replays a CUDA graph \(make_graphed_callables\), whose ops"):
        te.record(model, tmp_path / "a")


@pytest.mark.usefixtures("pretended")
def test_passes_of_a_schedule_are_refused_until_their_graphs_are_freed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(made("Linear"), made("Linear"))
    x = torch.zeros(4, model[1].in_features, dtype=torch.bfloat16)
    passes = te.make_graphed_callables((model[1],), [(x,)] * 2, _order=[1, 1, -1, -1])
    for one in passes:
        with pytest.raises(RuntimeError, match=r"record: 1 replays a CUDA graph \(make_graphed_callables\), whose ops"):
            te.record(model, tmp_path / "a")
        one.reset()
    te.record(model, tmp_path / "a")


def test_a_replay_in_the_block_is_refused(tmp_path: Path) -> None:
    """Of a graph that the program has captured itself, or made in the block."""
    model, one = made("LayerNormMLP"), Captured()
    with (
        pytest.raises(RuntimeError, match="record: a CUDA graph is replayed in the block, whose ops cannot be seen"),
        te.record(model, tmp_path / "a"),
    ):
        one.replay()
    assert not (tmp_path / "a").exists()
    with te.record(model, tmp_path / "a"):
        step(model, given(), None)
        beside = threading.Thread(target=one.replay)  # no part of the step
        beside.start()
        beside.join()
    one.replay()
    assert (tmp_path / "a").exists()


def test_both_packages_have_it() -> None:
    assert optimized.record is te.record
    assert steps.te is te


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_the_gpu_replays_on_the_cpu(name: str, recipe: str, tmp_path: Path, same_bits) -> None:
    """After steps that were replayed from tapes; the recorded step has the bits of one that is not recorded."""
    model = made(name, "cuda")
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    for _ in range(3):
        step(model, given("cuda"), RECIPES[recipe], optimizer)
        model.zero_grad()
    alone, path = copy.deepcopy(model), tmp_path / "step.safetensors"
    torch.manual_seed(1)
    expected = step(alone, given("cuda"), RECIPES[recipe])
    torch.manual_seed(1)
    x = given("cuda")
    with te.record(model, path, optimizer):
        y = step(model, x, RECIPES[recipe], optimizer)
    same_bits(y, expected, "y")

    recording, result = replayed(path)
    assert result.equal, result.differences[0]
    assert result.ended is None
    assert result.ops == sum(op.kind != "fed" for op in recording.ops) >= 6
    assert recording.about["provenance"]["gpu"] == torch.cuda.get_device_name()
    assert all(op.phase in ("forward", "backward") for op in recording.ops if op.name.startswith("twin::gemm"))
    assert any(op.phase == "backward" and op.kind == "twin" for op in recording.ops)


@pytest.mark.gpu
def test_whole_outputs_of_the_gpu(tmp_path: Path) -> None:
    model = made("TransformerLayer", "cuda")
    recorded(tmp_path / "a", model, RECIPES["delayed"], device="cuda", ops="outputs")
    _, result = replayed(tmp_path / "a")
    assert result.equal, result.differences[0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64]
)
@pytest.mark.parametrize("count", [1, 7, 70001, (1 << 24) + 12345])
def test_a_gpu_computes_the_same_digest(dtype: torch.dtype, count: int) -> None:
    """Of any words, NaNs of any bits among them."""
    x = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    assert torch.equal(digest.digest(x.cuda()).cpu(), digest.digest(x))
