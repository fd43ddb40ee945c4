"""The sink. Its ledger is external: RocketMQ has no storage that a single driver can own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.rocketmq.committer import SETTLE_S, RocketmqCommitter
from delivered.connectors.rocketmq.options import TRANSACTION, RocketmqSinkOptions
from delivered.connectors.rocketmq.publish import Publisher
from delivered.connectors.rocketmq.read import RocketmqScan
from delivered.connectors.rocketmq.remoting import Cluster
from delivered.connectors.rocketmq.sizes import refused_rows
from delivered.connectors.rocketmq.writer import HalfWriter, RocketmqWriter
from delivered.contract.finding import Finding
from delivered.contract.sink import BoundedScan, Committer, Writer
from delivered.kits.queue.columns import COLUMNS, TEXT, check_names, check_types
from delivered.kits.queue.sink import MessageSink, Nothing, sends
from delivered.ledger.store import Ledgers
from delivered.model.capability import Commit, SinkCapability
from delivered.model.errors import Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.outcome import Outcome, Unknown
from delivered.model.prepared import Prepared

_NEEDED = {"NORMAL": (), "FIFO": ("message_group",), "DELAY": ("delivery_timestamp",), TRANSACTION: ()}
HALF_MESSAGES_KEPT_S = 72 * 3_600.0
"""RocketMQ's default for fileReservedTime."""


@dataclass(frozen=True)
class RocketmqSink(MessageSink):
    options: RocketmqSinkOptions
    ledgers: Ledgers

    def capability(self) -> SinkCapability:
        options = self.options
        if options.kind == TRANSACTION:
            return self._two_phase()
        order = ("messages of a group are ordered only within a shard",) if options.kind == "FIFO" else ()
        return sends(
            "rocketmq",
            mechanism="receipts",
            send=f"rocketmq {options.topic}: {options.kind}, with a receipt for each message, each sent once",
            assumes=(
                f"the ledger {options.ledger} is kept as long as the checkpoint",
                "brokers do not lose confirmed messages (flushDiskType, replicas)",
            ),
            limits=(
                "a replayed batch has the same message_id, also among the keys (unless a column message_id sets it), "
                "so that receivers can detect duplicates",
                *order,
            ),
        )

    def _two_phase(self) -> SinkCapability:
        options = self.options
        return SinkCapability(
            system="rocketmq",
            commit=Commit.TWO_PHASE,
            mechanism="two-phase commit",
            stage=f"rocketmq {options.topic}: half messages, which brokers store and keep invisible",
            prepare="each confirmed by its broker; identified by its place in the broker's log",
            decide="one row in the ledger, by the one driver that owns it",
            apply="each half message is committed once, by one process at a time",
            send=f"rocketmq {options.topic}: half messages, committed when all of a shard are stored, each sent once",
            batch_atomic=False,
            prepared_timeout_s=HALF_MESSAGES_KEPT_S,
            assumes=(
                f"the ledger {options.ledger} is one file for every driver of this pipeline, and kept as long as the "
                "checkpoint",
                "brokers do not lose confirmed messages (flushDiskType, replicas), and keep half messages and the "
                "topic's for fileReservedTime (72 h unless set)",
                "no other producer connects with a group that starts with delivered_: brokers would let it end this "
                "sink's half messages",
            ),
            limits=(
                "each record is in the topic once; as always, messages that a group does not acknowledge in time are "
                "redelivered to it, with the same message_id, which is also among the keys",
                "transaction checks of brokers, at most transactionCheckMax (15), get no answer: the driver ends half "
                "messages, or the next driver by the decision, also after the last check (measured with 5.5.0)",
                f"a start after a crash during apply waits {SETTLE_S:.0f} s, then looks the batch up in the topic",
                "readers may see some rows of a shard before others, in any order",
            ),
        )

    def _look(self, guarantee: Guarantee) -> Sequence[Finding]:
        del guarantee
        if self.options.kind == TRANSACTION:
            cluster = Cluster(self.options)
            try:
                for broker in dict.fromkeys(p.broker for p in cluster.places()):
                    cluster.broker(broker)
            finally:
                cluster.close()
        publisher = Publisher(self.options)
        try:
            takes = publisher.takes()
        finally:
            publisher.close()
        if self.options.kind in takes:
            return []
        return [
            Finding(
                "TOPIC_TYPE",
                f"The topic {self.options.topic!r} accepts messages of type {', '.join(takes) or 'none'}, not "
                f"{self.options.kind}.",
                True,
                "correct the option messageType, or create a topic of that type",
            )
        ]

    def _check_schema(self, schema: pa.Schema) -> None:
        needed = {"value", *_NEEDED[self.options.kind]}
        way_out = "select these columns; messageType=fifo takes message_group, delay takes delivery_timestamp"
        system = f"rocketmq with messageType={self.options.kind.lower()}"
        check_names(system, schema, needed, {*COLUMNS, "tag", *needed}, way_out)
        check_types(pa.schema([f for f in schema if f.name in COLUMNS]))
        for field in schema:
            if field.name in ("tag", "message_group") and not any(fits(field.type) for fits in TEXT):
                raise UsageError(
                    "COLUMNS",
                    f"Column {field.name!r} is {field.type}; it must be text.",
                    next_step="cast the column to string",
                )
            if field.name == "delivery_timestamp" and not pa.types.is_timestamp(field.type):
                raise UsageError(
                    "COLUMNS",
                    f"Column {field.name!r} is {field.type}; it must be a timestamp.",
                    next_step="cast the column to timestamp",
                )

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        if guarantee is Guarantee.EXACTLY_ONCE and self.options.kind == TRANSACTION:
            return HalfWriter(self.options, work)
        return super().writer(work, guarantee, schema)

    def committer(self, scope: Scope) -> Committer:
        return RocketmqCommitter(self.options, scope) if self.options.kind == TRANSACTION else _PlainCommitter()

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        """See `delivered.contract.trial.TriesRows`."""
        return refused_rows(self.options, batch)

    def _writer(self, work: Work, *, gives_up: bool) -> RocketmqWriter:
        return RocketmqWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        if self.options.kind == TRANSACTION:
            return RocketmqScan(self.options)
        raise Refused(
            "NOT_READABLE",
            f"rocketmq {self.options.topic} cannot be read back: its client cannot read by offset, and brokers are "
            "only accessed with messageType=transaction.",
            next_step="create a second group, write it to a log with `delivered receive`, and compare that",
        )


class _PlainCommitter(Nothing):
    """Sent messages are visible; but an earlier run of the pipeline may have decided half messages."""

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        del prepared
        return Unknown(f"shard {work.shard} was decided with messageType=transaction: start once with that option")
