"""Random schedules and random checkpoints, for as long as `--fuzz-seconds` says; a failure prints its seed.

A schedule runs twice, once as it is and once with everything that may change no bit: each training forward under
`te.checkpoint`, a hook on a part (so that the parts of a layer run one by one), another thread for all of it or for a
backward, a copy of the model in its place, statistics around it and inside, lengths in place of masks or beside them.
"""

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from shared.bits import assert_same_bits

import reference as te
from reference.float8.float8_tensor import Float8Tensor
from reference.nn.core.module import TransformerEngineBaseModule

BF16 = torch.bfloat16
LONG, WIDE = 7, 32  # of an encoder's output
ANGLES = torch.arange(8 * 16).view(8, 1, 1, 16).remainder(13) / 4
RECIPES: list[Any] = [
    te.DelayedScaling(amax_history_len=2),
    te.DelayedScaling(amax_history_len=3, fp8_format=te.Format.E4M3, amax_compute_algo="most_recent"),
    te.DelayedScaling(amax_history_len=3, margin=1, fp8_format=te.Format.E4M3),
    te.DelayedScaling(amax_history_len=1, margin=3, fp8_dpa=True),
    te.DelayedScaling(amax_history_len=5, backward_override="high_precision"),
    te.recipe.Float8CurrentScaling(),
]


