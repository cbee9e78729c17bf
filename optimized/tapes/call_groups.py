"""Which calls agree, and their tapes: the one cache of launches.

    the first call of a group   runs, and the sizes of its arena, its scratch and its results are measured
    the second                  runs, with its tensors placed there, and is recorded
    a later call                plays the tape at these addresses, which is moved there if it is not known;
                                a call that no tape serves is recorded

A tape holds no memory. What a call saves for backward lies in one tensor, the arena, and its temporaries in another,
the scratch; both are allocated at each call. PyTorch's allocator gives the steps of a training loop the same addresses.

A call that allocates more than `LARGEST` bytes always runs, because its kernels take longer than its Python, and played
it would hold more: those of a layer of hidden 2048 with 8192 tokens allocate less, under any recipe. Measuring or
recording a call costs as much as running it. So where shapes keep changing, because each batch has lengths of its own,
this ends after `MOST_MISSES` times.

Where ranks share a layer a call has several times as many launches and messages, so its Python takes longer: there it
may allocate `LARGEST_SHARED` bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimized.cuda import launch
from optimized.tapes import collectives
from optimized.tapes.memory import ARENA, FIRST, NOWHERE, SCRATCH, Place, Places, Results, arrange, place_of, storage_of
from optimized.tapes.relocation import NotRelocatable, RelocatableTape
from optimized.tapes.tape import Tape
from optimized.tapes.tape_recorder import TapeRecorder, Watch
from reference.state import gradient_places
from reference.support.nested import Tensors

LARGEST, LARGEST_SHARED = 448 << 20, 4 << 30
MOST_GROUPS, MOST_TAPES = 4096, 256  # groups (a layer takes up to four for each length), and tapes of one group
MOST_MISSES = 4096  # by how many misses may outnumber hits
MOST_MOVED = 4096  # tapes of all groups that were moved: some 15 KB each

Function = Callable[[], tuple[Tensors, Tensors]]  # results, and what is saved for backward


class CallGroup:
    """Calls that agree in all but addresses.

    Attributes:
        usable: whether such a call can be played from a tape.
        results: how its results are allocated.
        places: where each allocation lies, in their order.
        form: how the runner puts together what was saved (`reference.support.nested`).
        sizes: bytes of the arena and of the scratch.
        saved_places: for each tensor saved for backward None, or its place in the tensors of `saved`.
        needed: the numbers of those tensors among arena, scratch, inputs, state and results.
        tapes: by all addresses.
        recorded: whether a tape has been.
        relocatable: the tape that was recorded last, for other addresses; None if it serves its own only.
        hits, misses: how many calls were played, and how many were recorded.
    """

    def __init__(self) -> None:
        self.usable = True
        self.results = Results()
        self.places: list[Place] = []
        self.form: Any = None
        self.sizes = (0, 0)
        self.saved_places: list[Place | None] = []
        self.needed: list[int] = []
        self.tapes: dict[tuple[int, ...], Tape] = {}
        self.recorded = False
        self.relocatable: RelocatableTape | None = None
        self.misses = self.hits = 0

    def measure(self, run: Function, places: Places) -> tuple[Tensors, Tensors]:
        """Run the first call, and note what it allocates; later ones have results in `places`."""
        collectives_before = collectives.made
        with Watch() as watch:
            results, saved = run()
        last = {one.address: i for i, one in enumerate(watch.allocated)}
        owners = {last.get(x.data_ptr(), -1): i for i, x in enumerate(results) if x is not None}
        saved_ones = {last.get(storage_of(x)) for x in saved if x is not None}
        self.places, self.sizes = arrange(watch.allocated, owners, saved_ones)
        self.results = Results(results, places)
        whole = all(x is None or (x.is_contiguous() and x.numel()) for x in results)
        distinct = -1 not in owners and len(owners) == sum(x is not None for x in results)
        most = LARGEST if collectives.made == collectives_before else LARGEST_SHARED
        self.usable = watch.usable and whole and distinct and sum(self.sizes) <= most
        return results, saved

    def allocate(self, where: int, device: torch.device) -> torch.Tensor | None:
        """A new arena or scratch."""
        size = self.sizes[where]
        return torch.empty(size, dtype=torch.uint8, device=device) if size else None

    def tape(self, addresses: tuple[int, ...]) -> Tape | None:
        """The tape of a call with these addresses, if there is one."""
        found = self.tapes.get(addresses)
        if found is not None:
            self.hits += 1
            counts.hits += 1
        return found

    def moved(self, addresses: tuple[int, ...], tensors: list[torch.Tensor]) -> Tape | None:
        """The recorded tape at other addresses, if it serves there."""
        tape = None
        if self.relocatable is not None:
            try:
                tape = self.relocatable.at(addresses, tensors)
            except NotRelocatable:
                self.relocatable = None
        if tape is not None:
            if counts.moved >= MOST_MOVED:
                counts.moved = 0
                for group in _groups.values():
                    group.tapes.clear()
            self.keep(addresses, tape)
            self.hits += 1
            counts.hits += 1
            counts.moved += 1
        return tape

    def add(self, addresses: tuple[int, ...], tape: Tape) -> None:
        """Keep the tape that a call with these addresses has recorded."""
        self.misses += 1
        counts.misses += 1
        self.keep(addresses, tape)

    def keep(self, addresses: tuple[int, ...], tape: Tape) -> None:
        """Keep the tape of a call with these addresses."""
        if len(self.tapes) >= MOST_TAPES:
            self.tapes.clear()
        self.tapes[addresses] = tape

    def record(
        self,
        run: Function,
        results: Tensors,
        sources: Sequence[torch.Tensor | None],
        tensors: list[torch.Tensor],
        addresses: tuple[int, ...],
    ) -> tuple[Tensors, Tensors]:
        """Run with every tensor in its place, and keep the launches.

        `sources` are arena, scratch, inputs and state; `tensors` are these and what the results lie in, of `addresses`.
        """
        tape = Tape()
        with launch.recording(tape), TapeRecorder(self.places, (*sources[:FIRST], *results), tape) as watch:
            found, saved = run()
        lying = [None if x is None else place_of(x, (*sources, *results)) for x in saved]
        needed = sorted({place.number for place in lying if place is not None})
        located = [p if p is None else p._replace(number=needed.index(p.number)) for p in lying]
        in_place = all(_address(a) == _address(b) for a, b in zip(found, results, strict=True))
        # These may differ from call to call, because inputs may share storage.
        same = not self.recorded or (self.needed, self.saved_places) == (needed, located)
        self.usable = watch.usable and in_place and same and not {-1, SCRATCH} & set(needed)
        self.needed, self.saved_places, self.recorded = needed, located, True
        self.add(addresses, tape)
        self.relocatable = RelocatableTape(
            tape, tensors, [x for i in self.results.placed if (x := results[i]) is not None]
        )
        return found, saved

    def saved(self, sources: Sequence[torch.Tensor | None]) -> Tensors:
        """What goes to `save_for_backward`: the arena, inputs, state and results, as far as they are needed."""
        return tuple([sources[i] for i in self.needed])

    def found(self, saved: Tensors) -> Tensors:
        """The tensors that the function itself would have saved."""
        return tuple(None if place is None else place.of(saved) for place in self.saved_places)


class Counts:
    """Calls of all groups."""

    def __init__(self) -> None:
        self.misses = self.hits = self.moved = 0

    def enough(self) -> bool:
        """Whether recording more would be in vain."""
        return self.misses > MOST_MISSES + self.hits


counts = Counts()
_groups: dict[Any, CallGroup] = {}


def _keep(key: Any, group: CallGroup) -> None:
    if len(_groups) >= MOST_GROUPS:
        _groups.clear()
    _groups[key] = group


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def specification(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """What launches depend on besides addresses, for each tensor."""
    return [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]


def run_or_play(
    prepare: Callable[[], Function],
    key: Any,
    inputs: Tensors,
    state: Sequence[torch.Tensor],
    before_first: Callable[[], None] | None = None,
    places: Places = NOWHERE,
) -> tuple[Tensors, Tensors, CallGroup | None]:
    """Run the function that `prepare` gives, or play its tape: its results, what it saved, and its group or None.

    With a group, what it saved is in the form of `CallGroup.saved`.

    Args:
        prepare: makes the function.
        key: everything that its launches depend on, except addresses.
        inputs: what it reads; the first is a tensor.
        state: what else it reads or changes.
        before_first: called before the first call of a group runs.
        places: where results lie that the caller has a place for, if the call is played; `key` names them.
    """
    if collectives.world is not None and collectives.outdated():
        _groups.clear()
    group = _groups.get(key)
    if group is None:
        if counts.enough():
            return *prepare()(), None
        if before_first is not None:
            before_first()
        counts.misses += 1
        group = CallGroup()
        gradient_places.here.taken = ()  # or an allocation would not be seen
        results, saved = group.measure(prepare(), places)  # if this fails, the next call is a first one again
        _keep(key, group)
        return results, saved, None
    if not group.usable:
        return *prepare()(), None
    device: torch.device = inputs[0].device  # type: ignore[union-attr]
    results, owners = group.results.allocate(device, places)
    sources = [group.allocate(ARENA, device), group.allocate(SCRATCH, device), *inputs, *state]
    tensors = [x for x in (*owners, *sources) if x is not None]
    addresses = tuple([x.data_ptr() for x in tensors])
    tape = group.tape(addresses) or group.moved(addresses, tensors)
    if tape is not None:
        tape.play(device.index)
    elif counts.enough():
        del results, owners, sources, tensors
        return *prepare()(), None
    else:
        gradient_places.here.taken = ()
        found, saved = group.record(prepare(), results, sources, tensors, addresses)
        if not group.usable:
            return found, saved, None
    return results, group.saved((*sources, *results)), group


def relaunch(key: Any, tensors: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
    """Call `run`, or make the launches of an earlier call with the same key and tensors.

    The function does nothing but launch. Where launches are recorded or collected, it runs.

    Args:
        key: everything that its launches depend on besides the tensors; hashable.
        tensors: what it reads or changes, at least one, on one CUDA device.
        run: the function; it checks its arguments.
    """
    if launch.noted():
        run()
        return
    if collectives.world is not None and collectives.outdated():
        _groups.clear()
    key = (key, *specification(tensors))
    addresses = tuple([x.data_ptr() for x in tensors])
    group = _groups.get(key)
    tape = None if group is None else group.tape(addresses)
    if tape is not None:
        tape.play(tensors[0].device.index)
    elif counts.enough():
        run()
    else:
        launches = Tape()
        with launch.recording(launches):
            run()
        if group is None:
            _keep(key, group := CallGroup())
        group.add(addresses, launches)
