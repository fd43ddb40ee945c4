"""What a database stored of the rows that were sent (P32).

A trigger, a rule, a policy, a conflict clause or the collation of a key can drop, divert or merge rows without an
error. So the counts that the database reports are compared with the rows sent, before the batch can be decided: by a
task before it prepares, or in the decision's transaction. Where the table's definition can make the count deceive, the
keys are looked up, too. A changed value cannot be counted: triggers are a finding before the start, and an audit
compares values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from delivered.contract.finding import Finding
from delivered.kits.sql.definition import Definition, listed
from delivered.kits.sql.options import TableOptions
from delivered.model.capability import WriteMode
from delivered.model.errors import UsageError

if TYPE_CHECKING:
    from delivered.kits.sql.database import Connection
    from delivered.kits.sql.merge import Merge


def check_count(options: TableOptions, sent: int, stored: int, definition: Definition, shard: str = "") -> None:
    """
    Args:
        shard: for the message: "shard 3 of batch 7".

    Raises:
        UsageError: the database stored another number of rows than were sent.
    """
    if stored != sent:
        raise not_stored(
            options, f"{sent} rows{f' of {shard}' * bool(shard)} were sent, but it stored {stored}", definition
        )


def not_stored(options: TableOptions, what: str, definition: Definition) -> UsageError:
    return UsageError(
        "ROWS_NOT_STORED",
        f"Table {options.table_text!r} {options.where} dropped rows without an error: {what} ({definition.suspects}). "
        "Under exactly_once nothing of the batch is decided or visible.",
        next_step="disable what drops the rows, or filter them in the transform; or keep them as dead letters: "
        '.option("onConstraint", "dead_letter"). Then start again: the batch runs again',
    )


def check_rules(options: TableOptions, definition: Definition) -> None:
    """
    Raises:
        UsageError: a rule replaces the sink's statements, whose counts are then those of the rule's own.
    """
    if definition.rules:
        raise UsageError(
            "TABLE_RULE",
            f"Rules of table {options.table_text!r} {options.where} replace the sink's statements, so rows would "
            f"disappear or be stored elsewhere without an error: {', '.join(definition.rules)}.",
            next_step=f"DROP RULE ... ON {options.table_text}, or write to the table that the rule writes to",
        )


def check_merged(connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition) -> None:
    """Check the staged rows of a shard, before only the winning row of each key is kept.

    Raises:
        UsageError: different keys are equal by the table's collation.
    """
    if found.loose and not merge.mode.insert:
        row = connection.execute(merge.merged_key(staged, found.loose_keys)).fetchone()
        if row is not None:
            raise _equal_keys(options, merge.mode, row, found)


def check_keys_stored(
    connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition
) -> None:
    """Look up the keys that were written. In the same transaction, after the write.

    Raises:
        UsageError: the table does not hold one, or holds it in another spelling.
    """
    if not found.deceives:
        return
    row = connection.execute(merge.missing_key(staged, found.loose_keys)).fetchone()
    if row is None:
        return
    if found.loose and connection.execute(merge.other_key(staged, found.loose_keys)).fetchone() is not None:
        raise _equal_keys(options, merge.mode, row, found)
    raise not_stored(options, f"it has no row of the key {_shown(merge.mode, row)} after it was written", found)


def check_before_delete(
    connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition
) -> None:
    """
    Raises:
        UsageError: a staged delete would delete the row of another key.
    """
    if found.loose:
        row = connection.execute(merge.other_key(staged, found.loose_keys, deletes=True)).fetchone()
        if row is not None:
            raise _equal_keys(options, merge.mode, row, found)


def check_deleted(connection: Connection, options: TableOptions, merge: Merge, staged: str, found: Definition) -> None:
    """
    Raises:
        UsageError: a staged delete had no effect.
    """
    if found.deceives:
        row = connection.execute(merge.undeleted_key(staged)).fetchone()
        if row is not None:
            raise not_stored(
                options, f"it still has the row of the key {_shown(merge.mode, row)} after a delete", found
            )


def check_emptied(connection: Connection, options: TableOptions, table: str, found: Definition) -> None:
    """
    Args:
        table: quoted for SQL.

    Raises:
        UsageError: rows of the table were not deleted.
    """
    if found.deceives and connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None:
        raise not_stored(options, "it still has rows after a delete of all", found)


_NO_COPY = " COPY, which loads the rows here, does not support it."


def findings(options: TableOptions, found: Definition, *, loads: bool = False) -> Iterator[Finding]:
    """What the table's definition says before the start.

    Args:
        loads: rows are loaded by a command that does not support row-level security.
    """
    table = options.table_text
    if found.triggers:
        yield Finding(
            "TRIGGERS",
            f"Triggers of table {table!r} may change or drop rows: {', '.join(found.triggers)}. Before each decision, "
            "the number of stored rows is compared with those sent; an audit compares the values.",
            False,
            "disable triggers that change what the pipeline writes",
        )
    if found.loose:
        first = next(iter(found.loose))
        yield Finding(
            "KEY_COLLATION",
            f"Different keys of table {table!r} may be equal there: {listed(found.loose)}. A batch with two such "
            "keys, or with one that the table has in another spelling, stops the query.",
            False,
            f"give column {first!r} a type and collation under which only identical keys are equal, or normalise the "
            "keys in the transform",
        )
    if found.row_security:
        yield Finding(
            "ROW_SECURITY",
            f"Row-level security of table {table!r} applies to this user: rows that a policy hides are neither found "
            f"nor deleted, and an audit does not see them.{_NO_COPY * loads}",
            loads,
            "ALTER ROLE ... BYPASSRLS"
            + ', or .option("mechanism", "one_transaction") under exactly_once' * loads
            + ", or a policy under which the user sees every row it writes" * (not loads),
        )
    if found.clauses:
        yield Finding(
            "CONFLICT_CLAUSE",
            f"ON CONFLICT clauses of table {table!r} would skip or replace rows without an error. The sink overrides "
            "them: a row that violates a constraint stops the query.",
            False,
            'keep such rows as dead letters: .option("onConstraint", "dead_letter")',
        )


def checked(options: TableOptions, found: Definition) -> Sequence[str]:
    """See `delivered.contract.powers.ChecksTarget`."""
    if not found.exists:
        return ()
    parts = (
        f"triggers {', '.join(found.triggers)}" if found.triggers else "no triggers",
        f"rules {', '.join(found.rules)}" if found.rules else "no rules",
        f"row security {'applies' if found.row_security else 'does not apply'}",
        f"keys {listed(found.loose)}" if found.loose else "keys equal only if identical",
        f"widths {', '.join(found.widths)}" if found.widths else "no widths",
        f"filled by the server {', '.join(found.filled)}" if found.filled else "no generated or identity columns",
    )
    return (f"table {options.table_text}: {'; '.join(parts)}",)


def _equal_keys(options: TableOptions, mode: WriteMode, key: Sequence[Any], found: Definition) -> UsageError:
    return UsageError(
        "KEY_COLLATION",
        f"Key {_shown(mode, key)} equals a different key of table {options.table_text!r} {options.where}: "
        f"{listed(found.loose or {})}. One row would stand for both. Under exactly_once nothing of the batch is "
        "decided or visible.",
        next_step="give the key columns a type and collation under which only identical keys are equal, or normalise "
        'the keys in the transform: lower(col("..."))',
    )


def _shown(mode: WriteMode, key: Sequence[Any]) -> str:
    return ", ".join(f"{k} = {str(v)[:60]!r}" for k, v in zip(mode.keys, key, strict=True))
