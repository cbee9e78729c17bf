"""`twin::embedding`, its backward, and `Embedding`: the written order, torch's semantics, refusals.

On a GPU they have every bit of the CPU's, forward and backward; tests/ops/test_ops.py asks the simulator.
"""

import copy
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared.bits import assert_same_bits
from shared.embedding_cases import DTYPES, lookups

import optimized
import reference as te

twin = torch.ops.twin
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def by_hand(grad: torch.Tensor, ids: torch.Tensor, rows: int, padding: int) -> torch.Tensor:
    """The gradient, row by row, as the definition's docstring says it."""
    out = np.zeros((rows, grad.shape[1]), np.float32)
    for row in range(rows):
        terms = [grad[i].float().numpy() for i in range(len(ids)) if ids[i] == row and row != padding]
        chunks = []
        for first in range(0, len(terms), 64):
            chunk, *others = terms[first : first + 64]
            for term in others:
                chunk = chunk + term
            chunks.append(chunk)
        for number, chunk in enumerate(chunks):
            out[row] = out[row] + chunk if number else chunk
    return torch.from_numpy(out).to(grad.dtype)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 500),
    rows=st.integers(1, 40),
    width=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    padding=st.integers(-1, 5),
    seed=st.integers(0, 2**30),
)
def test_the_order_is_the_written_one(count, rows, width, dtype, padding, seed) -> None:  # type: ignore[no-untyped-def]
    grad, ids = lookups(count, rows, width, dtype, seed)
    padding = min(padding, rows - 1)
    found = twin.embedding_backward(grad, ids, rows, padding)
    assert_same_bits(found, by_hand(grad, ids, rows, padding))
    # n terms: at most n - 1 roundings of partial sums, each of which is at most Σ |term|.
    kept = ids != padding
    truth, size = (
        torch.zeros(rows, width).double().index_add_(0, ids[kept], terms[kept])
        for terms in (grad.double(), grad.double().abs())
    )
    assert bool(
        ((found.double() - truth).abs() <= UNIT[dtype] * truth.abs() + count * 2.0**-23 * size + 2.0**-25).all()
    )


def test_a_chunk_has_64_terms() -> None:
    """2^24 + 1 + 1 ... in one chain stays 2^24; the ones of the second chunk are added among themselves."""
    grad = torch.ones(128, 1)
    grad[0] = 2.0**24
    assert twin.embedding_backward(grad, torch.zeros(128, dtype=torch.int64), 1, -1).item() == 2**24 + 64


def test_a_lone_term_keeps_its_sign() -> None:
    grad = torch.full((1, 2), -0.0)
    assert twin.embedding_backward(grad, torch.tensor([1]), 3, -1).signbit().tolist() == [
        [False] * 2,
        [True] * 2,
        [False] * 2,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_torchs_embedding(dtype: torch.dtype) -> None:
    for padding in (None, 2, -1):
        torch.manual_seed(3)
        ours = te.Embedding(11, 6, padding, params_dtype=dtype)
        theirs = torch.nn.Embedding(11, 6, padding, dtype=dtype)
        theirs.load_state_dict(ours.state_dict())
        assert ours.padding_idx == theirs.padding_idx
        assert repr(ours) == repr(theirs)
        for kind in (torch.int64, torch.int32):
            ids = torch.randint(0, 11, (3, 4)).to(kind)
            outs = ours(ids), theirs(ids)
            assert_same_bits(*outs)
            grad = torch.randint(-8, 8, (3, 4, 6)).to(dtype)  # sums of which are exact in any order
            for layer, out in zip((ours, theirs), outs, strict=True):
                layer.zero_grad()
                out.backward(grad)
            assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert isinstance(ours, torch.nn.Embedding)


def test_the_weight_is_drawn_as_by_every_layer() -> None:
    torch.manual_seed(5)
    weight = te.Embedding(300, 64, padding_idx=7).weight
    torch.manual_seed(5)
    assert torch.equal(weight, te.Embedding(300, 64, padding_idx=7).weight)
    assert not weight[7].any()
    assert weight.std().item() == pytest.approx(1, abs=0.02)
    layer = te.Embedding(4, 3, 1, init_method=torch.nn.init.ones_)
    assert layer.weight.sum(1).tolist() == [3, 0, 3, 3]


def test_the_meta_device() -> None:
    layer = te.Embedding(300, 64, device="meta", params_dtype=torch.bfloat16)
    assert layer.weight.is_meta
    assert layer(torch.zeros(3, 5, dtype=torch.int64, device="meta")).shape == (3, 5, 64)
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    assert torch.equal(layer.weight, te.Embedding(300, 64, params_dtype=torch.bfloat16).weight)


def test_a_given_weight() -> None:
    values = torch.randn(5, 4)
    layer = te.Embedding.from_pretrained(values, padding_idx=1)
    assert isinstance(layer, te.Embedding)
    assert layer.weight.data_ptr() == values.data_ptr()
    assert not layer.weight.requires_grad
    assert torch.equal(layer(torch.tensor([1, 4])), values[[1, 4]])


def test_no_gradient_is_made_that_nobody_wants() -> None:
    layer, ids = te.Embedding(5, 4), torch.tensor([1, 2])
    with torch.no_grad():
        assert not layer(ids).requires_grad
    assert not layer.requires_grad_(False)(ids).requires_grad
    assert copy.deepcopy(layer)(ids).equal(layer(ids))
    with torch.inference_mode():
        assert layer(ids).equal(layer.weight[ids])


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 2, 3)])
def test_numbers_of_any_shape(shape: tuple[int, ...]) -> None:
    layer = te.Embedding(5, 4)
    out = layer(torch.zeros(shape, dtype=torch.int64))
    assert out.shape == (*shape, 4)
    out.sum().backward()
    assert layer.weight.grad.sum().item() == 4 * math.prod(shape)


