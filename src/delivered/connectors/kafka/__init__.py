"""Apache Kafka, with Arrow in and out; no JAR.

Options of the source, named as in Spark's own, and of the sink; offsets in the format of Spark's source; by which
client records travel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from delivered.clients.kafka import (
    SETTINGS,
    check_client,
    check_complete,
    client_options,
    committed_only,
    in_clear,
    mechanism_of,
    path_option,
    protocol_of,
    record_batch,
    resolved,
)
from delivered.clients.kafka.record_batch import Partition
from delivered.contract.connector import Connector, Factory
from delivered.contract.source import Offsets, foreign_offsets
from delivered.kits.options import data_loss_option, headers_option, message_id_columns, names, not_blank
from delivered.kits.schemas import FormatOptions
from delivered.model.capability import Guarantee
from delivered.model.errors import MissingExtra, UsageError, did_you_mean
from delivered.model.identity import fitted_name
from delivered.model.limits import DECOMPRESSED_BYTES_MAX, TRANSACTION_TIMEOUT_S
from delivered.model.options import REFERENCES, Option, Options, OptionType, Unfit, choice, integer, option, several

EARLIEST, LATEST = -2, -1
"""Placeholders for an offset in the options' JSON."""

# Offsets, in the format of Spark's Kafka source and of its checkpoints.

_IDS = "#topic ids"
_FIRST = "#first"
_FROM = "#from"
_EPOCHS = "#epochs"
# No topic can have these names: Kafka does not allow "#".
METADATA = frozenset({_IDS, _FIRST, _FROM, _EPOCHS})
"""Keys that Spark's own connector does not know."""
LASTING = frozenset({_IDS, _FIRST, _EPOCHS})
"""Those that also apply to later offsets."""


@dataclass(frozen=True)
class Positions:
    """A stream's position.

    Attributes:
        at: partition -> next offset.
        ids: topic -> its Kafka topic id, which changes when the topic is deleted and recreated.
        first: partition -> first offset, if it was added after the stream started.
        begins: partition -> first offset of the batch that ends here, if that is not the end of the previous batch
            because records were lost.
        epochs: partition -> a leader epoch in which its log reached up to `at`; without one, nobody notices that the
            log lost its end.
    """

    at: Mapping[Partition, int]
    ids: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[Partition, int] = field(default_factory=dict)
    begins: Mapping[Partition, int] = field(default_factory=dict)
    epochs: Mapping[Partition, int] = field(default_factory=dict)

    def begin_of(self, partition: Partition, before: Positions) -> int | None:
        """First offset of a partition in the batches between `before` and here; None: not recorded."""
        return self.begins.get(partition, before.at.get(partition, self.first.get(partition)))

    def to_json(self) -> Offsets:
        """`{"orders": {"0": 12}, "#topic ids": {...}}`: Spark's format, plus keys that no topic can have."""
        data: Offsets = _nest(self.at)
        data[_IDS] = dict(sorted(self.ids.items()))
        if self.first:
            data[_FIRST] = _nest(self.first)
        if self.begins:
            data[_FROM] = _nest(self.begins)
        if self.epochs:
            data[_EPOCHS] = _nest(self.epochs)
        return data

    @classmethod
    def from_json(cls, data: Offsets) -> Positions:
        """Raise InvariantBroken if a checkpoint holds something else."""
        try:
            topics = {t: p for t, p in data.items() if not t.startswith("#")}
            first, begins, epochs = (_flatten(data.get(key, {})) for key in (_FIRST, _FROM, _EPOCHS))
            return cls(_flatten(topics), dict(data.get(_IDS, {})), first, begins, epochs)
        except (AttributeError, TypeError, ValueError):
            raise foreign_offsets("a Kafka", data) from None


@dataclass(frozen=True)
class Timestamp:
    """The first record at or after a time.

    Attributes:
        ms: since 1970.
    """

    ms: int


Place = int | Timestamp
"""An offset, EARLIEST, LATEST, or a time."""


@dataclass(frozen=True)
class Where:
    """Where to start or end reading.

    Attributes:
        everywhere: for all partitions; None: see `each`.
        each: partition -> place.
        option: where it was set, for errors.
        stored: positions from a driver's earlier `initial`, used as they are, whatever Kafka has now.
    """

    option: str
    everywhere: Place | None = None
    each: Mapping[Partition, Place] = field(default_factory=dict)
    stored: Positions | None = None

    def place(self, partition: Partition) -> Place | None:
        """None: not set for this partition."""
        return self.each.get(partition) if self.everywhere is None else self.everywhere


