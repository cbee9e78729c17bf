"""A CUDA graph of a generator's step, imitated on a CPU."""

from collections.abc import Callable
from typing import Any

import reference as te
from reference.generation.sampling import Drawing
from reference.nn.attentions.fixed_step import FixedStep


class Frozen:
    """What a graph does: a step runs again, with all that Python said when it was captured; only tensors are others."""

    def __init__(self, made: te.Generator) -> None:
        self.cache, self.captures, self.replays = made.cache, 0, 0
        assert made._graphed is not None
        self.forward, self.run = made._graphed._forward, made._graphed.run
        made._graphed.capture = self.capture  # type: ignore[method-assign]
        made._graphed.can_capture = lambda device: True  # type: ignore[method-assign]

    def capture(self, fixed: FixedStep, drawing: Drawing | None) -> Callable[[], None]:
        self.captures += 1
        cache, said = self.cache, {}
        step_of, check = cache.step_of, cache.check
        positions = cache.positions

        def seen(core: Any, *rest: Any) -> Any:
            said[core.layer_number] = step_of(core, *rest)
            return said[core.layer_number]

        cache.step_of = seen  # type: ignore[method-assign]
        self.forward(fixed.tokens, drawing)
        cache.step_of = step_of  # type: ignore[method-assign]

        def replay() -> None:
            self.replays += 1
            assert cache.positions is positions
            cache.step_of = lambda core, *rest: said[core.layer_number]  # type: ignore[method-assign]
            cache.check = lambda *rest: None  # type: ignore[method-assign]
            try:
                self.run(fixed, drawing)
            finally:
                cache.step_of, cache.check = step_of, check  # type: ignore[method-assign]

        return replay
