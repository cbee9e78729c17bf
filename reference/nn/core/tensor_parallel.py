"""Layers whose linear maps ranks share (`reference.parallel.tensor`): their group, parts of weights, checks."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from reference.arguments import check_arguments
from reference.nn.core.parameters import InitMethod
from reference.parallel import messages
from reference.parallel.ordered_reduce import shapes_on_ranks
from reference.parallel.tensor import Shared, cut_of, part_of
from reference.parallel.tokens import BLOCK, Tokens, can_be_gathered
from reference.support import groups

# By process group, what its ranks have found to be the same. It is the same on all of them, since all have made these
# calls; a group that is gone takes its own along.
_SAME: "weakref.WeakKeyDictionary[Any, set[Any]]" = weakref.WeakKeyDictionary()
MOST_SAME = 4096


def check_same_on_ranks(layer: str, argument: str, x: torch.Tensor, group: str) -> None:
    """Refuse, on all ranks of a group, tensors whose shapes differ: a collective would wait, or end the process.

    On a CPU every call compares. On a GPU, where that takes a wait of the host, a shape is compared once: when it is
    new to this rank. So ranks that differ are refused if both shapes are new. If both are known, nothing is compared.
    If one is, its rank goes on, and the other's comparison meets another collective. In neither case is anything
    refused, and NCCL does not check sizes: there may be an error, its timeout, or wrong numbers.
    """
    peers = messages.of_group(group, x.device)
    if peers is not None:
        peers.beat()
    known, key = _SAME.setdefault(groups.group_of(group), set()), (layer, argument, tuple(x.shape))
    if x.is_cuda and key in known:
        return
    shapes = shapes_on_ranks(group, tuple(x.shape), x.device)
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"{layer}: {argument} has shape {list(shapes[0])} on the group's rank 0 and {list(shape)} on rank "
                f"{rank}; one shape on all ranks is accepted."
            )
    if len(known) >= MOST_SAME:
        known.clear()
    known.add(key)


def refuse_compiler(layer: str, setting: str) -> None:
    """Refuse to be traced where ranks compute together."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{layer}: {setting} under torch.compile is not offered; eager mode is accepted.")


