"""`RotaryPositionEmbedding` and `apply_rotary_pos_emb`: Transformer Engine's formulas, the layers' bits."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from shared.bits import assert_same_bits
from shared.dry_gpu import DryGpu

import optimized
import reference as te
from reference.nn.core.dropout import bias_dropout_add

BF16 = torch.bfloat16
F32 = np.float32


def angles(
    dim: int, length: int, offset: int = 0, base: float = 1e4, factor: float = 0.0, interleaved: bool = False
) -> np.ndarray:
    """The formulas, in NumPy."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    frequencies = (1 / np.power(np.float64(base), exponents)).astype(F32)
    positions = np.arange(length, dtype=F32) + F32(offset)
    if factor:
        positions = positions * F32(1 / factor)
    found = positions[:, None] * frequencies
    both = np.repeat(found, 2, axis=1) if interleaved else np.concatenate([found, found], axis=1)
    return both.reshape(length, 1, 1, dim)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "length", "offset"), [(2, 1, 0), (16, 7, 3), (64, 33, 0), (128, 5, 4096), (66, 3, 1)])
def test_angles(dim: int, length: int, offset: int, interleaved: bool, same_bits: Any) -> None:
    for base in (10000.0, 500000, 1.5):
        embedding = te.RotaryPositionEmbedding(dim, rotary_base=base, interleaved=interleaved)
        found = embedding(length, offset)
        assert found.dtype == torch.float32
        same_bits(found, torch.from_numpy(angles(dim, length, offset, base, interleaved=interleaved)))
    plain = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # Transformer Engine's, in fp32
    assert torch.allclose(te.RotaryPositionEmbedding(dim).inv_freq, plain, rtol=3e-6, atol=0), "a few ulps apart"


def test_a_part_of_the_channels() -> None:
    half = te.RotaryPositionEmbedding(64, rotary_percent=0.5)
    assert torch.equal(half(5), te.RotaryPositionEmbedding(32)(5))


@pytest.mark.parametrize(("length", "factor"), [(8, 2.0), (16, 2.0), (24, 24 / 8)])
def test_interpolation(length: int, factor: float, same_bits: Any) -> None:
    """Positions are divided by the factor; past 2 · 8 positions, by what brings them back to 8."""
    embedding = te.RotaryPositionEmbedding(16, 1.0, 2, 8)
    same_bits(embedding(length), torch.from_numpy(angles(16, length, factor=factor)))


@pytest.mark.parametrize("pair", [(2, None), (None, 8)])
def test_one_half_of_an_interpolation_is_refused(pair: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match=r"of which neither acts without the other; both or None of them are accepted"):
        te.RotaryPositionEmbedding(16, 1.0, *pair)


def test_frequencies_stay_fp32_and_come_back_from_meta(same_bits: Any) -> None:
    embedding = te.RotaryPositionEmbedding(16)
    expected = embedding(4)
    same_bits(copy.deepcopy(embedding).to(BF16)(4), expected)
    same_bits(copy.deepcopy(embedding).half()(4), expected)
    with torch.device("meta"):
        hollow = te.RotaryPositionEmbedding(16)
    assert hollow.inv_freq.is_meta
    same_bits(hollow.to_empty(device="cpu")(4), expected)
    own = copy.deepcopy(embedding)
    own.inv_freq.mul_(2)
    other = te.RotaryPositionEmbedding(16)
    other.load_state_dict(own.state_dict())
    same_bits(other.to(BF16).inv_freq, embedding.inv_freq * 2)
    assert list(embedding.state_dict()) == ["inv_freq"]


def test_angles_of_no_channels_turn_nothing(same_bits: Any) -> None:
    layer, freqs = te.MultiheadAttention(32, 2, attention_dropout=0.0, params_dtype=BF16), torch.zeros(7, 1, 1, 0)
    x = torch.randn(7, 3, 32).to(BF16)
    same_bits(layer(x, rotary_pos_emb=freqs), layer(x))
    t = x.view(7, 3, 2, 16)
    same_bits(te.apply_rotary_pos_emb(t, freqs), t)


