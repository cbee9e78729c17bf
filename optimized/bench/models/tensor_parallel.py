"""A Llama layer of 70 billion parameters' sizes that GPUs of one host share by tensor and sequence parallelism.

    python -m optimized.bench.models.tensor_parallel --output tensor_parallel.json

Forward and backward of one layer, 4096 tokens, without an optimizer. "Alone": each GPU has the whole layer. Of ours
that ranks share, two more times: "without communication" is the step in which nothing is sent, with whatever is in the
memory where something would have been received; "communication alone" is all that a step sends, in its order, and
nothing between. PyTorch's layer has bf16 weights and torch.compile, and is shared by `parallelize_module`. Transformer
Engine runs where it is installed, under the same recipe and without user buffers (`ub_tp_comm_overlap`).

Of so many tokens ranks send each other codes, of which each computes its rows (`reference.parallel.exchange`). "Sums
passed on" is the way of fewer tokens: sums go from rank to rank.

A step of ours is played from a tape, which is one CUDA graph, messages between the GPUs included.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from optimized import measure
from optimized.bench import Payload
from optimized.bench.layers.layer_models import Case
from optimized.bench.models import on_ranks
from optimized.bench.models.on_ranks import OURS, THEIRS, TORCH, Benchmark, Row, Step, Turn, timed
from optimized.bench.table import Table, table
from optimized.tapes import call_groups
from optimized.tapes.collectives import Collective
from optimized.tapes.memory import TensorRef
from optimized.tapes.tape import Tape
from reference.parallel import exchange, ordered_reduce
from reference.support import groups

WHAT = "ms of forward and backward of a Llama layer that several GPUs share"
KERNELS = (
    "attention",
    "attention_backward",
    "attention_backward_ends",
    "cast_transpose",
    "gemm_fp8",
    "gemm_fp8_part",
)
CASE = Case("Llama 70B", 8192, 28672, 64, 4096, 1, torch.bfloat16, True, 0.0, llama=True, kv_heads=8)
Call = tuple[Callable[..., Any], list[Any]]


class Way(NamedTuple):
    """Whose layer it is, whether ranks share it, and of ours whether they pass sums of many rows on, too."""

    who: str
    shared: bool
    passes: bool = False

    @property
    def name(self) -> str:
        """As in a table."""
        how = "tensor parallel" if self.shared else "alone"
        return ", ".join([self.who, how] + ["sums passed on"] * self.passes)


WAYS = (
    Way(OURS, False),
    Way(OURS, True),
    Way(OURS, True, passes=True),
    Way(TORCH, False),
    Way(TORCH, True),
    Way(THEIRS, False),
    Way(THEIRS, True),
)


class Attention(torch.nn.Module):
    """PyTorch's attention, causal, with projections of their own, which can be shared."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.channels, kv = case.channels, (case.kv_heads or case.heads) * case.channels
        self.wq, self.wo = (torch.nn.Linear(case.hidden, case.hidden, bias=False) for _ in range(2))
        self.wk, self.wv = (torch.nn.Linear(case.hidden, kv, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are `[batch, sequence, hidden]`."""
        q, k, v = (w(x).unflatten(2, (-1, self.channels)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(torch.nn.Module):
    """SwiGLU."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.w1, self.w3 = (torch.nn.Linear(case.hidden, case.ffn, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(case.ffn, case.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are `[batch, sequence, hidden]`."""
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Layer(torch.nn.Module):
    """h = x + attention(norm(x)); y = h + mlp(norm(h))."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm1, self.norm2 = (torch.nn.RMSNorm(case.hidden, eps=1e-5) for _ in range(2))
        self.attention, self.mlp = Attention(case), Mlp(case)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are `[batch, sequence, hidden]`, where ranks share the layer this rank's tokens."""
        h = x + self.attention(self.norm1(x))
        return h + self.mlp(self.norm2(h))  # type: ignore[no-any-return]


def _share(layer: Layer, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {name: SequenceParallel() for name in ("norm1", "norm2")}
    for name in ("attention", "mlp"):
        plan[name] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan |= {f"attention.{one}": ColwiseParallel() for one in ("wq", "wk", "wv")}
    plan |= {f"mlp.{one}": ColwiseParallel() for one in ("w1", "w3")}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "mlp.w2")}
    parallelize_module(layer, init_device_mesh(device.type, (dist.get_world_size(),)), plan)


def _normal(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, 0, 0.02)


def _in_fp8(engine: Any, case: Case, shared: bool, device: torch.device) -> Any:
    options: dict[str, Any] = {"num_gqa_groups": case.kv_heads, "normalization": "RMSNorm", "activation": "swiglu"}
    options |= {"bias": False, "hidden_dropout": case.dropout, "attention_dropout": case.dropout}
    options |= {"params_dtype": case.dtype, "init_method": _normal, "output_layer_init_method": _normal}
    options |= {"self_attn_mask_type": case.mask_type, "fuse_qkv_params": True, "device": device}
    if shared:
        options |= {"set_parallel_mode": True, "tp_group": dist.group.WORLD, "sequence_parallel": True}
    return engine.TransformerLayer(case.hidden, case.ffn, case.heads, **options)


def stepper(way: Way, case: Case, device: torch.device) -> Step:
    """Forward and backward of a way."""
    torch.manual_seed(0)
    layer: Any
    tokens = case.tokens // (dist.get_world_size() if way.shared else 1)
    engine, fp8 = on_ranks.library(way.who), way.who != TORCH
    if fp8:
        layer = run = _in_fp8(engine, case, way.shared, device)
    else:
        with device:
            layer = Layer(case).to(case.dtype)
        if way.shared:
            _share(layer, device)
        run = torch.compile(layer)
    recipe = on_ranks.delayed(way.who, way.shared)
    shape = (tokens, 1, case.hidden) if fp8 else (1, tokens, case.hidden)
    x = torch.randn(shape, device=device, dtype=case.dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        with engine.autocast(enabled=fp8, recipe=recipe):
            y = run(x)
        y.backward(grad)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    return step


def _calls(step: Step) -> list[Call]:
    """What a step communicates, with its tensors, which stay alive; it runs without tapes."""
    found: list[Call] = []
    usual = groups._run

    def noted(function: Callable[..., Any], args: list[Any]) -> None:
        found.append((function, args))
        usual(function, args)

    call_groups._groups.clear()
    with mock.patch.object(groups, "_run", noted), mock.patch.object(call_groups, "LARGEST_SHARED", -1):
        step()
    return found


def _bytes(calls: list[Call]) -> int:
    """How many bytes a rank sends and, of sums, receives."""
    rank, found = dist.get_rank(), 0
    for function, args in calls:
        if function in (ordered_reduce._send, ordered_reduce._receive):
            found += args[0].nbytes
        elif function is ordered_reduce._hand_out:
            found += sum(x.nbytes for to, x in enumerate(args[1]) if to != rank)
        elif function is ordered_reduce._take and not args[2]:
            found += args[0].nbytes
        elif function is ordered_reduce._gather:
            found += args[1].nbytes * (dist.get_world_size() - 1)
        elif function is exchange._send:
            found += sum(x.nbytes for to, x in enumerate(args[0]) if to != rank)
    return found


def _only_shapes(function: Callable[..., Any], args: list[Any]) -> None:
    """Nothing is sent but what the host reads: shapes that ranks compare.

    What nobody sends is 0 on a CPU, where unwritten memory's NaNs would be computed by slower code.
    """
    to = args[0]
    if isinstance(to, torch.Tensor) and to.dtype == torch.int64:
        function(*args)
    elif isinstance(to, torch.Tensor) and to.device.type == "cpu":
        to.zero_()


def _communication(step: Step, device: torch.device) -> Row:
    """The times without communication and of it alone, and how many bytes a rank sends and receives."""
    calls = _calls(step)
    tape = Tape()
    for function, args in calls:
        tape.append(Collective(function, TensorRef.of(args), capturable=device.type == "cuda"))

    def alone() -> None:
        if device.type == "cuda":
            tape.play(device.index)
        else:
            for function, args in calls:
                function(*args)

    row: Row = {"communication alone": measure.spread(timed(alone, device)), "bytes": _bytes(calls)}
    calls.clear()
    call_groups._groups.clear()  # tapes of steps that communicate
    large = mock.patch.object(call_groups, "LARGEST", call_groups.LARGEST_SHARED)
    with mock.patch.object(groups, "_run", _only_shapes), large:
        row["without communication"] = measure.spread(timed(step, device))
    call_groups._groups.clear()
    return row


def measured(contestant: tuple[Way, Case], device: torch.device) -> Row:
    """Of a way: ms of its steps, and of ours that ranks share what communication costs."""
    way, case = contestant
    with mock.patch.object(exchange, "ROWS", sys.maxsize if way.passes else exchange.ROWS):
        step = stepper(way, case, device)
        row: Row = {"ms": measure.spread(timed(step, device))}
        return row | (_communication(step, device) if way.who == OURS and way.shared else {})


def tables(payload: Payload) -> list[Table]:
    """Each way, beside the same library's on one GPU, and what of ours is communication."""
    found = {row["way"]: row["ms"]["median"] for row in payload["rows"]}
    cells = []
    for row in payload["rows"]:
        parts = [row.get(name) for name in ("communication alone", "without communication")]
        one = next(found.get(Way(who, False).name) for who in (OURS, THEIRS, TORCH) if row["way"].startswith(who))
        ms = row["ms"]["median"]
        cells.append(
            (
                row["way"],
                f"{ms:.2f}",
                f"{one / ms:.2f}×" if one else "",
                *("" if part is None else f"{part['median']:.2f}" for part in parts),
            )
        )
    how = (
        f"Forward and backward of one layer of Llama 3 70B's shape, {payload['tokens']:,} tokens, on "
        f"{payload['ranks']} GPUs of one host with sequence parallelism; ms of the slowest GPU."
    )
    columns = ("", "ms", "speed over one GPU", "communication alone", "without communication")
    return [table(payload, "Tensor parallel", columns, cells, how)]


def run(
    output: str,
    world: int = 2,
    kind: str = "cuda",
    case: Case = CASE,
    ways: tuple[Way, ...] = WAYS,
    seconds: float = 120,
) -> None:
    """Measure on `world` ranks; no contestant begins later than `seconds`. All ways, in one JSON."""
    end = time.time() + seconds
    benchmark = Benchmark(WHAT, KERNELS, {"tokens": case.tokens, "hidden": case.hidden}, measured)
    on_ranks.start(output, benchmark, world)
    turns = [Turn({"way": way.name}, (way, case)) for way in ways if on_ranks.runs(way.who)]
    on_ranks.run(output, benchmark, turns, world, kind, end)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("--output", default="tensor_parallel.json")
    parser.add_argument("--seconds", type=float, default=120, help="no contestant begins later")
    given = parser.parse_args()
    run(given.output, seconds=given.seconds)
