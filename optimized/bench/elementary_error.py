"""How far each candidate for an elementary function is from float64.

exp over every fp32 word from -0 down to where e^x leaves fp32's normal range, rsqrt over every positive normal
word, the activations over all finite bf16 and fp16 words. An error in ulp is |y - t| / 2^(floor(log2|t|) - 23).
"""

from collections.abc import Callable

import torch

# Device functions of kernels/elementary_candidates.cuh, by what they compute.
CANDIDATES = {
    "exp": ("exp_fast", "exp_grid15", "exp", "exp_cuda", "exp_poly", "exp_poly6"),
    "rsqrt": ("rsqrt_fast", "rsqrt_refined", "rsqrt_normal", "rsqrt_newton", "rsqrt"),
    "gelu": ("gelu_tanh", "gelu", "gelu_grid15", "gelu_f32", "gelu_lean", "gelu_poly", "gelu_ieee"),
    "dgelu": ("dgelu_tanh", "dgelu", "dgelu_grid15", "dgelu_f32", "dgelu_lean", "dgelu_poly", "dgelu_ieee"),
    "silu": ("silu_tanh", "silu", "silu_grid15", "silu_f32", "silu_lean", "silu_poly", "silu_ieee"),
    "dsilu": ("dsilu", "dsilu_grid15", "dsilu_f32", "dsilu_lean", "dsilu_poly", "dsilu_ieee"),
}
SCALES = (1.0, 16.0, 64.0, 256.0)  # of FP8 casts
# Beyond this magnitude an activation's result matters to a 16-bit or FP8 consumer at ordinary scales.
SUBSTANTIAL = 2.0**-14
_GELU = 2 * (2 / torch.pi) ** 0.5


def truth(name: str, x: torch.Tensor) -> torch.Tensor:
    """The function in float64, for float64 x."""
    if name == "exp":
        return torch.exp(x)
    if name == "rsqrt":
        return 1 / torch.sqrt(x)
    z, slope = x, torch.ones_like(x)
    if name.endswith("gelu"):
        z, slope = _GELU * (x + 0.044715 * x**3), _GELU * (1 + 3 * 0.044715 * x * x)
    e = torch.exp(-z.abs())
    sigmoid = torch.where(z < 0, e, 1.0) / (1 + e)
    return sigmoid + x * (e / (1 + e) ** 2) * slope if name.startswith("d") else x * sigmoid


def ulps(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Errors of fp32 `y` against float64 `t`, in ulp of `t` (subnormal `t`: of 2^-126)."""
    _, exponent = torch.frexp(t)
    return (y.double() - t).abs() * torch.exp2(24.0 - exponent.clamp(min=-125).double())


def sixteen_bit_values(dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """All finite values of bf16 or fp16, in order of their words, as fp32."""
    x = torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16).view(dtype).float()
    return x[x.isfinite()]


def e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The E4M3 values of fp32(x) · scale, saturated (as values: -0 equals 0)."""
    return (x.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


def activation_errors(name: str, apply: Callable[[torch.Tensor], torch.Tensor], device: str) -> dict[str, object]:
    """Errors of one candidate over all finite bf16 and fp16 words."""
    result: dict[str, object] = {}
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        x = sixteen_bit_values(dtype, device)
        y, t = apply(x), truth(name, x.double())
        error = ulps(y, t)
        big = t.abs() >= SUBSTANTIAL
        # t is rounded to fp32 before 16 bits: a double rounding, of the truth itself, at worst one word off.
        result[kind] = {
            "max_ulp_substantial": float(error[big].max()),
            "mean_ulp_substantial": float(error[big].mean()),
            "max_ulp_above_2^-100": float(error[t.abs() >= 2.0**-100].max()),
            "max_absolute": float((y.double() - t).abs()[x.abs() <= 16].max()),
            "words_of_dtype_that_differ": int((y.to(dtype) != t.float().to(dtype)).sum()),
            "e4m3_codes_that_differ": [int((e4m3(y, s) != e4m3(t, s)).sum()) for s in SCALES],
            "not_finite": int((~y.isfinite()).sum()),
            "words": x.numel(),
        }
    return result


def fp32_errors(name: str, apply: Callable[[torch.Tensor], torch.Tensor], device: str) -> dict[str, object]:
    """Errors of one exp or rsqrt candidate over every fp32 word of its range whose result is a normal number."""
    first, last = (0x80000000, 0xC2AEAC50) if name == "exp" else (0x00800000, 0x7F7FFFFF)
    worst, total, count, at, step = 0.0, 0.0, 0, 0.0, 1 << 26
    relative = 0.0
    for start in range(first, last + 1, step):
        stop = min(start + step, last + 1)
        x = torch.arange(start, stop, dtype=torch.int64, device=device).to(torch.int32).view(torch.float32)
        t = truth(name, x.double())
        y = apply(x)
        normal = t >= 2.0**-126
        error = torch.where(normal, ulps(y, t), 0.0)
        top = float(error.max())
        if top > worst:
            worst, at = top, float(x[int(error.argmax())])
        total, count = total + float(error.sum()), count + int(normal.sum())
        relative = max(relative, float(torch.where(normal, (y.double() - t).abs() / t, 0.0).max()))
    return {"max_ulp": worst, "mean_ulp": total / count, "max_relative": relative, "worst_at": at, "words": count}
