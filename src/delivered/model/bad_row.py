"""What happens to a row that is invalid for a sink."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class OnBadRow(StrEnum):
    """The pipeline's choice."""

    FAIL = "fail"
    """The query stops; nothing of the batch counts."""
    DEAD_LETTER = "dead_letter"
    """The row goes to the dead-letter sink, in the same batch, with the reason and its source coordinates."""
    DROP = "drop"
    """at_most_once: the row is dropped and counted as given up."""


def as_json_text(row: Mapping[str, Any]) -> str:
    """A row in a dead letter: bytes as UTF-8 if valid, else in base64; other values as text."""
    return json.dumps(row, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    return str(value)
