"""Activations: `twin::activation`, its backward, and both with the FP8 cast or with the scale for one.

x `[rows, n]` is the pre-activation. The gated kinds split it into x1 = x[:, :n/2] and x2 = x[:, n/2:]; as in
Transformer Engine, the first half is activated and multiplied by the second. With m = n, or n/2 where gated, and grad
`[rows, m]` the gradient of y:

    kind                             y [rows, m]      dx [rows, n]
    gelu, relu, silu, qgelu, srelu   act(x)           grad · act'(x)
    geglu, reglu, swiglu, qgeglu,    act(x1) · x2     dx1 = (grad · x2) · act'(x1)
    sreglu, glu                                       dx2 = grad · act(x1)
    clamped_swiglu                   act(c1) · c2     dx1 = (grad · c2) · act'(c1), times 0 where x1 > limit
                                                      dx2 = grad · act(c1), times 0 where |x2| > limit

act is the function before "glu"; of swiglu it is silu, of glu the sigmoid. act and act' are fp32 values: those of
`reference.numbers.elementary` for gelu (its tanh form) and silu, which are recorded where x is bf16 or fp16, and for
qgelu and sigmoid, which take x as fp32; and

    relu(x)   = +0 where x <= 0, else x             so -0 becomes +0, and NaN stays
    relu'(x)  = 1 where x > 0, 0 where x <= 0       NaN where x is
    srelu(x)  = relu(x) · relu(x)                   one rounding to fp32
    srelu'(x) = 2 · relu(x)

clamped_swiglu is GPT-OSS's, with parameters limit, alpha and glu_linear_offset (`Clamp`): c1 = min(x1, limit), act(c) =
c · sigmoid(alpha · c) (`elementary.swish`), and c2 = x2 limited to [-limit, limit], plus glu_linear_offset, one
rounding. NaN stays. A kind names its parameters: "clamped_swiglu(7.0, 1.702, 1.0)", or "clamped_swiglu" for these.

grad, x and x2 are widened to fp32 exactly; each multiplication above rounds once, to fp32. Then

    activation, activation_backward             y, dx: one rounding to x's dtype
    activation_scale                            y, and `twin::current_scale` of the fp32 y, not of the rounded one
    activation_backward_scale                   dx, and `twin::current_scale` of it, rounded (`GRADIENT_IS_ROUNDED`)
    activation_scale_cast_transpose             q, q_t, scale_inv: `twin::cast_transpose` of the rounded y, with the
                                                scale that activation_scale gives
    activation_cast_transpose                   q, q_t, scale_inv, amax: `twin::cast_transpose` of the fp32 y
    activation_backward_cast_transpose_dbias    the same of the fp32 dx; dbias: its column sums in the order of
                                                `twin::dbias`, one rounding to x's dtype

Sources: GELU, arXiv 1606.08415 (its section 2 has qgelu); SiLU, 1702.03118; squared ReLU, 2109.08668; the gated ones,
2002.05202 and, for glu, 1612.08083; clamped_swiglu, openai/gpt-oss `gpt_oss/torch/model.py`. Names are Transformer
Engine's.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from reference.numbers import elementary, formats
from reference.ops.casts.cast import Scaling, cast_rows, check_cast
from reference.ops.casts.cast_transpose import Four, Three, cast_outputs, transpose_codes
from reference.ops.casts.current_scale import Scale, check_scale, scale_of
from reference.ops.casts.dbias import sum_rows
from reference.ops.checks import check_columns, check_input, check_like
from reference.ops.library import define

# Elements of x at a time: they stay in the cache and on one thread, as in `formats.cast`.
_CHUNK = 1 << 15

GRADIENT_IS_ROUNDED = True
"""Whether the amax by which current scaling casts an activation's gradient is that of dx rounded to x's dtype, or that
of the fp32 dx. Both sides read it here."""

Function = Callable[[torch.Tensor], torch.Tensor]


def relu(x: torch.Tensor) -> torch.Tensor:
    """+0 where x <= 0, else x: fp32, of fp32, bf16 or fp16 x."""
    wide = x.float()
    return wide.masked_fill(wide <= 0, 0.0)


def drelu(x: torch.Tensor) -> torch.Tensor:
    """The derivative of `relu`: 1 where x > 0, +0 where x <= 0, NaN where x is."""
    wide = x.float()
    return torch.where(wide > 0, 1.0, relu(wide))


def srelu(x: torch.Tensor) -> torch.Tensor:
    """The square of `relu`."""
    return relu(x).square()


def dsrelu(x: torch.Tensor) -> torch.Tensor:
    """The derivative of `srelu`: twice `relu`."""
    return relu(x) * 2.0


_GELU = (elementary.gelu, elementary.dgelu)
_SILU = (elementary.silu, elementary.dsilu)
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "gelu": _GELU,
    "geglu": _GELU,
    "relu": (relu, drelu),
    "silu": _SILU,
    "swiglu": _SILU,
    "reglu": (relu, drelu),
    "srelu": (srelu, dsrelu),
    "sreglu": (srelu, dsrelu),
    "qgelu": (elementary.qgelu, elementary.dqgelu),
    "qgeglu": (elementary.qgelu, elementary.dqgelu),
    "glu": (elementary.sigmoid, elementary.dsigmoid),
}
CLAMPED = "clamped_swiglu"
KINDS = (*FUNCTIONS, CLAMPED)
RECORDED = KINDS[:5]
"""The kinds that the recordings and the measurements of an H200 hold."""
GATED = ("geglu", "swiglu", "reglu", "sreglu", "qgeglu", "glu", CLAMPED)


class Clamp(NamedTuple):
    """The parameters of "clamped_swiglu", with Transformer Engine's names and defaults; each is rounded to fp32."""

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0

    @property
    def kind(self) -> str:
        """The kind with these parameters."""
        return f"{CLAMPED}({', '.join(repr(float(value)) for value in self)})"


