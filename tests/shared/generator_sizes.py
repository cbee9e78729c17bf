"""Sizes at which `twin bench generator` runs on a CPU."""

from dataclasses import replace
from typing import Any

from optimized.bench.models import generator

CASE = replace(generator.CASE, hidden=64, ffn=64, heads=4, kv_heads=2, sequence=128)
SMALL: dict[str, Any] = {"LAYERS": 1, "PAIRS": ((1, 112), (2, 112)), "THEIR_PAIRS": (), "STEPS": 1}
SMALL |= {"UNCOUNTED": 0, "SEQUENCES": 3, "LENGTHS": (3, 140)}