class Model(torch.nn.Module):
    def __init__(self, kind: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = te.LayerNormLinear(32, 32, params_dtype=dtype, normalization=("LayerNorm", "RMSNorm")[kind % 2])
        self.layer = te.TransformerLayer(
            *(32, 48, 2),
            fuse_qkv_params=kind % 3 > 0,
            layer_type=("encoder", "decoder")[kind // 8 % 2],
            enc_dec_attn_mask_type=("no_mask", "padding_causal_bottom_right")[kind // 8 % 2],
            params_dtype=dtype,
            activation=("gelu", "swiglu", "relu", "clamped_swiglu")[kind % 4],
            hidden_dropout=0.1 * (kind % 2),
            attention_dropout=0.1 * (kind // 2 % 2),
            drop_path_rate=0.2 * (kind // 2 % 2),
            parallel_attention_mlp=kind % 5 == 4 and kind // 8 % 2 == 0,
            qk_norm_type=(None, "RMSNorm", "L2Normalization")[kind % 3],
        )
        self.last = te.Linear(32, 16, bias=kind % 2 == 0, params_dtype=dtype)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **attends: Any) -> torch.Tensor:
        x = self.first(x, is_first_microbatch=is_first_microbatch)
        if self.layer.layer_type == "encoder":
            attends = {name: given for name, given in attends.items() if "enc" not in name and "kv" not in name}
        x = self.layer(x, is_first_microbatch=is_first_microbatch, **attends)
        out: torch.Tensor = self.last(x, is_first_microbatch)
        return out


def attention(draw: random.Random, tokens: int) -> dict[str, Any]:
    """Arguments of a layer's attention, and the lengths of its two sequences and of their sources."""
    kind = draw.choice(["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal"])
    return {
        "self_attn_mask_type": kind if draw.random() < 0.7 else "padding_causal_bottom_right",
        "window_size": draw.choice([None, None, (2, 0)]),
        "enc_dec_window_size": draw.choice([None, None, (3, 0)]),
        "core_attention_bias_type": draw.choice(["no_bias", "no_bias", "alibi"]),
        "rotary_pos_emb": draw.choice([None, ANGLES, (ANGLES, ANGLES + 1)]),
        "lengths": ([draw.randint(0, tokens) for _ in range(2)], [draw.randint(0, LONG) for _ in range(2)]),
    }


def said(attends: dict[str, Any], tokens: int, way: str) -> dict[str, Any]:
    """The same with the lengths in masks, in `cu_seqlens_q` and `cu_seqlens_kv`, or in both."""
    given = dict(attends)
    pair = given.pop("lengths")
    masks = [
        (torch.arange(size) >= torch.tensor(some)[:, None]).view(2, 1, 1, size)
        for some, size in zip(pair, (tokens, LONG), strict=True)
    ]
    if way != "lengths":
        given |= {"attention_mask": masks[0], "enc_dec_attn_mask": tuple(masks)}
    if way != "masks":
        ends = [torch.tensor([0, a, a + b], dtype=torch.int32) for a, b in pair]
        given |= {"cu_seqlens_q": ends[0], "cu_seqlens_kv": ends[1]}
    return given


def schedule(draw: random.Random) -> list[dict[str, Any]]:
    steps = []
    for i in range(draw.randint(3, 8)):
        tokens = draw.choice([5, 5, 5, 5, 5, 5, 0])
        attends, bad = attention(draw, tokens), draw.choice([None, None, None, "inf", "-inf", "nan"])
        if bad:  # where lengths say so a padding token's gradient is not read; a mask's 0 times its NaN is NaN
            attends["lengths"] = ([tokens] * 2, [LONG] * 2)
        steps.append(
            {
                "tokens": tokens,
                "attends": attends,
                "bad": bad,
                "seed": i,
                "recipe": draw.choice(RECIPES),
                "fp8": draw.random() < 0.8,
                "calibrating": draw.random() < 0.2,
                "nested": draw.choice([None, None, "off", "on"]),
                "mode": draw.choice(["train", "train", "train", "twice", "no_grad", "inference", "error", "eval"]),
                "micro": draw.choice([None, None, True, False]),
                "between": draw.choice([None, None, "state_dict", "half", "zero", "write", "reset", "by_layer"]),
                "scale": draw.choice([1.0, 16.0, 1e-3, 300.0]),
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
    with ThreadPoolExecutor(1) as pool:  # a new thread, whose errors arrive here
        return pool.submit(function).result()


def forward(
    model: torch.nn.Module, x: torch.Tensor, step: dict[str, Any], run: Callable[..., Any], way: str
) -> torch.Tensor:
    """In the step's contexts."""
    settings = {"recipe": step["recipe"], "calibrating": step["calibrating"]}
    attends = said(step["attends"], len(x), way)
    if getattr(step["recipe"], "fp8_dpa", False):
        attends["core_attention_bias_type"] = "no_bias"  # refused with it
    source = torch.randn(LONG, 2, WIDE, generator=torch.Generator().manual_seed(step["seed"])).to(x.dtype)
    run = functools.partial(run, encoder_output=source, **attends)
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
        x = (
            (torch.randn(step["tokens"], 2, 32, generator=numbers) * step["scale"])
            .to(BF16)
            .requires_grad_(step["seed"] % 3 > 0)
        )
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
        way = changed.choice(["masks", "lengths", "both"]) if changed else "masks"
        measured = [te.collect_stats(part, every=1) for part in (model, model.layer)] if maybe(0.2) else []

        def one(
            step: Any = step, x: Any = x, grad: Any = grad, run: Any = run, model: Any = model, way: Any = way
        ) -> Any:
            with grad():
                try:
                    return forward(model, x, step, run, way)
                except KeyError:
                    return None

        with contextlib.ExitStack() as stack:
            for stats in measured:
                stack.enter_context(stats)
            y = one()
        if y is not None:
            seen.append(y.detach().clone())
            if y.requires_grad:
                g = torch.randn(y.shape, generator=numbers).to(BF16)
                if step["bad"] is not None or not step["tokens"]:
                    model.zero_grad()
                    g.view(-1)[457 % max(1, g.numel()) :][:1] = float(step["bad"] or 0)
                twice = step["mode"] == "twice"
                in_thread(lambda y=y, g=g, twice=twice: y.backward(g, retain_graph=twice), threaded)
                if twice:
                    y.backward(g)
                check_gradients(model, step)
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if handle is not None:
            handle.remove()
        change(model, step["between"])
        seen += states(model)
    return seen


def check_gradients(model: torch.nn.Module, step: dict[str, Any]) -> None:
    """Those of no tokens are +0; an infinity or a NaN has reached the first layer's and the last one's."""
    if not step["tokens"]:
        for name, p in model.named_parameters():
            if p.grad is not None:
                assert_same_bits(p.grad, torch.zeros_like(p.grad), name)
    elif step["bad"] is not None:
        for part in (model.first, model.last):
            assert not part.weight.grad.isfinite().all(), f"{step['bad']} is lost in step {step['seed']}"


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
    elif how == "by_layer":
        te.recipe.by_layer(model, {"last": RECIPES[2], "layer.*": te.recipe.AUTOCAST, "first": None})
    elif how == "reset":
        torch.manual_seed(3)
        for part in model.modules():
            if isinstance(part, TransformerEngineBaseModule) and hasattr(part, "reset_parameters"):
                part.reset_parameters()


def made(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    recipe = RECIPES[5 if seed % 8 == 7 else 0]
    with te.quantized_model_init(enabled=seed % 4 == 3, recipe=recipe):
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
    """Ours names the entry (or another, or a state, that does not fit this model); torch's are about keys alone."""
    if isinstance(error, RuntimeError):
        assert "Error(s) in loading state_dict" in str(error), what
        assert "key(s) in state_dict" in str(error), what
        return
    assert isinstance(error, ValueError | TypeError), what
    assert str(error).startswith("checkpoint: "), what
    assert any(key in str(error) for key in touched) or "shape" in str(error) or "_extra_state" in str(error), what


def test_checkpoints(fuzz: Iterator[int]) -> None:
    """What is refused changes nothing, in a sentence that names the entry; what is accepted gives finite numbers."""
    refused = accepted = 0
    for seed in fuzz:
        draw = random.Random(seed)
        kind, other = draw.randint(0, 15), draw.randint(0, 15)
        source, target = made(kind), made(draw.choice([kind, kind, other]))
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
        whole = sum(len(getattr(part, "fp8_weights", ())) for part in target.modules())
        assert len(kept) in (0, whole), f"seed {seed}: {len(kept)} of {whole} weights in FP8"
        play(target.train(), schedule(random.Random(1))[:2], None)
    assert refused > 0
    assert accepted > 0
