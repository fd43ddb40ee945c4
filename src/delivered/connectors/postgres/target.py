"""The user's table: creation, checks, its stored Arrow schema, and what its definition does to rows: triggers, rules,
policies, loose keys; and the ledger's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.connectors.postgres import ENUM, TYPES, PostgresOptions
from delivered.kits.sql.database import (
    Definition,
    Server,
    create_statement,
    find_events,
    is_newest,
    quoted,
    with_values,
)
from delivered.kits.sql.merge import Merge, check_fits
from delivered.kits.sql.table import (
    Column,
    check_known,
    check_typed,
    compare,
    extend,
    find_absent,
    missing_at_server,
    no_right_to_alter,
    numbered_schema,
    record_schema,
    stored_columns,
    text_of,
)
from delivered.model.errors import UsageError

if TYPE_CHECKING:
    import psycopg

    from delivered.kits.sql.batches import NumberedTable
    from delivered.model.identity import Work

_CHANGE = "ALTER COLUMN {name} TYPE"


@dataclass(frozen=True)
class Target:
    """A table that matches the rows' schema.

    Attributes:
        name: qualified, quoted for SQL.
        kinds: PostgreSQL type of each column of the rows.
        columns: names of the rows' columns, quoted, comma-separated.
        merge: statements of an upsert, if the mode is not append.
        widths: column of a bounded varchar -> its limit in characters.
    """

    name: str
    kinds: tuple[str, ...]
    columns: str
    merge: Merge
    widths: dict[str, int]


def find(connection: psycopg.Connection[Any], options: PostgresOptions) -> tuple[int, str, str] | None:
    """Oid, qualified name and kind of the table; None if it does not exist. Raises psycopg.Error."""
    row = connection.execute(
        "SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)",
        [text_of(options)],
    ).fetchone()
    return None if row is None else (int(row[0]), f"{quoted(row[1])}.{quoted(row[2])}", row[3])


def check_kind(options: PostgresOptions, kind: str) -> None:
    """
    Args:
        kind: of `find`.

    Raises:
        UsageError: a view, or a table of another server: what it stores is neither counted nor transactional here.
    """
    if kind not in ("r", "p"):
        known = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}.get(kind, f"of kind {kind!r}")
        raise UsageError("NOT_A_TABLE.POSTGRES", table=options.table_text, where=options.where, kind=known)


def ready(connection: psycopg.Connection[Any], options: PostgresOptions, schema: pa.Schema) -> Target:
    """Check the table against `schema`; create it if allowed. Outside a transaction.

    The Arrow schema is stored next to the ledger: the columns that a pipeline writes, and their exact types.

    Args:
        schema: plain types.

    Raises:
        UsageError: the table is missing, a column is missing or of another type, or the rows' schema has changed.
        psycopg.Error: the server rejected it.
    """
    schema = numbered_schema(options, schema)
    kept = stored_columns(options.write, schema)
    found = find(connection, options)
    if found is None:
        if not options.create:
            raise missing_at_server(options)
        check_typed(options, schema)
        body = ", ".join(f"{quoted(f.name)} {TYPES.declared(f.type)}" for f in kept)
        if options.write.upserts:
            body += f", PRIMARY KEY ({', '.join(map(quoted, options.write.keys))})"
        with connection.transaction():
            alone(connection)
            if find(connection, options) is None:
                connection.execute(f"CREATE TABLE IF NOT EXISTS {text_of(options)} ({body})")
                if options.batch_column is not None:
                    connection.execute(f"CREATE INDEX ON {text_of(options)} ({quoted(options.batch_column)})")
        found = find(connection, options)
        if found is None:
            raise missing_at_server(options)
    relation, name, kind = found
    check_kind(options, kind)
    columns = table_columns(connection, relation)
    kinds = dict(zip(kept.names, compare(options, TYPES, kept, columns, _CHANGE), strict=True))
    _remember(connection, options, relation, record_schema(options, kept))
    return Target(
        name,
        tuple(
            kinds[str(options.write.version)] if n == options.write.expected else kinds.get(n, "bool")
            for n in schema.names
        ),
        ", ".join(quoted(n) for n in schema.names),
        Merge(options.write, name, tuple(kept.names)),
        {n: width for n in kept.names if (width := columns[n].width) is not None},
    )


def table_check(connection: psycopg.Connection[Any], options: PostgresOptions) -> Callable[[pa.Schema], None] | None:
    """See `delivered.contract.sink.Sink.target_check`. Raises psycopg.Error."""
    found = find(connection, options)
    if found is None:
        return None
    relation, columns = found[0], table_columns(connection, found[0])
    schema = stored_schema(connection, options, relation)
    known = None if schema is None else (schema, _recovery_action(options, relation))
    return partial(check_fits, options, TYPES, columns, _CHANGE, known)


def _alter(connection: psycopg.Connection[Any], options: PostgresOptions, statement: str) -> None:
    from psycopg.errors import InsufficientPrivilege

    try:
        connection.execute(statement)
    except InsufficientPrivilege as error:
        grant = f"ALTER TABLE {options.table_text} OWNER TO {connection.info.user}"
        raise no_right_to_alter(options, error, statement, grant) from error


def add_columns(connection: psycopg.Connection[Any], options: PostgresOptions, schema: pa.Schema) -> None:
    """Add the columns that the table lacks, and remember them, in one transaction. Outside a transaction.

    See `delivered.contract.sink.Sink.add_columns`. Raises psycopg.Error, too.

    Args:
        schema: plain types.
    """
    kept = numbered_schema(options, stored_columns(options.write, schema))
    with connection.transaction():
        alone(connection)
        found = find(connection, options)
        if found is None:
            return
        relation, name, _ = found
        missing = find_absent(options, kept, table_columns(connection, relation))
        if missing:
            added = ", ".join(f"ADD COLUMN {quoted(f.name)} {TYPES.declared(f.type)}" for f in missing)
            _alter(connection, options, f"ALTER TABLE {name} {added}")
        known = stored_schema(connection, options, relation)
        if known is not None:
            now = extend(
                options,
                known,
                TYPES.canonical_schema(record_schema(options, kept)),
                _recovery_action(options, relation),
            )
            connection.execute(
                f"UPDATE {with_values(options.ledger_schema)}.target SET arrow_schema = %s WHERE relation = %s",  # noqa: S608
                [now.serialize().to_pybytes(), relation],
            )


def _recovery_action(options: PostgresOptions, relation: int) -> str:
    return (
        "restore the rows' columns and types, or write to another table; or, if the existing rows need no audit, "  # noqa: S608
        f"DELETE FROM {quoted(options.ledger_schema)}.target WHERE relation = {relation}"
    )


def has_unique_index(connection: psycopg.Connection[Any], relation: int, keys: Sequence[str]) -> bool:
    """Whether there is a unique index on exactly these columns, usable for upserts. Raises psycopg.Error."""
    rows = connection.execute(
        """SELECT array_agg(a.attname::text) FROM pg_index i
           JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1])
           WHERE i.indrelid = %s AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
             AND i.indexprs IS NULL
           GROUP BY i.indexrelid""",
        [relation],
    ).fetchall()
    return any(set(names) == set(keys) for (names,) in rows)


def starts_index(connection: psycopg.Connection[Any], relation: int, column: str) -> bool:
    """Whether a complete index starts with this column. Raises psycopg.Error."""
    row = connection.execute(
        "SELECT 1 FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
        "WHERE i.indrelid = %s AND a.attname = %s AND i.indisvalid AND i.indpred IS NULL",
        [relation, column],
    ).fetchone()
    return row is not None


def batch_number(
    connection: psycopg.Connection[Any], server: Server[psycopg.Connection[Any]], options: PostgresOptions, work: Work
) -> int:
    """What the rows of a batch have in the column of the batch; 0 if the options name none. Raises psycopg.Error."""
    table = numbered_table(connection, server, options) if options.batch_column is not None else None
    return 0 if table is None else table.number(connection, work)


def numbered_table(
    connection: psycopg.Connection[Any],
    server: Server[psycopg.Connection[Any]],
    options: PostgresOptions,
    column: str | None = None,
) -> NumberedTable[psycopg.Connection[Any]] | None:
    """None: the table does not exist, or nobody names a column. Raises psycopg.Error.

    Args:
        column: of the batch; None: that of the options.
    """
    from delivered.kits.sql.batches import NumberedTable

    found, column = find(connection, options), column or options.batch_column
    if found is None or column is None:
        return None
    relation, rows = str(found[0]), found[1] if found[2] == "p" else f"ONLY {found[1]}"
    return NumberedTable(server, rows, relation, options.table_text, relation, column, row_hashes, _alone)


def row_hashes(columns: Sequence[str]) -> str:
    """SQL of the sum of all rows' hashes."""
    row = f"ROW({', '.join(map(quoted, columns))})::text"
    return f"mod(sum(hashtextextended({row}, 0)::numeric), 18446744073709551616)::text"


