"""How much the ops' caches keep: those by sizes or addresses have a bound, the others have few keys."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import optimized.cuda
import optimized.ops

# Without a bound, by what they are asked for.
UNBOUNDED = {
    "once in a process": {
        *("cuda.compiler.include_folder", "cuda.compiler.nvrtc_build", "cuda.compiler.nvrtc_library"),
        *("cuda.compiler.nvrtc_version", "cuda.compiler._nvrtc", "cuda.launch._driver", "cuda.launch._library"),
        *("cuda.launch.runtime", "cuda.tensor_map._driver", "cuda.tensor_map._replacer"),
    },
    "a device": {"cuda.device.check", "cuda.launch.processors", "ops.gemms.gemm_tile.multiprocessors"},
    "one of CUDA's headers": {"cuda.compiler._cuda_texts"},
    "a kernel that is kept anyway": {"cuda.launch.leads", "cuda.launch.clusters_at_once"},
    "dtypes, and a form of which there are few": {
        *(f"ops.activations.activation.{name}" for name in ("_casting", "_plain", "_with_amax")),
        "ops.activations.activation_cast_blocks._kernel",
        *("ops.attentions.attention.argument_type", "ops.attentions.attention.kernels"),
        *("ops.attentions.attention_backward.end_kernel", "ops.attentions.attention_backward.main_kernel"),
        *("ops.attentions.attention_bias._kernel", "ops.attentions.attention_fp8._kernels"),
        *("ops.attentions.attention_decode.argument_type", "ops.attentions.attention_decode.kernels"),
        *("ops.attentions.attention_fp8_backward._kernel", "ops.attentions.rotary._kernel"),
        *("ops.attentions.rotary_append._kernel", "ops.attentions.softmax._configured"),
        *("ops.gemms.gemm_activation_scale._amax_kernel", "ops.gemms.gemm_tile._costs"),
        *(
            "ops.norms.norm._any_kernel",
            "ops.norms.norm_backward._any_kernel",
            "ops.norms.norm_cast_blocks._statistics",
        ),
    },
    "a width of a model": {
        *("ops.norms.norm.rows_kernel", "ops.norms.norm_backward.kernel", "ops.norms.norm_cast._kernel"),
        *("ops.norms.norm_cast_transpose.configured", "ops.norms.norm_cast_transpose.tile_shape"),
    },
    "an order of a tree, by the number of ranks": {"ops.optimizers.tree_mean._kernel"},
}


def caches() -> Iterator[tuple[str, Any]]:
    """Those of modules and of their classes, by name."""
    for package in (optimized.cuda, optimized.ops):
        for entry in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(entry.name)
            owned = [value for value in vars(module).values() if inspect.isclass(value)]
            for value in [*vars(module).values(), *(one for owner in owned for one in vars(owner).values())]:
                if hasattr(value, "cache_parameters") and value.__module__ == module.__name__:
                    yield f"{module.__name__}.{value.__qualname__}".removeprefix("optimized."), value


def test_caches_have_a_bound_or_few_keys() -> None:
    found = dict(caches())
    unbounded = {name for name, one in found.items() if one.cache_parameters()["maxsize"] is None}
    assert {"cuda.tensor_map.encode", "ops.gemms.gemm.config", "ops.gemms.gemm_tile.cheapest_tile"} <= (
        found.keys() - unbounded
    )
    assert unbounded == set().union(*UNBOUNDED.values())
    assert sum(map(len, UNBOUNDED.values())) == len(unbounded), "one reason each"
    for name in UNBOUNDED["once in a process"]:
        assert not inspect.signature(found[name]).parameters, name
    for name in UNBOUNDED["a device"]:
        assert list(inspect.signature(found[name]).parameters) == ["index"], name
