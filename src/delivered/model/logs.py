"""Logs as JSON lines, one object each, with the place in a batch that a line comes from."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from delivered.model.errors import DeliveredError
from delivered.model.secrets import without_passwords
from delivered.model.step import place

FORMAT = "DELIVERED_LOG_FORMAT"
"""The environment variable; its value `json` is passed on to receivers and Spark's workers."""


def as_json() -> bool:
    """Whether this process and those that it starts log JSON lines."""
    return os.environ.get(FORMAT, "").lower() == "json"


def is_line_of_ours(line: str) -> bool:
    """Whether a line of a log with lines of others, Spark's, was written by `JsonLines` for this package."""
    return line.startswith('{"time": ') and '"logger": "delivered' in line


class JsonLines(logging.Formatter):
    """A line per record: time (RFC 3339, UTC), level, logger, message; pipeline, step, batch, shard and sink where they
    are known; code and next of an error.

    Set it on a handler of your own, `logging.getLogger("delivered").handlers`, to use it with other loggers.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname,
            "logger": record.name,
            "message": without_passwords(record.getMessage()),
            **place(),
        }
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, DeliveredError):
            line |= {"code": error.code, "next": error.next_step}
        elif record.exc_info:
            line["exception"] = without_passwords(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)
