"""FSDP2 (`torch.distributed.fsdp.fully_shard`): gradients in the order of `reference.parallel.gradient_tree`.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    order = te.parallel.GradientOrder(groups=8)
    te.parallel.tree_reduce_scatter(model, order)
    for number in order.microbatches(model, 16):    # forward and backward of one, as with any model

FSDP2 reduces the gradients of each module that it was given together, and lets a program choose the reduce-scatter
(`FSDPModule.set_custom_reduce_scatter`). Ours is called where a group of microbatches ends:

    not the step's last   the gradients join the nodes of this rank; -0 goes to the shards, to which any may be added
    the last              each rank sends its nodes' pieces to the pieces' owners, who add them as the tree says

On a mesh of two dimensions, [replicas, shards], each rank of the mesh owns a piece: the ranks that have the same shard
share it. Each writes its piece's sum and -0 elsewhere, and FSDP2's own all-reduce over the replicas puts them together:
x + -0 is x, in any order; of a NaN it is a NaN, whose word may be another.

Inside a group FSDP2 adds whole gradients, as a program of one process does. So a rank keeps whole gradients, and fp32
sums as large where it has several groups; with one group a rank there are none.

Every forward gathers weights from all ranks, so that all must run equally many. A rank that has fewer groups than
another also runs the next rank's first group, and drops its gradients. Amaxes, a maximum, do not change by that.
Where a group has several microbatches, a module that was given to `fully_shard` and runs twice in one is refused.

A loop that is left inside a group leaves whole gradients in the model, and torch has no call that removes them. So the
model's next step is refused.

torch.distributed.fsdp is not imported here: a program that has sharded a model has imported it.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from reference.parallel.gradient_tree import Nodes, push
from reference.parallel.peer_memory import PeerMemory, of_group
from reference.state import scaling
from reference.support.dtensor import is_dtensor, placed
from reference.support.groups import all_gather, bytes_of

Order = Any  # a GradientOrder, whose module imports this one

WHO = "tree_reduce_scatter"
_left: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules with gradients of a group that did not end


def sharded_modules(model: torch.nn.Module) -> list[Any]:
    """The modules to which `fully_shard` was applied, from the outside in."""
    cls = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if cls is None else [module for module in model.modules() if isinstance(module, cls)]


def tree_reduce_scatter(model: torch.nn.Module, order: Order) -> None:
    """Let `fully_shard`'s modules of `model` reduce gradients in `order`, inside of the loop of its microbatches.

    Args:
        model: which has modules that `fully_shard` sharded, over the ranks of the order.
        order: a GradientOrder.

    Raises:
        ValueError: there are no such modules, or they are sharded over others than the order's ranks.
        NotImplementedError: over a mesh other than [shards] or [replicas, shards].
    """
    modules = sharded_modules(model)
    if not modules:
        raise ValueError(f"{WHO}: no module of the model was given to fully_shard; one or more is accepted.")
    check_parameters(WHO, model, order)
    found: dict[int, TreeReduceScatter] = {}
    for module in modules:
        # `fully_shard` of a list of modules has one state, and one reduce-scatter, for all of them.
        key = id(module._get_fsdp_state())
        found.setdefault(key, TreeReduceScatter(order)).add(module)
        module.set_custom_reduce_scatter(found[key])
    order.reduce_scatters, order.trained = list(found.values()), []


def check_parameters(who: str, model: torch.nn.Module, order: Order) -> None:
    """`check_parameter` of those that train."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            check_parameter(who, name, p, order)


