"""Optimizers and gradient clipping: each step is a few ops of `twin`, with the same bits on a CPU and on a GPU."""

from reference.optimizers.adafactor import Adafactor
from reference.optimizers.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from reference.optimizers.fused_adam import FusedAdam
from reference.optimizers.fused_sgd import FusedSGD
from reference.support import not_offered

__all__ = ["Adafactor", "FusedAdam", "FusedSGD", "clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"]

not_offered.explain(__name__)
