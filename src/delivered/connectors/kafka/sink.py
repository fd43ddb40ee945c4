"""The configured Kafka sink: checked options, no connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.clients.kafka.record_batch import RECORD_OVERHEAD
from delivered.connectors.kafka import columns
from delivered.connectors.kafka.options import SINK_OWNER, SINK_SETTINGS, SinkOptions, by_arrow, check_settings, path
from delivered.contract.sink import BoundedScan, Committer, Sink, Writer
from delivered.contract.source import Finding
from delivered.kits.queue import identified, identified_schema
from delivered.ledger import Store
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import UsageError
from delivered.model.identity import Scope, Work


@dataclass(frozen=True)
class KafkaSink(Sink):
    """See `delivered.contract.sink.Sink`. Picklable; secrets travel as references."""

    options: SinkOptions

    @property
    def name(self) -> str:
        return self.options.default_name

    def capability(self) -> SinkCapability:
        target = self.options.topic or "the topics that rows name"
        timeout = self.options.transaction_timeout_s
        return SinkCapability(
            system="kafka",
            commit=Commit.TWO_PHASE,
            mechanism="two-phase commit",
            stage=f"kafka {target}: a transaction for each shard, invisible to read_committed readers",
            prepare="flush: every record and a marker in the same transaction acknowledged; transaction left open",
            decide="one transaction in the pipeline's internal topic, under the owner's transactional id",
            apply="EndTxn(commit) for each shard, from the driver",
            send=f"kafka {target}: acks=all",
            batch_atomic=False,
            validates=True,
            no_position="",
            prepared_timeout_s=float(timeout),
            records=path(self.options.through, self.options.client, SINK_SETTINGS, "Arrow, encoded in C"),
            assumes=(
                f"readers of {target} use isolation.level=read_committed",
                "a replayed batch gives the same rows (only needed if the query keeps state or a transaction expired: "
                f"{timeout} s after its first record)",
                "min.insync.replicas replicas are never lost together, of the topic or of Kafka's internal topics",
            ),
            transaction_limits=(
                f"a batch must be written and decided within {timeout} s (transactionTimeout)",
                "readers may see some shards of a batch about 20 ms before the others",
                "while a batch is open, read_committed readers of its partitions wait",
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        from delivered.connectors.kafka.preflight import preflight

        try:
            self.check_guarantee(guarantee)
            check_settings(SINK_OWNER, self.options.client)
            by_arrow(SINK_OWNER, self.options.through, self.options.client, SINK_SETTINGS)
        except UsageError as error:
            return [Finding.refusal(error)]
        return preflight(self.options, guarantee)

    def check_ledger(self, scope: Scope) -> Sequence[Finding]:
        from delivered.connectors.kafka.preflight import check_ledger

        return check_ledger(self.options, scope)

    def check_guarantee(self, guarantee: Guarantee) -> None:
        if self.options.acks != "all" and guarantee is not Guarantee.AT_MOST_ONCE:
            raise UsageError("ACKS", acks=self.options.acks, guarantee=guarantee.value)

    def check_schema(self, schema: pa.Schema) -> None:
        check_settings(SINK_OWNER, self.options.client)
        columns.check_schema(identified_schema("kafka", schema, self.options.message_id_columns), self.options.topic)

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        """What the client itself rejects. A lower limit of the broker, or an unknown partition, fails the query."""
        longest = int(self.options.client.get("message.max.bytes", "1048588")) - RECORD_OVERHEAD
        options, ids = self.options, self.options.message_id_columns
        rows = identified(batch, ids, nulls=True)
        return columns.invalid_rows(rows, options.topic, longest, bool(ids), options.ledger_topic)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return columns.records(identified(batch, self.options.message_id_columns))

    def writer(
        self,
        work: Work,
        guarantee: Guarantee,
        schema: pa.Schema,  # noqa: ARG002 - each batch carries its own
    ) -> Writer:
        from delivered.connectors.kafka.writer import DirectWriter, TransactionalWriter

        if guarantee is Guarantee.EXACTLY_ONCE:
            return TransactionalWriter(self.options, work)
        return DirectWriter(self.options, guarantee)

    def scan(self) -> BoundedScan:
        from delivered.connectors.kafka.options import SourceOptions
        from delivered.connectors.kafka.scan import KafkaScan
        from delivered.connectors.kafka.source import KafkaSource

        options = {f"kafka.{k}": v for k, v in self.options.client.items() if _for_readers(k)}
        if self.options.topic is not None:
            options["subscribe"] = self.options.topic
        else:
            options["subscribePattern"] = "^[^_].*"
        options |= {"startingOffsets": "earliest", "endingOffsets": "latest", "includeHeaders": "true"}
        return KafkaScan(KafkaSource(SourceOptions.parse(options)))

    def store(self, scope: Scope) -> Store:
        from delivered.connectors.kafka.store import KafkaStore

        return KafkaStore(self.options, scope)

    def committer(self, scope: Scope) -> Committer:
        from delivered.connectors.kafka.committer import KafkaCommitter

        return KafkaCommitter(self.options, scope)


def _for_readers(key: str) -> bool:
    """Whether a client setting is about connecting, not producing."""
    return key.startswith(("bootstrap.", "security.", "sasl.", "ssl.", "enable.ssl", "client.", "socket.", "broker."))