def is_gated(kind: str) -> bool:
    """Whether a kind, which may name parameters, splits x into halves."""
    return kind in GATED or kind.startswith(f"{CLAMPED}(")


@functools.cache
def clamp_of(kind: str) -> Clamp | None:
    """The parameters that a kind names; None for kinds without any, and for what is no kind."""
    if kind == CLAMPED:
        return Clamp()
    name, _, rest = kind.partition("(")
    try:
        values = [float(one) for one in rest.removesuffix(")").split(",")]
    except ValueError:
        return None
    if name != CLAMPED or len(values) != 3 or Clamp(*values).kind != kind:
        return None
    found = Clamp(*values)
    accepted = 1e-30 < found.limit < 1e30 and 1e-30 < found.alpha < 1e30 and abs(found.glu_linear_offset) < 1e30
    return found if accepted else None


class Functions(NamedTuple):
    """What an activation consists of: act and act' of x1; of a gated one c2 of x2, and what dx2 multiplies grad by."""

    act: Function
    derivative: Function
    gate: Function = torch.Tensor.float
    gate_slope: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda x2, act: act


@functools.cache
def functions(kind: str) -> Functions:
    """The functions of a kind, which may name parameters; each gives fp32."""
    clamp = clamp_of(kind)
    if clamp is None:
        return Functions(*FUNCTIONS[kind])
    limit, _, offset = (torch.tensor(value, dtype=torch.float32, device="cpu").item() for value in clamp)
    act, slope = (functools.partial(f, alpha=clamp.alpha) for f in (elementary.swish, elementary.dswish))
    return Functions(
        lambda x: act(x.float().clamp(max=limit)),
        lambda x: torch.where(x.float() > limit, 0.0, slope(x.float())),
        lambda x: x.float().clamp(-limit, limit) + offset,
        lambda x, act: torch.where(x.float().abs() > limit, 0.0, act),
    )


def width(kind: str, columns: int) -> int:
    """The number of y's columns where x has `columns`."""
    return columns // 2 if is_gated(kind) else columns


def check_activation(op: str, x: torch.Tensor, kind: str) -> None:
    """Refuse what the activations do not accept; `op` names the caller in the error."""
    if kind not in KINDS and clamp_of(kind) is None:
        raise ValueError(f"{op}: kind must be one of {', '.join(map(repr, KINDS))}; got {kind!r}.")
    check_input(op, "x", x)
    if is_gated(kind) and x.shape[1] % 2:
        raise ValueError(
            f"{op}: x must have an even number of columns for kind {kind!r}, whose first half is activated and "
            f"multiplied by the second; got {x.shape[1]} (shape {tuple(x.shape)})."
        )


