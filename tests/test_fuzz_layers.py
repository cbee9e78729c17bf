"""Random schedules and random checkpoints, for as long as `--fuzz-seconds` says; a failure prints its seed.

A schedule runs twice, once as it is and once with everything that may change no bit: each training forward under
`te.checkpoint`, a hook on a part (so that the parts of a layer run one by one), another thread for all of it or for a
backward, a copy of the model in its place.
"""

import copy
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import assert_same_bits

import reference as te
from reference.nn.float8_tensor import Float8Tensor
from reference.nn.module import TransformerEngineBaseModule

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
RECIPES = [
    te.DelayedScaling(amax_history_len=2),
    te.DelayedScaling(amax_history_len=3, fp8_format=te.Format.E4M3, amax_compute_algo="most_recent"),
    te.DelayedScaling(amax_history_len=3, margin=1, fp8_format=te.Format.E4M3),
    te.DelayedScaling(amax_history_len=2, margin=3),
    te.recipe.Float8CurrentScaling(),
]


class Model(torch.nn.Module):
    def __init__(self, kind: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = te.LayerNormLinear(32, 32, params_dtype=dtype, normalization=("LayerNorm", "RMSNorm")[kind % 2])
        self.layer = te.TransformerLayer(
            *(32, 48, 2),
            fuse_qkv_params=kind % 8 < 4,
            params_dtype=dtype,
            self_attn_mask_type=("no_mask", "padding", "padding_causal_bottom_right")[kind % 3],
            window_size=(-1, -1) if kind % 3 < 2 else (3, 0),
            activation=("gelu", "swiglu", "relu", "clamped_swiglu")[kind % 4],
            hidden_dropout=0.1 * (kind % 2),
            attention_dropout=0.1 * (kind // 2 % 2),
            drop_path_rate=0.2 * (kind // 2 % 2),
            parallel_attention_mlp=kind % 5 == 4,
            qk_norm_type=(None, "RMSNorm", "L2Normalization")[kind % 3],
        )
        self.last = te.Linear(32, 16, bias=kind % 2 == 0, params_dtype=dtype)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        x = self.first(x, is_first_microbatch=is_first_microbatch)
        mask = None
        if self.layer.self_attn_mask_type != "no_mask":  # the second sequence is shorter
            mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])[:, None, None]
        y = self.layer(x, attention_mask=mask, is_first_microbatch=is_first_microbatch)
        out: torch.Tensor = self.last(y, is_first_microbatch)
        return out


def schedule(draw: random.Random) -> list[dict[str, Any]]:
    steps = []
    for i in range(draw.randint(3, 8)):
        steps.append(
            {
                "seed": i,
                "recipe": draw.choice(RECIPES),
                "fp8": draw.random() < 0.8,
                "calibrating": draw.random() < 0.2,
                "nested": draw.choice([None, None, "off", "on"]),
                "mode": draw.choice(["train", "train", "train", "twice", "no_grad", "inference", "error", "eval"]),
                "micro": draw.choice([None, None, True, False]),
                "between": draw.choice([None, None, "state_dict", "half", "zero", "write", "reset"]),
                "scale": draw.choice([1.0, 16.0, 1e-3, 300.0]),
                "bad": draw.choice([None] * 6 + [math.inf, -math.inf, math.nan]),
            }
        )
    return steps


def states(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in model.modules():
        for meta in getattr(part, "fp8_meta", {}).values():
            if hasattr(meta, "scale"):
                yield meta.scale.clone()
                yield meta.amax_history.clone()


def in_thread(function: Callable[[], Any], threaded: bool) -> Any:
    if not threaded:
        return function()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def forward(model: torch.nn.Module, x: torch.Tensor, step: dict[str, Any], run: Callable[..., Any]) -> torch.Tensor:
    """In the step's contexts."""
    settings = {"recipe": step["recipe"], "calibrating": step["calibrating"]}
    torch.manual_seed(step["seed"])
    with te.autocast(enabled=step["fp8"], **settings):
        if step["nested"] is None:
            out = run(model, x, is_first_microbatch=step["micro"])
        else:
            with te.autocast(enabled=step["nested"] == "on", **settings):
                out = run(model, x, is_first_microbatch=step["micro"])
        if step["mode"] == "error":
            raise KeyError
    return out


def play(model: torch.nn.Module, steps: list[dict[str, Any]], changed: random.Random | None) -> list[torch.Tensor]:
    """Everything that a schedule computes; `changed` draws what may change no bit."""
    seen: list[torch.Tensor] = []

    def maybe(chance: float) -> bool:
        return changed is not None and changed.random() < chance

    for step in steps:
        numbers = torch.Generator().manual_seed(step["seed"])
        x = (torch.randn(5, 2, 32, generator=numbers) * step["scale"]).to(BF16).requires_grad_(step["seed"] % 3 > 0)
        model.train(step["mode"] != "eval")
        if maybe(0.2):
            model = copied(model)
        handle = None
        if maybe(0.5):
            part = changed.choice(list(model.layer.modules())) if changed else model
            handle = part.register_forward_hook(lambda *_: None)
        grad = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(step["mode"], torch.enable_grad)
        plain: Callable[..., Any] = lambda f, *a, **kw: f(*a, **kw)  # noqa: E731
        run = te.checkpoint if maybe(0.5) and grad is torch.enable_grad else plain
        threaded = maybe(0.3)

        def one(step: Any = step, x: Any = x, grad: Any = grad, run: Any = run, model: Any = model) -> Any:
            with grad():
                try:
                    return forward(model, x, step, run)
                except KeyError:
                    return None

        y = one()
        if y is not None:
            seen.append(y.detach().clone())
            if y.requires_grad:
                g = torch.randn(y.shape, generator=numbers).to(BF16)
                if step["bad"] is not None:  # it reaches what a gradient scaler or a clip looks at
                    g[0, 0, 3] = step["bad"]
                twice = step["mode"] == "twice"
                in_thread(lambda y=y, g=g, twice=twice: y.backward(g, retain_graph=twice), threaded)
                if twice:
                    y.backward(g)
                if step["bad"] is not None:
                    assert not all(bool(p.grad.isfinite().all()) for p in model.last.parameters())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if step["bad"] is not None:
            model.zero_grad()
        if handle is not None:
            handle.remove()
        change(model, step["between"])
        seen += states(model)
    return seen


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """A copy with what copies leave out: gradients, and which autocast a layer last ran in."""
    other = copy.deepcopy(model)
    for a, b in zip(model.modules(), other.modules(), strict=True):
        if isinstance(b, TransformerEngineBaseModule):
            b._membership = a._membership
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    return other


def change(model: torch.nn.Module, how: str | None) -> None:
    """What happens between two steps."""
    if how == "state_dict":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    elif how == "half":
        model.half().bfloat16()
    elif how == "zero":
        model.zero_grad(set_to_none=True)
    elif how == "write":
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p * 0.75)
    elif how == "reset":
        torch.manual_seed(3)
        for part in model.modules():
            if isinstance(part, TransformerEngineBaseModule) and hasattr(part, "reset_parameters"):
                part.reset_parameters()


def made(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    with te.quantized_model_init(enabled=seed % 4 == 3, recipe=RECIPES[0]):
        return Model(seed, (BF16, torch.float32)[seed % 5 == 4])


def test_schedules(fuzz: Iterator[int]) -> None:
    for seed in fuzz:
        steps = schedule(random.Random(seed))
        expected = play(made(seed), steps, None)
        changed = random.Random(seed + 1)
        actual = in_thread(lambda: play(made(seed), steps, changed), changed.random() < 0.3)  # noqa: B023
        assert len(expected) == len(actual), f"seed {seed}"
        for position, (a, b) in enumerate(zip(expected, actual, strict=True)):
            assert_same_bits(a, b, f"seed {seed}, tensor {position} of {len(expected)}")


HOSTILE: list[Callable[[torch.Tensor, random.Random], Any]] = [
    lambda t, d: t[: max(0, t.shape[0] - 1)] if t.dim() else t,
    lambda t, d: t.reshape(-1),
    lambda t, d: t.double(),
    lambda t, d: t.to(torch.int32) if t.dtype.itemsize > 1 else t.view(torch.uint8),
    lambda t, d: t.clone().float().index_fill_(0, torch.tensor([0]), float(d.choice(["nan", "inf", "-inf"]))),
    lambda t, d: -t.float() - 1,
    lambda t, d: torch.zeros_like(t.float()),
    lambda t, d: torch.full_like(t.float(), 1e-44),
    lambda t, d: t.to("meta"),
    lambda t, d: t.float().to_sparse(),
    lambda t, d: t.tolist() if t.numel() < 9 else [t],
    lambda t, d: None,
    lambda t, d: "weights",
    lambda t, d: torch.empty(0),
]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def words(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.uint8) if x.itemsize == 1 else x

    return a.keys() == b.keys() and all(torch.equal(words(a[key]), words(b[key])) for key in a)


def check_refusal(error: Exception, touched: list[str], what: str) -> None:
    """Ours names the entry (or another whose shape or columns are not this model's); torch's are about keys alone."""
    if isinstance(error, RuntimeError):
        assert "Error(s) in loading state_dict" in str(error), what
        assert "key(s) in state_dict" in str(error), what
        return
    assert isinstance(error, ValueError | TypeError), what
    assert str(error).startswith("checkpoint: "), what
    # The FP8 state of q, k and v in parts has other columns than that of one weight.
    others = ("shape", "_extra_state is torch.float32 [")
    assert any(one in str(error) for one in (*touched, *others)), what


def test_checkpoints(fuzz: Iterator[int]) -> None:
    """What is refused changes nothing, in a sentence that names the entry; what is accepted gives finite numbers."""
    refused = accepted = 0
    for seed in fuzz:
        draw = random.Random(seed)
        source, target = made(draw.randint(0, 7)), made(draw.randint(0, 7))
        for model in (source, target):
            play(model, schedule(draw)[:2], None)
        state = {k: v.clone() for k, v in source.state_dict().items()}
        touched = []
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            key = draw.choice(list(state))
            touched.append(key)
            if draw.random() < 0.2:
                del state[key]
                state[key + "x"] = torch.ones(1)
                break
            if isinstance(state[key], torch.Tensor) and state[key].layout == torch.strided and not state[key].is_meta:
                state[key] = draw.choice(HOSTILE)(state[key], draw)
        before = copy.deepcopy(target.state_dict())
        try:
            target.load_state_dict(state, strict=draw.random() < 0.7, assign=draw.random() < 0.3)
        except Exception as caught:
            error = caught
        else:
            error = None
        if error is not None:
            check_refusal(error, touched, f"seed {seed}: {error!r}")
            if not isinstance(error, RuntimeError):
                refused += 1
                assert same(before, target.state_dict()), f"seed {seed}: changed by {error}"
            continue
        accepted += 1
        for key, value in target.state_dict().items():
            numbers = value.float() if value.itemsize == 1 else value
            if key.endswith("_extra_state"):  # a step that overflowed leaves an infinite amax
                numbers = value[0]
            assert bool(numbers.isfinite().all()), f"seed {seed}"
        kept = [p for p in target.parameters() if isinstance(p, Float8Tensor)]
        assert len(kept) in (0, 6, 8), f"seed {seed}: {len(kept)} weights in FP8"
        play(target.train(), schedule(random.Random(1))[:2], None)
    assert refused > 0
    assert accepted > 0