_BASE = """CROSS JOIN LATERAL (
    WITH RECURSIVE d AS (
      SELECT a.atttypid AS type, a.atttypmod AS modifier, false AS required, 0 AS depth
      UNION ALL SELECT typbasetype, typtypmod, required OR typnotnull, depth + 1 FROM d JOIN pg_type ON oid = type
        WHERE typtype = 'd')
    SELECT * FROM d ORDER BY depth DESC LIMIT 1) b
  JOIN pg_type t ON t.oid = b.type"""
"""The type `t` of an attribute `a`, below its domains; `b.modifier` and `b.required` come from them, too."""


def table_columns(connection: psycopg.Connection[Any], relation: int) -> dict[str, Column]:
    """Columns of a table by name. Raises psycopg.Error."""
    rows = connection.execute(
        f"""SELECT a.attname, t.typname, t.typtype, b.modifier, format_type(a.atttypid, a.atttypmod),
                  (a.attnotnull OR b.required) AND NOT a.atthasdef AND a.attidentity = '' AND own.typdefault IS NULL,
                  a.attgenerated <> '' OR a.attidentity = 'a'
           FROM pg_attribute a JOIN pg_type own ON own.oid = a.atttypid {_BASE}
           WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum""",  # noqa: S608
        [relation],
    ).fetchall()
    found = {}
    for name, kind, category, modifier, shown, required, computed in rows:
        bounded = kind == "numeric" and modifier >= 4
        rounds = kind in ("timestamp", "timestamptz", "time") and 0 <= modifier < 6
        found[name] = Column(
            kind=ENUM if category == "e" else f"{kind}({modifier})" if rounds else kind,
            shown=shown,
            precision=((modifier - 4) >> 16) & 0xFFFF if bounded else None,
            scale=(modifier - 4) & 0x7FF if bounded else None,
            required=required,
            computed=computed,
            width=modifier - 4 if kind == "varchar" and modifier >= 4 else None,
        )
    return found


