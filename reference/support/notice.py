"""Notices: logged once per process by the logger `twin`, and on stderr for what takes long."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

PATIENCE = 2.0  # seconds of silence before a compilation says that it is running
_log = logging.getLogger("twin")
_said: set[str] = set()


def say_once(topic: str, sentence: str) -> None:
    """Warn, unless there was a warning about `topic`; `sentence` has no full stop."""
    if topic not in _said:
        _said.add(topic)
        _log.warning("%s (said once).", sentence)


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """Print `text` on stderr if what is inside takes longer than a moment."""
    timer = threading.Timer(PATIENCE, lambda: print(f"twin-engine: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