@pytest.mark.parametrize("fused", [False, True])
def test_tied_weights(fused: bool, same_bits) -> None:  # type: ignore[no-untyped-def]
    """The head's gradient and the embedding's are added in the parameter's dtype; or wait apart, as `main_grad`."""
    kinds = {"params_dtype": torch.bfloat16}
    table = te.Embedding(32, 16, **kinds)
    head = te.Linear(16, 32, bias=False, fuse_wgrad_accumulation=fused, **kinds)
    head.weight = table.weight
    ids, target = torch.randint(0, 32, (2, 10))
    if fused:
        table.weight.main_grad = torch.zeros(32, 16)
    te.cross_entropy(head(table(ids)), target).backward()
    apart = [copy.deepcopy(table.weight.detach()).requires_grad_() for _ in range(2)]
    looked_up = torch.nn.functional.embedding(ids, apart[0])
    other = te.Linear(16, 32, bias=False, **kinds)
    other.weight = torch.nn.Parameter(apart[1])
    hidden = looked_up.detach().requires_grad_()
    te.cross_entropy(other(hidden), target).backward()
    from_table = twin.embedding_backward(hidden.grad, ids, 32, -1)
    if fused:
        same_bits(table.weight.grad, from_table)
        assert table.weight.main_grad.any()
    else:
        same_bits(table.weight.grad, from_table + other.weight.grad)


def test_tied_weights_and_the_fused_loss(same_bits) -> None:  # type: ignore[no-untyped-def]
    table = te.Embedding(32, 16, params_dtype=torch.bfloat16)
    ids, target = torch.randint(0, 32, (2, 10))
    te.fused_linear_cross_entropy(table(ids), table.weight, target).backward()
    hidden, weight = (x.detach().requires_grad_() for x in (table(ids), table.weight))
    te.fused_linear_cross_entropy(hidden, weight, target).backward()
    same_bits(table.weight.grad, twin.embedding_backward(hidden.grad, ids, 32, -1) + weight.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_whole(backend: str) -> None:
    layer, ids = te.Embedding(9, 4, 3), torch.tensor([[1, 3], [1, 8]])
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    grads = []
    for one in (layer, compiled):
        layer.zero_grad()
        out = one(ids)
        assert torch.equal(out, layer.weight[ids])
        out.square().sum().backward()
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("wrong", [5, -1])
def test_a_number_outside_the_table_is_refused(wrong: int) -> None:
    with pytest.raises(IndexError, match=rf"ids\[1\] is {wrong}; 0 to 4, the rows of the table, are accepted"):
        te.Embedding(5, 4)(torch.tensor([0, wrong]))


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"num_embeddings": 0}, ValueError, "num_embeddings=0; an int from 1"),
        ({"embedding_dim": 2.0}, TypeError, "embedding_dim=2.0; an int from 1"),
        ({"padding_idx": 5}, ValueError, "padding_idx=5 with num_embeddings=5; None or an int from -5 to 4"),
        ({"padding_idx": -6}, ValueError, "padding_idx=-6 with num_embeddings=5"),
        ({"padding_idx": True}, TypeError, "padding_idx=True; None or an int"),
        ({"max_norm": 1.0}, NotImplementedError, "max_norm=1.0 is not offered; None is accepted"),
        ({"norm_type": 1.0}, NotImplementedError, "norm_type=1.0 is not offered; 2.0 is accepted"),
        ({"scale_grad_by_freq": True}, NotImplementedError, "scale_grad_by_freq=True is not offered"),
        ({"sparse": True}, NotImplementedError, "sparse=True is not offered"),
        ({"params_dtype": torch.float64}, TypeError, "params_dtype=torch.float64; float32, bfloat16 and float16"),
        ({"dtype": torch.float16, "params_dtype": torch.bfloat16}, ValueError, "one is accepted"),
        ({"device": "nowhere"}, ValueError, "device='nowhere'; None, a torch.device"),
        ({"init_method": 1}, TypeError, "init_method=1; None or a function"),
        ({"_weight": torch.zeros(4, 4)}, ValueError, "_weight has shape [4, 4]; [5, 4] is accepted"),
    ],
)
def test_constructor_refusals(arguments: dict, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=rf"^Embedding: .*{re.escape(sentence)}"):
        te.Embedding(**{"num_embeddings": 5, "embedding_dim": 4, **arguments})


