"""The tensors of a model step after step: names, dtypes and shapes are made once, while nothing but addresses changes.

A walk along the modules' dictionaries finds every tensor that may have a name, without names. Where its keys, modules,
dtypes, devices, shapes and strides are those of the last step, and the same tensors share memory, the names are the
same. Otherwise `state_of` names them anew.
"""

from itertools import chain
from typing import Any, NamedTuple

import torch

from reference.inspect.recorded_step.tensor_names import parts_of
from reference.inspect.trails.file import Named
from reference.inspect.trails.state import state_of, where
from reference.nn.core.dropout import Generator
from reference.state.scaling import KEYS

_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


class _Walk(NamedTuple):
    """What a model has, without names: of equal walks the names are equal, too.

    Attributes:
        keys: of the modules' dictionaries, and the modules in them; how many each module has; of parts, their names.
        layouts: of each tensor, None where there is none.
        shared: of each tensor the first that begins at its address.
    """

    keys: list[Any]
    layouts: list[Any]
    shared: list[int]


class Group(NamedTuple):
    """The tensors on a device, and their positions among all names."""

    device: torch.device
    order: list[int]
    tensors: list[torch.Tensor]


class StateAgain:
    """`state_of(what, model, None, kinds)` for each step."""

    def __init__(self, what: str, model: torch.nn.Module, kinds: tuple[str, ...]) -> None:
        self._what, self._model, self._kinds = what, model, kinds
        self._modules: list[torch.nn.Module] = []
        self._generators: list[Generator] = []
        self._walk: _Walk | None = None
        self._named: tuple[Named, ...] = ()
        self._groups: list[tuple[torch.device, list[int], list[int]]] = []  # device, positions, places in the walk

    def now(self) -> tuple[tuple[Named, ...], list[Group]]:
        """The names, and the tensors by device.

        Raises:
            TypeError: as `state_of`.
        """
        walk, tensors = self._walked()
        if walk is None or walk != self._walk:
            return self._anew()
        return self._named, [
            Group(device, order, [tensors[i] for i in places]) for device, order, places in self._groups
        ]

    def _walked(self) -> tuple[_Walk | None, list[Any]]:
        modules = self._modules
        dicts = [[getattr(m, name) for m in modules] for name in ("_parameters", "_buffers", "_modules")]
        keys = [list(chain.from_iterable([one.keys() for one in each if one])) for each in dicts]
        parameters, buffers, children = (
            list(chain.from_iterable([one.values() for one in each if one])) for each in dicts
        )
        keys.append(children)
        keys.append(list(map(len, chain.from_iterable(dicts))))
        given = [p for p in parameters if p is not None]
        tensors: list[Any] = [*parameters, *buffers]
        tensors += [p.grad for p in given]
        tensors += [getattr(p, "main_grad", None) for p in given]
        metas: list[Any] = [m.__dict__.get("fp8_meta") for m in modules]
        held = [(i, key) for i, meta in enumerate(metas) if meta for key in KEYS if meta.get(key) is not None]
        keys.append(held)
        for i, key in held:
            one = metas[i][key]
            tensors += (one.scale, one.amax_history)
        tensors += [one.state for one in self._generators]
        if not set(map(type, tensors)) <= _PLAIN:
            parts = [[("", x)] if type(x) in _PLAIN else list(parts_of("", x)) for x in tensors]
            keys.append([[name for name, _ in each] for each in parts])
            tensors = [x for each in parts for _, x in each]
            if not set(map(type, tensors)) <= _PLAIN:
                return None, tensors  # `state_of` says why
        try:
            layouts = [None if x is None else (x.dtype, x.device, x.shape, x.stride()) for x in tensors]
            pointers = [0 if x is None else x.data_ptr() or id(x) for x in tensors]  # 0: it is empty
        except RuntimeError:  # sparse, nested or uninitialized
            return None, tensors
        first: dict[int, int] = {}
        return _Walk(keys, layouts, [first.setdefault(one, i) for i, one in enumerate(pointers)]), tensors

    def _anew(self) -> tuple[tuple[Named, ...], list[Group]]:
        state = state_of(self._what, self._model, None, self._kinds)
        named = tuple(Named(name, str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in state.items())
        groups: dict[torch.device, Group] = {}
        for i, x in enumerate(state.values()):
            group = groups.setdefault(x.device, Group(x.device, [], []))
            group.order.append(i)
            group.tensors.append(x)
        self._keep(named, list(groups.values()))
        return named, list(groups.values())

    def _keep(self, named: tuple[Named, ...], groups: list[Group]) -> None:
        """Note where the walk finds them, if it does."""
        self._modules = list(self._model.modules())
        self._generators = [m for m in self._modules if isinstance(m, Generator)]
        self._walk, tensors = self._walked()
        if self._walk is None:
            return
        places = {(x.dtype, *where(x)): i for i, x in enumerate(tensors) if x is not None}
        found = [[places.get((x.dtype, *where(x))) for x in group.tensors] for group in groups]
        if any(None in one for one in found):
            self._walk = None
            return
        self._named = named
        self._groups = [(group.device, group.order, one) for group, one in zip(groups, found, strict=True)]  # type: ignore[misc]
