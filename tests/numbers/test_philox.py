"""Philox4x32-10 against its authors' known answers, and the distributions made of it."""

import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from shared.bits import torch_threads

from reference.numbers import philox

ONES = 0xFFFFFFFF

# sha256 of the little-endian fp32 words.
GOLDEN = {
    "uniform": "c7e1531e60561c8c2f151211ea370a73e942e373d1ba4e07f2ce252c4af2e007",
    "uniform in [-0.1, 0.3)": "436dd36fd2e501f205ca29d2961b24540622c7fb5fece322663f8bce2839f8cd",
    "normal": "5267145c3c4a7e1f5b2fbe0bbf174b27d6cf1c779f5927dedc5e544ddb0f5069",
    "normal(0.5, 0.023)": "4b838457a7c8dd51d6f7249fd92a5216cc01dfbefaaa51c8c406662fd59dbd8e",
    "first seed after torch.manual_seed(1234)": 3532910284440527571,
}


# Random123's kat_vectors: counter, key, answer.
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "answer"),
    [
        (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, (ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            10,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
        (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, (ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ],
)
def test_known_answers(rounds, counter, key, answer):
    assert tuple(int(word) for word in philox.philox4x32(counter, key, rounds)) == answer


def scalar_philox(counter, key):
    """The algorithm with Python's integers, for one counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c0, c1, c2, c3


def test_an_element_is_its_index_under_the_seed():
    seed, offset, start = 0x0123456789ABCDEF, 0xFEDCBA9876543210, (1 << 32) - 3
    words = philox.element_words(seed, start, 6, offset)
    for i in range(6):
        index = start + i  # crosses into the second counter word
        counter = (index % (1 << 32), index >> 32, 0x76543210, 0xFEDCBA98)
        expected = scalar_philox(counter, (0x89ABCDEF, 0x01234567))
        assert tuple(int(word[i]) for word in words) == expected


def test_elements_do_not_depend_on_the_shape_or_the_thread_count():
    flat = philox.normal((100_000,), seed=9)
    with torch_threads(1):
        alone = philox.normal((100_000,), seed=9)
    assert torch.equal(alone, flat)
    assert torch.equal(philox.normal((250, 400), seed=9), flat.view(250, 400))
    assert torch.equal(philox.normal((77,), seed=9), flat[:77])
    assert philox.normal((0, 3), seed=9).shape == (0, 3)
    assert philox.uniform((), seed=9).shape == ()


def digest(values: torch.Tensor) -> str:
    assert values.dtype == torch.float32
    return hashlib.sha256(values.numpy().astype("<f4").tobytes()).hexdigest()


def test_golden_digests():
    """The same bits on every machine: made of correctly rounded operations, these have to hold anywhere."""
    assert digest(philox.uniform((200_000,), seed=1)) == GOLDEN["uniform"]
    assert digest(philox.uniform((200_000,), -0.1, 0.3, seed=2)) == GOLDEN["uniform in [-0.1, 0.3)"]
    assert digest(philox.normal((200_000,), seed=3)) == GOLDEN["normal"]
    assert digest(philox.normal((200_000,), 0.5, 0.023, seed=4)) == GOLDEN["normal(0.5, 0.023)"]
    torch.manual_seed(1234)
    assert philox.draw_seed() == GOLDEN["first seed after torch.manual_seed(1234)"]


def test_the_normal_quantile_is_accurate_and_symmetric():
    rng = np.random.default_rng(0)
    p = np.concatenate([rng.random(5000), 2.0 ** rng.uniform(-53, -1, 5000), [0.075, 0.925, 0.5, 2.0**-53]])
    p = np.round(p * 2.0**53).clip(1, 2.0**53 - 1) * 2.0**-53  # so that 1 - p is exact
    z = philox.normal_quantile(p)
    expected = np.array([NormalDist().inv_cdf(x) for x in p])
    assert np.max(np.abs(z - expected) / np.maximum(np.abs(expected), 1e-300)) < 3e-15
    assert np.array_equal(philox.normal_quantile(1 - p), -z)
    in_order = philox.normal_quantile(np.linspace(1e-6, 1 - 1e-6, 20_001))
    assert (np.diff(in_order) > 0).all()


def test_the_logarithm_is_accurate():
    x = 2.0 ** np.random.default_rng(1).uniform(-53, -1, 20_000)
    expected = np.array([math.log(value) for value in x])
    assert np.max(np.abs(philox._log(x) - expected) / np.spacing(np.abs(expected))) <= 3


def test_uniform_is_uniform():
    n = 1 << 20
    u = philox.uniform((n,), seed=11).double().numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert np.array_equal(u * 2**24, np.floor(u * 2**24))
    counts = np.histogram(u, bins=256, range=(0, 1))[0]
    chi_squared = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi_squared - 255) < 4 * math.sqrt(2 * 255)
    # Neighbours, and the same elements under the next seed, have nothing to do with each other.
    other = philox.uniform((n,), seed=12).double().numpy()
    for a, b in ((u[1:], u[:-1]), (u, other)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(n)
    shifted = philox.uniform((n,), -3.0, 5.0, seed=11).double().numpy()
    assert np.allclose(shifted, -3 + 8 * u, atol=1e-6)


def test_normal_is_normal():
    n = 1 << 20
    z = philox.normal((n,), seed=21).double().numpy()
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs((z**2).mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96 / n)
    # Kolmogorov-Smirnov at 201 points: sqrt(n) · D < 1.95 in 999 cases of 1000.
    points = np.linspace(-4, 4, 201)
    below = np.searchsorted(np.sort(z), points, side="right") / n
    expected = np.array([NormalDist().cdf(point) for point in points])
    assert np.abs(below - expected).max() * math.sqrt(n) < 1.95
    # Tails: 2 · 1.35e-3 beyond 3, 6.3e-5 beyond 4.
    assert abs((np.abs(z) > 3).mean() / 2.6998e-3 - 1) < 0.1
    assert abs((np.abs(z) > 4).mean() / 6.334e-5 - 1) < 0.5
    scaled = philox.normal((n,), 0.5, 0.023, seed=21)
    assert torch.equal(scaled, torch.from_numpy(0.5 + 0.023 * philox_z(21, n)).float())


def philox_z(seed: int, n: int) -> np.ndarray:
    return philox.normal_quantile(philox._unit_interval(seed, 0, n))


def test_the_seed_comes_from_torchs_cpu_generator():
    torch.manual_seed(7)
    first, second = philox.normal((1000,)), philox.normal((1000,))
    torch.manual_seed(7)
    assert torch.equal(philox.normal((1000,)), first)
    assert torch.equal(philox.normal((1000,)), second)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    seed = philox.draw_seed()
    assert torch.equal(philox.normal((1000,), seed=seed), first)


def test_refusals():
    with pytest.raises(ValueError, match=r"std must not be negative; got -1"):
        philox.normal((1,), std=-1)
    with pytest.raises(ValueError, match=r"low must not be greater than high; got low=1, high=0"):
        philox.uniform((1,), 1, 0)
    with pytest.raises(ValueError, match=r"seed must be from 0 to 2\^64 - 1; got -1"):
        philox.normal((1,), seed=-1)
    with pytest.raises(ValueError, match=r"offset must be from 0 to 2\^64 - 1"):
        philox.element_words(0, 0, 1, offset=1 << 64)
