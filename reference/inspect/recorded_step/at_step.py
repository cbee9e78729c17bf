"""A recording of one step of a training loop: it begins and ends with a step of the optimizer."""

from types import TracebackType
from typing import Any

from torch.utils.hooks import RemovableHandle

from reference.arguments import is_int


class AtStep:
    """Around a training loop: the recorder is open in its step number `step`; see
    `reference.inspect.recorded_step.record`.

    Attributes:
        made: steps that the optimizer has made inside the block. One that a scaler skips is none.
    """

    def __init__(self, recorder: Any, optimizer: Any, step: Any) -> None:
        if not is_int(step) or step < 1:
            raise ValueError(f"record: step={step!r}; None or an int of at least 1 is accepted.")
        if optimizer is None:
            raise ValueError(
                f"record: step={step} without an optimizer, whose steps are counted; record(model, path, optimizer, "
                f"step={step}) is accepted."
            )
        self.recorder, self.optimizer, self.step = recorder, optimizer, int(step)
        self.made = 0
        self._records = False
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> "AtStep":
        if self._handle is not None or self.made:
            raise RuntimeError("record: this recording has been opened; te.record(...) for each step is accepted.")
        if self.step == 1:
            self._begin()
        self._handle = self.optimizer.register_step_post_hook(self._stepped)
        return self

    def _begin(self) -> None:
        self.recorder.__enter__()
        self._records = True

    def _stepped(self, *_: Any) -> None:
        self.made += 1
        if self.made == self.step - 1:
            self._begin()
        elif self.made == self.step:
            self._records = False
            self.recorder.__exit__(None, None, None)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._handle is not None
        self._handle.remove()
        if self.made >= self.step:
            return
        short = RuntimeError(
            f"record: step={self.step}, and the optimizer made {self.made} steps in the block, so nothing was written; "
            f"a step that it completes is accepted."
        )
        if self._records:
            self.recorder.__exit__(*((RuntimeError, short, None) if error_type is None else (error_type, error, trace)))
        if error_type is None:
            raise short
