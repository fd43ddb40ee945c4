"""What a table's definition does to the rows that the sink writes: triggers, and keys under a loose collation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivered.connectors.mysql.options import MysqlOptions
from delivered.connectors.mysql.target import exact, find, table_columns
from delivered.kits.sql.definition import Definition, events

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session


def read(session: Session, options: MysqlOptions) -> Definition:
    """Raises MySQLError. The server shows triggers only to users with the privilege TRIGGER."""
    found = find(session, options)
    if found is None:
        return Definition(exists=False)
    runs = events(options.write)
    rows = session.execute(
        "SELECT trigger_name, action_timing, event_manipulation FROM information_schema.triggers "
        "WHERE event_object_schema = %s AND event_object_table = %s ORDER BY event_manipulation, action_order",
        [found.base, found.name],
    ).fetchall()
    columns = table_columns(session, found)
    lower = {name.lower(): column for name, column in columns.items()}
    keys = {k: lower[k.lower()] for k in options.write.keys if k.lower() in lower}
    return Definition(
        tuple(f"{name} ({timing} {event})" for name, timing, event in rows if event in runs),
        loose={k: f"collation {c.collation}" for k, c in keys.items() if not exact(c.collation)},
        widths=tuple(f"{n} {c.shown}" for n, c in columns.items() if c.width is not None or c.precision is not None),
        filled=tuple(
            f"{n} ({'generated' if c.computed else 'from null'})"
            for n, c in columns.items()
            if c.computed or c.fills_null
        ),
        computed=tuple(n for n, c in columns.items() if c.computed),
    )