def _remember(connection: psycopg.Connection[Any], options: PostgresOptions, relation: int, schema: pa.Schema) -> None:
    known = stored_schema(connection, options, relation)
    canonical = TYPES.canonical_schema(schema)
    if known is None:
        connection.execute(
            f"INSERT INTO {with_values(options.ledger_schema)}.target (relation, name, arrow_schema) "  # noqa: S608
            "VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
            [relation, options.table_text, canonical.serialize().to_pybytes()],
        )
        known = stored_schema(connection, options, relation)
    if known is not None:
        check_known(options, known, canonical, _recovery_action(options, relation))


def stored_schema(connection: psycopg.Connection[Any], options: PostgresOptions, relation: int) -> pa.Schema | None:
    """The canonical Arrow schema that the table was written with; None: never written. Raises psycopg.Error."""
    row = connection.execute(
        f"SELECT arrow_schema FROM {with_values(options.ledger_schema)}.target WHERE relation = %s",  # noqa: S608
        [relation],
    ).fetchone()
    return None if row is None else pa.ipc.read_schema(pa.py_buffer(row[0]))


_BEFORE, _INSTEAD = 2, 64
_BITS = {"INSERT": 4, "DELETE": 8, "UPDATE": 16}
"""Bits of pg_trigger.tgtype."""
_KINDS = {"INSERT": "3", "UPDATE": "2", "DELETE": "4"}
"""Values of pg_rewrite.ev_type."""

