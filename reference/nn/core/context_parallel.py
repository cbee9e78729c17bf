"""Context parallelism's group, given to a layer after it was made: one rank is accepted, as by the constructors.

Megatron-LM and NeMo make a model first and call this method of every layer that has it.
"""

from typing import Any

from reference.arguments import check_arguments


class ContextGroup:
    """A layer that takes a context-parallel group."""

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Accept None and a process group of one rank, as `DotProductAttention`'s arguments; refuse more ranks."""
        given = {"cp_group": cp_group, "cp_global_ranks": cp_global_ranks}
        check_arguments(type(self).__name__, {**given, "cp_stream": cp_stream, "cp_comm_type": cp_comm_type})
