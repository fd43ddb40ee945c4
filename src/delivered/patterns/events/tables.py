"""The event log's tables, and its errors."""

from __future__ import annotations

from typing import Any

from delivered.model.errors import Refused
from delivered.patterns.caller import Caller, check_dialect, format_ddl

FORMAT = 1
EVENTS, SNAPSHOTS, FORMATS = "delivered_event", "delivered_event_snapshot", "delivered_event_format"
ID_BYTES_MAX = 128
NAME_BYTES_MAX = 64

# Exact text: MySQL's other collations ignore case and spaces at the end.
_TYPES = {
    "postgres": {
        "name": f'VARCHAR({NAME_BYTES_MAX}) COLLATE "C"', "key": f'VARCHAR({ID_BYTES_MAX}) COLLATE "C"', "id": "UUID",
        "json": "TEXT", "tail": "",
    },
    "mysql": {
        "name": f"VARCHAR({NAME_BYTES_MAX}) CHARACTER SET ascii COLLATE ascii_bin", "key": f"VARBINARY({ID_BYTES_MAX})",
        "id": "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
        "json": "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", "tail": " ENGINE=InnoDB",
    },
    "sqlite": {"name": "TEXT", "key": "TEXT", "id": "TEXT", "json": "TEXT", "tail": ""},
}  # fmt: skip


class Conflict(Refused):
    """The aggregate is not at the expected version. Nothing was written, and the transaction can go on.

    Attributes:
        found: its version; 0: it has no events.
    """

    found = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.args, {"found": self.found})

    @classmethod
    def at(cls, what: str, expected: int, found: int) -> Conflict:
        made = cls(
            "EVENTS_CONFLICT",
            f"{what} is at version {found}; expected was {expected}. Nothing was written.",
            next_step="roll back, load it again, and decide again with the state that it has now",
        )
        made.found = found
        return made


class DuplicateEvent(Refused):
    """The log has an event with this id already. Nothing was written, and the transaction can go on."""


def ddl(dialect: str) -> tuple[str, ...]:
    """The statements that make the tables, unless they are there.

    Args:
        dialect: postgres, mysql (and MariaDB), or sqlite.
    """
    t = _TYPES[check_dialect(dialect)]
    key = f"aggregate {t['name']} NOT NULL,\n  aggregate_id {t['key']} NOT NULL"
    make = "CREATE TABLE IF NOT EXISTS"
    return (
        f"{make} {EVENTS} (\n  {key},\n  version BIGINT NOT NULL,\n  id {t['id']} NOT NULL UNIQUE,\n"
        f"  type {t['name']} NOT NULL,\n  payload {t['json']} NOT NULL,\n  at_ms BIGINT NOT NULL,\n"
        f"  PRIMARY KEY (aggregate, aggregate_id, version)\n){t['tail']}",
        f"{make} {SNAPSHOTS} (\n  {key},\n  version BIGINT NOT NULL,\n  fold BIGINT NOT NULL,\n"
        f"  state {t['json']} NOT NULL,\n  PRIMARY KEY (aggregate, aggregate_id)\n){t['tail']}",
        *format_ddl(FORMATS, FORMAT, t["tail"]),
    )


def check_tables(caller: Caller) -> None:
    """Raise Refused if the tables are not there, or a newer version of this package made them."""
    absent = Refused(
        "EVENTS_TABLES",
        "The database has no event log.",
        next_step=f'roll back, then run each statement of events.ddl("{caller.dialect}")',
    )
    caller.check_format(FORMATS, "an event log", FORMAT, absent)