_FACTS = f"""
WITH own AS (SELECT to_regclass(%(table)s)::oid AS o),
  parts AS (SELECT o FROM own UNION SELECT relid FROM own, pg_partition_tree(o::regclass)),
  fires AS (SELECT CASE current_setting('session_replication_role') WHEN 'replica' THEN 'RA' ELSE 'OA' END AS modes),
  keys AS (SELECT a.attrelid, a.attnum, a.attname, a.attcollation, t.typname AS kind
           FROM own JOIN pg_attribute a ON a.attrelid = o {_BASE}
           WHERE a.attname = ANY(%(keys)s) AND NOT a.attisdropped)
SELECT 'table', '', '' FROM own WHERE o IS NOT NULL
UNION SELECT 'trigger', tgname::text, tgtype::int::text FROM parts, fires, pg_trigger
  WHERE tgrelid = o AND NOT tgisinternal AND strpos(modes, tgenabled::text) > 0
UNION SELECT 'rule', rulename::text, ev_type::text || is_instead::text FROM own, fires, pg_rewrite
  WHERE ev_class = o AND strpos(modes, ev_enabled::text) > 0
UNION SELECT 'policy', '', '' FROM own WHERE row_security_active(o)
UNION SELECT 'loose', attname::text, 'type ' || kind FROM keys WHERE kind IN ('citext', 'jsonb')
UNION SELECT 'loose', attname::text, 'collation ' || collname FROM keys
  JOIN pg_index i ON indrelid = attrelid AND indisunique
  CROSS JOIN LATERAL unnest(indkey::int2[], indcollation::oid[]) AS x (number, used)
  JOIN pg_collation c ON c.oid IN (attcollation, used) AND NOT collisdeterministic WHERE number = attnum
UNION SELECT 'loose', attname::text, 'operator class ' || opcname FROM keys
  JOIN pg_index i ON indrelid = attrelid AND indisunique
  CROSS JOIN LATERAL unnest(indkey::int2[], indclass::oid[]) AS x (number, used)
  JOIN pg_opclass c ON c.oid = used AND NOT opcdefault AND opcname NOT LIKE '%%_pattern_ops' WHERE number = attnum
ORDER BY 1, 2, 3"""  # noqa: S608

_COLUMNS = f"""
SELECT attname::text, CASE WHEN b.modifier <> -1 THEN format_type(b.type, b.modifier) END,
       CASE WHEN attgenerated <> '' THEN 'generated' WHEN attidentity = 'a' THEN 'identity'
            WHEN attidentity = 'd' OR pg_get_expr(adbin, adrelid) LIKE 'nextval(%%'
            THEN 'a sequence, which values of the rows do not advance' END
FROM pg_attribute a {_BASE}
LEFT JOIN pg_attrdef d ON adrelid = attrelid AND adnum = attnum
WHERE attrelid = to_regclass(%(table)s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum"""  # noqa: S608


def read_definition(
    connection: psycopg.Connection[Any], options: PostgresOptions, *, copies: bool = False, columns: bool = False
) -> Definition:
    """Raises psycopg.Error.

    Args:
        copies: rows are loaded into the table by COPY, which ignores rules.
        columns: read limits and computed columns, too.
    """
    write = options.write
    runs = find_events(write)
    values = {"table": text_of(options), "keys": list(write.keys)}
    triggers, rules, loose, policy, exists = [], [], dict[str, str](), False, False
    for what, name, detail in connection.execute(_FACTS, values).fetchall():
        if what == "trigger":
            fired = [event for event in runs if int(detail) & _BITS[event]]
            if fired:
                triggers.append(f"{name} ({_time(int(detail))} {' OR '.join(fired)})")
        elif what == "rule":
            # ON CONFLICT is refused for a table with any rule on INSERT or UPDATE.
            plain_upsert = write.upserts and not write.conditional and detail[0] in "23"
            event = next((e for e in runs if detail[0] == _KINDS[e]), None)
            if event is not None and not copies and (detail[1:] == "true" or plain_upsert):
                rules.append(f"{name} (ON {event}{' DO INSTEAD' * (detail[1:] == 'true')})")
        elif what == "table":
            exists = True
        elif what == "policy":
            policy = True
        else:
            loose.setdefault(name, detail)
    found = connection.execute(_COLUMNS, values).fetchall() if columns else []
    return Definition(
        tuple(dict.fromkeys(triggers)),
        tuple(rules),
        loose,
        policy,
        widths=tuple(f"{name} {limit}" for name, limit, _ in found if limit is not None),
        filled=tuple(f"{name} ({how})" for name, _, how in found if how is not None),
        computed=tuple(name for name, _, how in found if how in ("generated", "identity")),
        exists=exists,
    )


def _time(kind: int) -> str:
    return "BEFORE" if kind & _BEFORE else "INSTEAD OF" if kind & _INSTEAD else "AFTER"


