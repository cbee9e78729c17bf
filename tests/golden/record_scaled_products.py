"""Record what cuBLASLt computes with a scale for each block of 128: `tests/golden/scaled_products.npz`.

    PYTHONPATH=.:tests python tests/golden/record_scaled_products.py          # on a Hopper machine

fp32 outputs of `torch._scaled_mm`, of scales that are no powers of two, so that the order of its multiplications shows.
`tests/ops/gemms/test_gemm_fp8_blocks.py` compares.
"""

import json

import numpy as np
import torch
from shared.scaled_products import FORMS, PATH, operands

from optimized import measure
from optimized.bench.kernels.gemm_blocks import scaled_mm
from reference.support import files


def main() -> None:
    words = {}
    for name, squares in FORMS.items():
        a, b = ((codes.cuda(), scales.cuda()) for codes, scales in operands(squares))
        words[name] = scaled_mm(a, b, squares, torch.float32).cpu().numpy()
    about = json.dumps(measure.provenance(()))
    with files.replacing(PATH) as file:
        np.savez_compressed(file, about=np.array(about), **words)
    print(f"{sum(x.size for x in words.values()):,} words written to {PATH}")


if __name__ == "__main__":
    main()
