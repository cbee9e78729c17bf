"""A tensor of which each rank has a part is quantized with the scale of the whole: `with_amax_reduction`."""

import copy
import datetime
import itertools
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shared.bits import assert_same_bits
from shared.processes import free_port, ranks

import reference as te

KINDS = (te.DType.kFloat8E4M3, te.DType.kFloat8E5M2)
SCALES = tuple(itertools.product(KINDS, (False, True), (0.0, 1000.0)))


def parts(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's rows."""
    x = (torch.randn(10, 24, generator=torch.Generator().manual_seed(3)) * 7).to(dtype)
    with_nan, with_infinity = x[4:].clone(), x[4:].clone()
    with_nan[1, 2] = torch.nan
    with_infinity[1, 2] = torch.inf
    return {
        "larger on rank 0": (x[:4] * 9, x[4:]),
        "larger on rank 1": (x[:4], x[4:] * 9),
        "NaN": (x[:4], with_nan),
        "nothing but NaN": (x[:4], torch.full_like(x[4:], torch.nan)),
        "infinity": (x[:4], with_infinity),
        "no tokens": (x[:0], x[4:]),
        "no tokens at all": (x[:0], x[:0]),
    }


def worker(rank: int, port: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        found = {}
        pair = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=60))
        alone = [dist.new_group([one], timeout=datetime.timedelta(seconds=60)) for one in (0, 1)]
        for dtype, (kind, power, epsilon) in itertools.product((torch.float32, torch.bfloat16), SCALES):
            quantizer = te.Float8CurrentScalingQuantizer(
                kind,
                "cpu",
                force_pow_2_scales=power,
                amax_epsilon=epsilon,
                with_amax_reduction=True,
                amax_reduction_group=pair if power else None,
            )
            assert quantizer.with_amax_reduction
            assert quantizer.amax_reduction_group is (pair if power else dist.group.WORLD)
            for name, own in parts(dtype).items():
                y = quantizer(own[rank])
                found[dtype, kind, power, epsilon, name] = (y._data, y._transpose, y._scale_inv)
        x = parts(torch.float32)["larger on rank 0"][rank]
        again = pickle.loads(pickle.dumps(copy.deepcopy(quantizer.copy())))
        assert_same_bits(again(x)._scale_inv, quantizer(x)._scale_inv)
        own = {"with_amax_reduction": True, "amax_reduction_group": alone[rank]}
        by_itself = te.Float8CurrentScalingQuantizer(KINDS[0], "cpu", **own)
        plain = te.Float8CurrentScalingQuantizer(KINDS[0], "cpu")
        assert_same_bits(by_itself(x)._scale_inv, plain(x)._scale_inv, "a group of one")
        with pytest.raises(ValueError, match="a process group of which this process is a rank are accepted"):
            te.Float8CurrentScalingQuantizer(
                KINDS[0], "cpu", with_amax_reduction=True, amax_reduction_group=alone[1 - rank]
            )
        torch.save(found, Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_codes_and_scales_are_those_of_one_tensor(tmp_path: Path) -> None:
    ranks(worker, (free_port(), str(tmp_path)), 2)
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    for dtype, (kind, power, epsilon) in itertools.product((torch.float32, torch.bfloat16), SCALES):
        one = te.Float8CurrentScalingQuantizer(kind, "cpu", force_pow_2_scales=power, amax_epsilon=epsilon)
        for name, (first, second) in parts(dtype).items():
            whole = one(torch.cat([first, second]))
            (codes, turned, scale), (codes_1, turned_1, scale_1) = (
                each[dtype, kind, power, epsilon, name] for each in found
            )
            assert_same_bits(torch.cat([codes, codes_1]), whole._data, name)
            assert_same_bits(torch.cat([turned, turned_1], dim=1), whole._transpose, name)
            assert_same_bits(scale, whole._scale_inv, name)
            assert_same_bits(scale_1, whole._scale_inv, name)