def check_parameter(who: str, name: str, p: torch.Tensor, order: Order) -> None:
    """Refuse what `fully_shard` has not sharded over the ranks of the order, and no others."""
    if not is_dtensor(p):
        raise ValueError(
            f"{who}: {name} is not sharded, so that its gradient is that of one rank; a parameter of fully_shard is "
            f"accepted, or one that does not train."
        )
    mesh, (*others, last) = placed(p)  # type: ignore[misc]
    if mesh.ndim > 2 or not last.is_shard() or not all(one.is_replicate() for one in others):
        raise NotImplementedError(
            f"{who}: {name} has {[*others, last]} over a mesh {tuple(mesh.shape)}; [Shard], or [Replicate, Shard] "
            f"as of fully_shard over a mesh of two dimensions, is accepted."
        )
    if mesh.ndim == 2 and shards(mesh) == 1:
        raise NotImplementedError(
            f"{who}: {name} is sharded over a mesh {tuple(mesh.shape)}, which divides nothing; several ranks in the "
            f"second dimension, or DistributedDataParallel, are accepted."
        )
    theirs = mesh.mesh.flatten().tolist()
    ours = dist.get_process_group_ranks(order.process_group) if order.ranks > 1 else [dist.get_rank()]
    if theirs != ours:
        raise ValueError(f"{who}: {name} is sharded over the ranks {theirs}; {ours}, the order's, are accepted.")


def shards(mesh: Any) -> int:
    """How many parts `fully_shard` over this mesh makes of a parameter."""
    count: int = mesh.size(mesh.ndim - 1)
    return count


def copy_engine_all_gather(model: torch.nn.Module) -> None:
    """Let `fully_shard`'s modules gather weights by their GPUs' copy engines (`reference.parallel.peer_memory`).

    NCCL's kernels and persistent ones wait for each other. Where ranks cannot write to each other's memory, or each
    sees one GPU alone, the process group gathers as before. The words are the same. Without a backward no collective is
    in flight, so that nothing tells a rank that another is gone.

    Args:
        model: which has modules that `fully_shard` sharded.

    Raises:
        ValueError: there are no such modules.
    """
    modules = sharded_modules(model)
    if not modules:
        raise ValueError(
            "copy_engine_all_gather: no module of the model was given to fully_shard; one or more is accepted."
        )
    for module in modules:
        module.set_custom_all_gather(CopyEngineAllGather())


class CopyEngineAllGather:
    """torch's interface `AllGather`. The memory that ranks write to is one for all modules."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """From `input_tensor` [n], which may be this rank's part of it, to `output_tensor` [ranks · n]."""
        memory = of_group(group, input_tensor, PeerMemory)
        if memory is None:
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        memory.gather(bytes_of(input_tensor), bytes_of(output_tensor))
        return None


