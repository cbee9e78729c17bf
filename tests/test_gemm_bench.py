"""`twin bench gemm`: the roof that its plot holds products under."""

import pytest

from optimized.bench import gemm_roofline


def test_intensity() -> None:
    assert gemm_roofline.intensity("fast", 32, 16, 64) == 2 * 32 * 16 * 64 / (32 * 64 + 16 * 64 + 2 * 32 * 16)
    assert gemm_roofline.intensity("bf16", 32, 16, 64) == 32 * 16 * 64 / (32 * 64 + 16 * 64 + 32 * 16)


def test_peak() -> None:
    provenance = {"nvidia_smi": {"clocks.max.sm": "1000 MHz"}, "gpu": {"processors": 132}}
    assert gemm_roofline.peak("split", provenance) == pytest.approx(1081.344)
    assert gemm_roofline.peak("bf16", provenance) == pytest.approx(540.672)
