"""What a foreign schema or record may cost, and what becomes of one that cannot be read."""

from __future__ import annotations

from delivered.model.limits import RECORD_VALUES_MAX, SCHEMA_DEPTH_MAX, SCHEMA_TYPES_MAX
from delivered.model.secrets import one_line

_REASON_LENGTH_MAX = 300


class Unmappable(ValueError):
    """A schema that has no columns; the text names the field."""


class Unreadable(ValueError):
    """A value that does not match its schema; the text names the field."""


def in_words(error: BaseException) -> str:
    """Why a record cannot be read, for its dead letter: what a library raised may be anything, but is its record's."""
    match error:
        case RecursionError():
            found = "it is nested too deeply"
        case MemoryError():
            found = "it does not fit into memory"
        case UnicodeEncodeError():
            found = (
                f"its text has half a surrogate pair (U+{ord(error.object[error.start]):04X}), which is no character"
            )
        case UnicodeDecodeError():
            found = f"its text is not {error.encoding.upper()} at byte {error.start}: {error.reason}"
        case Unreadable() | Unmappable():
            found = str(error)
        case _:
            found = ": ".join(filter(None, (type(error).__name__, str(error)[:_REASON_LENGTH_MAX])))
    return one_line(found)[:_REASON_LENGTH_MAX]


class TypeCount:
    """Counts a schema's types while references are expanded: a kilobyte can stand for billions."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, path: str, depth: int) -> None:
        """
        Args:
            path: of the field, with a dot in front.

        Raises:
            Unmappable: too many, or nested too deeply.
        """
        self._count += 1
        if self._count > SCHEMA_TYPES_MAX:
            raise Unmappable(f"it has more than {SCHEMA_TYPES_MAX:,} types, with references expanded")
        if depth > SCHEMA_DEPTH_MAX:
            raise Unmappable(f"field {path[1:80]!r} is recursive, or nested more than {SCHEMA_DEPTH_MAX} deep")


class Budget:
    """Counts the values of one record of this many bytes: a few can stand for many."""

    def __init__(self, size: int) -> None:
        self._limit = self._left = max(RECORD_VALUES_MAX, size)

    def spend(self, values: int) -> None:
        """Raises Unreadable."""
        self._left -= values
        if self._left < 0:
            raise too_many_values(self._limit)


def too_many_values(limit: int = RECORD_VALUES_MAX) -> Unreadable:
    return Unreadable(f"it stands for more than {limit:,} values")