def parse_offsets(owner: str, option: str, text: str) -> Where:
    """Read "earliest", "latest", JSON like {"orders": {"0": 23, "1": -1}}, or the result of a driver's `initial`."""
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return Where(option, EARLIEST if word == "earliest" else LATEST)
    if _IDS in text:
        stored = Positions.from_json(_json_object(owner, option, text, "an offset written by this source"))
        return Where(option, each=dict(stored.at), stored=stored)
    each = parse_partitions(owner, option, text, '"earliest", "latest" or {"topic": {"0": 23, "1": -1}}')
    for (topic, number), offset in each.items():
        if offset < EARLIEST:
            raise UsageError(
                "OPTION_VALUE.KAFKA_OFFSET", owner=owner, option=option, offset=offset, topic=topic, number=number
            )
    return Where(option, each=dict(each))


def parse_timestamps(owner: str, option: str, text: str) -> Where:
    """Read JSON like {"orders": {"0": 1700000000000}}: milliseconds since 1970."""
    each = parse_partitions(owner, option, text, '{"topic": {"0": 1700000000000}}')
    return Where(option, each={p: Timestamp(_at_least_0(owner, option, ms)) for p, ms in each.items()})


def parse_timestamp(owner: str, option: str, text: str) -> Where:
    """Read milliseconds since 1970, for all partitions."""
    try:
        return Where(option, Timestamp(_at_least_0(owner, option, int(text))))
    except ValueError:
        raise UsageError("OPTION_VALUE.TIMESTAMP", owner=owner, option=option, text=text) from None


def parse_assign(owner: str, option: str, text: str) -> tuple[Partition, ...]:
    """Read JSON like {"orders": [0, 1]}."""
    example = '{"topic": [0, 1]}'
    data = _json_object(owner, option, text, example)
    found: list[Partition] = []
    for topic, numbers in data.items():
        if not isinstance(numbers, list) or not numbers or any(not _is_integer(n) or n < 0 for n in numbers):
            raise _bad_json(owner, option, text, example)
        found += [(topic, n) for n in numbers]
    if not found:
        raise _bad_json(owner, option, text, example)
    return tuple(sorted(set(found)))


def parse_partitions(owner: str, option: str, text: str, example: str) -> dict[Partition, int]:
    """Read JSON like {"orders": {"0": 23}}."""
    found: dict[Partition, int] = {}
    for topic, partitions in _json_object(owner, option, text, example).items():
        if not isinstance(partitions, dict):
            raise _bad_json(owner, option, text, example)
        for number, value in partitions.items():
            if not number.isascii() or not number.isdigit() or not _is_integer(value):
                raise _bad_json(owner, option, text, example)
            found[topic, int(number)] = value
    if not found:
        raise _bad_json(owner, option, text, example)
    return found


