"""Every limit of the product in one place. tests/unit/test_limits.py checks the inequalities between them."""

from __future__ import annotations

NAME_LENGTH_MAX = 64
"""Characters in a pipeline's or a sink's name: they become part of transactional ids and topic names."""

SHARDS_MAX = 10_000
"""Participants in one batch. A decision record names all of them."""

DECISION_BYTES_MAX = 900_000
"""One decision record, encoded. Below the broker's default of 1 MB for a record."""

OFFSETS_BYTES_MAX = 400_000
"""The text of a batch's source offsets in its decision record."""

TRANSFORM_VERSIONS_KEPT = 16
"""Versions of a pipeline's transform that its decisions distinguish; older ones are merged."""

TRANSFORM_VERSIONS_BYTES_MAX = 100_000
"""The same in bytes: each version holds the source offsets at which it began."""

LEDGER_HISTORY_BATCHES = 1_000
"""Decisions kept for the audit, per sink. Older ones are folded into the running total.

More than the 100 batches that Spark keeps in a checkpoint (spark.sql.streaming.minBatchesToRetain), so that no batch
that Spark can still rerun is forgotten.
"""

LEDGER_INCARNATIONS = 100
"""Earlier checkpoints of one pipeline and sink whose newest decision a ledger keeps."""

SPARK_BATCHES_RETAINED = 100
"""Spark's default for spark.sql.streaming.minBatchesToRetain."""

OWNERS_REMEMBERED = 16
"""Superseded owners that a ledger remembers, so that a fenced driver cannot reclaim it."""

TRANSACTION_SLOTS = 4
"""Transactional ids per shard: two for batches that alternate, times two for attempts that overlap."""

CLAIMS_APART = 8
"""Claims of a ledger in a row whose tasks share no transactional id."""

SWEEP_EVERY_S = 60.0
"""How often a running driver aborts what tasks of superseded drivers opened after its start."""

CONNECT_TIMEOUT_S = 10.0
"""Until a server that does not answer is reported. The promise: one clear error within 15 s."""

REQUEST_TIMEOUT_S = 30.0
"""One request to a server that answered before."""

APPLY_TIMEOUT_S = 120.0
"""All attempts to apply one decided participant, including a broker's restart."""

RECOVERY_WAIT_S = 120.0
"""How long recovery waits for transactions of others to leave the marker's partition."""

NOTIFY_EVERY_S = 10.0
"""Between two looks for problems to report to a webhook, and between two tries."""

NOTIFY_TRIES_MAX = 180
"""Of one message: for half an hour. Then it is dropped, and logged."""

TRANSACTION_TIMEOUT_S = 600.0
"""How long a prepared Kafka transaction lives. Below the broker's default limit of 900 s."""

OPEN_TRANSACTION_OLD_S = 3_600.0
"""Age at which an open transaction causes a warning: it blocks readers, or holds locks and blocks VACUUM (P20)."""

BROKER_TRANSACTION_TIMEOUT_S_DEFAULT = 900.0
"""Kafka's default for transaction.max.timeout.ms, in seconds."""

OUTAGE_PATIENCE_S = 120.0
"""How long a running pipeline waits for an unreachable server: a restart of its brokers."""

GRANT_WAIT_S = OUTAGE_PATIENCE_S
"""at_most_once: how long a second attempt of a shard waits for the end of the one that may send, before it gives up."""

SOURCE_PATIENCE_S = OUTAGE_PATIENCE_S
"""The same for a source or receiver in the middle of its records."""

RESTART_CONFIRM_S = 10.0
"""A Kafka broker may briefly report too little after a restart: how long to ask again."""

SOURCE_BATCH_RECORDS_MAX = 16_384
"""Records in one Arrow batch of the Kafka source."""

SOURCE_QUEUE_KBYTES = 16_384
"""Records that a Kafka consumer prefetches for the task, in KiB."""

RECORD_BATCH_BYTES_MAX = 256 << 20
"""One Kafka record batch that is written, before its compression."""

DECOMPRESSED_BYTES_MAX = 64 << 20
"""One Kafka record batch that is read, decompressed: the default of maxRecordBatchBytes."""

SCHEMA_TYPES_MAX = 10_000
"""Types of one registered schema, with its references expanded."""

SCHEMA_DEPTH_MAX = 32
"""Records within records of a registered schema."""

RECORD_VALUES_MAX = 1_000_000
"""Values that one record with a schema stands for, with the fields that its schema fills in; or one for each byte."""

RECORD_CHECKS_MAX = 200_000
"""Rules of a JSON Schema that are applied to one record, or ten for each of its bytes if that is more."""

