"""`detect_anomaly`: which op of which module first made a NaN or an infinity of finite numbers.

    with te.detect_anomaly(model):
        loss = step(model)                  # one step: forward, loss, backward

At the end of the `with` the device is read once, and if an op made a NaN or an infinity, one sentence names the module,
the op, the output and the index. Inside, every op passes by a dispatch mode of PyTorch: nothing is replayed, layers run
module by module, and the bits are those of any other run. It is for looking for a fault, not for training.

What counts as made: a NaN where no input of the op has one, an infinity where every input is finite. What the caller
writes does not count (`masked_fill(mask, -inf)`), nor do the infinities that pass through.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference.float8.kept_tensor import KeptTensor

__all__ = ["detect_anomaly"]

_KEY = "twin_module"  # in the metadata of autograd's nodes
_OUTSIDE = "code outside of the model's modules"
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_")
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_")  # ops that do not read the tensor that they change
_FP8 = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7C}  # dtype → the last code that is no NaN


class _Flag(NamedTuple):
    """One tensor of one op.

    Attributes:
        what: "output 0", or the name of a changed argument.
        words: int64 `[2]` on the device: where it was made, and where a NaN is; 2·index, + 1 for an infinity, or -1.
    """

    op: str
    where: str
    what: str
    shape: torch.Size
    words: torch.Tensor


def _leaves(x: Any) -> Iterator[torch.Tensor]:
    """The tensors in x whose numbers can be NaN."""
    for t in tree_leaves(x):
        if isinstance(t, torch.Tensor) and t.numel() and not t.is_meta and (t.is_floating_point() or t.is_complex()):
            yield t


def _nan_and_inf(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where x is NaN, and where it is infinite."""
    if x.dtype in _FP8:  # no infinity is ever written as a code
        nan = (x.view(torch.uint8) & 0x7F) > _FP8[x.dtype]
        return nan, torch.zeros_like(nan)
    return torch.isnan(x), torch.isinf(x)


class _Watch(TorchDispatchMode):
    """Sees every op of a step."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self.paths = paths
        self.flags: list[_Flag] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, float)]
        if func.is_view or name in _EMPTY or not all(map(math.isfinite, numbers)):
            return func(*args, **kwargs)
        read = args[1:] if name in _OVERWRITES else (args, {k: x for k, x in kwargs.items() if k != "out"})
        with torch.no_grad():
            found = [[mask.any() for mask in _nan_and_inf(x)] for x in _leaves(read)]
            nan, bad = [one[0] for one in found], [flag for one in found for flag in one]
        out = func(*args, **kwargs)
        with torch.no_grad():
            for what, x in self._results(func, name, args, kwargs, out):
                had_nan, had_bad = _any(nan, x), _any(bad, x)
                self.flags.append(_Flag(func._schema.name, self._where(), what, x.shape, _words(x, had_nan, had_bad)))
        return out

    def _results(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """What the op wrote: its outputs, and the arguments that it changed."""
        outs = out if isinstance(out, (tuple, list)) else (out,)
        # The other results of attention's forward are of softmax: of a row that sees no key an infinity is right.
        outs = outs[:1] if "attention" in name and "backward" not in name else outs
        changed: dict[int, str] = {}
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed |= {id(t): argument.name for t in _leaves(x)}
        changed |= {id(t): "out" for t in _leaves(kwargs.get("out"))}
        for i, x in enumerate(outs):
            for t in _leaves(x):
                if id(t) not in changed:
                    yield f"output {i}", t
        for t in _leaves((args, kwargs)):
            if id(t) in changed:
                yield f"the changed argument {changed.pop(id(t))!r}", t

    def _where(self) -> str:
        """The module that runs, and in which pass."""
        if torch._C._current_graph_task_id() == -1:
            return f"{self.paths[-1] if self.paths else _OUTSIDE} (forward)"
        node: Any = torch._C._current_autograd_node()
        return f"{_OUTSIDE if node is None else node.metadata.get(_KEY, _OUTSIDE)} (backward)"


def _any(flags: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Whether one of them is true, on the device of `like`."""
    if not flags:
        return torch.zeros((), dtype=torch.bool, device=like.device)
    return torch.stack([one.to(like.device) for one in flags]).any()


def _words(x: torch.Tensor, had_nan: torch.Tensor, had_bad: torch.Tensor) -> torch.Tensor:
    """`_Flag.words` of a result; see there. `had_nan`, `had_bad`: what the inputs had."""
    nan, inf = (mask.reshape(-1) for mask in _nan_and_inf(x))
    made = (nan & ~had_nan) | (inf & ~had_bad)
    found = []
    for mask in (made, nan):
        first = mask.view(torch.uint8).argmax().view(1)  # the first of equal ones
        # `mask[first]` would wait for the device.
        is_there, is_inf = (one.index_select(0, first) for one in (mask, inf))
        found.append(torch.where(is_there, 2 * first + is_inf.long(), -1))
    return torch.cat(found)