def check_grad(op: str, grad: torch.Tensor, x: torch.Tensor, kind: str) -> None:
    """Refuse a gradient of another shape than y, or of another dtype or device than x."""
    check_like(op, "grad", grad, x.dtype, (x.shape[0], width(kind, x.shape[1])), x.device)


def activation_outputs(x: torch.Tensor, kind: str) -> torch.Tensor:
    check_activation("twin::activation", x, kind)
    return x.new_empty((x.shape[0], width(kind, x.shape[1])))


def activation_scale_outputs(x: torch.Tensor, kind: str, *scale: *Scale) -> tuple[torch.Tensor, torch.Tensor]:
    op = "twin::activation_scale"
    check_activation(op, x, kind)
    check_scale(op, *scale)
    return x.new_empty((x.shape[0], width(kind, x.shape[1]))), x.new_empty(1, dtype=torch.float32)


def activation_backward_outputs(grad: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    check_activation("twin::activation_backward", x, kind)
    check_grad("twin::activation_backward", grad, x, kind)
    return torch.empty_like(x)


def activation_backward_scale_outputs(
    grad: torch.Tensor, x: torch.Tensor, kind: str, *scale: *Scale
) -> tuple[torch.Tensor, torch.Tensor]:
    op = "twin::activation_backward_scale"
    check_activation(op, x, kind)
    check_grad(op, grad, x, kind)
    check_scale(op, *scale)
    return torch.empty_like(x), x.new_empty(1, dtype=torch.float32)


def forward_outputs(op: str, x: torch.Tensor, kind: str, *scaling: *Scaling) -> Three:
    """Check the arguments of `activation_cast_transpose` and allocate (q, q_t, scale_inv)."""
    columns = _columns_of_codes(op, x, kind)
    check_cast(op, x, *scaling)
    return cast_outputs(x, columns, scaling[3])


def _columns_of_codes(op: str, x: torch.Tensor, kind: str) -> int:
    """The number of y's columns, after a check of x and kind and of that number."""
    check_activation(op, x, kind)
    columns = width(kind, x.shape[1])
    check_columns(op, "the activation", columns, f" (kind {kind!r}, x of shape {tuple(x.shape)})")
    return columns


def activation_scale_cast_outputs(x: torch.Tensor, kind: str, *scale: *Scale) -> Three:
    op = "twin::activation_scale_cast_transpose"
    columns = _columns_of_codes(op, x, kind)
    check_scale(op, *scale)
    return cast_outputs(x, columns, scale[0])


forward_cast_outputs = functools.partial(forward_outputs, "twin::activation_cast_transpose")


def backward_cast_outputs(grad: torch.Tensor, x: torch.Tensor, kind: str, *scaling: *Scaling) -> Four:
    op = "twin::activation_backward_cast_transpose_dbias"
    check_activation(op, x, kind)
    check_grad(op, grad, x, kind)
    check_cast(op, x, *scaling)
    return *cast_outputs(x, x.shape[1], scaling[3]), x.new_empty(x.shape[1])


def _forward(x: torch.Tensor, kind: str, out: torch.Tensor) -> torch.Tensor:
    """Write y, rounded to the dtype of `out` `[rows, m]`, to it and return it."""
    act, _, gate, _ = functions(kind)
    half, gated = width(kind, x.shape[1]), is_gated(kind)
    at_once = max(1, _CHUNK // max(x.shape[1], 1))
    for piece, target in zip(x.detach().split(at_once), out.split(at_once), strict=True):
        y = act(piece[:, :half])
        target.copy_(y * gate(piece[:, half:]) if gated else y)
    return out


def _backward(grad: torch.Tensor, x: torch.Tensor, kind: str, out: torch.Tensor) -> torch.Tensor:
    """Write dx, rounded to the dtype of `out` `[rows, n]`, to it and return it."""
    act, derivative, gate, gate_slope = functions(kind)
    half, gated = width(kind, x.shape[1]), is_gated(kind)
    at_once = max(1, _CHUNK // max(x.shape[1], 1))
    pieces = (tensor.detach().split(at_once) for tensor in (grad, x, out))
    for g16, piece, target in zip(*pieces, strict=True):
        g, x1 = g16.float(), piece[:, :half]
        if gated:
            x2 = piece[:, half:]
            target[:, :half].copy_((g * gate(x2)) * derivative(x1))
            target[:, half:].copy_(g * gate_slope(x2, act(x1)))
        else:
            target.copy_(g * derivative(x1))
    return out


@define(activation_outputs)
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """`x` `[rows, n]` -> y `[rows, m]` of x's dtype (fp32, bf16 or fp16); `kind` is one of `KINDS`, or `Clamp.kind`."""
    return _forward(x, kind, activation_outputs(x, kind))


@define(activation_scale_outputs)
def activation_scale(
    x: torch.Tensor, kind: str, dtype: torch.dtype, power_of_two: bool, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[rows, n]` -> (y `[rows, m]` of x's dtype, the scale for a cast of it to `dtype`, fp32 `[1]`)."""
    y, scale = activation_scale_outputs(x, kind, dtype, power_of_two, epsilon)
    wide = _forward(x, kind, torch.empty(y.shape, dtype=torch.float32, device="cpu"))
    scale.copy_(scale_of(formats.amax(wide), dtype, power_of_two, epsilon))
    return y.copy_(wide), scale


@define(activation_scale_cast_outputs)
def activation_scale_cast_transpose(
    x: torch.Tensor, kind: str, dtype: torch.dtype, power_of_two: bool, epsilon: float
) -> Three:
    """`x` `[rows, n]` -> (q `[rows, m]`, q_t `[m, ceil16(rows)]` of `dtype`, scale_inv fp32 `[1]`)."""
    q, q_t, scale_inv = activation_scale_cast_outputs(x, kind, dtype, power_of_two, epsilon)
    y, scale = activation_scale(x, kind, dtype, power_of_two, epsilon)
    cast_rows(y, scale, None, 0, q, scale_inv)
    transpose_codes(q, q_t)
    return q, q_t, scale_inv


@define(activation_backward_outputs)
def activation_backward(grad: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """`grad` `[rows, m]`, `x` `[rows, n]` of one dtype -> dx `[rows, n]` of that dtype."""
    return _backward(grad, x, kind, activation_backward_outputs(grad, x, kind))


@define(activation_backward_scale_outputs)
def activation_backward_scale(
    grad: torch.Tensor, x: torch.Tensor, kind: str, dtype: torch.dtype, power_of_two: bool, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grad` `[rows, m]`, `x` `[rows, n]` -> (dx `[rows, n]` of x's dtype, the scale for a cast of it, fp32 `[1]`)."""
    dx, scale = activation_backward_scale_outputs(grad, x, kind, dtype, power_of_two, epsilon)
    wide = _backward(grad, x, kind, torch.empty(x.shape, dtype=torch.float32, device="cpu"))
    dx.copy_(wide)
    scale.copy_(scale_of(formats.amax(dx if GRADIENT_IS_ROUNDED else wide), dtype, power_of_two, epsilon))
    return dx, scale


@define(forward_cast_outputs, mutates=("amax_history",))
def activation_cast_transpose(
    x: torch.Tensor, kind: str, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> Three:
    """`x` `[rows, n]` -> (q `[rows, m]`, q_t `[m, ceil16(rows)]` of `dtype`, scale_inv fp32 `[1]`)."""
    q, q_t, scale_inv = forward_cast_outputs(x, kind, scale, amax_history, column, dtype)
    y = _forward(x, kind, torch.empty(q.shape, dtype=torch.float32, device="cpu"))
    cast_rows(y, scale, amax_history, column, q, scale_inv)
    transpose_codes(q, q_t)
    return q, q_t, scale_inv


@define(backward_cast_outputs, mutates=("amax_history",))
def activation_backward_cast_transpose_dbias(
    grad: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> Four:
    """`grad` `[rows, m]`, `x` `[rows, n]` -> (q `[rows, n]`, q_t `[n, ceil16(rows)]`, scale_inv, dbias `[n]`).

    q and q_t are of `dtype`, scale_inv fp32 `[1]`, dbias of x's dtype.
    """
    q, q_t, scale_inv, dbias = backward_cast_outputs(grad, x, kind, scale, amax_history, column, dtype)
    dx = _backward(grad, x, kind, torch.empty(x.shape, dtype=torch.float32, device="cpu"))
    cast_rows(dx, scale, amax_history, column, q, scale_inv)
    transpose_codes(q, q_t)
    return q, q_t, scale_inv, dbias.copy_(sum_rows(dx))
