"""What an H200 recorded, and the cases that make its inputs again; read by `twin parity`, README, notebooks and tests.

    reader             the files of data/
    tensor_core        `wgmma` instructions and cuBLASLt's GEMMs (inputs: tensor_core_cases)
    linear             six training steps of an FP8 Linear made of cuBLASLt
    transformer_engine Transformer Engine's own layers, step by step and op by op (inputs: transformer_engine_cases)
    cases              this project's ops and layers, one by one (case, calls)
    outputs            the recording of these cases, which `twin parity --record` writes

Only outputs are stored. data/README.md says what each file holds and which script recorded it.
"""

from optimized.recordings.reader import arrays, provenance
from optimized.recordings.tensor_core import products, steps

__all__ = ["arrays", "products", "provenance", "steps"]
