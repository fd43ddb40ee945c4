"""The keys of a pipeline's dedup, in tables next to the ledger.

    memory   one row per checkpoint of a pipeline and sink: its last batch, and the newest time before that
    noted    keys that tasks admitted; not active yet, and valid only under the claim they were noted under
    seen     keys of decided batches

A decision's transaction moves the batch's keys from `noted` to `seen`, and deletes keys that expired by the
newest time of the batches *before* it. So a batch rerun after its decision (a prepared transaction was lost) gets the
same answers.

Values are inlined in the SQL, because clients limit parameters; all are generated numbers and hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Generic

from delivered.kits.sql.database import C, Connection, Database, Dialect, scope_values
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Scope
from delivered.model.limits import KEY_MEMORIES_KEPT
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision

CHUNK = 2_000
"""Keys per statement."""

_SINK = "pipeline = :pipeline AND sink = :sink"


def number_of(scope: Scope) -> int:
    """Short id of a checkpoint, stored in each of its rows."""
    text = f"{scope.pipeline}\0{scope.sink}\0{scope.incarnation}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def open_memory(sql: Dialect, connection: Connection, scope: Scope, *, fresh: bool) -> None:
    """In a claim's transaction: void the notes of earlier claims, and delete the memories of old checkpoints.

    Args:
        fresh: this checkpoint has no decided batch, so no memory can be missing.
    """
    key = scope_values(scope)
    number = number_of(scope)
    sql.forget(connection, "noted", "PRIMARY", f"number = {number}")
    if fresh:
        # Hosts' clocks differ: never before an earlier memory. The owner's row is locked.
        (newest,) = connection.execute(sql(f"SELECT max(made_ms) FROM {{memory}} WHERE {_SINK}"), key).fetchone()
        made_ms = max(int(time.time() * 1000), (newest or 0) + 1)
        connection.execute(
            sql(
                "INSERT INTO {memory} (pipeline, sink, incarnation, number, batch, newest_us, former_us, made_ms) "
                f"VALUES (:pipeline, :sink, :incarnation, {number}, -1, {_NEVER}, {_NEVER}, {made_ms}) "
                + sql.known("pipeline, sink, incarnation", None)
            ),
            key,
        )
    others = connection.execute(
        sql(f"SELECT number FROM {{memory}} WHERE {_SINK} AND incarnation <> :incarnation ORDER BY made_ms DESC"), key
    ).fetchall()
    for (old,) in others[KEY_MEMORIES_KEPT:]:
        for table in ("noted", "seen"):
            sql.forget(connection, table, "PRIMARY", f"number = {int(old)}")
        sql.forget(connection, "memory", "of_number", f"number = {int(old)}")


_NEVER = -(1 << 62)
"""Before every time."""


def keep(sql: Dialect, connection: Connection, decision: Decision, epoch: int) -> None:
    """In a decision's transaction, before its COMMIT: activate the keys of its batch.

    Does nothing without a dedup, or for a later revision of a batch, whose keys are active already.
    """
    number = number_of(decision.scope)
    row = connection.execute(sql(f"SELECT batch, newest_us FROM {{memory}} WHERE number = {number}"), {}).fetchone()
    if row is None or int(row[0]) >= decision.batch:
        return
    claim = f"number = {number} AND epoch = {epoch}"
    own = f"{claim} AND batch = {decision.batch}"
    count, last = connection.execute(sql(f"SELECT count(*), max(at_us) FROM {{noted}} WHERE {own}"), {}).fetchone()
    newest = former = int(row[1])
    if not count and former == _NEVER:
        return
    reach(StepId.DEDUP_KEEP, Moment.BEFORE, batch=decision.batch)
    sql.forget(connection, "seen", "of_time", f"number = {number} AND until_us < {former}")
    if count:
        connection.execute(
            sql(
                "INSERT INTO {seen} (number, hash, until_us, batch) "
                f"SELECT number, hash, until_us, batch FROM {{noted}} WHERE {own} "
                + sql.known("number, hash, until_us", "batch")
            ),
            {},
        )
        # A single time in the future must not expire all other keys. The driver's clock only bounds it: set back, it
        # keeps keys for longer.
        newest = max(former, min(int(last), decision.decided_at_ms * 1_000))
    sql.forget(connection, "noted", "PRIMARY", f"{claim} AND batch <= {decision.batch}")
    connection.execute(
        sql(
            f"UPDATE {{memory}} SET batch = {decision.batch}, former_us = {former}, newest_us = {newest} "
            f"WHERE number = {number}"
        ),
        {},
    )
    reach(StepId.DEDUP_KEEP, Moment.AFTER, batch=decision.batch)


class KeyTable(Generic[C]):
    """See `delivered.contract.powers.KeyMemory`."""

    def __init__(self, database: Database[C], scope: Scope) -> None:
        self._database = database
        self._sql = database.dialect
        self._scope = scope
        self._number = number_of(scope)
        self._epoch: int | None = None

    def known(self, batch: int, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = self._database.waiting(lambda: self._known(batch, keys), kept=True)
        return found

    def _known(self, batch: int, keys: Sequence[bytes]) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        with self._database.borrow(writes=False) as connection:
            newest = self._opened(connection, batch)
            for part in _parts(list(keys)):
                hashes = ", ".join(self._sql.hash(k) for k in part)
                rows = connection.execute(
                    self._sql(
                        f"SELECT hash, until_us FROM {{seen}} WHERE number = {self._number} AND hash IN ({hashes}) "
                        f"AND batch < {batch} AND until_us >= {newest}"
                    ),
                    {},
                ).fetchall()
                for key, until in rows:
                    found.setdefault(bytes(key), []).append(int(until))
        return found

    def note(self, batch: int, keys: Sequence[bytes], times: Sequence[int], untils: Sequence[int]) -> None:
        """One transaction per statement: a hanging task holds no lock that a claim or decision needs."""
        for part in _parts(list(zip(keys, times, untils, strict=True))):
            rows = ", ".join(
                f"({self._number}, {self._epoch}, {batch}, {self._sql.hash(k)}, {int(t)}, {int(u)})" for k, t, u in part
            )
            statement = self._sql(
                f"INSERT INTO {{noted}} (number, epoch, batch, hash, at_us, until_us) VALUES {rows} "
                + self._sql.known("number, epoch, batch, hash, at_us", None)
            )
            self._database.waiting(partial(self._insert, statement), kept=True)

    def _insert(self, statement: str) -> None:
        """Idempotent: keys that are there stay."""
        with self._database.borrow(writes=True) as connection:
            connection.execute(statement, {})

    def close(self) -> None:
        """Connections are released after each query."""

    def _opened(self, connection: C, batch: int) -> int:
        """Read the current claim; return the newest time of the earlier batches."""
        row = connection.execute(
            self._sql(
                "SELECT m.batch, m.newest_us, m.former_us, o.epoch FROM {memory} AS m JOIN {owner} AS o "
                f"ON o.pipeline = m.pipeline AND o.sink = m.sink WHERE m.number = {self._number}"
            ),
            {},
        ).fetchone()
        if row is None:
            raise InvariantBroken(
                "DEDUP_MEMORY_GONE",
                f"Batch {batch} of {self._scope}: the sink's database has no dedup keys for this checkpoint, so "
                "duplicates of records that earlier batches delivered cannot be detected.",
                next_step="restore the database together with its ledger; or start a new checkpoint, without earlier "
                "keys, at the offsets where this one ended",
            )
        at, newest, former, epoch = (int(v) for v in row)
        self._epoch = epoch
        return former if at >= batch else newest


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    for at in range(0, len(items), CHUNK):
        yield items[at : at + CHUNK]