def test_forward_refusals() -> None:
    layer = te.Embedding(5, 4)
    for wrong, error, sentence in (
        ([1, 2], TypeError, "input is a list; a tensor of torch.int64 or torch.int32 is accepted"),
        (torch.zeros(2), TypeError, "input is a torch.float32 tensor"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), RuntimeError, "input is on meta, the weight on cpu"),
    ):
        with pytest.raises(error, match=sentence):
            layer(wrong)


def test_op_refusals() -> None:
    weight, ids = torch.zeros(5, 4), torch.tensor([1, 2])
    for args, sentence in (
        ((weight, ids.int()), "ids must be contiguous torch.int64 [count] on cpu; got torch.int32"),
        ((weight, ids[None]), "ids must be contiguous"),
        ((weight[0], ids), "weight must be 2-D"),
        ((weight.double(), ids), "weight must be torch.float32"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            twin.embedding(*args)
    for args, sentence in (
        ((weight, ids, 5, -1), "grad has 5 rows and ids 2"),
        ((weight[:2], ids, -1, -1), "rows must not be negative; got -1"),
        ((weight[:2], ids, 5, 5), "padding_idx must be from -1 (none) to 4; got 5"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            twin.embedding_backward(*args)
    with pytest.raises(IndexError, match=r"ids\[1\] is 2; 0 to 1"):
        twin.embedding_backward(weight[:2], ids, 2, -1)


def compare(count: int, rows: int, width: int, dtype: torch.dtype, padding: int, seed: int, start: int = 0) -> None:
    grad, ids = lookups(count, rows, width, dtype, seed)
    weight = torch.randn(rows, width).to(dtype)
    weight.view(-1)[::17], grad.view(-1)[::29] = math.nan, math.inf
    weight.view(-1)[3::19], grad.view(-1)[3::31] = -0.0, -0.0
    there = [torch.empty(x.numel() + start, dtype=dtype, device="cuda")[start:].view(x.shape) for x in (weight, grad)]
    for x, y in zip((weight, grad), there, strict=True):
        y.copy_(x)
    what = f"{count} of {rows} rows of {width}, {dtype}, padding {padding}"
    assert_same_bits(twin.embedding(weight, ids), twin.embedding(there[0], ids.cuda()), what)
    here = twin.embedding_backward(grad, ids, rows, padding)
    assert_same_bits(here, twin.embedding_backward(there[1], ids.cuda(), rows, padding), what)


@pytest.mark.gpu
@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "rows", "width"),
    [(1, 1, 1), (63, 2, 8), (64, 1, 8), (65, 1, 16), (1000, 3, 264), (2000, 50304, 64), (4096, 700, 1100)],
)
def test_sizes(dtype: torch.dtype, count: int, rows: int, width: int) -> None:
    for padding in (-1, 0):
        compare(count, rows, width, dtype, padding, 1)


@pytest.mark.gpu
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(0, 3000),
    rows=st.integers(1, 300),
    width=st.integers(1, 1100),
    dtype=st.sampled_from(DTYPES),
    padding=st.integers(-1, 2),
    seed=st.integers(0, 2**30),
)
def test_any_shape(count, rows, width, dtype, padding, seed) -> None:  # type: ignore[no-untyped-def]
    compare(count, rows, width, dtype, min(padding, rows - 1), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 40, 1032, 2048])
def test_views_off_the_16_byte_boundary(dtype: torch.dtype, width: int) -> None:
    for start in (0, 1):
        compare(700, 20, width, dtype, -1, 2, start)


@pytest.mark.gpu
def test_a_number_outside_the_table() -> None:
    """Its row is NaN; its gradient goes nowhere, 2^32 + 1 not to row 1 either."""
    ids = torch.tensor([1, 5, -1, 2**32 + 1, 0, *([7] * 200)], device="cuda")
    weight = torch.randn(5, 16, device="cuda")
    out = twin.embedding(weight, ids)
    assert out.isnan().all(1).tolist() == [False, True, True, True, False, *([True] * 200)]
    grad = torch.ones(len(ids), 16, device="cuda")
    assert twin.embedding_backward(grad, ids, 5, -1).sum(1).tolist() == [16, 16, 0, 0, 0]


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    """So a CUDA graph holds a step of it."""
    layer = optimized.Embedding(500, 64, padding_idx=3, params_dtype=torch.bfloat16)
    grad, ids = (x.cuda() for x in lookups(1000, 500, 64, torch.bfloat16, 1))

    def step() -> torch.Tensor:
        return torch.autograd.grad(layer(ids), layer.weight, grad)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    ids.copy_(ids.roll(5))
    graph.replay()
    assert_same_bits(found, step())
