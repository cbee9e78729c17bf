"""Runs pairs of functions (`reference.nn.core.autograd`), from tapes where it can."""

import functools
from typing import Any

import torch

from optimized.cuda import precompile
from optimized.tapes.call_groups import CallGroup, Function, run_or_play, specification
from reference.nn.core import autograd
from reference.state import gradient_places
from reference.support import unwritten
from reference.support.nested import Tensors, flatten, rebuild

_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


class TapeRunner(autograd.Runner):
    """What `optimized` registers in `reference.nn.core.autograd`, in place of `Runner`, which always runs a pair."""

    def prepare(self, pair: Any, plan: Any, context: Any, tensors: Tensors, backward: Any) -> None:
        precompile.compile_plain(pair, backward, plan, context, tensors)

    def forward(self, pair: Any, plan: Any, context: Any, tensors: Tensors, backward: Any) -> tuple[Any, Tensors, Any]:
        # Hooks that move what is saved (offloading) or compare it (checkpoint) get tensors, not arenas.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        plain = hooked or tensors[0] is None or not tensors[0].is_cuda or torch._C._len_torch_dispatch_stack()
        plain = plain or bool(unwritten.here.addresses)  # launches that are right there alone
        # A weight that is kept in FP8 comes quantized; its tensors lie where they lay in the step before.
        inputs, form = tensors, None
        if not _PLAIN.issuperset(map(type, tensors)):
            inputs, form = flatten(tensors)
        # A pair without a module is a single op, which launches as fast by itself.
        if plain or not context.modules or not context.playable or not _PLAIN.issuperset(map(type, inputs)):
            self.prepare(pair, plan, context, tensors, backward)
            return super().forward(pair, plan, context, tensors, backward)
        state, changed = context.state(backward=False)

        ran: list[Any] = []  # the form of what was saved, if the pair ran

        def run() -> tuple[Tensors, Tensors]:
            out, saved = pair(plan, context, *tensors)
            flat, of_saved = flatten(saved)
            ran.append(of_saved)
            return (out if isinstance(out, tuple) else (out,)), flat

        compile_both = functools.partial(precompile.compile_pair, pair, backward, plan, context, tensors)
        key = (pair, plan, form, tensors[0].device.index, *specification(inputs), *specification(context.reads))  # type: ignore[union-attr]
        out, saved, group = run_or_play(lambda: run, key, inputs, state, compile_both)
        out = out if len(out) > 1 else out[0]  # type: ignore[assignment]
        if group is None:
            return out, saved, ran[0]
        if ran:
            group.form = ran[0]
        if changed:
            torch.autograd.graph.increment_version(changed)
        return out, saved, group

    def backward(self, pair: Any, plan: Any, context: Any, saved: Tensors, grads: Tensors, note: Any) -> Tensors:
        if not isinstance(note, CallGroup):
            return super().backward(pair, plan, context, saved, grads, note)
        group = note

        def prepare() -> Function:
            found = rebuild(group.form, group.found(saved))
            return lambda: (pair(plan, context, found, *grads), ())

        if torch._C._len_torch_dispatch_stack() or not context.settled:
            return prepare()()[0]
        state, changed = context.state(backward=True)
        # The group stands for the plan, and for the shapes and dtypes of what was saved.
        places = {one.number: one.place for one in gradient_places.here.taken}
        key = (pair, group, tuple(places), *specification(grads))
        results, _, played = run_or_play(prepare, key, (*grads, *saved), state, places=places)
        if played is not None and changed:
            torch.autograd.graph.increment_version(changed)
        return results
