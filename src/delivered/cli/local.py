"""Next steps that a development server on this machine makes shorter."""

from __future__ import annotations

import re

_MISSING_TOPIC = frozenset(("TOPIC_MISSING", "TOPIC_UNKNOWN"))


def next_here(code: str, message: str, step: str | None) -> str | None:
    """The next step of an error; also the command that creates a topic, if it is missing on our development Kafka.

    Args:
        code: without the prefix.
    """
    topic = re.search(r"'([^']+)'", message)
    if code not in _MISSING_TOPIC or topic is None:
        return step
    from delivered_lab import brokers

    here = brokers.status(brokers.default_folder("kafka"))
    if not (here.answering and here.bootstrap and here.bootstrap in message):
        return step
    command = f"delivered brokers topic {topic[1]}"
    return f"{step}; on this development broker: {command}" if step else command