def _json_object(owner: str, option: str, text: str, example: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError:
        raise _bad_json(owner, option, text, example) from None
    if not isinstance(data, dict):
        raise _bad_json(owner, option, text, example)
    return data


def _bad_json(owner: str, option: str, text: str, example: str) -> UsageError:
    return UsageError(
        "OPTION_VALUE.KAFKA_JSON",
        owner=owner,
        option=option,
        text=text,
        wanted=example,
        example=example[example.index("{") :],
    )


def _at_least_0(owner: str, option: str, ms: int) -> int:
    if ms < 0:
        raise UsageError("OPTION_VALUE.TIME_NEGATIVE", owner=owner, option=option, time=ms)
    return ms


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _nest(flat: Mapping[Partition, int]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for (topic, number), offset in sorted(flat.items()):
        data.setdefault(topic, {})[str(number)] = offset
    return data


def _flatten(nested: Mapping[str, Mapping[str, int]]) -> dict[Partition, int]:
    return {(t, int(n)): int(o) for t, numbers in nested.items() for n, o in numbers.items()}


# Options of the Kafka source, named as in Spark's own Kafka source.

OWNER = "delivered_kafka source"

SERVERS = Option(
    "kafka.bootstrap.servers",
    "Comma-separated bootstrap brokers, as host:port.",
    required=True,
    example="localhost:9092",
)
_COUNT = integer(1)

_UNITS_S = {"ms": 0.001, "": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def _duration_s(text: str) -> float:
    found = re.fullmatch(r"(\d+)\s*(ms|s|m|min|h|d|)", text.strip().lower())
    if found is None:
        raise Unfit.build("OPTION_VALUE.DURATION_SHORT", text=text)
    return int(found[1]) * _UNITS_S[found[2]]


def _unused(name: str, why: str) -> Option:
    return Option(name, f"Accepted as in Spark, without effect: {why}", type=integer(0), example="1")


_UNUSED = (
    _unused("fetchOffset.numRetries", "the source retries for two minutes."),
    _unused("fetchOffset.retryIntervalMs", "the source retries at once."),
    _unused("kafkaConsumer.pollTimeoutMs", "a read waits two minutes for brokers."),
)
_READER_RESERVED = {
    "auto.offset.reset": "write startingOffsets",
    "enable.auto.commit": "write commitOffsetsToGroup",
    "enable.auto.offset.store": "write commitOffsetsToGroup",
    "enable.partition.eof": "the source sets it",
    "key.deserializer": "write key.format, or cast the column",
    "value.deserializer": "write value.format, or cast the column",
    "interceptor.classes": "there is no Java client",
}


def _reader_client(owner: str, values: Mapping[str, str]) -> dict[str, str]:
    check_client(owner, values, _READER_RESERVED)
    for unused in _UNUSED:
        if unused.name in values:
            unused.parse(owner, values[unused.name])
    settings = client_options(values)
    if "groupIdPrefix" in values:
        settings.setdefault("group.id", values["groupIdPrefix"] + "-reader")
    return settings


_WHICH = ("subscribe", "subscribePattern", "assign")
_SUBSCRIBE = Option("subscribe", "Comma-separated topics.", type=names("topic"), example="orders")


def _parse_subscription(owner: str, values: Mapping[str, str]) -> tuple[str, ...] | None:
    which = [name for name in _WHICH if name in values]
    if len(which) != 1:
        raise UsageError(
            "OPTION_CONFLICT.KAFKA_TOPICS" if which else "OPTION_MISSING.KAFKA_TOPICS",
            owner=owner,
            choices=", ".join(_WHICH),
            actual=", ".join(which),
        )
    return _SUBSCRIBE.parse(owner, values["subscribe"]) if "subscribe" in values else None


def _pattern(text: str) -> str:
    pattern = text.strip()
    if not pattern:
        raise Unfit.build("OPTION_VALUE.TOPIC_PATTERN", text=text)
    try:
        re.compile(pattern)
    except re.error as error:
        raise Unfit.build("OPTION_VALUE.REGEX", text=text, error=error) from None
    return pattern


def _parse_where(owner: str, values: Mapping[str, str], side: str, forbidden: int | None) -> Where | None:
    """As in Spark, a timestamp for all partitions overrides timestamps per partition, which override offsets.

    Stored positions of a stream's first start override everything, as they were resolved from the other options.
    """
    offsets = values.get(f"{side}Offsets")
    if offsets is not None and (before := parse_offsets(owner, f"{side}Offsets", offsets)).stored is not None:
        return before
    found = [f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"]
    readers = [parse_timestamp, parse_timestamps, parse_offsets]
    for name, read in zip(found, readers, strict=True):
        if name in values:
            where = read(owner, name, values[name])
            if forbidden is not None and forbidden in (where.everywhere, *where.each.values()):
                word = "earliest (-2)" if forbidden == EARLIEST else "latest (-1)"
                raise UsageError("OPTION_VALUE.END_IS_START", owner=owner, name=name, value=values[name], word=word)
            return where
    return None


_PER_TIME = 'Milliseconds since 1970 per partition, as {"topic": {"0": 1700000000000}}.'


class SourceOptions(Options, owner=OWNER, ignored=("path",), more=(FormatOptions,)):
    """
    Attributes:
        client: librdkafka's settings from `client_options`; secrets are not resolved yet.
        topics, pattern, partitions: the partitions to read; exactly one is set.
        starting, ending: None: the default, which differs between stream and batch.
        timestamp_strict: a partition without a record at or after the starting time is an error.
        rows_min: a batch waits for this many offsets, at most `delay_s_max` seconds.
        piece_rows_max: offsets in one task.
        group: consumer group to commit offsets to.
    """

    topics: tuple[str, ...] | None = several(_parse_subscription, _SUBSCRIBE, default=None)
    pattern: str | None = option(
        "subscribePattern",
        "Regular expression (Python syntax), searched in topic names as in Spark; anchor it with ^ and $.",
        OptionType(_pattern),
        default=None,
        example="^orders-",
    )
    partitions: tuple[Partition, ...] | None = several(
        lambda owner, values: parse_assign(owner, "assign", values["assign"]) if "assign" in values else None,
        Option("assign", 'Partitions, as {"topic": [0, 1]}.'),
        default=None,
    )
    starting: Where | None = several(
        partial(_parse_where, side="starting", forbidden=None),
        Option(
            "startingOffsets",
            'earliest, latest, or {"topic": {"0": 23, "1": -1}} with -1 for latest and -2 for earliest. Applies to '
            "a new checkpoint; partitions added later start at their earliest offset.",
            "latest for a stream, earliest for a batch",
        ),
        Option("startingOffsetsByTimestamp", _PER_TIME),
        Option("startingTimestamp", "Milliseconds since 1970, for all partitions."),
        default=None,
    )
    ending: Where | None = several(
        partial(_parse_where, side="ending", forbidden=EARLIEST),
        Option("endingOffsets", 'Batch only: latest, or {"topic": {"0": 50, "1": -1}}.', "latest"),
        Option("endingOffsetsByTimestamp", f"Batch only. {_PER_TIME}"),
        Option("endingTimestamp", "Batch only. Milliseconds since 1970, for all partitions."),
        default=None,
    )
    timestamp_strict: bool = option(
        "startingOffsetsByTimestampStrategy",
        "What to do with a partition that has no record at or after the time: error or latest.",
        choice({"error": True, "latest": False}),
        default=True,
    )
    rows_max: int | None = option(
        "maxOffsetsPerTrigger",
        "Approximate maximum number of offsets per batch.",
        _COUNT,
        default=None,
        shown="no bound",
        example="10000",
    )
    rows_min: int | None = option(
        "minOffsetsPerTrigger",
        "A batch waits for this many offsets, at most maxTriggerDelay; ignored with available-now.",
        _COUNT,
        default=None,
        example="1000",
    )
    delay_s_max: float = option(
        "maxTriggerDelay",
        "How long a batch waits for minOffsetsPerTrigger: 90s, 15m, 1h.",
        OptionType(_duration_s),
        default=900.0,
        shown="15m",
        example="15m",
    )
    piece_rows_max: int | None = option(
        "maxRecordsPerPartition",
        "Maximum number of offsets per task.",
        _COUNT,
        default=None,
        shown="no bound",
        example="10000",
    )
    pieces_min: int | None = option(
        "minPartitions",
        "Minimum number of tasks per batch.",
        _COUNT,
        default=None,
        shown="one per Kafka partition with records",
        example="8",
    )
    batch_bytes_max: int = option(
        "maxRecordBatchBytes",
        "Largest record batch of a producer, decompressed, in bytes. A larger one stops the query, or is a dead letter "
        "(on_bad_row): a few kilobytes can stand for gigabytes. Where Arrow reads the records; librdkafka has "
        "kafka.receive.message.max.bytes.",
        integer(1024),
        default=DECOMPRESSED_BYTES_MAX,
        example="268435456",
    )
    fail_on_data_loss: bool = data_loss_option("records")
    headers: bool = headers_option("Add the column headers.")
    group: str | None = option(
        "commitOffsetsToGroup",
        "Consumer group to commit the pipeline's offsets to after each batch, so that tools can show its lag. Its "
        "offsets are never read.",
        OptionType(not_blank),
        default=None,
        example="delivered",
    )

    through: str = path_option("How records are read: arrow decodes column by column")
    client: Mapping[str, str] = several(
        _reader_client,
        SERVERS,
        Option(
            "kafka.isolation.level",
            "read_committed: skips aborted transactions, and reads only up to the first open one; read_uncommitted, "
            "Spark's default: reads all records immediately.",
            "read_committed",
        ),
        Option("kafka.group.id", "Group id for authorization. The consumers join no group."),
        Option("groupIdPrefix", "Prefix of the group id, unless kafka.group.id is set.", "delivered"),
        *_UNUSED,
        Option(
            "checkpointLocation",
            "The query's checkpointLocation again, to detect a topic that was recreated while the query was stopped. "
            "delivered.Pipeline sets it.",
        ),
        passthrough=("kafka.",),
        secret=True,
    )

    @property
    def in_clear(self) -> tuple[str, ...]:
        return in_clear(self.client)

    def check(self, owner: str) -> None:
        if self.rows_min is not None and self.rows_max is not None and self.rows_min > self.rows_max:
            raise UsageError(
                "OPTION_CONFLICT.KAFKA_LIMITS", owner=owner, rows_min=self.rows_min, rows_max=self.rows_max
            )

    @property
    def servers(self) -> str:
        """For messages."""
        return self.client["bootstrap.servers"]

    @property
    def committed_only(self) -> bool:
        return committed_only(self.client)

    @property
    def what(self) -> str:
        """Describes what is read, for messages."""
        if self.topics is not None:
            return ",".join(self.topics)
        if self.pattern is not None:
            return f"topics like {self.pattern}"
        return ",".join(f"{t}-{n}" for t, n in self.partitions or ())


def refuse_latest_start(where: Where) -> None:
    """A batch read cannot start at the latest offsets: it would almost always be empty."""
    if LATEST in (where.everywhere, *where.each.values()):
        raise UsageError("OPTION_VALUE.KAFKA_BATCH_LATEST", option=where.option)


# Options of the Kafka sink.

SINK_OWNER = "delivered_kafka sink"
TOPIC_LENGTH_MAX = 249

_WRITER_RESERVED = {
    "transactional.id": "the sink chooses it",
    "enable.idempotence": "the guarantee chooses it",
    "transaction.timeout.ms": "write the option transactionTimeout, in seconds",
    "delivery.report.only.error": "the sink sets it",
    "partitioner": "rows are partitioned as the Java client does",
}
_ACKS = ("kafka.acks", "kafka.request.required.acks")
_RETRIES = ("kafka.retries", "kafka.message.send.max.retries")


def _writer_client(owner: str, values: Mapping[str, str]) -> dict[str, str]:
    check_client(owner, values, _WRITER_RESERVED)
    for name in _RETRIES:
        if name in values:
            integer(0).parse(owner, name, values[name])
    return client_options({k: v for k, v in values.items() if k not in (*_ACKS, *_RETRIES)})


def _acks(owner: str, values: Mapping[str, str]) -> str:
    for name in _ACKS:
        value = values.get(name, "all").strip().lower()
        if value not in ("all", "-1", "1"):
            raise UsageError("OPTION_VALUE.KAFKA_ACKS", owner=owner, name=name, value=values[name])
        if value == "1":
            return "1"
    return "all"


def is_topic(name: str) -> bool:
    """Whether Kafka allows the name."""
    return name not in (".", "..") and re.fullmatch(rf"[A-Za-z0-9._-]{{1,{TOPIC_LENGTH_MAX}}}", name) is not None


LEDGER_TOPICS = "__delivered_"
"""Prefix of internal topics without a configured name."""
_INTERNAL = re.compile(rf"__consumer_offsets|__transaction_state|__share_group_state|{LEDGER_TOPICS}.*")


def is_internal(name: str, ledger_topic: str | None = None) -> bool:
    """Whether a topic is Kafka's own or holds a ledger: a row written there could forge a decision.

    Args:
        ledger_topic: the option of that name.
    """
    return name == ledger_topic or _INTERNAL.fullmatch(name) is not None


def _topic(text: str) -> str:
    if not is_topic(text):
        raise Unfit.build("TOPIC_INVALID.OPTION", text=text, topic_length_max=TOPIC_LENGTH_MAX)
    return text


class SinkOptions(Options, owner=SINK_OWNER, ignored=("path",), more=(FormatOptions,)):
    """
    Attributes:
        client: librdkafka's settings, without the prefix `kafka.`; secrets are not resolved yet.
        acks: all or 1; the ledger and transactions always use all.
        topic: None: each row names its own.
        through: auto, arrow or librdkafka.
        transaction_timeout_s: in full seconds.
    """

    client: Mapping[str, str] = several(
        _writer_client,
        SERVERS,
        Option("kafka.retries", "Accepted as in Spark, without effect: the guarantee chooses it."),
        passthrough=("kafka.",),
        secret=True,
    )
    acks: str = several(
        _acks,
        Option(
            "kafka.acks",
            "all; with at_most_once also 1 (leader only): records that a leader loses are not counted as given up.",
            "all",
        ),
        default="all",
    )
    topic: str | None = option(
        "topic",
        "Topic for every row. Without it, each row names its topic in the column `topic`.",
        OptionType(_topic),
        default=None,
    )
    compression: str | None = option(
        "compression",
        "none, gzip, snappy, lz4 or zstd.",
        choice(("none", "gzip", "snappy", "lz4", "zstd")),
        default=None,
        shown="none",
    )
    through: str = path_option("How records are produced: arrow encodes column by column")
    transaction_timeout_s: int = option(
        "transactionTimeout",
        "Seconds that a prepared batch waits for its decision before the broker drops it (exactly_once).",
        integer(1, 86_400),
        default=int(TRANSACTION_TIMEOUT_S),
    )
    message_id_columns: tuple[str, ...] = message_id_columns()
    ledger_topic: str | None = option(
        "ledgerTopic",
        "Name of the pipeline's internal topic.",
        OptionType(_topic),
        default=None,
        shown=f"{LEDGER_TOPICS}<pipeline>",
    )
    ledger_replication: int | None = option(
        "ledgerReplicationFactor",
        "Of the internal topic, when it is created.",
        integer(1, 32_767),
        default=None,
        shown="the topic's",
        example="3",
    )

    def check(self, owner: str) -> None:
        if self.topic is not None and is_internal(self.topic, self.ledger_topic):
            raise UsageError("TOPIC_INTERNAL.OPTION", owner=owner, topic=self.topic)
        if self.compression not in (None, self.client.get("compression.type", self.compression)):
            raise UsageError(
                "OPTION_CONFLICT.SAME",
                owner=owner,
                first="compression",
                second="kafka.compression.type",
                name="compression",
            )

    @property
    def in_clear(self) -> tuple[str, ...]:
        return in_clear(self.client)

    def resolved(self) -> dict[str, str]:
        """Client settings with secrets resolved. Call it only where they are used."""
        return resolved(self.client)

    @property
    def default_name(self) -> str:
        """A sink's name derived from its topic. Names may be shorter than topics, with the same characters."""
        if self.topic is None:
            return "topics"
        return fitted_name(self.topic)


DELIVERY_TIMEOUT_S = 120
"""at_least_once: how long a record may wait for its acknowledgement; longer than a broker restart."""


def producer_config(options: SinkOptions, guarantee: Guarantee, transactional_id: str | None) -> dict[str, str]:
    """A producer's settings by librdkafka's names; the user's override the defaults, not what the guarantee needs."""
    config = {"message.max.bytes": "1048588"}  # the broker's default
    if options.compression is not None:
        config["compression.type"] = options.compression
    config |= {**options.resolved(), "acks": "all"}
    match guarantee:
        case Guarantee.EXACTLY_ONCE:
            config |= {
                "transactional.id": transactional_id or "",
                "transaction.timeout.ms": str(options.transaction_timeout_s * 1000),
                "enable.idempotence": "true",
            }
            config.setdefault("message.timeout.ms", str(options.transaction_timeout_s * 1000))
        case Guarantee.AT_LEAST_ONCE:
            config |= {"enable.idempotence": "true"}
            config.setdefault("message.timeout.ms", str(DELIVERY_TIMEOUT_S * 1000))
        case Guarantee.AT_MOST_ONCE:
            # A request without an answer may have been stored, so it is given up instead of retried.
            config |= {"enable.idempotence": "false", "message.send.max.retries": "0", "acks": options.acks}
            config.setdefault("message.timeout.ms", "30000")
    return config


# By which client records travel: Arrow, unless a setting, a mechanism or the platform needs librdkafka.

_SETTINGS = SETTINGS | {"bootstrap.servers", "client.id"}
SINK_SETTINGS = _SETTINGS | {
    "acks",
    "message.max.bytes",
    "message.timeout.ms",
    "compression.type",
    "linger.ms",
}
SOURCE_SETTINGS = _SETTINGS | {
    "isolation.level",
    "group.id",
    "max.partition.fetch.bytes",
    "fetch.max.bytes",
    "fetch.wait.max.ms",
}


_OTHERS = """
batch.num.messages batch.size broker.address.family client.dns.lookup client.rack compression.level
connections.max.idle.ms debug fetch.min.bytes max.in.flight.requests.per.connection metadata.max.age.ms partitioner
queue.buffering.max.kbytes queue.buffering.max.messages receive.message.max.bytes reconnect.backoff.max.ms
reconnect.backoff.ms request.timeout.ms retries retry.backoff.ms session.timeout.ms socket.keepalive.enable
socket.timeout.ms statistics.interval.ms
"""
_USUAL = SINK_SETTINGS | SOURCE_SETTINGS | set(_OTHERS.split())
"""Those that a misspelt one may mean: librdkafka has no list to ask for."""


def by_arrow(owner: str, through: str, client: Mapping[str, str], known: Set[str]) -> bool:
    """Whether the option `client` (`through`) selects arrow. Raises UsageError: it is arrow, which lacks something."""
    missing = "client is librdkafka" if through == "librdkafka" else find_lack(client, known)
    if missing is not None and through == "arrow":
        check_settings(owner, client)  # one that nobody knows
        raise UsageError("OPTION_CONFLICT.KAFKA_ARROW", owner=owner, missing=missing)
    if missing is not None and (login := find_login_lack(client)) is not None:
        raise UsageError("OPTION_CONFLICT.KAFKA_LIBRDKAFKA", owner=owner, missing=missing, login=login)
    return missing is None


def path(through: str, client: Mapping[str, str], known: Set[str], arrow: str) -> str:
    """By which client records travel, and why, for the plan. `arrow`: what it says of Arrow."""
    missing = find_lack(client, known) if through != "librdkafka" else "client=librdkafka"
    return arrow if missing is None else f"librdkafka, because {missing}"


def find_lack(client: Mapping[str, str], known: Set[str]) -> str | None:
    """Why only librdkafka can be used with these settings; None: nothing is missing."""
    if not record_batch.available():
        return "the package was built without a C compiler"
    if unknown := sorted(set(client) - known):
        return f"kafka.{unknown[0]} is a setting of librdkafka"
    return None


def find_login_lack(client: Mapping[str, str]) -> str | None:
    """What of a login librdkafka, as confluent-kafka brings it, does not have; None: it has all."""
    if protocol_of(client).startswith("SASL") and mechanism_of(client) == "GSSAPI":
        return "the SASL mechanism GSSAPI"
    return "kafka.ssl.enabled.protocols" if "ssl.enabled.protocols" in client else None


def check_settings(owner: str, client: Mapping[str, str]) -> None:
    """Check the user's settings on the driver, before anything runs. Opens no connection: no server is named.

    Args:
        client: from `client_options`. Secrets and files are left out: they are on other machines.

    Raises:
        UsageError: unknown setting, or invalid value.
    """
    check_complete(owner, client)
    known = {
        name: value
        for name, value in client.items()
        if name != "bootstrap.servers"
        and name not in SETTINGS  # checked by us
        and not value.startswith(REFERENCES)
    }
    if not known:
        return
    from delivered.clients.kafka.librdkafka import connect, kafka_client  # not loaded if Arrow's client is used

    with suppress(MissingExtra):  # reported when a client is created
        make = kafka_client().Producer
        try:
            connect(make, owner, known)
        except UsageError:  # it may name an alias: name what the user wrote
            for name, value in known.items():
                try:
                    connect(make, owner, {name: value})
                except UsageError as error:
                    if error.code != "DELIVERED_OPTION_UNKNOWN":
                        raise
                    near = did_you_mean(f"kafka.{name}", [f"kafka.{n}" for n in _USUAL])
                    raise UsageError(
                        "OPTION_UNKNOWN.OF_LIBRDKAFKA", owner=owner, name=f"kafka.{name}", hint=near
                    ) from None
            raise


CONNECTOR = Connector(
    "kafka",
    "kafka",
    sources=Factory(SourceOptions, "delivered.connectors.kafka.source:KafkaSource"),
    sinks=Factory(SinkOptions, "delivered.connectors.kafka.sink:KafkaSink"),
    transactions="",
    messaging=True,
)
