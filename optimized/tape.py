"""Tapes: a layer's kernels launched again without running its Python.

What a pair of functions (`reference.nn.autograd`) launches follows from the shapes and dtypes of its tensors, from the
constants of its call, and from addresses. So a call that agrees in all of them with an earlier one makes the same
launches, and a loop over a list makes them in a fraction of the time, which for a layer of a few hundred tokens is most
of its time. A tape holds no memory: a call's temporaries and what it saves for backward lie in one tensor, the arena,
allocated at each call. PyTorch's allocator gives the steps of a training loop the same addresses.

    first call of a kind       runs, and is measured: sizes of its arena and of its results
    then                       its launches, if a tape was recorded at these addresses
                               else it runs, with its tensors placed in an arena, and is recorded

cuDNN's attention is called anew, and its results are looked for where they were. A function that does anything else
but our own launches, allocations, views and copies of whole tensors always runs; so does one whose arena would be
larger than `LARGEST`, because its kernels outlast its Python, and one whose addresses keep changing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimized import launch
from reference.nn import autograd
from reference.nn.precision import Operand

LARGEST = 256 << 20
MOST_KINDS, MOST_TAPES = 512, 64  # of all, and of a kind
_ALIGNMENT = 512  # as of PyTorch's allocator

_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}

Saved = tuple[torch.Tensor | None, ...]
Function = Callable[[], tuple[Saved, Saved]]  # results, and what is saved for backward

aten = torch.ops.aten
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_VIEWS = {aten._unsafe_view.default, aten.detach.default, aten.alias.default, aten._reshape_alias.default}

_FOREIGN = {
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}


class Place(NamedTuple):
    """A tensor in the storage of another: of the arena, an input, or what an op of torch's made, by their number."""

    number: int
    offset: int  # bytes from the other's first
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, sources: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The tensor."""
        whole = sources[self.number]
        assert whole is not None
        size = self.dtype.itemsize
        if whole.dtype != self.dtype:
            first = (whole.storage_offset() * whole.element_size() + self.offset) // size
            made = torch.empty(0, dtype=self.dtype, device=whole.device)
            return made.set_(whole.untyped_storage(), first, self.shape, self.stride)  # type: ignore[call-overload]
        if (self.offset, self.shape, self.stride) == (0, whole.shape, whole.stride()):
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset // size)


def _place(x: Any, sources: Sequence[torch.Tensor | None]) -> Any:
    """Where a tensor lies (number -1: in none of them); what is no tensor, as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage().data_ptr()
    for number, whole in enumerate(sources):
        if whole is not None and whole.untyped_storage().data_ptr() == storage:
            # Not from addresses: that of a tensor without elements is 0.
            offset = int(x.storage_offset()) * x.itemsize - int(whole.storage_offset()) * whole.itemsize
            return Place(number, offset, x.shape, x.stride(), x.dtype)
    return Place(-1, 0, x.shape, x.stride(), x.dtype)


class Foreign(NamedTuple):
    """An op of torch's to be called again, whose results later launches read: they must lie where they lay."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    addresses: list[int]

    def again(self, sources: list[torch.Tensor | None]) -> bool:
        """Call it, and add what it makes to `sources`; whether that lies as it did."""
        made = self.func(*(x.of(sources) if isinstance(x, Place) else x for x in self.args), **self.kwargs)
        tensors = [x for x in made if isinstance(x, torch.Tensor)]
        sources += tensors
        return self.addresses == [x.data_ptr() for x in tensors]


class _Watch(TorchDispatchMode):
    """Sees what a function does on the GPU besides launching, and places what it allocates."""

    transparent = True  # ops past the dispatcher may stay there

    def __init__(self) -> None:
        super().__init__()
        self.usable = True
        self.allocated: list[tuple[int, int]] = []  # address and bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            return self.allocate(func, args, kwargs)
        if func is aten.clone.default and args[0].is_contiguous():
            made = self.allocate(aten.empty_like.default, args, {})
            self.copy(made, args[0])
            return made
        if func in _FOREIGN:
            return self.call(func, args, kwargs)
        self.usable = self.usable and (func.is_view or func in _VIEWS)
        return func(*args, **kwargs)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op of torch's that a tape may hold."""
        return func(*args, **kwargs)

    def allocate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """An ordinary tensor, noted."""
        made: torch.Tensor = func(*args, **kwargs)
        self.allocated.append((made.data_ptr(), made.untyped_storage().nbytes()))
        return made

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """A whole tensor."""
        to.copy_(source)


