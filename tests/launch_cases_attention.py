"""Cases of launches: attention, and softmax and rotary embedding around it. See `launch_cases`."""

import itertools

import torch
from launch_notes import BF16, E4M3, FP16, FP32, WIDE, Notes, empty, twin

from optimized.ops import attention


def rotaries(note: Notes) -> None:
    for dtype, interleaved, backward in itertools.product(WIDE, (False, True), (False, True)):
        note(twin.rotary, empty(33, 2, 3, 48, dtype=dtype), empty(40, 32, dtype=FP32), interleaved, backward)
    for x in (
        empty(33, 2, 3, 48, start=1),
        empty(33, 2, 3, 52),  # heads off 16 bytes
        empty(33, 2, 3, 44)[..., :40],
        empty(33, 1, 1, 32)[:, :, :, :32].transpose(0, 1),
        empty(0, 2, 3, 48),
        empty(33, 2, 9, 48)[:, :, 3:6],
    ):
        note(twin.rotary, x, empty(40, 32, dtype=FP32), False, False)
    note(twin.rotary, empty(4, 1, 1, 48), empty(4, 24, dtype=FP32), False, False)  # halves of 12
    note(twin.rotary, empty(4, 1, 1, 48), empty(4, 24, dtype=FP32), True, False)
    note(twin.rotary, empty(2, 1, 1, 4096), empty(2, 4096, dtype=FP32), True, False)


def softmaxes(note: Notes) -> None:
    mask = empty(2, 1, 1, 150, dtype=torch.bool)
    for dtype, mask_type, hidden in itertools.product(WIDE, ("none", "causal", "causal_bottom_right"), (None, mask)):
        note(twin.softmax, empty(2, 3, 40, 150, dtype=dtype), 0.3, mask_type, hidden)
    for dtype, cols in itertools.product(WIDE, (256, 257, 512, 520, 1024, 1025, 2048, 2056)):
        note(twin.softmax, empty(1, 1, 5, cols, dtype=dtype), 0.5, "none", None)
        note(twin.softmax_backward, *(empty(1, 1, 5, cols, dtype=dtype) for _ in range(2)), 0.5)
    note(twin.softmax, empty(2, 3, 0, 16), 0.5, "none", None)
    note(twin.softmax_backward, empty(2, 3, 0, 16), empty(2, 3, 0, 16), 0.5)
    note(twin.softmax, empty(1, 2, 3, 16, start=1), 0.5, "none", empty(1, 2, 3, 16, dtype=torch.bool))
    note(twin.softmax_backward, empty(1, 2, 3, 16, start=1), empty(1, 2, 3, 16), 0.5)
    note(twin.softmax_backward, empty(1, 2, 3, 16), empty(1, 2, 3, 16, start=1), 0.5)


