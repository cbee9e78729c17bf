"""A step's gradients in the order of `reference.parallel.gradient_tree`, in one process and over ranks.

    order = te.parallel.GradientOrder(groups=8)
    model = DistributedDataParallel(model)                      # or not: a plain module does the same
    model.register_comm_hook(order, te.parallel.tree_hook)
    for numbers of steps:
        for number in order.microbatches(model, 16):            # of this rank, counted over all ranks
            with te.autocast(recipe=recipe):
                loss = loss_of(model, batch(step, number))
            (loss / 2).backward()                               # 16 / 8 microbatches a group
        optimizer.step()

Over ranks a piece of every sum belongs to each rank:

    all-to-all    each rank sends its nodes' pieces to the pieces' owners
    sums          the owner adds the nodes of its piece, as the tree says; times fp32(1/G); rounds to `.grad`'s dtype
    all-gather    of the pieces

Where each rank has one group, these are the bytes of a reduce-scatter and an all-gather in `.grad`'s dtype.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reference.arguments import is_group, is_int
from reference.ops.library import twin
from reference.parallel import flat_gradients, fully_sharded, peer_memory
from reference.parallel.bucket_places import BucketPlaces
from reference.parallel.gradient_tree import Nodes, additions, nodes, owned, push
from reference.parallel.peer_memory import Beat, PeerMemory
from reference.state import scaling
from reference.support import streams
from reference.support.dtensor import is_dtensor, placed, shard
from reference.support.groups import all_gather, bytes_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Sums = dict[torch.Tensor, torch.Tensor]  # by parameter


class GradientOrder:
    """The groups of a step, and the sums of those that this rank has done.

    Args:
        groups: of a step, on all ranks together; an int from the number of ranks on. It decides about bits.
        process_group: whose ranks share a step; None is the default group, or this process where there is none.
        peer_memory: whether ranks write to each other's GPU memory (`reference.parallel.peer_memory`), or use the
            process group's collectives (False); the words are the same. None: they do where their GPUs can.

    Attributes:
        mine: the numbers of this rank's groups, a range.
    """

    def __init__(self, groups: int, process_group: Any = None, peer_memory: bool | None = None) -> None:
        if process_group is not None and not is_group(process_group):
            raise TypeError(f"GradientOrder: process_group={process_group!r}; a process group or None is accepted.")
        ready = process_group is not None or (dist.is_available() and dist.is_initialized())
        self.process_group = process_group
        self.ranks, self.rank = (dist.get_world_size(process_group), dist.get_rank(process_group)) if ready else (1, 0)
        if not is_int(groups) or groups < self.ranks:
            raise ValueError(
                f"GradientOrder: groups={groups!r}; an int from {self.ranks}, the number of ranks, on is accepted."
            )
        self.groups = int(groups)
        self.mine = owned(self.groups, self.ranks, self.rank)
        if not (peer_memory is None or isinstance(peer_memory, bool)):
            raise TypeError(f"GradientOrder: peer_memory={peer_memory!r}; True, False or None is accepted.")
        self.peer_memory = peer_memory
        self._memory: PeerMemory | Literal[False] | None = None  # None: nobody has asked yet
        self._beat = Beat()
        self._additions = additions(self.groups, self.ranks)
        self._counts = [len(nodes(self.groups, owned(self.groups, self.ranks, rank))) for rank in range(self.ranks)]
        self._done: Nodes[Sums] = []
        self.most = -(-self.groups // self.ranks)  # groups of the rank that has most
        self.left = 0  # of this rank's microbatches of the step, the one under way among them
        self.ended = 0  # groups of the step that this rank has done, under fully_shard
        self.reduce_scatters: list[fully_sharded.TreeReduceScatter] = []
        self.trained: list[torch.Tensor] = []  # parameters that those have looked at
        self._hooked = False  # whether a hook has communicated in this step
        self._stream: Any = None
        self._places = BucketPlaces()

    def share(self, count: int) -> range:
        """The numbers of this rank's microbatches, of `count` in a step."""
        if not is_int(count) or count < 1 or count % self.groups:
            raise ValueError(
                f"GradientOrder: {count!r} microbatches in {self.groups} groups; a multiple of {self.groups} is "
                f"accepted."
            )
        each = count // self.groups
        return range(self.mine.start * each, self.mine.stop * each)

    def runs(self, count: int) -> range:
        """The numbers that this rank runs under `fully_shard`: its own, and where others have more, the next ones."""
        share = self.share(count)
        return range(share.start, share.start + self.most * (count // self.groups))

    def microbatches(self, model: torch.nn.Module, count: int, find_unused_parameters: bool = False) -> Iterator[int]:
        """The numbers of this rank's microbatches of one step; each is run, backward included, before the next.

        After the last, `.grad` is the mean over groups on every rank, and the scales of delayed scaling are updated, by
        amaxes of all microbatches (and ranks: `amax_reduction_group`). Before that no scale changes. A loop that is
        left early leaves gradients behind, and no scale.

        Args:
            model: whose gradients are None. A DistributedDataParallel has `tree_hook` with this order registered; it
                communicates during the last backward. With any other module the ranks communicate after it.
            count: microbatches of a step, on all ranks together; a multiple of the groups.
            find_unused_parameters: a parameter may have no gradient on some ranks; the ranks tell each other which.
                DistributedDataParallel has its own argument of that name.

        Raises:
            ValueError: count is no multiple of the groups, or a parameter has a gradient before the step.
            TypeError: a parameter has another dtype than those in `DTYPES`.
            RuntimeError: a step is open in this thread; the last backward ran without `tree_hook`; or, without
                find_unused_parameters, a parameter has no gradient on some rank: on all ranks.
        """
        share = self.share(count)
        parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        modules = fully_sharded.sharded_modules(model)
        self._check(model, parameters, bool(modules))
        if self.ranks > 1 and modules:
            yield from fully_sharded.microbatches(self, model, modules, parameters, count)
            return
        parallel = model if isinstance(model, DistributedDataParallel) else None
        self._places.begin(parallel)
        with scaling.once_a_step(), self._step():
            for number in share:
                self.left = share.stop - number
                last = self.left == 1
                # torch has no no_sync for a static graph's first backward; there the hook returns what it gets.
                synced = parallel is None or last or parallel.static_graph
                with (
                    contextlib.nullcontext() if synced else parallel.no_sync(),  # type: ignore[union-attr]
                    self._places.offered() if last else contextlib.nullcontext(),
                ):
                    yield number
                if not last and (number + 1) % (count // self.groups) == 0:
                    self._end_group(parameters, keep=parallel is not None)
            self.left = 0
            if parallel is None:
                self._finish(parameters, find_unused_parameters)
            elif not self._hooked:
                raise RuntimeError(
                    "GradientOrder: the last backward of the step communicated by no hook of this order; "
                    "model.register_comm_hook(order, te.parallel.tree_hook) is accepted."
                )
        self._places.end(parallel)

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Around a step: however it ends, nothing of it is left."""
        self._done, self._hooked = [], False
        try:
            yield
        finally:
            self.left = 0
            self._done = []  # fp32 sums as large as the model
            self._places.end(None)

    def pipelined(self, stage: torch.nn.Module, count: int, find_unused_parameters: bool = False) -> Iterator[range]:
        """The numbers of the microbatches of each of this rank's groups of a step: a schedule runs those of one group.

        For a rank that has a stage of a pipeline (`torch.distributed.pipelining`); `process_group` then has the ranks
        that have the same stage, or this rank alone. A schedule runs backward microbatch by microbatch, and so adds in
        a group's order. It is made with `scale_grads=False`. After the last group as `microbatches`.

        Args:
            stage: this rank's modules, whose gradients are None.
            count: microbatches of a step, on all ranks that have this stage.
            find_unused_parameters: as in `microbatches`.

        Raises:
            ValueError: count is no multiple of the groups, or a parameter has a gradient before the step.
            TypeError: a parameter has another dtype than those in `DTYPES`.
            NotImplementedError: the stage is a DistributedDataParallel, or `fully_shard` has divided it.
            RuntimeError: a step is open in this thread, or a parameter has no gradient on some rank.
        """
        self.share(count)
        parameters: list[torch.Tensor] = [p for p in stage.parameters() if p.requires_grad]
        if isinstance(stage, DistributedDataParallel) or fully_sharded.sharded_modules(stage):
            raise NotImplementedError(
                "GradientOrder.pipelined: a stage in DistributedDataParallel or fully_shard is not offered; the module "
                "itself is accepted."
            )
        self._check(stage, parameters, sharded=False)
        each = count // self.groups
        with scaling.once_a_step(), self._step():
            for group in self.mine:
                yield range(group * each, (group + 1) * each)
                if group + 1 < self.mine.stop:
                    self._end_group(parameters, keep=False)
            self._finish(parameters, find_unused_parameters)

    def _check(self, model: torch.nn.Module, parameters: Sequence[torch.Tensor], sharded: bool) -> None:
        """Refuse parameters of the model with a gradient, or of a kind that is not offered; `sharded`: some modules
        were given to `fully_shard`."""
        for p in parameters:
            if p.grad is not None:
                raise ValueError(
                    f"GradientOrder: {_name(model, p)} has a gradient before the step's first microbatch, to which "
                    f"others would be added; None is accepted (optimizer.zero_grad())."
                )
            if p.dtype not in DTYPES:
                raise TypeError(
                    f"GradientOrder: {_name(model, p)} is {p.dtype}; torch.float32, torch.bfloat16 and torch.float16 "
                    f"are accepted."
                )
            if not sharded and is_dtensor(p):
                raise NotImplementedError(
                    f"GradientOrder: {_name(model, p)} is a DTensor {list(placed(p)[1])} of no module that "  # type: ignore[index]
                    f"fully_shard sharded; plain parameters and those of fully_shard are accepted."
                )

    # --- sums of this rank ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _end_group(self, parameters: Iterable[torch.Tensor], keep: bool) -> None:
        """Move gradients, the sums of the next group, from `.grad` to the nodes.

        With `keep` a gradient of -0, to which any may be added, stays: DistributedDataParallel counts a parameter that
        it has seen used among those with a gradient.
        """
        sums = {}
        for p in parameters:
            if p.grad is not None:
                # A copy: `.grad` may be memory of a DDP bucket or of a CUDA graph.
                sums[p] = shard(p.grad).detach().to(torch.float32, copy=True)
                p.grad = torch.full_like(p, -0.0) if keep else None
        push(self._done, self._next(), sums, self.groups, _add)

    def _next(self) -> range:
        """The group that ends next."""
        start = self._done[-1][0].stop if self._done else self.mine.start
        return range(start, start + 1)

    @torch.no_grad()
    def _finish(self, parameters: list[torch.Tensor], find_unused: bool) -> None:
        """End the last group, and make `.grad` the mean on every rank."""
        if self.groups == 1:
            return
        for bucket in flat_gradients.buckets(self._used(parameters, find_unused)):
            flat = shard(bucket[0]).new_empty(sum(p.numel() for p in bucket))
            leaf = dict(zip(bucket, flat_gradients.views(flat, bucket), strict=True))
            for p, view in leaf.items():
                view.fill_(-0.0) if p.grad is None else view.copy_(shard(p.grad))
            self._mean(flat, leaf)
            for p, view in leaf.items():
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                shard(p.grad).copy_(view)  # in place: it may be memory of a CUDA graph
        if parameters:
            self.beat(parameters[0].device)

    def _used(self, parameters: list[torch.Tensor], find_unused: bool) -> list[torch.Tensor]:
        """The parameters that have a gradient on any rank."""
        used = [p.grad is not None or any(p in sums for _, sums in self._done) for p in parameters]
        if self.ranks > 1 and parameters:
            if find_unused:
                flags = torch.tensor(used, dtype=torch.int32, device=parameters[0].device)
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
                used = [flag > 0 for flag in flags.tolist()]
            else:
                self._refuse_unused(used, parameters[0].device)
        return [p for p, one in zip(parameters, used, strict=True) if one]

    def _refuse_unused(self, used: list[bool], device: torch.device) -> None:
        """Refuse, on every rank, a parameter without a gradient on any: the others would wait for this one."""
        first = len(used) if all(used) else used.index(False)
        found = torch.tensor([(len(used) - first) * self.ranks + self.rank], dtype=torch.int64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.process_group)
        left, rank = divmod(int(found), self.ranks)
        if left:
            raise RuntimeError(
                f"GradientOrder: parameter {len(used) - left} of the model (of those that train) has no gradient on "
                f"rank {rank}; find_unused_parameters=True is accepted."
            )

    # --- sums over ranks -----------------------------------------------------------------------------------

    def _mean(self, flat: torch.Tensor, leaf: Sums) -> None:
        """Replace `flat` [n], whose parts `leaf` are this rank's last group, by the mean over all groups."""
        if not flat.numel():  # on every rank
            return
        found: Nodes[torch.Tensor] = []
        for which, sums in self._done:
            node = torch.full_like(flat, -0.0, dtype=torch.float32)
            for p, part in leaf.items():
                if p in sums:
                    flat_gradients.part_of(node, part, flat).copy_(sums[p])
                    if sums[p].is_cuda:  # made on another stream, perhaps
                        sums[p].record_stream(streams.current(flat.device))
            found.append((which, node))
        push(found, self._next(), flat, self.groups, torch.Tensor.add_)
        if self.ranks == 1:
            flat.copy_(self._scaled(found[0][1]))
        else:
            size = -(-flat.numel() // self.ranks)  # numbers of a piece
            own = flat[self.rank * size : (self.rank + 1) * size]  # from which the other ranks get it
            if own.numel() < size:
                own = flat.new_empty(size)
            self.piece([node for _, node in found], own)
            self._gather(own, flat)

    def _gather(self, piece: torch.Tensor, out: torch.Tensor) -> None:
        """Write to `out` [n] the pieces [size] of all ranks, one after the other; what is beyond n is left out."""
        if (memory := self._peer_memory(out.device)) is not None:
            memory.gather(bytes_of(piece), bytes_of(out))
            return
        size = piece.numel()
        whole = out.numel() == self.ranks * size
        target = out if whole else out.new_empty(self.ranks * size)
        all_gather(bytes_of(target), bytes_of(piece), group=self.process_group)
        if not whole:
            out.copy_(target[: out.numel()])

    def piece(self, mine: list[torch.Tensor], out: torch.Tensor) -> None:
        """Write to `out` this rank's piece of the mean of all ranks' nodes.

        Args:
            mine: this rank's nodes, [n] with n at most ranks · size; in fp32, or that of one group in out's dtype.
            out: contiguous [size], of `.grad`'s dtype; it may be this rank's place in the node of one group.
        """
        ranks, size = self.ranks, out.numel()
        dtype = out.dtype if self.groups == ranks else torch.float32
        if len(mine) == 1 and mine[0].numel() == ranks * size and mine[0].dtype == dtype:
            given = mine[0]
        else:
            given = out.new_zeros(ranks, len(mine), size, dtype=dtype)
            for i, node in enumerate(mine):
                flat_gradients.write_rows(given[:, i], node)
        counts = self._counts
        if (memory := self._peer_memory(out.device)) is not None:
            sizes = [count * size * given.element_size() for count in counts]
            parts = memory.exchange(bytes_of(given).split(sizes[self.rank]), sizes)
            found = [part.view(dtype) for part in parts]
            pieces = found if max(counts) == 1 else [row for part in found for row in part.split(size)]
        else:
            whole = out.new_empty(sum(counts), size, dtype=dtype)
            flat_gradients.all_to_all(whole, given, counts, [len(mine)] * ranks, size, self.process_group)
            pieces = list(whole)
        twin.tree_mean(pieces, self._additions, 1 / self.groups, out)

    def beat(self, device: torch.device) -> None:
        """Start a `Beat` at the end of a step whose exchanges were in peers' memory."""
        if self._peer_memory(device) is not None:
            self._beat.start(self.process_group, device)

    def _peer_memory(self, device: torch.device) -> PeerMemory | None:
        """How this order's ranks exchange, None: by the process group's collectives; all ranks ask for it alike."""
        if device.type != "cuda" or self.ranks == 1 or torch.cuda.is_current_stream_capturing():
            return None  # a graph would wait for the same numbers at each replay
        if self._memory is None:
            group = self.process_group or dist.group.WORLD
            why = peer_memory.obstacle(group, device, self.peer_memory)
            if why and self.peer_memory:
                raise RuntimeError(f"GradientOrder: peer_memory=True, but {why}; None or False is accepted.")
            self._memory = False if why else PeerMemory(group, device)
        return self._memory or None

    def _scaled(self, total: torch.Tensor) -> torch.Tensor:
        """fp32 sums, in place times fp32(1/G)."""
        if self.groups == 1:
            return total
        return total.mul_(float(np.float32(1 / self.groups)))

    # --- the hook ------------------------------------------------------------------------------------------

    def _hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """`tree_hook`."""
        flat = bucket.buffer()
        if flat.dtype not in DTYPES:
            raise TypeError(
                f"tree_hook: a bucket of {flat.dtype}; torch.float32, torch.bfloat16 and torch.float16 are accepted."
            )
        if self.left == 0:
            raise RuntimeError(
                "tree_hook: a backward outside of the loop of GradientOrder.microbatches; one inside is accepted."
            )
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[flat.device] if flat.device.type == "cuda" else []
        )
        if self.left > 1:  # of a static graph
            done.set_result(flat)
            return done
        self._hooked = True
        # Where each gradient lies costs the host more than the rest, so it is asked for only if it matters.
        leaf = {}
        if self._done or any(p.grad is None for p in bucket.parameters()):
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            leaf = {p: flat_gradients.laid_out(view, p) for p, view in pairs}
        self._places.learn(bucket)
        for p, view in leaf.items():
            if p.grad is None:  # DistributedDataParallel has put +0 there
                view.fill_(-0.0)
        if flat.device.type != "cuda":
            self._mean(flat, leaf)
            done.set_result(flat)
            return done
        # Beside backward, on a stream of its own; who waits for the future waits for this stream.
        if self._stream is None:
            # Its kernels begin as soon as a multiprocessor is free.
            self._stream = torch.cuda.Stream(flat.device, priority=-1)
        self._stream.wait_stream(streams.current(flat.device))
        with streams.On(self._stream):
            self._mean(flat, leaf)
            if bucket.is_last():
                self.beat(flat.device)
            done.set_result(flat)
        return done


def _name(model: torch.nn.Module, parameter: torch.Tensor) -> str:
    return next(name for name, p in model.named_parameters() if p is parameter)


def tree_hook(order: GradientOrder, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DistributedDataParallel: the mean over groups, in the tree's order.

    `model.register_comm_hook(order, tree_hook)`. It runs in the last backward of `order.microbatches`. Over NCCL it
    overlaps with backward.
    """
    with torch.no_grad():
        return order._hook(bucket)


def _add(left: Sums, right: Sums) -> Sums:
    """The sums of both, in the memory of `left`; what is missing in one is not added."""
    both = [p for p in left if p in right]
    if both:
        torch._foreach_add_([left[p] for p in both], [right[p] for p in both])
    return right | left