# The ledger's tables, versioned, in their own schema.

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE {s}.owner (
            pipeline text NOT NULL, sink text NOT NULL, id text NOT NULL, epoch bigint NOT NULL,
            host text NOT NULL, process bigint NOT NULL, started_ms bigint NOT NULL, superseded text[] NOT NULL,
            PRIMARY KEY (pipeline, sink))""",
        """CREATE TABLE {s}.decision (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            decision text NOT NULL, decided_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (pipeline, sink, incarnation, batch))""",
        """CREATE TABLE {s}.{started} (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            offsets text NOT NULL, {started_at} timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (pipeline, sink, incarnation))""",
        # Not unique by shard: two attempts with open markers would block each other forever.
        """CREATE TABLE {s}.marker (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            shard integer NOT NULL, gid text NOT NULL, fingerprint text NOT NULL)""",
        "CREATE INDEX marker_of_shard ON {s}.marker (pipeline, sink, incarnation, batch, shard)",
        "CREATE TABLE {s}.target (relation oid PRIMARY KEY, name text NOT NULL, arrow_schema bytea NOT NULL)",
    ),
    (
        """CREATE TABLE {s}.memory (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, number bigint NOT NULL UNIQUE,
            batch bigint NOT NULL, newest_us bigint NOT NULL, former_us bigint NOT NULL, made_ms bigint NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation))""",
        """CREATE TABLE {s}.{admitted} (
            number bigint NOT NULL, epoch bigint NOT NULL, batch bigint NOT NULL, hash bytea NOT NULL,
            at_us bigint NOT NULL, until_us bigint NOT NULL, PRIMARY KEY (number, epoch, batch, hash, at_us))""",
        """CREATE TABLE {s}.seen (
            number bigint NOT NULL, hash bytea NOT NULL, until_us bigint NOT NULL, batch bigint NOT NULL,
            PRIMARY KEY (number, hash, until_us))""",
        "CREATE INDEX seen_of_time ON {s}.seen (number, until_us)",
    ),
    (
        """CREATE TABLE {s}.archive (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, entry bytea NOT NULL,
            PRIMARY KEY (pipeline, sink, incarnation))""",
    ),
    (
        """CREATE TABLE {s}.{skipped} (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            kind text NOT NULL, total bigint NOT NULL)""",
        "CREATE INDEX {skipped}_of ON {s}.{skipped} (pipeline, sink, incarnation, batch)",
        """CREATE TABLE {s}.dead_letter (
            pipeline text NOT NULL, sink text NOT NULL, incarnation text NOT NULL, batch bigint NOT NULL,
            shard integer NOT NULL, reason text NOT NULL, record text NOT NULL)""",
    ),
    (
        """CREATE TABLE {s}.seal (
            pipeline text NOT NULL, sink text NOT NULL, number bigint NOT NULL, seal text NOT NULL,
            PRIMARY KEY (pipeline, sink, number))""",
    ),
    (
        """CREATE TABLE {s}.writer (
            target text NOT NULL, number bigint NOT NULL, pipeline text NOT NULL, sink text NOT NULL,
            incarnation text NOT NULL, PRIMARY KEY (target, number), UNIQUE (target, pipeline, sink, incarnation))""",
    ),
)
"""Statements that migrate from version n to n + 1. Append-only."""

_LOCK = 0x64656C69
"""Key of the advisory lock for creating schemas and tables."""


def version_of(connection: psycopg.Connection[Any], schema: str) -> int:
    """Version of the ledger's tables; 0: they do not exist. Raises psycopg.Error."""
    table = f"{quoted(schema)}.migration"
    row = connection.execute("SELECT to_regclass(%s)", [table]).fetchone()
    if row is None or row[0] is None:
        return 0
    row = connection.execute(f"SELECT coalesce(max(version), 0) FROM {table}").fetchone()  # noqa: S608
    return int(row[0]) if row else 0


def migrate(connection: psycopg.Connection[Any], schema: str) -> None:
    """Create or migrate the ledger's tables; does nothing if they are up to date. Outside a transaction.

    Raises:
        UsageError: a newer version of this package created them.
        psycopg.Error: the server rejected it.
    """
    if is_newest(version_of(connection, schema), len(MIGRATIONS), f"in schema {schema!r}"):
        return
    s = quoted(schema)
    with connection.transaction():
        alone(connection)
        # IF NOT EXISTS requires the CREATE privilege even if everything exists.
        if connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [schema]).fetchone() is None:
            connection.execute(f"CREATE SCHEMA {s}")
        if version_of(connection, schema) == 0:
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {s}.migration "
                "(version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
            )
        # Check again: another process may have been faster.
        for version in range(version_of(connection, schema), len(MIGRATIONS)):
            for statement in MIGRATIONS[version]:
                connection.execute(create_statement(statement, s))
            connection.execute(f"INSERT INTO {with_values(schema)}.migration (version) VALUES (%s)", [version + 1])  # noqa: S608


@contextmanager
def _alone(connection: psycopg.Connection[Any]) -> Iterator[None]:
    with connection.transaction():
        alone(connection)
        yield


def alone(connection: psycopg.Connection[Any]) -> None:
    """Serialize our migrations in this database until the transaction ends."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
