"""Kernels load 16 bytes at once exactly where every row begins at a multiple of 16 bytes."""

import pytest
from shared.dry_gpu import DryGpu

from optimized.recordings import cases
from optimized.recordings.calls import Inputs
from reference.inspect.recorded_step.ops import tensors_of

OPS = {
    "activation": ("activation", "activation_scale", "activation_backward", "activation_backward_scale"),
    "cross_entropy": ("cross_entropy",),
    "dbias": ("dbias",),
    "likeliest": ("likeliest",),
}


@pytest.mark.parametrize("name", OPS)
def test_rows_are_loaded_16_bytes_at_once_where_they_begin_there(name: str) -> None:
    seen = set()
    for cols in range(1, 42):
        with DryGpu(written=False) as gpu:
            for call in cases.MODULES[name].sized(Inputs("cuda", filled=False), 3, cols):
                if call.name not in OPS[name]:
                    continue
                gpu.launches.clear()
                call.run()
                size = next(iter(tensors_of(call.args))).element_size()
                (vector,) = {one.kernel.defines["VECTOR"] for one in gpu.launches if "VECTOR" in one.kernel.defines}
                assert bool(vector) == (cols * size % 16 == 0), (call.name, cols, size)
                seen.add((call.name, bool(vector)))
    assert seen == {(op, vector) for op in OPS[name] for vector in (False, True)}
