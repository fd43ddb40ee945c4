"""Transactions: opened, extended by partitions, ended; also by a process that did not open them."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from delivered.clients.pulsar.connection import ABORT, COMMIT, Cluster, Connection, Error, NoAnswer, Rejected
from delivered.model.work import Failed, Ok, Outcome, Unknown

COORDINATORS = "persistent://pulsar/system/transaction_coordinator_assign"
_PAUSE_S = 0.1

T = TypeVar("T")


class TransactionId(NamedTuple):
    """
    Attributes:
        most: number of its coordinator.
    """

    most: int
    least: int

    def __str__(self) -> str:
        return f"({self.most},{self.least})"  # as Pulsar's tools write it

    @property
    def fields(self) -> dict[str, int]:
        return {"txnid_most_bits": self.most, "txnid_least_bits": self.least}


class Coordinators:
    """The transaction coordinators of a cluster, each served by one broker at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._joined: dict[int, Connection] = {}
        self._count = 0

    def count(self, deadline: float) -> int:
        """Raises NoAnswer, Rejected: NOT_ALLOWED if there are none."""
        if not self._count:
            try:
                self._count = self._cluster.partitions(COORDINATORS, deadline)
            except Rejected as error:
                if error.code != Error.TOPIC_NOT_FOUND:  # where transactions are off, nothing creates it
                    raise
        if not self._count:
            raise Rejected(Error.NOT_ALLOWED, "the brokers have no transaction coordinator")
        return self._count

    def load(self, coordinators: Iterable[int], deadline: float) -> None:
        """Make the brokers load these: their admin interface knows no others.

        Raises:
            NoAnswer, Rejected, ssl.SSLError
        """
        for coordinator in coordinators:
            self._patiently(partial(self._at, coordinator, deadline), deadline)

    def begin(self, number: int, ttl_s: float, deadline: float) -> TransactionId:
        """Open a transaction.

        Args:
            number: any; picks the coordinator.
            ttl_s: after which its coordinator aborts it.

        Raises:
            NoAnswer: one may be open, without a partition. Rejected, ssl.SSLError
        """
        coordinator = number % self.count(deadline)
        answer = self._patiently(
            lambda: self._at(coordinator, deadline).ask(
                "new_txn", deadline, ttl_ms=int(ttl_s * 1000), tc_id=coordinator
            ),
            deadline,
        )
        return TransactionId(answer.txnid_most_bits, answer.txnid_least_bits)

    def add(self, transaction: TransactionId, topics: Sequence[str], deadline: float) -> None:
        """Before the first message to each. May be repeated. Raises NoAnswer, Rejected."""

        def ask() -> Any:
            connection = self._at(transaction.most, deadline)
            return connection.ask("add_partitions", deadline, partitions=topics, **transaction.fields)

        self._patiently(ask, deadline)

    def end(self, transaction: TransactionId, *, commit: bool, deadline: float) -> Outcome[None]:
        return self.end_all([transaction], commit=commit, deadline=deadline)[0]

    def end_all(self, transactions: Sequence[TransactionId], *, commit: bool, deadline: float) -> list[Outcome[None]]:
        """End them side by side.

        Returns:
            Ok: it ended so, in all its partitions. Failed: its coordinator does not know it (any more), or ends it
            otherwise: it was committed, aborted or expired, which only a marker tells. Unknown: ask again.
        """
        action = COMMIT if commit else ABORT
        outcomes: list[Outcome[None]] = []
        asked: list[Any] = []
        for transaction in transactions:
            try:
                connection = self._at(transaction.most, deadline)
                asked.append((connection, connection.request("end_txn", deadline, action=action, **transaction.fields)))
            except (NoAnswer, Rejected, ssl.SSLError) as error:
                asked.append(error)
        for transaction, one in zip(transactions, asked, strict=True):
            try:
                if isinstance(one, Exception):
                    raise one
                connection, answer = one
                connection.wait(answer, deadline)
                outcomes.append(Ok(None))
            except Rejected as error:
                if error.code in (Error.TXN_NOT_FOUND, Error.INVALID_TXN_STATUS):
                    outcomes.append(Failed(f"transaction {transaction}: {error}"))
                else:
                    self._joined.pop(transaction.most, None)
                    outcomes.append(Unknown(f"transaction {transaction}: {error}"))
            except (NoAnswer, ssl.SSLError) as error:
                outcomes.append(Unknown(f"transaction {transaction}: {error}"))
        return outcomes

    def _at(self, coordinator: int, deadline: float) -> Connection:
        """A connection to the broker of this coordinator, which the lookup makes it load."""
        known = self._joined.get(coordinator)
        if known is not None and known.usable:
            return known
        connection = self._cluster.serving(f"{COORDINATORS}-partition-{coordinator}", deadline, again=True)
        connection.ask("join_coordinator", deadline, tc_id=coordinator)
        self._joined[coordinator] = connection
        return connection

    def _patiently(self, ask: Callable[[], T], deadline: float) -> T:
        """Ask again where the answer says that nothing was done, and that this may pass."""
        while True:
            try:
                return ask()
            except Rejected as error:
                if not error.may_pass or time.monotonic() + _PAUSE_S > deadline:
                    raise
                self._joined.clear()
                time.sleep(_PAUSE_S)