def test_no_tokens_need_no_angles() -> None:
    layer, x = te.MultiheadAttention(32, 2, params_dtype=BF16), torch.zeros(0, 3, 32, dtype=BF16, requires_grad=True)
    y = layer(x, rotary_pos_emb=torch.zeros(0, 1, 1, 16))
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [0, 7])
def test_a_layer_refuses_angles_of_another_dtype(length: int) -> None:
    """Also where there are no tokens, which would read none of them."""
    layer, freqs = te.MultiheadAttention(32, 2, params_dtype=BF16), torch.zeros(7, 1, 1, 16, dtype=BF16)
    said = r"^MultiheadAttention: rotary_pos_emb is torch.bfloat16 \[7, 1, 1, 16\]; float32 \[positions, .* accepted"
    with pytest.raises(ValueError, match=said):
        layer(torch.zeros(length, 3, 32, dtype=BF16), rotary_pos_emb=freqs)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_is_what_attention_does(layout: str, interleaved: bool, same_bits: Any) -> None:
    """Rotating q and k before `DotProductAttention` has the bits of `rotary_pos_emb`, forward and backward."""
    torch.manual_seed(0)
    heads, channels = 4, 16
    layer = te.MultiheadAttention(
        64, heads, attention_dropout=0.0, params_dtype=BF16, qkv_format=layout, rotary_pos_interleaved=interleaved,
        fuse_qkv_params=True, qkv_weight_interleaved=False,
    )  # fmt: skip
    freqs = te.RotaryPositionEmbedding(channels, interleaved=interleaved)(9)
    shape = (7, 3, 64) if layout == "sbhd" else (3, 7, 64)
    x = torch.randn(shape).to(BF16)
    results = []
    for by_hand in (False, True):
        leaf = x.clone().requires_grad_()
        if by_hand:
            mixed = layer.qkv(leaf).view(*shape[:2], 3, heads, channels)
            q, k, v = mixed.unbind(2)
            q, k = (te.apply_rotary_pos_emb(t, freqs, layout, interleaved=interleaved) for t in (q, k))
            out = layer.proj(layer.core_attention(q, k, v))
        else:
            out = layer(leaf, rotary_pos_emb=freqs)
        out.float().square().sum().backward()
        results.append((out.detach(), leaf.grad))
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


def test_fused_changes_no_bit(same_bits: Any) -> None:
    t, freqs = torch.randn(5, 2, 3, 16).half(), te.RotaryPositionEmbedding(8)(5)
    same_bits(te.apply_rotary_pos_emb(t, freqs, fused=True), te.apply_rotary_pos_emb(t, freqs, fused=False))
    assert torch.equal(te.apply_rotary_pos_emb(t, freqs)[..., 8:], t[..., 8:])


STARTS = (5, 0, 11)