class TreeReduceScatter:
    """The reduce-scatter of what `fully_shard` was given together: torch's interface `ReduceScatter`."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.modules: list[Any] = []
        self.done: Nodes[torch.Tensor] = []
        self.called = 0  # groups of the step that have ended
        self.trained: list[torch.Tensor] = []
        self.numbers = 0  # of their gradients, with shards of one size

    def add(self, module: Any) -> None:
        self.modules.append(module)

    def parameters(self) -> list[torch.Tensor]:
        """Those that it reduces, which train; not those of modules inside that `fully_shard` was given, too."""
        nested = {
            id(p)
            for m in self.modules
            for one in sharded_modules(m)
            if one not in self.modules
            for p in one.parameters()
        }
        own = {p: None for m in self.modules for p in m.parameters() if id(p) not in nested and p.requires_grad}
        return list(own)

    def look(self) -> None:
        """Note which parameters train."""
        self.trained = self.parameters()
        self.numbers = sum(_padded(p) for p in self.trained)

    def begin(self) -> None:
        """A step begins: sums without division."""
        self.done, self.called = [], 0
        for module in self.modules:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    def synchronize(self, enabled: bool, last: bool) -> None:
        """Whether the next backward ends a group, and the last one, whose sums replicas put together."""
        for module in self.modules:
            module.set_requires_gradient_sync(enabled, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """From `input_tensor` [ranks · n], a group's sums, to `output_tensor` [n]; on the stream that FSDP2 chose."""
        order = self.order
        self._check(input_tensor)
        number = order.mine.start + self.called
        self.called += 1
        last = self.called == order.most
        if number < order.mine.stop:
            leaf = input_tensor if last else input_tensor.to(torch.float32, copy=True)
            push(self.done, range(number, number + 1), leaf, order.groups, torch.Tensor.add_)
        replicas, size = order.ranks // group.size(), output_tensor.numel()
        if not last or replicas > 1:  # else all of it is written below
            output_tensor.fill_(-0.0)
        if last:
            each = -(-size // replicas)
            nodes = [_turned(node, group.size(), replicas, each) for _, node in self.done]
            place = slice(order.rank // group.size() * each, (order.rank // group.size() + 1) * each)
            own = output_tensor[place]
            piece = own if own.numel() == each else own.new_empty(each)
            order.piece(nodes, piece)
            if piece is not own:
                own.copy_(piece[: own.numel()])
            self.done = []

    def _check(self, given: torch.Tensor) -> None:
        """Refuse gradients that are not one group's, of all parameters and in their dtype."""
        order = self.order
        what = f"{WHO}: the gradients of {type(self.modules[0]).__name__}"
        if order.left == 0:
            raise RuntimeError(
                f"{what}: a backward outside of the loop of GradientOrder.microbatches; one inside is accepted."
            )
        if self.called != order.ended:
            raise RuntimeError(
                f"{what} are reduced {self.called + 1} times in {order.ended + 1} groups of microbatches; once in each "
                f"is accepted."
            )
        dtype = self.trained[0].dtype
        if given.dtype != dtype:
            raise TypeError(
                f"{what} are reduced in {given.dtype}, and .grad is {dtype}, in which groups are added; "
                f"MixedPrecisionPolicy(reduce_dtype={dtype}) is accepted."
            )
        if given.numel() != self.numbers:
            raise RuntimeError(
                f"{what} have {given.numel()} numbers, and its parameters {self.numbers}: one has no gradient in a "
                f"group. Under fully_shard each parameter that trains must have one."
            )


def _padded(p: torch.Tensor) -> int:
    """Numbers of a parameter whose shards have one size."""
    mesh, (*_, placement) = placed(p)  # type: ignore[misc]
    size, count = p.shape[placement.dim], shards(mesh)
    return p.numel() // size * (-(-size // count) * count) if size else 0


def _turned(node: torch.Tensor, count: int, replicas: int, each: int) -> torch.Tensor:
    """`node` [shards · n] as [replicas, shards, each], flat: of a shard `each` for each replica's rank, or 0."""
    if replicas == 1:
        return node
    found = node.new_zeros(count, replicas * each)
    found[:, : node.numel() // count] = node.view(count, -1)
    return found.view(count, replicas, each).transpose(0, 1).reshape(-1)


def microbatches(
    order: Order, model: torch.nn.Module, modules: Sequence[Any], trained: list[torch.Tensor], count: int
) -> Iterator[int]:
    """`GradientOrder.microbatches` of a model that `fully_shard` has sharded over several ranks.

    `modules` are the model's `sharded_modules`, `trained` its parameters that train.
    """
    found = order.reduce_scatters
    if {id(m) for one in found for m in one.modules} != set(map(id, modules)):
        raise RuntimeError(
            "GradientOrder: modules of fully_shard reduce gradients in an order of their own; "
            "te.parallel.tree_reduce_scatter(model, order) before the loop is accepted."
        )
    if list(map(id, trained)) != list(map(id, order.trained)):  # seldom: looking at all of them takes long
        check_parameters("GradientOrder", model, order)
        for one in found:
            one.look()
        order.trained = trained
    if any(module in _left for one in found for module in one.modules):
        raise RuntimeError(
            "GradientOrder: the loop of an earlier step was left inside a group of microbatches, and fully_shard keeps "
            "its gradients, to which others would be added; a model that is made anew is accepted."
        )
    each = count // order.groups
    runs = order.runs(count)
    for one in found:
        one.begin()
    try:
        with scaling.once_a_step():
            for number in runs:
                order.left, order.ended = runs.stop - number, (number - runs.start) // each
                for one in found:
                    one.synchronize((number + 1) % each == 0, order.ended + 1 == order.most)
                yield number
            for one in found:
                if one.called != order.most and one.trained:
                    raise RuntimeError(
                        f"GradientOrder: the gradients of {type(one.modules[0]).__name__} were reduced {one.called} "
                        f"times in {order.most} groups; a backward of it in each microbatch is accepted."
                    )
        if trained:
            order.beat(trained[0].device)
    finally:
        order.left = 0
        for one in found:
            if each > 1 and one.trained and one.called <= order.ended:
                _left.update(one.modules)
            one.done = []  # fp32 sums as large as the model
