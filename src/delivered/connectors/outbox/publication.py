"""Whether a publication has everything that is read: the table as one, its operations, its rows, its columns."""

from __future__ import annotations

from delivered.connectors.outbox.options import OWNER, OutboxOptions
from delivered.connectors.outbox.server import State
from delivered.model.errors import Refused

_COMPARE = "changes made meanwhile are not in the log for this slot: compare the table with what was delivered"


def check_publication(now: State, options: OutboxOptions) -> None:
    """
    Raises:
        Refused: it lacks something; or the one that would be made does.
    """
    name, table = options.publication, options.table
    if now.publishes is not None:
        wanted = "insert" if options.changes is None else "insert,update,delete,truncate"
        lacking = [kind for kind in wanted.split(",") if kind not in now.publishes.split(",")]
        if now.parts_published and not now.via_root:
            raise Refused(
                "OUTBOX_PUBLICATION",
                f"{OWNER}: the publication {name} publishes the partitions of {table} each as a table of its own "
                "(publish_via_partition_root is false): their changes would not be found under its name.",
                next_step=f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true)",
            )
        if lacking or now.published is None:
            why = f"does not have the table {table}" if now.published is None else f"publishes no {lacking[0]}"
            raise Refused(
                "OUTBOX_PUBLICATION",
                f"{OWNER}: the publication {name} {why}: changes would be skipped.",
                next_step=f"ALTER PUBLICATION {name} "
                + (f"ADD TABLE {table}" if now.published is None else f"SET (publish = '{wanted}')")
                + f"; {_COMPARE}",
            )
        if '"rowfilter": "' in now.published:
            raise Refused(
                "OUTBOX_PUBLICATION",
                f"{OWNER}: the publication {name} filters rows of {table}: {now.published}.",
                next_step="publish the table without WHERE, and filter in the pipeline's transform",
            )
    needed = now.key if options.changes is not None else options.columns
    lost = next((column for column in needed if column in now.columns and column not in now.carried), None)
    if lost is not None:
        why = "is generated, and PostgreSQL's log has no generated columns" if lost in now.generated else (
            f"is not in the column list of the publication {name}"
        )  # fmt: skip
        raise Refused(
            "OUTBOX_PUBLICATION",
            f"{OWNER}: the column {lost} of {table} {why}: rows would come without it.",
            next_step=f"ALTER PUBLICATION {name} SET TABLE {table}, without a column list; {_COMPARE}"
            if lost not in now.generated
            else 'write .option("method", "poll"), or name another column in the option columns',
        )


def missing_columns(now: State) -> list[str]:
    """Columns of the table that its changes come without."""
    return [column for column in now.columns if column not in now.carried]