def attentions(note: Notes) -> None:
    """Forward and backward; inputs `[s, b, h, d]` seen as `[b, h, s, d]`, as in the layers, if not contiguous."""

    def both(
        sizes: tuple[int, int, int, int, int, int],
        dtype: torch.dtype = BF16,
        mask_type: str = "none",
        mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        start: int = 0,
        contiguous: bool = False,
        window: tuple[int, int] = (-1, -1),
        bias: tuple[torch.Tensor | None, ...] = (),
        e: int = 0,
    ) -> None:
        b, h, heads, sq, skv, d = sizes
        e = e or d

        def of(n: int, s: int, d: int) -> torch.Tensor:
            if contiguous:
                return empty(b, n, s, d, dtype=dtype, start=start)
            return empty(s, b, n, d, dtype=dtype, start=start).permute(1, 2, 0, 3)

        q, k, v = of(h, sq, d), of(heads, skv, d), of(heads, skv, e)
        rest = (0.125, mask_type, *window, mask, dropout, empty(2, dtype=torch.int64) if dropout else None)
        out, m, inv = note(twin.attention, q, k, v, *rest, *bias)
        grad = of(h, sq, e)
        note(twin.attention_backward, grad, q, k, v, out, m, inv, *rest, *bias)
        if bias and bias[0] is not None:
            note(twin.attention_bias_backward, grad, q, k, v, out, m, inv, *rest, *bias)

    for d, dropout in ((64, 0.1), (128, 0.0), (128, 0.1), (256, 0.0)):
        both((2, 4, 2, 130, 150, d), dropout=dropout)
    both((2, 4, 2, 130, 150, 64), FP16)
    for d in (8, 72, 136):
        both((1, 2, 2, 128, 129, d), contiguous=True)
    for mask_type in ("causal", "causal_bottom_right"):
        both((2, 2, 1, 40, 140, 32), mask_type=mask_type)
    for mask_type, window in (("none", (300, 0)), ("causal", (200, 5))):
        both((1, 2, 1, 700, 500, 32), mask_type=mask_type, window=window)
    both((1, 2, 1, 140, 500, 200), mask_type="causal_bottom_right", window=(2**31 - 1, 0))
    both((2, 2, 1, 40, 70, 32), mask=empty(2, 1, 1, 70, dtype=torch.bool), dropout=0.5)
    both((2, 2, 1, 40, 70, 32), mask=empty(2, 2, 40, 70, dtype=torch.bool))
    both((2, 2, 2, 40, 70, 32), start=1)
    both((1, 2, 2, 40, 70, 8))
    for sizes in ((2, 2, 2, 0, 70, 32), (2, 2, 2, 40, 0, 32), (0, 2, 2, 40, 70, 32), (1, 1, 1, 1, 1, 8)):
        both(sizes, dropout=0.1)
    both((1, 48, 24, 400, 300, 128))  # more tiles than a GPU has multiprocessors
    for d, dropout in ((64, 0.0), (128, 0.1)):
        both((2, 4, 2, 130, 150, d), dropout=dropout, bias=(empty(1, 4, 130, 150), None))
    both((2, 4, 2, 130, 150, 64), FP16, "causal", bias=(empty(2, 1, 130, 150, dtype=FP32), None))
    both((2, 2, 1, 40, 70, 32), bias=(empty(1, 40, 70, 2).permute(0, 3, 1, 2), None))  # read as a copy
    both((2, 2, 1, 0, 70, 32), bias=(empty(2, 2, 0, 70), None))
    for d, dropout in ((64, 0.1), (256, 0.0)):
        both((2, 4, 2, 130, 150, d), dropout=dropout, bias=(None, None, empty(4, dtype=FP32)))
    lengths = (empty(2, dtype=torch.int32), empty(2, dtype=torch.int32))
    for d in (64, 256):  # wide heads have a mask of them
        rest = (0.125, "causal", -1, -1, None, 0.1, empty(2, dtype=torch.int64), None, None, None, *lengths)
        note(twin.attention, *(empty(2, n, s, d) for n, s in ((4, 130), (2, 150), (2, 150))), *rest)
    both((2, 4, 2, 130, 150, 128), bias=(empty(1, 4, 130, 150), None, None, *lengths), window=(40, 5))
    for sizes in ((2, 4, 130, 64), (1, 2, 40, 200), (0, 2, 40, 64)):
        row = empty(*sizes[:3], dtype=FP32)
        note(twin.attention_sink_backward, empty(*sizes), empty(*sizes), row, row, empty(sizes[1], dtype=FP32))
    for d, slopes in ((32, empty(2, dtype=FP32)), (64, empty(2, 2, dtype=FP32)), (200, empty(1, 2, dtype=FP32)[0])):
        both((2, 2, 1, 40, 70, d), mask_type="causal_bottom_right", bias=(None, slopes))
    # Heads of two sizes: with the kernels of the larger one.
    both((2, 4, 2, 130, 150, 192), bias=(empty(1, 4, 130, 150), None), e=128)
    both((2, 4, 2, 130, 150, 40), e=128)
    both((1, 1, 1, 1, 1, 16), e=8)  # where strides say nothing
    # k and v of other strides, and repeated heads.
    q, k, v = empty(2, 2, 40, 32), empty(2, 1, 70, 32), empty(70, 2, 1, 32).permute(1, 2, 0, 3)
    rest = (0.125, "none", -1, -1, None, 0.0, None)
    out, m, inv = note(twin.attention, q, k, v, *rest)
    note(twin.attention_backward, empty(2, 2, 40, 32), q, k, v, out, m, inv, *rest)
    note(twin.attention, q, empty(2, 1, 70, 32).expand(2, 2, 70, 32), v.expand(2, 2, 70, 32), *rest)
    note.table("capacity of a head dimension", ((d, attention.capacity(d)) for d in (8, 64, 65, 128, 129, 256)))


def attentions_fp8(note: Notes) -> None:
    """Forward, and once the backward, of codes `[s, b, h, d]` seen as `[b, h, s, d]`, as in the layers."""

    def forward(
        sizes: tuple[int, int, int, int, int, int],
        dtype: torch.dtype = BF16,
        mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        room: int = 0,
        backward: bool = False,
    ) -> None:
        b, h, heads, sq, skv, d = sizes

        def of(n: int, s: int, kind: torch.dtype = E4M3) -> torch.Tensor:
            return empty(s, b, n, d, dtype=kind).permute(1, 2, 0, 3)

        q, k, v = of(h, sq), of(heads, skv), of(heads, skv)
        v_t = empty(b, heads, d, room or -(-skv // 16) * 16, dtype=E4M3)[..., :skv]
        invs = [empty(1, dtype=FP32) for _ in range(3)]
        rest = (0.125, "causal", 200, -1, mask, dropout, empty(2, dtype=torch.int64) if dropout else None)
        out, m, inv = note(twin.attention_fp8, q, k, v_t, *invs, *rest, dtype)
        if backward:
            note(twin.attention_fp8_backward, of(h, sq, dtype), q, k, v, *invs, out, m, inv, *rest)

    forward((2, 4, 2, 130, 152, 64), backward=True)
    forward((1, 2, 2, 128, 129, 80), FP16, dropout=0.1)  # 129 keys: a copy with room for 132
    forward((2, 2, 1, 40, 72, 256), mask=empty(2, 1, 1, 72, dtype=torch.bool))
    forward((2, 2, 2, 40, 0, 32), dropout=0.1)
    forward((1, 48, 24, 400, 300, 128))  # more tiles than a GPU has multiprocessors
    forward((2, 2, 2, 40, 72, 32), room=75)  # rows of values that do not start at multiples of 16 bytes: a copy
