"""Tapes: a layer's kernels launched again without running its Python.

What a pair of functions (`reference.nn.autograd`) launches follows from the shapes and dtypes of its tensors, from the
constants of its call, and from addresses. So a call that agrees in all of them with an earlier one makes the same
launches, and a loop over a list makes them in a fraction of the time, which for a layer of a few hundred tokens is most
of its time. A tape holds no memory: what a call saves for backward lies in one tensor, the arena, and its temporaries
in another, the scratch, allocated at each call. PyTorch's allocator gives the steps of a training loop the same
addresses.

    first call of a kind       runs, and is measured: sizes of its arena, its scratch and its results
    then                       its launches, if a tape was recorded at these addresses
                               else it runs, with its tensors placed there, and is recorded

cuDNN's attention puts its results where PyTorch allocates them; they are copied to where ours would lie. A function
that does anything else but our own launches, allocations, views and copies of whole tensors always runs; so does one
with more than `LARGEST` bytes in both, because its kernels outlast its Python. Where addresses keep changing, as with
lengths that are drawn for each batch, no more is measured or recorded after `MOST_MISSES` times, each of which costs as
much as running does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimized import ahead, launch
from optimized.watch import Allocation, Place, Record, Watch, place_of, storage_of
from reference.nn import autograd
from reference.quantized import Quantized

LARGEST = 448 << 20
MOST_KINDS, MOST_TAPES = 512, 256  # of all, and of a kind
MOST_MISSES = 4096  # more than hits, of all
_ALIGNMENT = 512  # as of PyTorch's allocator

_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}

Saved = tuple[torch.Tensor | None, ...]
Function = Callable[[], tuple[Saved, Saved]]  # results, and what is saved for backward

ARENA, SCRATCH, FIRST = range(3)  # of what a call's tensors lie in; then its inputs and its state, or its results


class Kind:
    """Calls that agree in all but addresses.

    Attributes:
        usable: whether such a call can be replayed.
        results: shape and dtype of each result, or None.
        rooms: for each allocation, in order, its place in arena, scratch, or a result (`FIRST` + its number).
        sizes: bytes of the arena and of the scratch.
        pooled: elements of the results but the first and of paddings, if they share one allocation, of `pool_dtype`.
        pooled_at: which of those each result is, and its shape.
        kept: what is saved for backward: None, or a place in what `saved` gives.
        needed: the numbers of those.
        tapes: by all addresses.
    """

    def __init__(self) -> None:
        self.usable = True
        self.results: list[tuple[torch.Size, torch.dtype] | None] = []
        self.rooms: list[Place] = []
        self.sizes = [0, 0]
        self.pooled: list[int] = []
        self.pool_dtype = torch.uint8
        self.pooled_at: list[tuple[int, torch.Size] | None] = []
        self.kept: list[Place | None] = []
        self.needed: list[int] = []
        self.tapes: dict[tuple[int, ...], launch.Launches] = {}
        self.misses = self.hits = 0

    def measure(self, run: Function) -> tuple[Saved, Saved]:
        """Run as ever, and note what was allocated."""
        with Watch() as watch:
            results, saved = run()
        last = {one.address: i for i, one in enumerate(watch.allocated)}
        owners = {last.get(x.data_ptr(), -1): i for i, x in enumerate(results) if x is not None}
        self._make_rooms(watch.allocated, owners, {last.get(storage_of(x)) for x in saved if x is not None})
        self.results = [None if x is None else (x.shape, x.dtype) for x in results]
        whole = all(x is None or (x.is_contiguous() and x.numel()) for x in results)
        distinct = -1 not in owners and len(owners) == sum(x is not None for x in results)
        self.usable = watch.usable and whole and distinct and sum(self.sizes) <= LARGEST
        shared = [x for x in results[1:] if x is not None]
        if len(shared) > 1 and len({x.dtype for x in shared}) == 1:
            self.pool_dtype = shared[0].dtype
            for x in results[1:]:
                self.pooled_at.append(None if x is None else (len(self.pooled), x.shape))
                if x is not None:
                    padding = -x.numel() % (_ALIGNMENT // x.element_size())
                    self.pooled += [x.numel(), padding] if padding else [x.numel()]
        return results, saved

    def _make_rooms(self, allocated: list[Allocation], owners: dict[int, int], kept: set[int | None]) -> None:
        """A temporary lies at the first place that is free at its time."""
        taken: list[tuple[int, int, int]] = []  # from, to, until
        for i, one in enumerate(allocated):
            size = max(1, -(-one.size // _ALIGNMENT)) * _ALIGNMENT
            where, offset = SCRATCH, 0
            if i in owners:
                where = FIRST + owners[i]
            elif i in kept or not one.size:  # all tensors without elements have the address 0
                where, offset = ARENA, self.sizes[ARENA]
                self.sizes[ARENA] += size
            else:
                taken = sorted(other for other in taken if other[2] > i)
                for begin, end, _ in taken:
                    if offset + size <= begin:
                        break
                    offset = max(offset, end)
                taken.append((offset, offset + size, one.until))
                self.sizes[SCRATCH] = max(self.sizes[SCRATCH], offset + size)
            self.rooms.append(Place(where, offset, *one.like))

    def room(self, where: int, device: torch.device) -> torch.Tensor | None:
        """A new arena or scratch."""
        size = self.sizes[where]
        return torch.empty(size, dtype=torch.uint8, device=device) if size else None

    def room_for_results(self, device: torch.device) -> tuple[Saved, Saved]:
        """The results, and what they lie in: the first is its own tensor, which may live longer; others may share."""
        first = [None if x is None else torch.empty(x[0], dtype=x[1], device=device) for x in self.results[:1]]
        if not self.pooled:
            others = [None if x is None else torch.empty(x[0], dtype=x[1], device=device) for x in self.results[1:]]
            return (*first, *others), (*first, *others)
        pool = torch.empty(sum(self.pooled), dtype=self.pool_dtype, device=device)
        parts = pool.unsafe_split_with_sizes(self.pooled)  # unsafe: they are no views to autograd
        others = [
            None if at is None else parts[at[0]] if len(at[1]) == 1 else parts[at[0]].view(*at[1])
            for at in self.pooled_at
        ]
        return (*first, *others), (*first, pool)

    def record(
        self, run: Function, results: Saved, sources: Sequence[torch.Tensor | None], addresses: tuple[int, ...]
    ) -> tuple[Saved, Saved]:
        """Run with every tensor in its place, and keep the launches; `sources` are arena, scratch, inputs and state."""
        tape = launch.Launches()
        with launch.recording(tape), Record(self.rooms, (*sources[:FIRST], *results), tape) as watch:
            found, kept = run()
        places_kept = [None if x is None else place_of(x, sources) for x in kept]
        needed = sorted({place.number for place in places_kept if place is not None})
        located = [p if p is None else p._replace(number=needed.index(p.number)) for p in places_kept]
        in_place = all(_address(a) == _address(b) for a, b in zip(found, results, strict=True))
        same = not self.tapes or (self.needed, self.kept) == (needed, located)  # not if inputs share storage at times
        self.usable = watch.usable and in_place and same and not {-1, SCRATCH} & set(needed)
        self.needed, self.kept = needed, located
        if len(self.tapes) >= MOST_TAPES:
            self.tapes.clear()
        self.tapes[addresses] = tape
        return found, kept

    def saved(self, sources: Sequence[torch.Tensor | None]) -> Saved:
        """What goes to `save_for_backward`: of arena, inputs and state, what is needed."""
        return tuple([sources[i] for i in self.needed])

    def found(self, saved: Saved) -> Saved:
        """What the function itself would have saved."""
        return tuple(None if place is None else place.of(saved) for place in self.kept)


_kinds: dict[Any, Kind] = {}


class _All:
    """Of all kinds."""

    misses = hits = 0


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def play(
    prepare: Callable[[], Function],
    key: Any,
    inputs: Saved,
    state: Sequence[torch.Tensor],
    new: tuple[Any, ...] | None = None,
) -> tuple[Saved, Saved, Kind | None]:
    """What the function that `prepare` gives returns; with a kind, in the form of `Kind.saved`.

    Args:
        prepare: makes the function.
        key: all but addresses that its launches depend on.
        inputs: what it reads; the first is a tensor.
        state: what else it reads or changes.
        new: arguments of `ahead.compile_pair`, for a call of a new kind; a backward's kernels came with its forward's.
    """
    kind = _kinds.get(key)
    enough = _All.misses > MOST_MISSES + _All.hits
    if kind is None:
        if enough:
            return *prepare()(), None
        if new is not None:
            ahead.compile_pair(*new)
        _All.misses += 1
        if len(_kinds) >= MOST_KINDS:
            _kinds.clear()
        kind = Kind()
        results, saved = kind.measure(prepare())  # which may fail: then the next call is new again
        _kinds[key] = kind
        return results, saved, None
    if not kind.usable:
        return *prepare()(), None
    device: torch.device = inputs[0].device  # type: ignore[union-attr]
    results, rooms = kind.room_for_results(device)
    sources = [kind.room(ARENA, device), kind.room(SCRATCH, device), *inputs, *state]
    addresses = tuple([x.data_ptr() for x in (*rooms, *sources) if x is not None])
    tape = kind.tapes.get(addresses)
    if tape is not None:
        kind.hits += 1
        _All.hits += 1
        tape.again(device.index)
    elif enough:
        del results, rooms, sources
        return *prepare()(), None
    else:
        kind.misses += 1
        _All.misses += 1
        found, kept = kind.record(prepare(), results, sources, addresses)
        if not kind.usable:
            return found, kept, None
    return results, kind.saved(sources), kind


def _specifications(tensors: Saved) -> list[Any]:
    return [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]


class Player(autograd.Plain):
    """Runs pairs of functions from tapes, where their call says what it depends on."""

    def forward(self, pair: Any, plan: Any, context: Any, tensors: Saved, backward: Any) -> tuple[Any, Saved, Any]:
        # Whoever takes what is saved elsewhere (offloading) or compares it (checkpoint) gets tensors, not arenas.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        plain = hooked or tensors[0] is None or not tensors[0].is_cuda or torch._C._len_torch_dispatch_stack()
        # A weight that is kept in FP8 comes quantized; its tensors are where they were the step before.
        inputs = tensors
        if Quantized in map(type, tensors):
            inputs = tuple(part for x in tensors for part in (x[:3] if isinstance(x, Quantized) else (x,)))
        # What no module takes part in is one op, which launches as fast by itself.
        if plain or not context.modules or not context.replayable or not _PLAIN.issuperset(map(type, inputs)):
            ahead.compile_plain(pair, backward, plan, context, tensors)
            return super().forward(pair, plan, context, tensors, backward)
        state, changed = context.state(backward=False)

        def run() -> tuple[Saved, Saved]:
            out, saved = pair(plan, context, *tensors)
            return (out if isinstance(out, tuple) else (out,)), saved

        key = (pair, plan, tensors[0].device.index, *_specifications(inputs), *_specifications(context.reads))  # type: ignore[union-attr]
        out, saved, kind = play(lambda: run, key, inputs, state, (pair, backward, plan, context, tensors))
        if kind is not None and changed:
            torch.autograd.graph.increment_version(changed)
        return out if len(out) > 1 else out[0], saved, kind

    def backward(self, pair: Any, plan: Any, context: Any, saved: Saved, grads: Saved, kind: Kind | None) -> Saved:
        if kind is None:
            return super().backward(pair, plan, context, saved, grads, None)

        def prepare() -> Function:
            kept = kind.found(saved)
            return lambda: (pair(plan, context, kept, *grads), ())

        if torch._C._len_torch_dispatch_stack():
            return prepare()()[0]
        state, changed = context.state(backward=True)
        # The kind stands for the plan, and for shapes and dtypes of what it saved.
        key = (pair, kind, *_specifications(grads))
        results, _, replayed = play(prepare, key, (*grads, *saved), state)
        if replayed is not None and changed:
            torch.autograd.graph.increment_version(changed)
        return results


autograd.register(Player())