@pytest.mark.parametrize(("layout", "starts"), [("sbhd", STARTS), ("bshd", STARTS), ("thd", None), ("thd", STARTS)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_of_each_sequence(
    layout: str, starts: tuple[int, ...] | None, interleaved: bool, same_bits: Any
) -> None:
    """Each sequence has the bits that it has alone with its own rows of angles, forward and backward."""
    lengths = (4, 1, 6) if layout == "thd" else (5, 5, 5)
    freqs = te.RotaryPositionEmbedding(8, interleaved=interleaved)(17)
    pieces = [torch.randn(n, 1, 2, 16).to(BF16).requires_grad_() for n in lengths]
    grads = [torch.randn(n, 1, 2, 16).to(BF16) for n in lengths]
    alone = []
    for n, piece in enumerate(pieces):
        first = 0 if starts is None else starts[n]
        alone.append(te.apply_rotary_pos_emb(piece, freqs[first:], interleaved=interleaved))

    def together(xs: list[torch.Tensor]) -> torch.Tensor:
        if layout == "thd":
            return torch.cat(xs)[:, 0]
        return torch.cat(xs, 1) if layout == "sbhd" else torch.cat(xs, 1).transpose(0, 1)

    given = {"start_positions": None if starts is None else torch.tensor(starts, dtype=torch.int32)}
    given["cu_seqlens"] = torch.tensor([0, 4, 5, 11], dtype=torch.int32) if layout == "thd" else None
    t = together([piece.detach() for piece in pieces]).requires_grad_()
    out = te.apply_rotary_pos_emb(t, freqs, layout, interleaved=interleaved, **given)
    same_bits(out.detach(), together([one.detach() for one in alone]))
    (back,) = torch.autograd.grad(out, t, together(grads))
    same_bits(back, together(list(torch.autograd.grad(alone, pieces, grads))))


def placed(x: torch.Tensor, how: str) -> torch.Tensor:
    """x's numbers with other strides."""
    if how == "channels first":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if how == "heads first":
        return x.movedim(-2, 0).contiguous().movedim(0, -2)
    if how == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "every other channel":
        return x.repeat_interleave(2, -1)[..., ::2]
    if how == "some channels":
        return torch.cat([x, x], -1)[..., x.shape[-1] :]
    if how == "queries, keys, values":
        return torch.stack([x, x, x], -3).select(-3, 1)
    if how == "parts of a head":
        return torch.stack([x, x, x], -2).select(-2, 1)
    if how == "every other token":
        return x.repeat_interleave(2, 0)[::2]
    return x


PLACES = ("as it is", "channels first", "heads first", "transposed", "every other channel", "some channels")
PLACES += ("queries, keys, values", "parts of a head", "every other token")


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("starts", [None, torch.int32, torch.int64])
def test_strides_change_no_bit_and_the_result_is_contiguous(layout: str, starts: Any, same_bits: Any) -> None:
    """Strides of t and of the gradient; both pairings, every dtype."""
    freqs = te.RotaryPositionEmbedding(8)(20)
    shape = {"sbhd": (5, 3, 2, 16), "bshd": (3, 5, 2, 16), "thd": (11, 2, 16)}[layout]
    given: dict[str, Any] = {"start_positions": None if starts is None else torch.tensor(STARTS, dtype=starts)}
    if layout == "thd":
        given["cu_seqlens"] = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    for dtype, interleaved in itertools.product((BF16, torch.float16, torch.float32), (False, True)):
        t, grad = torch.randn(2, *shape).to(dtype)
        expected = None
        for place, of_grad in [*zip(PLACES, PLACES, strict=True), *itertools.product(PLACES[:2], PLACES)]:
            leaf = placed(t, place).requires_grad_()
            out = te.apply_rotary_pos_emb(leaf, freqs, layout, interleaved=interleaved, fused=True, **given)
            (back,) = torch.autograd.grad(out, leaf, placed(grad, of_grad))
            assert out.is_contiguous()
            expected = (out.detach(), back) if expected is None else expected
            same_bits(out.detach(), expected[0])
            same_bits(back, expected[1])


def test_an_expanded_input_and_gradient(same_bits: Any) -> None:
    freqs, t = te.RotaryPositionEmbedding(8)(5), torch.randn(1, 1, 2, 8).to(BF16)
    for layout in ("sbhd", "bshd"):
        whole = t.expand(5, 5, 2, 8)
        leaves = [whole.clone().requires_grad_(), whole.detach().requires_grad_()]
        results = []
        for leaf, grad in zip(leaves, (torch.ones(5, 5, 2, 8, dtype=BF16), torch.ones((), dtype=BF16)), strict=True):
            out = te.apply_rotary_pos_emb(leaf, freqs, layout, torch.zeros(5, dtype=torch.int32))
            results.append((out.detach(), *torch.autograd.grad(out, leaf, grad.expand(5, 5, 2, 8))))
        for a, b in zip(*results, strict=True):
            same_bits(a, b)


def test_positions_are_those_of_a_cache(same_bits: Any) -> None:
    """`MultiheadAttention` with `InferenceParams` rotates the new tokens as start_positions does."""
    freqs = te.RotaryPositionEmbedding(16)(20)
    layer = te.MultiheadAttention(64, 4, attention_dropout=0.0, params_dtype=BF16, fuse_qkv_params=True).eval()
    x = torch.randn(9, 2, 64).to(BF16)
    cache = te.InferenceParams(2, 20, 4, 16, BF16)
    with torch.no_grad():
        for first, last in ((0, 5), (5, 6), (6, 9)):
            cache.pre_step({0: last - first, 1: last - first})
            layer(x[first:last], inference_params=cache, rotary_pos_emb=freqs)
            new = layer.qkv(x[first:last]).view(last - first, 2, 4, 3, 16)[:, :, :, 1]
            starts = torch.full((2,), first)
            expected = te.apply_rotary_pos_emb(new, freqs, start_positions=starts)
            same_bits(cache.cache[1][0][:, first:last].transpose(0, 1), expected)


def test_positions_wait_for_no_gpu() -> None:
    """On a GPU they are found and checked there; the rotation is one launch for all sequences."""
    with DryGpu() as gpu:
        t, freqs = torch.empty(5, 3, 2, 16, dtype=BF16, device="cuda"), torch.empty(17, 1, 1, 8, device="cuda")
        starts = torch.empty(3, dtype=torch.int64, device="cuda")
        te.apply_rotary_pos_emb(t, freqs, start_positions=starts)
        ends = torch.empty(4, dtype=torch.int32, device="cuda")
        te.apply_rotary_pos_emb(t[:, 0], freqs, "thd", start_positions=starts, cu_seqlens=ends)
    text = "\n".join(gpu.taken())
    assert text.count("rotary.rotary") == 2
    assert text.count("_assert_async") == 3
    assert "_local_scalar_dense" not in text


T, FREQS = torch.zeros(4, 2, 3, 16), torch.zeros(4, 1, 1, 16)
ENDS = torch.tensor([0, 4, 7], dtype=torch.int32)
THD = {"t": torch.zeros(7, 3, 16), "tensor_format": "thd", "cu_seqlens": ENDS}


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"dim": 0}, ValueError, r"dim=0; an int from 1"),
        ({"dim": 3}, ValueError, r"dim=3 with rotary_percent=1.0 rotates 3 channels; an even number from 2 on"),
        ({"dim": 16, "rotary_percent": 0.1}, ValueError, r"dim=16 with rotary_percent=0.1 rotates 1 channels; an even"),
        ({"dim": 16, "rotary_percent": 1.5}, ValueError, r"rotary_percent=1.5; a number above 0, at most 1"),
        ({"dim": 16, "rotary_base": "1e4"}, TypeError, r"rotary_base='1e4'; a number between"),
        ({"dim": 16, "interleaved": 1}, TypeError, r"interleaved=1; True and False"),
        (
            {"dim": 16, "seq_len_interpolation_factor": 0.5},
            TypeError,
            r"seq_len_interpolation_factor=0.5; None or",
        ),
        ({"dim": 16, "pretrained_max_position_embeddings": 0}, ValueError, r"embeddings=0; None or an int from 1"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, Any], error: type[Exception], sentence: str) -> None:
    for side in (te, optimized):
        with pytest.raises(error, match=rf"^RotaryPositionEmbedding: .*{sentence}.* accepted\.$"):
            side.RotaryPositionEmbedding(**given)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"t": None}, TypeError, "t=None; a tensor is accepted"),
        ({"t": T.int()}, TypeError, "t has dtype torch.int32; float32, bfloat16 and float16 are accepted"),
        ({"t": T[0]}, ValueError, r"t has shape \[2, 3, 16\]; \['s', 'b', 'h', 'd'\] is accepted"),
        (
            {"freqs": FREQS.half()},
            ValueError,
            r"freqs is torch.float16 \[4, 1, 1, 16\]; float32 \[positions",
        ),
        ({"freqs": FREQS[:3]}, ValueError, r"freqs is torch.float32 \[3, 1, 1, 16\]; .* with 4 positions or more"),
        ({"freqs": FREQS[..., :3]}, ValueError, r"an even number of channels up to 16"),
        ({"freqs": torch.zeros(4, 1, 1, 18)}, ValueError, r"an even number of channels up to 16"),
        ({"freqs": torch.zeros(4, 16)}, ValueError, r"freqs is torch.float32 \[4, 16\]"),
        ({"freqs": FREQS.to("meta")}, RuntimeError, "freqs is on meta and t on cpu; one device is accepted"),
        ({"tensor_format": "hdt"}, ValueError, "tensor_format='hdt'; one of .* is accepted"),
        ({"tensor_format": "thd"}, ValueError, r"t has shape \[4, 2, 3, 16\]; \['t', 'h', 'd'\] is accepted"),
        ({**THD, "cu_seqlens": None}, TypeError, r"cu_seqlens=None; torch.int32 \[sequences \+ 1\] is accepted"),
        ({**THD, "cu_seqlens": ENDS.long()}, ValueError, r"cu_seqlens is torch.int64 \[3\]; torch.int32 \[3\] is"),
        ({**THD, "cu_seqlens": ENDS[:1]}, ValueError, r"cu_seqlens is torch.int32 \[1\]; torch.int32 \[sequences"),
        ({**THD, "cu_seqlens": ENDS.to("meta")}, RuntimeError, "cu_seqlens is on meta and t on cpu; one device is"),
        ({**THD, "cu_seqlens": ENDS + 1}, ValueError, "cu_seqlens must start with 0, not fall, and end with t's 7"),
        ({**THD, "cu_seqlens": ENDS.flip(0)}, ValueError, "cu_seqlens must start with 0, not fall, and end with t's 7"),
        ({**THD, "cu_seqlens": ENDS[[0, 2]]}, ValueError, "freqs has 4 positions, and a token's position is not among"),
        ({"cu_seqlens": ENDS}, ValueError, "cu_seqlens goes with tensor_format='thd'; None is accepted"),
        ({"start_positions": 1}, TypeError, r"start_positions=1; torch.int32 or torch.int64 \[2\] is accepted"),
        ({"start_positions": torch.zeros(2)}, ValueError, r"start_positions is torch.float32 \[2\]; torch.int32 or"),
        (
            {"start_positions": ENDS},
            ValueError,
            r"start_positions is torch.int32 \[3\]; torch.int32 or torch.int64 \[2",
        ),
        ({"start_positions": torch.tensor([0, 1])}, ValueError, "freqs has 4 positions, and a token's position is"),
        ({"start_positions": torch.tensor([0, -1])}, ValueError, "freqs has 4 positions, and a token's position is"),
        ({"cp_size": 2}, NotImplementedError, "cp_size=2 is not offered; 1 is accepted"),
        ({"cp_rank": 1}, NotImplementedError, "cp_rank=1 is not offered; 0 is accepted"),
        ({"fused": None}, TypeError, "fused=None; True and False are accepted"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=rf"^apply_rotary_pos_emb: .*{sentence}") as found:
        te.apply_rotary_pos_emb(**{"t": T, "freqs": FREQS, **given})
    assert str(found.value).endswith(".")


