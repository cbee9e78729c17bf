"""Tensors of the CPU that say that they are on "cuda:0": so tests that were made for a GPU run in the simulator.

What is on "cuda" is known by storage: one that was asked for there, and every result of an op on one.
"""

import contextlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference.ops.library import _IMPLEMENTATIONS

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)


def _type_of(x: Any) -> str | None:
    """The type of device that an argument names, if it is one."""
    if isinstance(x, torch.device):
        return x.type
    return x.split(":")[0] if isinstance(x, str) and x.split(":")[0] in ("cuda", "cpu") else None


def _tensors(*trees: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(trees) if isinstance(x, torch.Tensor)]


class _Storages:
    """The storages on "cuda"."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for x in tensors:
            storage = x.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage)  # which keeps the number from being used again

    def remove(self, x: torch.Tensor) -> None:
        self._known.pop(x.untyped_storage()._cdata, None)

    def __contains__(self, x: torch.Tensor) -> bool:
        return x.untyped_storage()._cdata in self._known


class _Functions(TorchFunctionMode):
    """What tensors say of their device, and tensors that are asked for on "cuda" or moved."""

    def __init__(self, storages: _Storages) -> None:
        super().__init__()
        self.storages = storages
        self.attributes: dict[Any, Callable[[torch.Tensor], Any]] = {
            torch.Tensor.device.__get__: lambda x: CUDA,  # type: ignore[attr-defined]
            torch.Tensor.is_cuda.__get__: lambda x: True,  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: lambda x: False,  # type: ignore[attr-defined]
            torch.Tensor.get_device: lambda x: 0,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.attributes:
            return self.attributes[func](args[0]) if args[0] in self.storages else func(*args)
        if func is torch.device:
            return func(*args, **kwargs)
        named = {_type_of(x) for x in (*args[1:], *kwargs.values())} - {None}
        if func in _MOVES:
            return self._moved(func, args, kwargs, named)
        if "cuda" not in named:
            return func(*args, **kwargs)
        args = tuple(CPU if _type_of(x) == "cuda" else x for x in args)
        out = func(*args, **{name: CPU if _type_of(x) == "cuda" else x for name, x in kwargs.items()})
        self.storages.add(_tensors(out))
        return out

    def _moved(self, func: Any, args: Any, kwargs: Any, named: set[Any]) -> torch.Tensor:
        x = args[0]
        others = [other for other in args[1:] if isinstance(other, torch.Tensor)]
        here = x in self.storages
        if func is torch.Tensor.to:
            target = any(other in self.storages for other in others) if others else "cuda" in named if named else here
            args = (x, *(one for one in args[1:] if isinstance(one, (torch.Tensor, torch.dtype))))
            kwargs = {name: one for name, one in kwargs.items() if name not in ("device", "non_blocking")}
            out = x if len(args) == 1 and not kwargs else func(*args, **kwargs)
        else:
            target, out = func is torch.Tensor.cuda, x
        if target != here and out.untyped_storage()._cdata == x.untyped_storage()._cdata:
            out = out.clone()
        if target:
            self.storages.add([out])
        elif here:
            self.storages.remove(out)
        return out


class _Ops(TorchDispatchMode):
    """Results of ops on tensors on "cuda" are there, too, and the ops of `twin` run their kernels.

    `everything`: those on tensors of the CPU, too.
    """

    def __init__(self, storages: _Storages, functions: _Functions, everything: bool) -> None:
        super().__init__()
        self.storages, self.functions, self.everything = storages, functions, everything

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _tensors(args, kwargs)
        if self.everything and func.namespace == "twin" and not any(x in self.storages for x in given):
            return self._there(func, args, kwargs, given)
        there = any(x in self.storages for x in given)
        if func.namespace == "twin" and there:
            with self, self.functions:
                out = _IMPLEMENTATIONS["CUDA"][func._schema.name.removeprefix("twin::")](*args)
        else:
            out = func(*args, **(kwargs or {}))
        if there:
            before = {x.untyped_storage()._cdata for x in given}
            self.storages.add(x for x in _tensors(out) if x.untyped_storage()._cdata not in before)
        return out

    def _there(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """An op of `twin`, as if the tensors of the CPU that it is given were on "cuda"."""
        self.storages.add(given)
        try:
            out = self.__torch_dispatch__(func, (), args, kwargs)
        finally:
            for x in given:
                self.storages.remove(x)
        for x in _tensors(out):
            self.storages.remove(x)
        return out


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class PretendedCuda(contextlib.ExitStack):
    """`torch.cuda` as far as tests of single ops use it; `everything`: see `_Ops`."""

    def __init__(self, everything: bool = False) -> None:
        super().__init__()
        self._everything = everything

    def __enter__(self) -> "PretendedCuda":
        super().__enter__()
        storages = _Storages()
        properties = SimpleNamespace(multi_processor_count=132, name="a simulated H200", major=9, minor=0)
        stubs: dict[str, Any] = {
            "synchronize": _nothing,
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_capability": lambda *args: (9, 0),
            "get_device_properties": lambda *args: properties,
            "get_device_name": lambda *args: properties.name,
            "empty_cache": _nothing,
        }
        for name, stub in stubs.items():
            self.enter_context(mock.patch.object(torch.cuda, name, stub))
        self.enter_context(mock.patch.object(torch._C, "_cuda_exchangeDevice", lambda index: index, create=True))
        functions = _Functions(storages)
        engine = torch.autograd._engine_run_backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            with functions:  # which torch puts aside while it handles `Tensor.backward`
                return engine(*args, **kwargs)

        self.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", backward))
        self.enter_context(_Ops(storages, functions, self._everything))
        self.enter_context(functions)
        return self