class TensorParallel:
    """A layer that takes a tensor-parallel group.

    Attributes:
        tp_size: how many ranks share its maps; 1 where none does.
        tp_name: the group's name; None without one. A group itself could not be copied or pickled with the layer.
        sequence_parallel: whether each rank has its own tokens outside of the maps.
        cp_name: the name of a group whose ranks have some of the tokens each, everywhere; None without one.
    """

    tp_size = 1
    tp_name: str | None = None
    cp_name: str | None = None
    sequence_parallel = False

    def take_tensor_group(self, tp_group: Any, tp_size: int, sequence_parallel: bool) -> None:
        """What a constructor was given, before it makes parameters: the size of a group counts, as in TE."""
        self.tp_size = int(tp_size) if tp_group is None else dist.get_world_size(tp_group)
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.tp_name = groups.name_of(tp_group) if tp_group is not None and self.tp_size > 1 else None

    @property
    def tp_group(self) -> Any:
        """The process group, where it has several ranks; else None."""
        return None if self.tp_name is None else groups.group_of(self.tp_name)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give the group after the layer was made, as Megatron-LM does: one of `tp_size` ranks, or None."""
        layer: Any = self
        self._take_group(tp_group)
        layer._take_roles()
        self.forget_precision()

    def forget_precision(self) -> None:
        """Make quantizers anew at the next forward."""
        layer: Any = self
        layer._precision = layer._found = None
        layer._wide = {}

    def _take_group(self, tp_group: Any) -> None:
        name = type(self).__name__
        check_arguments(name, {"tp_group": tp_group})
        size = 1 if tp_group is None else dist.get_world_size(tp_group)
        if tp_group is not None and size != self.tp_size:
            raise ValueError(
                f"{name}: tp_group=<a process group of {size} ranks>; the layer was made for tp_size={self.tp_size}, "
                f"a group of as many ranks is accepted."
            )
        self.tp_name = groups.name_of(tp_group) if size > 1 else None

    def shared(self, splits_input: bool, sizes: tuple[int, ...]) -> Shared | None:
        """How the ranks share a map, whose chain takes pieces of K of these sizes on each."""
        if self.tp_size == 1 or self.tp_name is None:
            return None
        return Shared(self.tp_name, splits_input, self.sequence_parallel, sizes)

    def divided(self, name: str, size: int, why: str) -> int:
        """A rank's part of `size`, an argument of the constructor that is called `name`."""
        if size % self.tp_size:
            raise ValueError(
                f"{type(self).__name__}: {name}={size} with tp_size={self.tp_size}{why}; a multiple of {self.tp_size} "
                f"is accepted."
            )
        return size // self.tp_size

    def check_parallel_mode(self) -> None:
        """Refuse what no layer of several maps is offered for."""
        layer: Any = self
        name, here = type(self).__name__, f"tp_size={self.tp_size}"
        if self.tp_size > 1 and not layer.set_parallel_mode:
            raise ValueError(f"{name}: {here} with set_parallel_mode=False; True is accepted.")
        if self.tp_size > 1 and layer.quantized_init is not None:
            raise NotImplementedError(
                f"{name}: {here} in quantized_model_init is not offered; a layer that is made outside is accepted."
            )

    # --- tokens that ranks share (`reference.parallel.tokens`) -----------------------------------------

    @property
    def tokens(self) -> Tokens | None:
        """Which ranks have some of the tokens each."""
        return None if self.cp_name is None else Tokens(self.cp_name)

    def take_tokens(self, group: Any) -> None:
        """Let the ranks of a group have some of the tokens each, two chunks of every sequence; None ends that."""
        layer: Any = self
        self.cp_name = None if group is None or dist.get_world_size(group) == 1 else groups.name_of(group)
        if hasattr(layer, "_take_roles"):
            layer._take_roles()
            self.forget_precision()

    def check_tokens(self, precision: Any) -> None:
        """Refuse a forward of some tokens that ranks cannot share, before anything is changed."""
        layer: Any = self
        here = f"a group of {dist.get_world_size(groups.group_of(str(self.cp_name)))} ranks that share tokens"
        refuse_compiler(type(self).__name__, here)
        for one in layer.roles.gemms:
            for quantizer in (precision.gemms[one.part].input, precision.gemms[one.part].grad):
                if not can_be_gathered(quantizer):
                    raise NotImplementedError(
                        f"{type(self).__name__}: square blocks of tokens with {here} are not offered; blocks of 1 × "
                        f"128 are accepted."
                    )

    def check_rows_of_tokens(self, argument: str, x: torch.Tensor, least: int = 2, ranks: int = 1) -> None:
        """Refuse a tensor that is no two chunks of tokens, or whose shape differs between ranks.

        `least`: how many dimensions it must have; 1 for numbers of tokens, which have no features. `ranks`: as in
        `check_whole_chunks`.
        """
        refuse_compiler(type(self).__name__, "a group that shares tokens")
        check_same_on_ranks(type(self).__name__, argument, x, str(self.cp_name))  # first: no rank waits for another
        self.check_whole_chunks(argument, x, type(self).__name__, least, ranks)

    def check_whole_chunks(self, argument: str, x: torch.Tensor, layer: str, least: int = 2, ranks: int = 1) -> None:
        """Refuse a tensor that is no two chunks of tokens; `layer` names the caller.

        `ranks`: how many have some of the rows of the chunks each; sequence parallel, `tp_size`.
        """
        if x.dim() < least or x.shape[0] * ranks % (2 * BLOCK):
            accepted = "[sequence, ..., features]" if least > 1 else "[sequence, ...]"
            whose = "on each rank" if ranks == 1 else f"on the {ranks} ranks of tp_group together"
            raise ValueError(
                f"{layer}: {argument} has shape {list(x.shape)} with a group that shares tokens; "
                f"{accepted} is accepted, the sequence a multiple of {2 * BLOCK} {whose}."
            )

    # --- a whole layer becomes one that ranks share (`reference.parallel.styles`) ---------------------

    parallel_modes: tuple[str | None, ...] = ()
    """The modes that it can be given; None of a layer of several maps."""

    def parts_to_share(self, mode: str | None) -> Iterator[tuple[Any, str | None]]:
        """The layer, and those that it is made of, with the mode of each."""
        yield self, mode

    def divide(self, mode: str | None) -> None:
        """Take the sizes of this rank's part, as the constructor does with a group; parameters are cut later."""
        raise NotImplementedError

    # --- weights -------------------------------------------------------------------------------------

    def partitions(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Parameter → the dimension along which ranks have parts of it, and the sizes of the pieces of this rank's."""
        return {}

    def mark_parameters(self) -> None:
        """Set Megatron's attributes of parameters, by which it tells parts from copies."""
        layer: Any = self
        if self.tp_size > 1:
            for name, (dim, sizes) in self.partitions().items():
                if (parameter := layer._parameters.get(name)) is not None:
                    parameter.tensor_model_parallel = True
                    parameter.partition_dim, parameter.partition_stride = dim, len(sizes)

    def of_part(self, name: str, init_method: InitMethod) -> Callable[[torch.Tensor], Any]:
        """An initialisation of this rank's part: the whole weight is drawn, as one process draws it, and cut.

        All ranks have the weights of one process if they draw from one seed. Without a group there is no rank to cut
        for: the part itself is drawn.
        """
        found = self.partitions().get(name)
        if self.tp_size == 1 or self.tp_name is None or found is None:
            return init_method
        dim, sizes = found
        rank, count = dist.get_rank(self.tp_group), self.tp_size

        def fill(weight: torch.Tensor) -> None:
            shape = list(weight.shape)
            shape[dim] *= count
            whole = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            init_method(whole)
            with torch.no_grad():
                weight.copy_(part_of(whole, dim, sizes, rank, count))

        return fill

    # --- checks --------------------------------------------------------------------------------------

    def check_shared(self, precision: Any) -> None:
        """Refuse a forward whose chains would not have the words of one process, before anything is changed."""
        layer: Any = self
        name, here = type(self).__name__, f"tp_size={self.tp_size}"
        if self.tp_name is None:
            if getattr(self, "parallel_mode", None) is None and not getattr(self, "set_parallel_mode", False):
                return
            raise RuntimeError(
                f"{name}: {here} and no tp_group; set_tensor_parallel_group(group) before a forward is accepted."
            )
        refuse_compiler(name, here)
        for one in layer.roles.gemms:
            if one.shared is None:
                continue
            gemm, row = precision.gemms[one.part], one.shared.splits_input
            cut = cut_of(gemm.weight if row else gemm.grad, gemm.how.fprop if row else gemm.how.dgrad)
            for size in one.shared.sizes:
                if size % cut:
                    raise ValueError(
                        f"{name}: {here} gives a rank {size} {'columns' if row else 'rows'} of {one.parameter}, along "
                        f"which sums go through the ranks; a multiple of {cut} is accepted under this recipe."
                    )

    def check_rows(self, inp: torch.Tensor, splits_input: bool) -> None:
        """Refuse an input without a dimension for tokens, or one whose results cannot be scattered by rows."""
        if not self.sequence_parallel:
            return
        accepted = f"a multiple of {self.tp_size}" if splits_input else "any number"
        if inp.dim() < 2 or (splits_input and inp.shape[0] % self.tp_size):
            raise ValueError(
                f"{type(self).__name__}: inp has shape {list(inp.shape)} with sequence_parallel=True and "
                f"tp_size={self.tp_size}; [sequence, ..., features] is accepted, the sequence {accepted}."
            )

    def check_ranks(self, inp: torch.Tensor, splits_input: bool = False) -> None:
        """Refuse inputs whose shapes differ between the ranks that share a map, or its tokens.

        `splits_input`: as in `check_rows`; then a rank's input has all rows.
        """
        if self.cp_name is not None:
            self.check_rows_of_tokens("inp", inp, ranks=1 if splits_input else self.ranks_of_rows)
        if self.tp_name is not None and inp.device.type != "meta":
            check_same_on_ranks(type(self).__name__, "inp", inp, self.tp_name)

    @property
    def ranks_of_rows(self) -> int:
        """How many ranks have some of the rows each outside of the maps."""
        return self.tp_size if self.sequence_parallel else 1

    def lead(self, inp: torch.Tensor, gathers: bool, scatters: bool) -> tuple[int, ...]:
        """The dimensions before a result's features, of an input's."""
        if not self.sequence_parallel or gathers is scatters:
            return tuple(inp.shape[:-1])
        first = inp.shape[0] * self.tp_size if gathers else inp.shape[0] // self.tp_size
        return (first, *inp.shape[1:-1])


class TensorParallelParts(TensorParallel):
    """A layer that is made of such layers, which have the group."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give the group to the layer's parts; as theirs."""
        layer: Any = self
        self._take_group(tp_group)
        for part in layer.children():
            if isinstance(part, TensorParallel) and part.tp_size > 1:
                part.set_tensor_parallel_group(tp_group)
