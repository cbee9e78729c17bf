"""What an H200 recorded, and the cases that make its inputs again: `twin parity`, README, notebooks and tests read it.

    reader             the files of data/
    tensor_core        `wgmma` instructions and cuBLASLt's GEMMs (inputs: tensor_core_cases)
    linear             six training steps of an FP8 Linear made of cuBLASLt
    transformer_engine Transformer Engine's own layers, step by step and op by op (transformer_engine_cases)
    cases              this project's ops and layers, one by one (case, cases_ops, cases_layers)
    outputs            the file of those, written by `twin parity --record`

Only outputs are stored. data/README.md says what each file holds and which script recorded it.
"""

from optimized.recordings.reader import arrays, provenance
from optimized.recordings.tensor_core import products, steps

__all__ = ["arrays", "products", "provenance", "steps"]
