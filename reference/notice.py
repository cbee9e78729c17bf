"""Notices that are said once per process, on the logger `twin`."""

import logging

_log = logging.getLogger("twin")
_said: set[str] = set()


def say_once(topic: str, sentence: str) -> None:
    """Warn, unless something has been said about `topic`; `sentence` ends without its full stop."""
    if topic not in _said:
        _said.add(topic)
        _log.warning("%s (said once).", sentence)
