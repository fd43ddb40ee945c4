"""What a table's definition does to the rows that the sink writes: triggers, rules, policies, loose keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivered.connectors.postgres.options import PostgresOptions
from delivered.kits.sql.definition import Definition, events
from delivered.kits.sql.target import text_of

if TYPE_CHECKING:
    import psycopg

_BEFORE, _INSTEAD = 2, 64
_BITS = {"INSERT": 4, "DELETE": 8, "UPDATE": 16}
"""Bits of pg_trigger.tgtype."""
_KINDS = {"INSERT": "3", "UPDATE": "2", "DELETE": "4"}
"""Values of pg_rewrite.ev_type."""

_FACTS = """
WITH own AS (SELECT to_regclass(%(table)s)::oid AS o),
  parts AS (SELECT o FROM own UNION SELECT relid FROM own, pg_partition_tree(o::regclass)),
  fires AS (SELECT CASE current_setting('session_replication_role') WHEN 'replica' THEN 'RA' ELSE 'OA' END AS modes),
  keys AS (SELECT a.attrelid, a.attnum, a.attname, a.attcollation, coalesce(b.typname, t.typname) AS kind
           FROM own JOIN pg_attribute a ON a.attrelid = o JOIN pg_type t ON t.oid = a.atttypid
           LEFT JOIN pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype
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
ORDER BY 1, 2, 3"""

_COLUMNS = """
SELECT attname::text, CASE WHEN coalesce(nullif(a.atttypmod, -1), t.typtypmod) <> -1
         THEN format_type(coalesce(b.oid, t.oid), coalesce(nullif(a.atttypmod, -1), t.typtypmod)) END,
       CASE WHEN attgenerated <> '' THEN 'generated' WHEN attidentity = 'a' THEN 'identity'
            WHEN attidentity = 'd' OR pg_get_expr(adbin, adrelid) LIKE 'nextval(%%'
            THEN 'a sequence, which values of the rows do not advance' END
FROM pg_attribute a JOIN pg_type t ON t.oid = atttypid
LEFT JOIN pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype
LEFT JOIN pg_attrdef d ON adrelid = attrelid AND adnum = attnum
WHERE attrelid = to_regclass(%(table)s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum"""


def read(
    connection: psycopg.Connection[Any], options: PostgresOptions, *, copies: bool = False, columns: bool = False
) -> Definition:
    """Raises psycopg.Error.

    Args:
        copies: rows are loaded into the table by COPY, which ignores rules.
        columns: read limits and computed columns, too.
    """
    write = options.write
    runs = events(write)
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