@pytest.mark.sample(6)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "module by module"])
def test_a_decoder_turns_queries_and_keys_of_its_cross_attention(layout: str, fused: bool, pair: bool) -> None:
    """As Transformer Engine's: the angles of self-attention; here against its cross-attention written out."""
    torch.manual_seed(1)
    sizes = {"sbhd": ((6, 2), (9, 2)), "bshd": ((2, 6), (2, 9)), "thd": ((12,), (18,))}[layout]
    types = dict.fromkeys(
        ["self_attn_mask_type", "enc_dec_attn_mask_type"], "padding" if layout == "thd" else "no_mask"
    )
    layer = te.TransformerLayer(
        32, 64, 2, layer_type="decoder", attn_input_format=layout, params_dtype=BF16, hidden_dropout=0.0,
        attention_dropout=0.0, **types,
    )  # fmt: skip
    if not fused:
        layer.layernorm_mlp.register_forward_hook(lambda *_: None)
        layer.inter_attention.proj.register_forward_hook(lambda *_: None)
    numbers = np.random.default_rng(2)
    x, source = (torch.from_numpy(numbers.normal(size=(*size, 32))).to(BF16).requires_grad_() for size in sizes)
    own, other = te.RotaryPositionEmbedding(16)(9), te.RotaryPositionEmbedding(16, rotary_base=100.0)(9)
    given: Any = (own, other) if pair else own
    lengths: dict[str, Any] = {}
    if layout == "thd":
        ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (6, 9)]
        lengths = {"cu_seqlens_q": ends[0], "cu_seqlens_kv": ends[1], "max_seqlen_q": 6, "max_seqlen_kv": 9}
    leaves = [x, source, *layer.parameters()]

    def grads(out: torch.Tensor) -> list[torch.Tensor]:
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    def written_out() -> torch.Tensor:
        cross, of_self = layer.inter_attention, {key: one for key, one in lengths.items() if "kv" not in key}
        of_self |= {key.replace("_q", "_kv"): one for key, one in of_self.items()}
        hidden = bias_dropout_add(*layer.self_attention(x, rotary_pos_emb=given, **of_self), x, 0.0, None)
        q = cross.layernorm_query(hidden).unflatten(-1, (2, 16))
        k, v = cross.key_value(source).unflatten(-1, (2, 2, 16)).unbind(-3)
        ends_of = [lengths.get("cu_seqlens_q"), lengths.get("cu_seqlens_kv")]
        q, k = (
            te.apply_rotary_pos_emb(t.contiguous(), freqs, layout, fused=True, cu_seqlens=one)
            for t, freqs, one in zip((q, k), (own, other if pair else own), ends_of, strict=True)
        )
        y, bias = cross.proj(cross.core_attention(q, k, v.contiguous(), **lengths))
        hidden = bias_dropout_add(y, bias, hidden, 0.0, None)
        return bias_dropout_add(*layer.layernorm_mlp(hidden), hidden, 0.0, None)

    found = grads(layer(x, encoder_output=source, rotary_pos_emb=given, **lengths))
    assert not torch.equal(found[0], layer(x, encoder_output=source, rotary_pos_emb=(own * 0, own * 0), **lengths))
    want = grads(written_out())
    # Gradients of hidden states that have two uses are added in another order there.
    assert_same_bits(found[0], want[0])
    for one, two in zip(found, want, strict=True):
        assert float((one - two).abs().max()) <= 0.03 * float(two.abs().max())


def test_a_decoder_takes_angles_or_a_cache() -> None:
    layer = te.TransformerLayer(32, 64, 2, layer_type="decoder", params_dtype=BF16).eval()
    cache, x = te.InferenceParams(2, 8, 2, 16, BF16), torch.zeros(4, 2, 32, dtype=BF16)
    cache.pre_step({0: 4, 1: 4})
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=r"^TransformerLayer: rotary_pos_emb with inference_"),
    ):
        layer(x, encoder_output=x, rotary_pos_emb=te.RotaryPositionEmbedding(16)(8), inference_params=cache)