class _Record(_Watch):
    """The second and later runs: tensors go where the kind's measurement said."""

    def __init__(
        self, rooms: Sequence[tuple[torch.Tensor, int]], tape: "Tape", sources: Sequence[torch.Tensor | None]
    ) -> None:
        super().__init__()
        self.rooms, self.tape, self.sources = iter(rooms), tape, list(sources)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        places = [_place(x, self.sources) for x in args]
        made = func(*args, **kwargs)
        tensors = [x for x in made if isinstance(x, torch.Tensor)]
        self.usable = self.usable and not any(isinstance(x, Place) and x.number < 0 for x in places)
        self.tape.append(Foreign(func, places, kwargs, [x.data_ptr() for x in tensors]))
        self.sources += tensors
        return made

    def allocate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        like = func(*args, **{**kwargs, "device": "meta"})
        room, offset = next(self.rooms)
        return Place(0, offset, like.shape, like.stride(), like.dtype).of([room])

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)
        launch.note(self.tape, launch.Copy(to.data_ptr(), source.data_ptr(), to.nbytes))


Tape = list[launch.Launches | Foreign]


class Kind:
    """Calls that agree in all but addresses.

    Attributes:
        usable: whether such a call can be replayed.
        results: shape and dtype of each result, or None.
        rooms: for each allocation, in order, the result that it is (None: it lies in the arena) and its offset.
        size: bytes of the arena.
        pooled: shapes of the results but the first and of paddings, if they share one allocation.
        pooled_at: which of those are results.
        pool_size: its elements.
        kept: what is saved for backward: None, or a place in what `saved` gives.
        needed: the numbers of those.
        tapes: by all addresses.
    """

    def __init__(self) -> None:
        self.usable = True
        self.results: list[tuple[torch.Size, torch.dtype] | None] = []
        self.rooms: list[tuple[int | None, int]] = []
        self.size = 0
        self.pooled: list[torch.Tensor] = []
        self.pooled_at: list[int] = []
        self.pool_size = 0
        self.kept: list[Place | None] = []
        self.needed: set[int] = set()
        self.tapes: dict[tuple[int, ...], Tape] = {}
        self.misses = self.hits = 0

    def measure(self, run: Function) -> tuple[Saved, Saved]:
        """Run as ever, and note what was allocated."""
        with _Watch() as watch:
            results, saved = run()
        last = {address: i for i, (address, _) in enumerate(watch.allocated)}
        owners = {last.get(x.data_ptr(), -1): i for i, x in enumerate(results) if x is not None}
        for i, (_, size) in enumerate(watch.allocated):
            self.rooms.append((owners.get(i), 0 if i in owners else self.size))
            self.size += 0 if i in owners else -(-size // _ALIGNMENT) * _ALIGNMENT
        self.results = [None if x is None else (x.shape, x.dtype) for x in results]
        whole = all(x is None or (x.is_contiguous() and x.numel()) for x in results)
        distinct = -1 not in owners and len(owners) == sum(x is not None for x in results)
        self.usable = watch.usable and whole and distinct and self.size <= LARGEST
        shared = [x for x in results[1:] if x is not None]
        if len(shared) > 1 and len({x.dtype for x in shared}) == 1:
            for x in shared:
                self.pooled_at.append(len(self.pooled))
                padding = -x.numel() % (_ALIGNMENT // x.element_size())
                shapes = [x.shape, torch.Size([padding])] if padding else [x.shape]
                self.pooled += [torch.empty(shape, dtype=x.dtype, device="meta") for shape in shapes]
            self.pool_size = sum(x.numel() for x in self.pooled)
        return results, saved

    def room_for_results(self, device: torch.device) -> Saved:
        """The first result is a tensor of its own, which may live longer; the others share one: fewer allocations."""

        def room(x: tuple[torch.Size, torch.dtype] | None) -> torch.Tensor | None:
            return None if x is None else torch.empty(x[0], dtype=x[1], device=device)

        if not self.pooled:
            return tuple(map(room, self.results))
        pool = torch.empty(self.pool_size, dtype=self.pooled[0].dtype, device=device)
        made = torch._C._nn.unflatten_dense_tensors(pool, self.pooled)
        views = iter([made[i] for i in self.pooled_at])
        return (room(self.results[0]), *(None if x is None else next(views) for x in self.results[1:]))

    def record(
        self, run: Function, results: Saved, sources: list[torch.Tensor | None], addresses: tuple[int, ...]
    ) -> tuple[Saved, Saved]:
        """Run with every tensor in its place, and keep the launches; `sources` are the arena and the inputs."""
        tape: Tape = []
        rooms: list[Any] = [(sources[0] if i is None else results[i], offset) for i, offset in self.rooms]
        with launch.recording(tape), _Record(rooms, tape, sources) as watch:
            found, kept = run()
        sources[:] = watch.sources
        self.kept = [_place(x, sources) for x in kept]
        self.needed = {place.number for place in self.kept if place is not None}
        in_place = all(_address(a) == _address(b) for a, b in zip(found, results, strict=True))
        self.usable = watch.usable and in_place and -1 not in self.needed
        if len(self.tapes) >= MOST_TAPES:
            self.tapes.clear()
        self.tapes[addresses] = tape
        return found, kept

    def saved(self, sources: Sequence[torch.Tensor | None]) -> Saved:
        """What goes to `save_for_backward`: of the arena, the inputs and what torch's ops made, what is needed."""
        return tuple(x if i in self.needed else None for i, x in enumerate(sources))

    def found(self, saved: Saved) -> Saved:
        """What the function itself would have saved."""
        return tuple(None if place is None else place.of(saved) for place in self.kept)


def _replay(tape: Tape, sources: list[torch.Tensor | None], device: int) -> bool:
    """Make a tape's launches again; False: an op of torch's put its results elsewhere, and the function must run."""
    for part in tape:
        if isinstance(part, launch.Launches):
            part.again(device)
        elif not part.again(sources):
            return False
    return True


_kinds: dict[Any, Kind] = {}


def _specification(x: torch.Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype)


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def play(
    prepare: Callable[[], Function], constants: Any, inputs: Saved, state: Sequence[torch.Tensor]
) -> tuple[Saved, Saved, Kind | None]:
    """What the function that `prepare` gives returns; with a kind, in the form of `Kind.saved`."""
    device = next(x.device for x in inputs if x is not None)
    key = (constants, device.index, *map(_specification, inputs))
    kind = _kinds.get(key)
    if kind is None:
        if len(_kinds) >= MOST_KINDS:
            _kinds.clear()
        kind = _kinds[key] = Kind()
        return *kind.measure(prepare()), None
    if not kind.usable or kind.misses > 2 * MOST_TAPES + kind.hits:
        return *prepare()(), None
    results = kind.room_for_results(device)
    arena = torch.empty(kind.size, dtype=torch.uint8, device=device)
    addresses = (arena.data_ptr(), *map(_address, results), *map(_address, inputs), *map(_address, state))
    sources = [arena, *inputs]
    tape = kind.tapes.get(addresses)
    if tape is not None and _replay(tape, sources, device.index):
        kind.hits += 1
    else:
        kind.misses += 1
        del sources[1 + len(inputs) :]
        found, kept = kind.record(prepare(), results, sources, addresses)
        if not kind.usable:
            return found, kept, None
    return results, kind.saved(sources), kind


class Player(autograd.Plain):
    """Runs pairs of functions from tapes, where their call says what it depends on."""

    def forward(self, pair: Any, call: Any, needs: tuple[bool, ...], tensors: Saved) -> tuple[Any, Saved, Any]:
        # Whoever takes what is saved elsewhere (offloading) or compares it (checkpoint) gets tensors, not arenas.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        plain = hooked or tensors[0] is None or not tensors[0].is_cuda or torch._C._len_torch_dispatch_stack()
        constants = None if plain else call.constants()
        # A weight that is kept in FP8 comes as an operand, the tensors of which are where they were the step before.
        inputs = tuple(part for x in tensors for part in (x if isinstance(x, Operand) else (x,)))
        if constants is None or not {type(x) for x in inputs} <= _PLAIN:
            return super().forward(pair, call, needs, tensors)
        state, changed, _ = call.tensors()

        def run() -> tuple[Saved, Saved]:
            out, saved = pair(call, needs, *tensors)
            return (out,), saved

        (out,), saved, kind = play(lambda: run, (pair, constants, needs), inputs, state)
        if kind is not None and changed:
            torch.autograd.graph.increment_version(changed)
        return out, saved, kind

    def backward(
        self, pair: Any, call: Any, needs: tuple[bool, ...], saved: Saved, grads: Saved, kind: Kind | None
    ) -> Saved:
        if kind is None:
            return super().backward(pair, call, needs, saved, grads, None)

        def prepare() -> Function:
            kept = kind.found(saved)
            return lambda: (pair(call, needs, kept, *grads), ())

        constants = call.constants()
        if constants is None or torch._C._len_torch_dispatch_stack():
            return prepare()()[0]
        state, _, changed = call.tensors()
        results, _, replayed = play(prepare, (pair, kind, constants, needs), (*grads, *saved), state)
        if replayed is not None and changed:
            torch.autograd.graph.increment_version(changed)
        return results


autograd.player = Player()
