"""Training on several ranks whose bits do not depend on how many there are.

    gradient_tree.py    the order of a step's gradients: groups of microbatches, and a binary tree over groups
    flat_gradients.py   gradients one after the other in one tensor, as ranks exchange them
    gradient_order.py   that order in one process, over ranks, and as a hook of DistributedDataParallel
    fully_sharded.py    that order as the reduce-scatter of FSDP2's fully_shard, and an all-gather for it
    peer_memory.py      what ranks of one host send to each other by copy engines
    ordered_reduce.py   a sum over K that passes from rank to rank
    exchange.py         such a sum of many rows, of which each rank computes some
    messages.py         messages in the memory of other ranks of the host
    tensor.py           layers whose weights the ranks of a group share
    context.py          attention of a sequence whose tokens they share
    tokens.py           the layers around it
    styles.py           styles for PyTorch's parallelize_module
    vocabulary.py       embedding and cross-entropy of a vocabulary that they share
    tensor_state.py     one process's state, cut for ranks and joined
    ending.py           ranks that end together, and say why

docs/numerics.md says what is computed, in its sections on what ranks share.
"""

from reference.parallel.ending import RanksEnded, ending_together
from reference.parallel.fully_sharded import copy_engine_all_gather, tree_reduce_scatter
from reference.parallel.gradient_order import GradientOrder, tree_hook
from reference.parallel.tokens import share_tokens, tokens_of_rank

__all__ = [
    "GradientOrder",
    "RanksEnded",
    "copy_engine_all_gather",
    "ending_together",
    "share_tokens",
    "tokens_of_rank",
    "tree_hook",
    "tree_reduce_scatter",
]
