"""Notices: said once per process on the logger `twin`, and on stderr where something takes long."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

PATIENCE = 2.0  # seconds of silence before a compilation says that it is running
_log = logging.getLogger("twin")
_said: set[str] = set()


def say_once(topic: str, sentence: str) -> None:
    """Warn, unless something has been said about `topic`; `sentence` ends without its full stop."""
    if topic not in _said:
        _said.add(topic)
        _log.warning("%s (said once).", sentence)


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """Say `text` on stderr if what is inside takes longer than a moment."""
    timer = threading.Timer(PATIENCE, lambda: print(f"twin-engine: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
