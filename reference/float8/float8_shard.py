"""`ShardedWeight`: a rank's rows of a weight that is kept in FP8, as FSDP2's `fully_shard` makes them.

    with te.quantized_model_init(recipe=recipe):
        model = Model()
    for layer in (*model.layers, model):
        fully_shard(layer)          # each kept weight becomes a DTensor of such rows

A rank has the codes of its rows, and the scales of the whole weight, which are the same on all ranks.

    gathered      the codes alone, a byte a number; with the scales they are the weight of one process
    written       amaxes of all ranks' rows, their maximum, which has no order, then the cast with the whole's scales
    delayed       the scale is known, so that the cast is first; the maximum is what the history records
    current       scale of the maximum
    blocks        the amax of a square of 128 × 128 that ranks share is the maximum of theirs. A rank's cast sees it as
                  one more number of the square, in a row that another rank has
    read          the numbers of one's rows

So a write is a collective: all ranks write the same weights in the same order, as optimizers do, also those without
rows. Weights that are written together share one exchange of amaxes, 4 bytes a scale.

Transposed codes are made on each rank from the gathered ones, in each backward; FSDP2 frees them with these.

Source: FSDP2's extensions `fsdp_pre_all_gather` and `fsdp_post_all_gather`, as Transformer Engine's tensors have them.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from reference.float8.float8_storage import Kept
from reference.float8.float8_tensor import dequantized
from reference.float8.kept_tensor import KeptTensor, wrapped
from reference.float8.quantized_tensor import QuantizedTensor, View
from reference.numbers.formats import WIDE_DTYPES
from reference.ops.casts.cast_blocks import BLOCK
from reference.ops.casts.cast_transpose import ceil16
from reference.ops.library import twin
from reference.recipes.block_scaling import SQUARES, InBlocks
from reference.recipes.current_scaling import Current
from reference.recipes.quantized import PER_TENSOR, Operand, dequantize
from reference.state.scaling import FP8TensorMeta
from reference.support import groups
from reference.support.dtensor import shard

TOGETHER = 1 << 26  # numbers that one launch casts, and so bytes of the transposed codes that it makes beside


@dataclass
class Place:
    """Where a rank's rows are in the whole weight.

    Attributes:
        whole: its shape.
        rows: of a shard; the last ranks may have fewer.
        group: the ranks' group by name; None until FSDP2, a layer or an optimizer says it.
        rank: in that group.
        mesh: which said so.
        turned: the transposed codes of the gathered weight, whose memory FSDP2 frees; at most one.
        drawn: the whole weight's initial values, if they were preserved.
    """

    whole: torch.Size
    rows: int
    group: str | None = None
    rank: int = 0
    mesh: Any = None
    turned: list[torch.Tensor] = field(default_factory=list)
    drawn: torch.Tensor | None = None


class ShardedWeight(KeptTensor):
    """A rank's rows of a weight kept in FP8; the module's docstring says what they do."""

    _place: Place
    _room: torch.Tensor  # codes of a whole shard, whose first rows are this rank's

    @staticmethod
    def of_room(room: torch.Tensor, rows: int, like: Kept, dtype: torch.dtype, place: Place) -> "ShardedWeight":
        """The first `rows` of `room` [rows of a shard, in]."""
        kept = replace(like, codes=room[:rows], transposed=None, scale_inv_t=None)
        made: ShardedWeight = wrapped(kept, dtype, None, ShardedWeight)
        made._room, made._place = room, place
        return made

    @property
    def first(self) -> int:
        """The whole weight's row that is this rank's first."""
        return min(self._place.rank * self._place.rows, self._place.whole[0])

    def place_on(self, mesh: Any) -> None:
        """Take the ranks of a mesh's last dimension, as `fully_shard` does."""
        if mesh is self._place.mesh:
            return
        group = mesh.get_group(mesh.ndim - 1)
        self._place.group, self._place.rank, self._place.mesh = groups.name_of(group), dist.get_rank(group), mesh

    def on(self, device: torch.device) -> "ShardedWeight":
        """The same state on another device; zeros where it comes from the meta device."""
        kept = replace(self._kept, codes=self._room).moved(device)
        return ShardedWeight.of_room(
            kept.codes, len(self), replace(kept, scales=self._kept.scales), self.dtype, self._place
        )

    def in_dtype(self, dtype: torch.dtype) -> "ShardedWeight":
        """The same memory, standing for numbers of another dtype."""
        return ShardedWeight.of_room(self._room, len(self), self._kept, dtype, self._place)

    def of_shard(self, codes: torch.Tensor, scale_inv: torch.Tensor) -> "ShardedWeight":
        """Such rows of other codes, of this rank's shape, and scales of the whole."""
        room = torch.zeros(self._room.shape, dtype=torch.uint8, device=self.device).view(self._room.dtype)
        room[: len(self)].view(torch.uint8).copy_(codes.view(torch.uint8))
        kept = replace(self._kept, scale_inv=scale_inv.to(self.device).clone())
        return ShardedWeight.of_room(room, len(self), kept, self.dtype, self._place)

    def take_rows(self, whole: KeptTensor) -> None:
        """Take this rank's rows of a weight that every rank has; nothing is sent."""
        self._kept.count_write()
        self._kept.codes.copy_(whole.codes[self.first : self.first + len(self)])
        self._kept.scale_inv.copy_(whole._scale_inv)

    def numbers(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        kept, dtype = self._kept, dtype or self.dtype
        if kept.layout == PER_TENSOR:
            return dequantized(kept.codes, kept.scale_inv, dtype)
        own = min(len(self), self._place.whole[0] - self.first)
        if own < len(self):  # FSDP2 looks at whole shards, of which the last ranks' have rows of nobody
            found = torch.zeros(self.shape, dtype=dtype, device=self.device)
            found[:own] = self[:own].numbers(dtype)  # type: ignore[attr-defined]
            return found
        if not own:
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        top, blocks = self._squares()
        codes = self._in_squares(kept.codes.view(torch.uint8)).view(kept.codes.dtype)
        found = dequantize(Operand(codes, kept.scale_inv[blocks].contiguous(), SQUARES), self.shape[1], dtype)
        return found[top : top + len(self)]

    def _squares(self) -> tuple[int, slice]:
        """How many rows of the first square are before this rank's, and which rows of squares it has a part of."""
        return self.first % BLOCK, slice(self.first // BLOCK, -(-(self.first + len(self)) // BLOCK))

    def _in_squares(self, x: torch.Tensor) -> torch.Tensor:
        """x [own rows, in] where it is in its squares, with zeros in the rows of other ranks."""
        top, blocks = self._squares()
        rows = min(blocks.stop * BLOCK, self._place.whole[0]) - blocks.start * BLOCK
        found = x.new_zeros(rows, x.shape[1])
        found[top : top + len(self)] = x
        return found

    def operand(self, transpose: bool) -> Any:
        """Refused: a product needs the whole weight."""
        raise RuntimeError(
            "a layer runs with the rows that one rank has of a weight kept in FP8; a forward of the module that "
            "fully_shard was given is accepted."
        )

    @property
    def get_high_precision_init_val(self) -> Callable[[], torch.Tensor | None]:
        place = self._place
        if place.drawn is None:
            raise AttributeError("this weight was not made with preserve_high_precision_init_val=True.")
        return lambda: None if place.drawn is None else place.drawn[self.first : self.first + len(self)]

    @property
    def clear_high_precision_init_val(self) -> Callable[[], None]:
        return lambda: setattr(self._place, "drawn", None)

    def is_cast_of(self, values: torch.Tensor) -> bool:
        """Whether the whole weight is what a write of all ranks' `values` would write."""
        by = self._kept.state()
        trial = self.of_shard(self.codes, self._kept.scale_inv)
        if isinstance(by, FP8TensorMeta):  # nothing is recorded
            codes, _ = twin.cast(values.to(self.device), 1 / self._kept.scale_inv, None, 0, self.codes.dtype)
            trial._kept.codes.copy_(codes)
        else:
            _cast([(trial, values.to(self.device).contiguous())])
        same = torch.equal(trial.codes.view(torch.uint8), self.codes.view(torch.uint8))
        same = same and torch.equal(trial._scale_inv, self._scale_inv)
        differs = torch.tensor([not same], dtype=torch.int32, device=self.device)
        dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=groups.group_of(self._group()))
        return not int(differs)

    def _group(self) -> str:
        if self._place.group is None:
            raise RuntimeError(
                "a weight kept in FP8 that fully_shard has sharded is written before its ranks are known; a write by "
                "an optimizer, reset_parameters or load_state_dict is accepted, or any after a forward."
            )
        return self._place.group

    # --- FSDP2's extensions --------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What ranks send: codes, as many on each."""
        self.place_on(mesh)
        return (self._room.view(torch.uint8),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight; with `out` that of an earlier call, whose codes have been gathered anew."""
        kept, turned = self._kept, self._place.turned
        if out is None:
            codes = gathered[0].view(kept.codes.dtype)[: self._place.whole[0]]
            whole = replace(kept, codes=codes, transposed=None, scale_inv_t=None)
            return wrapped(whole, param_dtype), turned
        whole = out._kept
        whole.scale_inv, whole.scales = kept.scale_inv, kept.scales
        # The forward reads no transposed codes: its backward makes them anew, once for the two gatherings of a step.
        whole.stale = whole.transposed is not None
        turned[:] = [whole.transposed] if whole.stale else []
        return None

    # --- as a tensor ---------------------------------------------------------------------------------------

    def _shared(self) -> "ShardedWeight":
        made: ShardedWeight = wrapped(self._kept, self.dtype, None, ShardedWeight)
        made._room, made._place = self._room, self._place
        return made

    sharing = None  # type: ignore[assignment]

    def _reshaped(self, shape: torch.Size) -> "ShardedWeight | None":
        return self._shared() if shape == self.shape else None

    def _copied(self, device: torch.device) -> "ShardedWeight":
        kept = replace(self._kept, codes=self._room).moved(device, copied=True)
        return ShardedWeight.of_room(kept.codes, len(self), kept, self.dtype, replace(self._place, turned=[]))

    def _parts(self, make: Callable[[torch.Tensor], Any]) -> Any:
        found = make(self.codes)
        of_start = isinstance(found, torch.Tensor) and found.dim() == 2 and found.shape[1] == self.shape[1]
        if not of_start or found.storage_offset() != self._room.storage_offset() or not found.is_contiguous():
            return None
        return ShardedWeight.of_room(self._room, len(found), self._kept, self.dtype, self._place)

    def _replace(self, values: torch.Tensor) -> None:
        raise ValueError(f"ShardedWeight: data has shape {list(values.shape)}; {list(self.shape)} is accepted.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "a rank's rows of a weight kept in FP8 are not pickled; model.state_dict() has its codes and scales."
        )

    @classmethod
    def write_all(cls, pairs: list[tuple[Any, torch.Tensor]]) -> None:
        """Write values: codes and scales of the same form as they are, others cast with the scales of the whole."""
        cast = []
        for target, values in pairs:
            kept = target._kept
            kept.count_write()
            codes, source = _codes_of(values)
            if codes is not None and (codes.dtype, codes.shape, source.layout) == (
                kept.codes.dtype,
                target.shape,
                kept.layout,
            ):
                kept.codes.copy_(codes)
                kept.scale_inv.copy_(source.scale_inv)
                if isinstance(values, View) and target._place.group is None:  # `fully_shard` cuts the whole
                    rows = (codes.storage_offset() - source.codes.storage_offset()) // codes.shape[1]
                    target._place.rank = rows // target._place.rows
                continue
            values = values.numbers() if isinstance(values, QuantizedTensor) else values.detach()
            dtype = values.dtype if values.dtype in WIDE_DTYPES else target.dtype
            cast.append((target, values.to(target.device, dtype).expand(target.shape).contiguous()))
        if cast:
            _cast(cast)


def rows_of(p: Any) -> torch.Tensor:
    """`shard(p)`; rows that are kept in FP8 learn which ranks have the others."""
    local = shard(p)
    if isinstance(local, ShardedWeight) and local is not p:
        local.place_on(p.device_mesh)
    return local


def _codes_of(values: Any) -> tuple[torch.Tensor | None, Any]:
    """Codes of a kept tensor, or of a part of one, and what it keeps."""
    if isinstance(values, View) and isinstance(values._source, KeptTensor):
        return values._make(values._source.codes), values._source._kept
    return (values.codes, values._kept) if isinstance(values, KeptTensor) else (None, None)


def _cast(pairs: Sequence[tuple[ShardedWeight, torch.Tensor]]) -> None:
    """Write plain values of the targets' shapes; all ranks do so with the same weights."""
    by_group: dict[tuple[str, torch.device], list[tuple[ShardedWeight, torch.Tensor]]] = {}
    for target, values in pairs:
        by_group.setdefault((target._group(), target.device), []).append((target, values))
    for (group, _), found in by_group.items():
        delayed = [pair for pair in found if isinstance(pair[0]._kept.state(), FP8TensorMeta)]
        others = [pair for pair in found if not isinstance(pair[0]._kept.state(), FP8TensorMeta)]
        _cast_delayed(delayed, group)
        _cast_current([pair for pair in others if pair[0]._kept.layout == PER_TENSOR], group)
        squares = [pair for pair in others if pair[0]._kept.layout != PER_TENSOR]
        amaxes = [_amaxes_of_squares(*pair) for pair in squares]
        _share(amaxes, group)
        _share([_write_squares(*pair, amax) for pair, amax in zip(squares, amaxes, strict=True)], group)  # type: ignore[call-arg]


def _share(parts: list[torch.Tensor], group: str) -> None:
    """Replace contiguous fp32 numbers from +0 on by their maximum over the ranks."""
    if parts:
        groups.largest_together([part.view(-1) for part in parts], groups.group_of(group))


def _amaxes_of_squares(target: ShardedWeight, values: torch.Tensor) -> torch.Tensor:
    """This rank's amaxes, fp32, one for each square of the whole: `[rows of squares, squares]`."""
    squares = -(-values.shape[1] // BLOCK)
    amax = torch.zeros(target._kept.scale_inv.shape[0], squares, dtype=torch.float32, device=values.device)
    if values.numel():
        found = target._in_squares(values.float().abs().nan_to_num(nan=0.0, posinf=torch.inf))
        found = torch.nn.functional.pad(found, (0, -found.shape[1] % BLOCK, 0, -found.shape[0] % BLOCK))
        amax[target._squares()[1]] = found.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3))
    return amax


def _cast_delayed(pairs: Sequence[tuple[ShardedWeight, torch.Tensor]], group: str) -> None:
    """The scales are known; each rank's cast records its amaxes, of which all take the maximum."""
    states: list[Any] = [target._kept.state() for target, _ in pairs]
    columns = [target._kept.column for target, _ in pairs]
    _write(pairs, [by.scale for by in states], [by.amax_history for by in states], columns)
    _share([by.amax_history[0, i : i + 1] for by, i in zip(states, columns, strict=True)], group)


def _cast_current(pairs: Sequence[tuple[ShardedWeight, torch.Tensor]], group: str) -> None:
    """The scale is that of the largest amax of all ranks."""
    if not pairs:
        return
    amaxes = torch.zeros(len(pairs), 1, 1, dtype=torch.float32, device=pairs[0][1].device)
    for (_, values), amax in zip(pairs, amaxes, strict=True):
        if values.numel():
            twin.amax(values, amax, 0)
    groups.largest(amaxes, groups.group_of(group))
    how: list[Any] = [target._kept.state() for target, _ in pairs]
    _write(pairs, [twin.current_scale(a, *by.how) for a, by in zip(amaxes, how, strict=True)], [], [0] * len(pairs))


def _write(
    pairs: Sequence[tuple[ShardedWeight, torch.Tensor]],
    scales: Sequence[torch.Tensor],
    histories: Sequence[torch.Tensor],
    columns: Sequence[int],
) -> None:
    """Cast values by entry `columns[i]` of `scales[i]`, and record amaxes there in the histories, if there are any."""
    for batch in _batches(pairs):
        xs, codes, turned = [], [], []
        for target, values in (pairs[i] for i in batch):
            own = target._kept.codes
            # A rank without rows finds the scale, too.
            xs.append(values if values.numel() else values.new_zeros(1, values.shape[1]))
            codes.append(own if values.numel() else own.new_empty(1, own.shape[1]))
        sizes = [x.shape[1] * ceil16(x.shape[0]) for x in xs]
        room = codes[0].new_empty(sum(sizes))  # of transposed codes, which nobody reads
        turned = [part.view(x.shape[1], -1) for part, x in zip(room.split(sizes), xs, strict=True)]
        noted = [histories[i] for i in batch] if histories else []
        scale_invs = [pairs[i][0]._kept.scale_inv for i in batch]
        twin.multi_cast_transpose(
            xs, [scales[i] for i in batch], noted, [columns[i] for i in batch], codes, turned, scale_invs
        )


def _batches(pairs: Sequence[tuple[ShardedWeight, torch.Tensor]]) -> list[list[int]]:
    """The numbers of those that one launch casts: of the same dtypes, about `TOGETHER` numbers."""
    found: dict[tuple[torch.dtype, torch.dtype], list[list[int]]] = {}
    sizes: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for i, (target, values) in enumerate(pairs):
        form = values.dtype, target._kept.codes.dtype
        if form not in found or sizes[form] >= TOGETHER:
            found.setdefault(form, []).append([])
            sizes[form] = 0
        found[form][-1].append(i)
        sizes[form] += values.numel()
    return [batch for batches in found.values() for batch in batches]


def _write_squares(target: ShardedWeight, values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Cast values with the scales of the whole; these, of which ranks have parts, are returned, to be shared."""
    kept, by = target._kept, target._kept.state()
    kept.scale_inv.zero_()
    if values.numel():
        top, blocks = target._squares()
        whole = target._in_squares(values)
        for number, amaxes in enumerate(amax[blocks]):  # of squares that others have rows of, in one of these
            first, stop = number * BLOCK, min((number + 1) * BLOCK, len(whole))
            free = first if first < top else stop - 1
            if free < top or free >= top + len(values):
                whole[free, ::BLOCK] = amaxes.to(whole.dtype)
        assert isinstance(by, InBlocks)
        (codes, scale_inv, *_), _ = by.quantize(whole, False)
        kept.codes.copy_(codes[top : top + len(values)])
        kept.scale_inv[blocks].copy_(scale_inv)  # type: ignore[arg-type]
    return kept.scale_inv


def room_of(weight: KeptTensor, size: Any) -> ShardedWeight | None:
    """What FSDP2 gets where it asks a weight for zeros in which to keep a rank's rows; None for anybody else."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            break
        if frame.f_back is None:
            return None
        frame = frame.f_back
    else:
        return None
    if not weight.is_weight or weight.dim() != 2 or tuple(size[1:]) != tuple(weight.shape[1:]):
        raise NotImplementedError(
            f"fully_shard: {type(weight).__name__} {list(weight.shape)} along another dimension than the first, or no "
            f"layer's weight; a weight of quantized_model_init with Shard(0) is accepted."
        )
    kept = weight._kept
    by = kept.scales
    if not (isinstance(by, FP8TensorMeta) or type(by) is Current or (type(by) is InBlocks and by.layout == SQUARES)):
        raise NotImplementedError(
            f"fully_shard: a weight whose layout is {kept.layout!r} is not offered; those of DelayedScaling, "
            f"Float8CurrentScaling and Float8BlockScaling are accepted."
        )
    room = torch.zeros(tuple(size), dtype=torch.uint8, device=weight.device).view(kept.codes.dtype)
    if isinstance(weight, ShardedWeight):
        place = weight._place
    else:
        place = Place(weight.shape, size[0], drawn=vars(weight).get("_high_precision_init_val"))
    return ShardedWeight.of_room(room, size[0], kept, weight.dtype, place)


KeptTensor._room_of = staticmethod(room_of)
# FSDP2 asks for it at each gathering, of each weight; to find it anew takes Python longer than all of the rest.
_pre: Any = ShardedWeight.fsdp_pre_all_gather
_pre.__signature__ = inspect.signature(_pre)
