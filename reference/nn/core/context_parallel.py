"""Context parallelism's group, given to a layer after it was made: its arguments are checked as the constructor's.

Megatron-LM and NeMo make a model first and call this method of every layer that has it.
"""

from typing import Any

import torch.distributed as dist

from reference.arguments import check_arguments
from reference.support import groups


def take_context_group(module: Any, cp_group: Any, cp_global_ranks: Any, cp_comm_type: str) -> None:
    """Keep the group's name; None, and a group of one rank, are none."""
    name = type(module).__name__
    size = 1 if cp_group is None else dist.get_world_size(cp_group)
    if cp_global_ranks is not None and len(cp_global_ranks) != size:
        raise ValueError(
            f"{name}: cp_global_ranks={cp_global_ranks!r}; None and a list of the ranks of cp_group, {size}, are "
            f"accepted."
        )
    if size > 1 and cp_comm_type != "all_gather":
        raise NotImplementedError(
            f"{name}: cp_comm_type={cp_comm_type!r} with a cp_group of {size} ranks is not offered; 'all_gather' is "
            f"accepted."
        )
    module.cp_name = groups.name_of(cp_group) if size > 1 else None
    module.cp_comm_type = cp_comm_type


class ContextGroup:
    """A layer that takes a context-parallel group."""

    cp_name: str | None = None

    @property
    def cp_group(self) -> Any:
        """The process group, where it has several ranks; else None."""
        return None if self.cp_name is None else groups.group_of(self.cp_name)

    @property
    def cp_size(self) -> Any:
        """How many ranks share the tokens."""
        return 1 if self.cp_name is None else dist.get_world_size(self.cp_group)

    @property
    def cp_rank(self) -> Any:
        """This process's rank among them."""
        return 0 if self.cp_name is None else dist.get_rank(self.cp_group)

    def check_context(self, here: str) -> None:
        """Refuse settings of the layer with which no ranks can share its tokens; `here` says how many."""

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Give the group, as Megatron-LM and NeMo do; the parts of a layer get it, too.

        Each rank then has its two chunks of every sequence (`te.parallel.tokens_of_rank`), and every gradient of the
        layer is that of all tokens, on each rank (`reference.parallel.tokens`).

        Args:
            cp_group: a process group; None, or one of one rank, ends it.
            cp_global_ranks: its ranks, or None.
            cp_stream: without effect.
            cp_comm_type: of several ranks "all_gather"; Transformer Engine's others are not offered.
        """
        name = type(self).__name__
        given = {"cp_group": cp_group, "cp_global_ranks": cp_global_ranks}
        check_arguments(name, {**given, "cp_stream": cp_stream, "cp_comm_type": cp_comm_type})
        size = 1 if cp_group is None else dist.get_world_size(cp_group)
        if size > 1:
            self.check_context(f"a cp_group of {size} ranks")
        take_context_group(self, cp_group, cp_global_ranks, cp_comm_type)
        layer: Any = self
        for part in layer.children():
            if hasattr(part, "set_context_parallel_group"):
                part.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
            elif hasattr(part, "take_tokens"):
                part.take_tokens(cp_group)
