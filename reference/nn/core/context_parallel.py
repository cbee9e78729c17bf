"""Context parallelism's group, given to a layer after it was made: its arguments are checked as the constructor's.

Megatron-LM and NeMo make a model first and call this method of every layer that has it.
"""

from typing import Any

from reference.arguments import check_arguments


class ContextGroup:
    """A layer that takes a context-parallel group."""

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Accept what the layer's constructor accepts: None and one rank, or several (`SharesContext`)."""
        given = {"cp_group": cp_group, "cp_global_ranks": cp_global_ranks}
        check_arguments(type(self).__name__, {**given, "cp_stream": cp_stream, "cp_comm_type": cp_comm_type})