KAFKA_RESPONSE_BYTES_MAX = 256 << 20
"""One response of a Kafka broker: a fetch holds at least one record batch, however large."""

PULSAR_COMMAND_BYTES_MAX = 8 << 20
"""One command of a Pulsar broker to this client, which reads no messages."""

PULSAR_IN_FLIGHT_BYTES_MAX = 16 << 20
"""Bytes that a task has sent to Pulsar, and which are not acknowledged yet."""

ROCKETMQ_FRAME_BYTES_MAX = 64 << 20
"""One answer of a RocketMQ broker; its own limit is 16 MiB by default."""

ROCKETMQ_QUEUES_MAX = 10_000
"""Queues of a topic on one RocketMQ broker."""

OFFSET_METADATA_MAX = 200
"""Changes of a stream's offset metadata that a checkpoint's sidecar keeps: new topics and partitions, lost records."""

LANDMARK_EVERY_S = 60.0
"""How often a stream with a backlog stores what stands before its position: a request and a small file."""

LANDMARK_IDLE_EVERY_S = 5.0
"""The same for a stream that waits for records. At the end of an available-now run it always does."""

DEDUP_WINDOW = 1_000_000
"""Newest messages per partition of a receiver's log among which a redelivered one is recognised."""

DEDUP_WINDOW_MAX = 100_000_000
"""The same at most, however long ids are kept."""

DEDUP_BYTES_PER_ID = 130
"""Memory per kept id of 36 characters; measured: 124 to 132."""

STATE_BYTES_PER_KEY = 460
"""Executor memory per key of 36 characters in Spark's state, which keeps two versions; measured."""

KEY_TABLE_BYTES = {"sqlite": 89, "postgres": 198, "mysql": 231}
"""Disk space per key in a key table of dedup, with its index, whatever the key's length; measured."""

KEY_MEMORIES_KEPT = 2
"""Earlier checkpoints of one pipeline and sink whose key table is kept."""

RECEIVE_MESSAGES_MAX = 10_000
"""Messages that a receiver appends in one commit."""

RECEIVE_BYTES_MAX = 64 << 20
"""Bytes of messages that a receiver holds before it appends them."""

MESSAGE_BYTES_MAX = 16 << 20
"""The largest message that a receiver accepts."""

RECEIVE_LINGER_S = 0.1
"""How long a receiver waits for more messages before it appends."""

REFUSED_TIMES = 3
"""A message that the log rejects on its own this many times is bad."""

REFUSED_IN_A_ROW_MAX = 10
"""Messages rejected in a row, with none appended in between, before the log counts as broken."""

APPEND_ATTEMPTS_MAX = 30
"""Attempts of one append that competes with other receivers of the same log."""

LOG_FILES_MAX = 200
"""Files of a receiver's log before it compacts small ones."""

RECEIVE_UPKEEP_S = 10.0
"""Interval at which a receiver maintains its log: is it full, too many files, anything to remove."""

RECEIVER_SILENT_S = 30.0
"""A receiver that did not report for so long counts as dead. Above any of its reports' intervals, and a connect."""

RECEIVERS_MAX = 64
"""Receiver processes that one command starts."""

DEAD_LETTERS_MAX = 100_000
"""Dead letters that one command lists, retries or drops."""

DEAD_LETTERS_BATCH_MAX = 10_000
"""Dead letters of one batch of a retry."""

SAGA_STEPS_MAX = 64
"""Steps of one saga."""

SAGA_ID_BYTES_MAX = 128
"""A saga's id, in UTF-8."""

SAGA_DATA_BYTES_MAX = 1 << 20
"""A saga's data, or the result of one of its steps, as JSON."""

SAGA_ERROR_LENGTH_MAX = 500
"""Characters of an error that a saga's log keeps."""

SAGA_BACKOFF_S_MAX = 60.0
"""Longest pause before a step of a saga is tried again."""

EVENT_BYTES_MAX = 1 << 20
"""One event's payload, or the state of a snapshot, as JSON."""

EVENTS_APPENDED_MAX = 1_000
"""Events that one call appends."""

REDO_MEMORY_BYTES = 32 << 20
"""Rows of a shard that a task keeps in memory until they are prepared, to send them again after an outage of a database
server. Further rows are kept in a temporary file."""

AUDIT_MEMORY_BYTES = 256 << 20
"""What an audit without Spark keeps of the records of both sides, 64 bytes of each, and keys and ids. It uses 2.4 times
as much: of 1 million records of Kafka on either side, 400 MB. What needs more is audited by Spark."""
