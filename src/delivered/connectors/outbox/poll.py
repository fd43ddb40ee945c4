"""The driver of a source that polls: it numbers the rows that it finds, and delivers them by number."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tenacity

from delivered.connectors.outbox.database import connect, sqlstate, transaction
from delivered.connectors.outbox.options import LATEST, OWNER, OutboxOptions
from delivered.connectors.outbox.positions import NUMBERED_MAX, Positions
from delivered.connectors.outbox.wal import LOCK_WAIT_S, NUMBERED, in_use, lock_key
from delivered.contract.source import Offsets, Slice
from delivered.model import patience
from delivered.model.errors import DeliveredError, InvariantBroken, Unreachable, UsageError
from delivered.patterns.caller import Caller

log = logging.getLogger("delivered.patterns.outbox")
T = TypeVar("T")

_NEW = -1


class PollDriver:
    """See `delivered.contract.source.SourceDriver`.

    Offsets are {"number": 12, "#id": "018f..."}: the last row that was read. -1: nothing is numbered yet.
    """

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        self._positions = Positions(options)
        self._connection: Any = None
        self._file: Any = None
        self._locked = False
        self._freezes = False
        self._frozen: int | None = None

    def initial(self) -> Offsets:
        if isinstance(self._options.starting, dict):
            return dict(self._options.starting)
        return {"number": _NEW}

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        self._lock()
        at = int(start["number"])
        if at == _NEW:
            self._transaction(self._began, writes=True)
            at = self._transaction(self._positions.last)[0] if self._options.starting == LATEST else 0
            start = self._offsets(at)
        else:
            self._check(start)
        if self._freezes and self._frozen is None:
            self._frozen = self._number_all()
        frozen = self._frozen
        last = self._transaction(self._positions.last)[0]
        if frozen is None and (rows_max is None or last < at + rows_max):
            limit = NUMBERED_MAX if rows_max is None else min(NUMBERED_MAX, rows_max)
            self._transaction(lambda caller: self._positions.number(caller, limit), writes=True)
            last = self._transaction(self._positions.last)[0]
        end = last if frozen is None else max(at, min(frozen, last))
        end = end if rows_max is None else min(end, at + rows_max)
        return start if end == at else self._offsets(end)

    def newest(self) -> Offsets | None:
        def newest(caller: Caller) -> int:
            if not self._positions.exists(caller):
                return 0
            return self._positions.last(caller)[0] + self._positions.unnumbered(caller)

        return {"number": self._transaction(newest)}

    def freeze(self) -> None:
        """At the first `latest`, which checks the table before it numbers rows: numbers given to a table that was
        restored would hide that."""
        self._freezes = True

    def _number_all(self) -> int:
        while (
            self._transaction(lambda caller: self._positions.number(caller, NUMBERED_MAX), writes=True) == NUMBERED_MAX
        ):
            pass
        return int(self._transaction(self._positions.last)[0])

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        first, last = max(0, int(start["number"])), int(end["number"])
        return [Slice((NUMBERED, {"number": first}, last), self._options.outbox)] if first < last else []

    def batch(self) -> tuple[Offsets, Offsets]:
        if not self._transaction(self._positions.exists):
            raise UsageError(
                "OUTBOX_BATCH",
                f"{OWNER}: a batch read shows the rows that a stream has numbered and not deleted, and there is no "
                f"table {self._options.positions}.",
                next_step="start the stream first, or read the table itself",
            )
        starting = self._options.starting
        start = dict(starting) if isinstance(starting, dict) else {"number": self._transaction(self._first)}
        return start, self._offsets(self._transaction(self._positions.last)[0])

    def acknowledge(self, end: Offsets) -> None:
        if self._options.keep or int(end["number"]) <= 0:
            return
        try:
            self._lock()
            while self._transaction(
                lambda caller: self._positions.delete_until(caller, int(end["number"])), writes=True
            ):
                pass
        except DeliveredError as error:
            log.warning("rows of %s were not deleted: %s", self._options.outbox, error)  # by the next batch

    def close(self) -> None:
        self._locked = False
        for held in (self._connection, self._file):
            if held is not None:
                held.close()
        self._connection = self._file = None

    def _began(self, caller: Caller) -> None:
        """A new checkpoint: all rows of the outbox are numbered anew. Until Spark logs a batch, this may come again."""
        self._positions.check(caller)
        self._positions.prepare(caller)
        self._positions.restart(caller)

    def _first(self, caller: Caller) -> int:
        return self._positions.first(caller) - 1

    def _check(self, start: Offsets) -> None:
        """The row that was read last still has its number: else the table is another one, or of an older state."""
        at, known = int(start["number"]), start.get("#id")
        found = self._transaction(
            lambda caller: self._positions.id_of(caller, at) if self._positions.exists(caller) else None
        )
        if at > 0 and found != known:
            raise InvariantBroken(
                "OUTBOX_DATABASE_BEHIND",
                f"{OWNER}: row {at} of {self._options.positions} at {self._options.system} has the id {found}, and "
                f"this query read it with the id {known}: the database was restored from an older copy, or promoted "
                "without its last transactions, or is another one.",
                next_step="restore the table; or compare the outbox with what was delivered, and start a new "
                "checkpoint, which begins with all rows of the outbox",
            )

    def _offsets(self, number: int) -> Offsets:
        return {"number": number, "#id": self._transaction(lambda caller: self._positions.id_of(caller, number))}

    def _transaction(self, work: Callable[[Caller], T], *, writes: bool = False) -> T:
        """May be done again if the server was away: it numbers and deletes what is left."""

        def once() -> T:
            if self._connection is None:
                self._connection = connect(self._options)
                if self._locked:
                    self._take_lock()
            try:
                with transaction(self._options, self._connection, writes=writes) as caller:
                    return work(caller)
            except Unreachable:
                self._connection.close()
                self._connection = None
                raise

        return patience.patiently(
            self._options.system, once, patience_s=patience.patience_s(answered=self._connection is not None)
        )

    def _lock(self) -> None:
        """Own the positions for the life of this driver."""
        if not self._locked:
            self._transaction(lambda _: None)
            self._take_lock()
            self._locked = True

    def _take_lock(self) -> None:
        name, options = self._options.positions, self._options
        match options.dialect:
            case "postgres":
                taken = self._lock_session(self._connection, lock_key(name))
            case "mysql":
                with transaction(options, self._connection) as caller:
                    taken = caller.execute("SELECT GET_LOCK(?, ?)", [f"delivered {lock_key(name)}", LOCK_WAIT_S]).rows[
                        0
                    ][0]
            case _:
                taken = self._lock_file()
        if not taken:
            raise in_use("it", name, options)

    def _lock_session(self, connection: Any, key: int) -> bool:
        try:
            with transaction(self._options, connection) as caller:
                caller.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT_S}s'")
                caller.execute("SELECT pg_advisory_lock(?)", [key])
        except DeliveredError as error:
            if sqlstate(error) != "55P03":
                raise
            return False
        return True

    def _lock_file(self) -> bool:
        """A process that dies releases it."""
        self._file = open(f"{self._options.file}-{self._options.positions}.lock", "a")  # noqa: PTH123, SIM115
        waiting = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(BlockingIOError),
            wait=tenacity.wait_fixed(0.2),
            stop=tenacity.stop_after_delay(LOCK_WAIT_S),
            retry_error_callback=lambda _: False,
        )
        return waiting(lambda: fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None
