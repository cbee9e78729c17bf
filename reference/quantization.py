"""What Transformer Engine's `pytorch/quantization.py` (once `fp8.py`) tells about FP8: what runs here, what is open.

    te.is_fp8_available(return_reason=True)            (True, "")
    te.quantization.FP8GlobalStateManager.is_fp8_enabled()

Twin Engine has no global FP8 state: autocast's settings belong to a thread (`reference.state.threads`), scales to a
module. So `FP8GlobalStateManager` answers questions, and every other part of it raises an error that names it.
"""

from typing import Any, NoReturn

import torch

from reference.arguments import check_arguments
from reference.float8.float8_quantizer import TE_DTYPES, DType
from reference.numbers import block_formats
from reference.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, Recipe
from reference.state import model_init
from reference.state.autocast import autocast, current, fp8_autocast
from reference.state.model_init import fp8_model_init, quantized_model_init
from reference.state.threads import here
from reference.support import not_offered

__all__ = [
    "DelayedScaling",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "Recipe",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_cudnn_version",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_device_compute_capability",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_bf16_available",
    "is_bf16_compatible",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]

Answer = bool | tuple[bool, str]
Support = tuple[bool, str]


def check_fp8_support() -> Support:
    """(True, ""): every CPU runs FP8. `optimized.is_fp8_available` says whether a GPU does."""
    return True, ""


def _on_a_cpu_alone(name: str) -> Support:
    return False, f"te.recipe.{name} runs on a CPU alone: {block_formats.CPU_ONLY}."


def check_mxfp8_support() -> Support:
    """(False, why no GPU runs MXFP8BlockScaling here); a CPU does."""
    return _on_a_cpu_alone("MXFP8BlockScaling")


def check_nvfp4_support() -> Support:
    """(False, why no GPU runs NVFP4BlockScaling here); a CPU does."""
    return _on_a_cpu_alone("NVFP4BlockScaling")


def check_fp8_block_scaling_support() -> Support:
    """(True, ""), as `check_fp8_support`."""
    return check_fp8_support()


def check_recipe_support(recipe: Recipe) -> None:
    """Refuse what is no recipe of `te.recipe`."""
    _check_recipe("check_recipe_support", recipe)


def answer(name: str, support: Support, return_reason: Any) -> Answer:
    """`support`, or its first part, as the caller wishes; `name` is the caller's."""
    check_arguments(name, {"return_reason": return_reason})
    return support if return_reason else support[0]


def is_fp8_available(return_reason: bool = False) -> Answer:
    """Whether FP8 runs here: True; with `return_reason` (True, "")."""
    return answer("is_fp8_available", check_fp8_support(), return_reason)


def is_bf16_available(return_reason: bool = False) -> Answer:
    """Whether bf16 runs here: True; with `return_reason` (True, "")."""
    return answer("is_bf16_available", check_fp8_support(), return_reason)


def is_bf16_compatible() -> bool:
    """True: bf16 runs on every CPU, and on every GPU that the kernels run on."""
    return True


def get_device_compute_capability() -> tuple[int, int]:
    """The current GPU's, as (9, 0).

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("get_device_compute_capability: no GPU is visible here; a machine with one is accepted.")
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def get_cudnn_version() -> tuple[int, int, int]:
    """Major, minor and patch of the cuDNN that PyTorch has loaded; (0, 0, 0) where it has none, as on a CPU."""
    number = torch.backends.cudnn.version() or 0
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return major, rest // 100, rest % 100


def is_mxfp8_available(return_reason: bool = False) -> Answer:
    """False, so that a program chooses the same recipe on either device; with `return_reason` also why."""
    return answer("is_mxfp8_available", check_mxfp8_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Answer:
    """False, so that a program chooses the same recipe on either device; with `return_reason` also why."""
    return answer("is_nvfp4_available", check_nvfp4_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Answer:
    """As `is_fp8_available`."""
    return answer("is_fp8_block_scaling_available", check_fp8_block_scaling_support(), return_reason)


def get_default_recipe() -> Recipe:
    """`DelayedScaling()`, the recipe of an `autocast` without one."""
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe
"""`get_default_recipe` under its older name."""


def _check_recipe(name: str, recipe: Any) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{name}: recipe={recipe!r}; a recipe of te.recipe is accepted.")


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Transformer Engine's: 16, what the sizes of an FP8 product must be multiples of; 32 of MXFP8, 128 of NVFP4.

    Layers take any number of tokens, and features in multiples of 16, under all of them.
    """
    _check_recipe("get_align_size_for_quantization", recipe)
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """The float8 dtype of the forward's tensors, or of gradients."""
    _check_recipe("get_fp8_torch_dtype", fp8_recipe)
    return fp8_recipe.fp8_format.dtype(fprop_tensor)


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """The format of `get_fp8_torch_dtype`, as a `te.DType`."""
    _check_recipe("get_fp8_te_dtype", fp8_recipe)
    return TE_DTYPES[fp8_recipe.fp8_format.dtype(fprop_tensor)]


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """The largest finite number of `get_fp8_torch_dtype`."""
    _check_recipe("get_fp8_max", fp8_recipe)
    return fp8_recipe.fp8_format.fp8_max(fprop_tensor)


class _Explained(type):
    """Transformer Engine's other methods are named in the error."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(
            f"FP8GlobalStateManager.{name} is not offered by Twin Engine: scales belong to a layer (layer.fp8_meta) "
            f"and autocast's settings to a thread; FP8GlobalStateManager answers "
            f"{', '.join(key for key in vars(cls) if not key.startswith('_'))}.",
            name=name,
            obj=cls,
        )


class FP8GlobalStateManager(metaclass=_Explained):
    """What is open in this thread: Transformer Engine's queries of its global state."""

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether the innermost autocast has FP8 on."""
        return current().enabled

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Whether the innermost autocast calibrates."""
        return current().calibrating

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """The innermost autocast's recipe; outside of one the default."""
        return current().recipe

    @staticmethod
    def get_fp8_group() -> Any:
        """The innermost autocast's process group; None is the default one."""
        return current().group

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Whether a layer made here keeps its weights in FP8 (`quantized_model_init`)."""
        return model_init.current() is not None

    @staticmethod
    def with_high_precision_init_val() -> bool:
        """Whether such a layer also keeps the initial values."""
        settings = model_init.current()
        return settings is not None and settings.preserve

    @staticmethod
    def fp8_graph_capturing() -> bool:
        """Whether a CUDA graph is being captured."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @staticmethod
    def reset() -> None:
        """Do nothing: there is no global state. Inside an autocast it raises."""
        if here().autocasts:
            raise RuntimeError(
                "FP8GlobalStateManager.reset: an autocast is open in this thread; a call outside of it is accepted."
            )


not_offered.explain(__name__)