class detect_anomaly:
    """A `with` for one step that raises FloatingPointError if an op makes a NaN or an infinity of finite numbers.

    The sentence names the module (by its name in `model`), forward or backward, the op, the output and the first index
    in it. It also raises where a parameter of the model holds one before the step, or where a NaN came with the data.
    Weights that are kept in FP8 are looked at as the layers read them. Nothing is seen inside of torch.compile and of
    CUDA graphs. An error that leaves the `with` goes on.

    Args:
        model: a module whose parts are to be named; what else runs is "code outside of
            the model's modules".
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"detect_anomaly: model={model!r}; a torch.nn.Module is accepted.")
        self.model = model
        self._watch: _Watch | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> "detect_anomaly":
        if self._watch is not None:
            raise RuntimeError("detect_anomaly: it is open already; one `with` at a time is accepted.")
        paths: list[str] = []
        self._watch = _Watch(paths)
        try:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    self._look_at(name, parameter)
            for name, module in self.model.named_modules():
                self._follow(module, name or type(module).__name__, paths)
            self._watch.__enter__()
        except BaseException:  # whoever cannot begin does not end
            self._closed()
            raise
        return self

    def _closed(self) -> "_Watch":
        """The watch; the modules have no hooks any more."""
        watch, self._watch = self._watch, None
        assert watch is not None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return watch

    def _look_at(self, name: str, parameter: torch.Tensor) -> None:
        """Flag a parameter that holds a NaN or an infinity already."""
        assert self._watch is not None
        values = parameter.numbers() if isinstance(parameter, KeptTensor) else parameter
        for x in _leaves(values):
            none = torch.zeros((), dtype=torch.bool, device=x.device)
            self._watch.flags.append(_Flag("", name, "", x.shape, _words(x, none, none)))

    def _follow(self, module: torch.nn.Module, path: str, paths: list[str]) -> None:
        """Know when a module runs. With a hook on every part, layers run module by module, with the same bits."""

        def begins(_: Any, args: Any, kwargs: Any) -> None:
            _label((args, kwargs), paths[-1] if paths else _OUTSIDE)
            paths.append(path)

        def ends(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            _label(out, path)
            paths.pop()

        self._handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
        self._handles.append(module.register_forward_hook(ends, with_kwargs=True, always_call=True))

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        watch = self._closed()
        watch.__exit__(error_type, error, trace)
        if error_type is None:
            sentence = _sentence(watch.flags)
            if sentence is not None:
                raise FloatingPointError(sentence)


def _label(tensors: Any, path: str) -> None:
    """Note in autograd's nodes behind `tensors`, back to those that have a note, which module they belong to."""
    waiting: list[Any] = [t.grad_fn for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)]
    while waiting:
        node = waiting.pop()
        if node is not None and _KEY not in node.metadata:
            node.metadata[_KEY] = path
            waiting += [before for before, _ in node.next_functions]


def _read(flags: Iterable[_Flag]) -> list[tuple[_Flag, int, int]]:
    """The flags with their words, one copy from each device."""
    flags = list(flags)
    words: dict[int, list[int]] = {}
    for device in dict.fromkeys(one.words.device for one in flags):
        here = [i for i, one in enumerate(flags) if one.words.device == device]
        words |= dict(zip(here, torch.stack([flags[i].words for i in here]).tolist(), strict=True))
    return [(one, *words[i]) for i, one in enumerate(flags)]  # type: ignore[misc]


def _index(word: int, shape: torch.Size) -> list[int]:
    """The index of an element, of its number in row-major order."""
    rest, found = word // 2, []
    for size in reversed(shape):
        found.append(rest % size)
        rest //= size
    return found[::-1]


def _sentence(flags: Iterable[_Flag]) -> str | None:
    """What `detect_anomaly` says; None where there is nothing to say."""
    found = _read(flags)
    for one, made, _ in found:
        if made >= 0:
            what = f"the first {'infinity' if made % 2 else 'NaN'}"
            at = f"at index {_index(made, one.shape)}"
            if not one.op:
                return f"detect_anomaly: {what} was there before the step, in the parameter {one.where}, {at}."
            return (
                f"detect_anomaly: {what} was made by {one.op} in {one.where}, in {one.what} of shape "
                f"{list(one.shape)}, {at}."
            )
    for one, _, nan in found:
        if nan >= 0:
            return (
                f"detect_anomaly: no op made a NaN, one was there before the step, in its data or in a gradient: "
                f"{one.op} in {one.where} is the first that has it, in {one.what} of shape {list(one.shape)}, at index "
                f"{_index(nan, one.shape)}."
            )
    return None
