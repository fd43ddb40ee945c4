"""Options of the Kafka source, as Spark's own Kafka source spells them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from delivered.connectors.kafka.client_options import check_client, client_options
from delivered.connectors.kafka.offsets import (
    EARLIEST,
    LATEST,
    Partition,
    Where,
    parse_assign,
    parse_offsets,
    parse_timestamp,
    parse_timestamps,
)
from delivered.model.errors import UsageError
from delivered.model.options import Option, OptionTable, choice, flag, whole_number

OWNER = "delivered_kafka source"

_WHICH = ("subscribe", "subscribePattern", "assign")
_NO_EFFECT = {
    "fetchOffset.numRetries": "the source asks again for two minutes.",
    "fetchOffset.retryIntervalMs": "the source asks again at once.",
    "kafkaConsumer.pollTimeoutMs": "a read waits two minutes for brokers.",
}
_PER_TIME = 'Milliseconds since 1970 per partition, as {"topic": {"0": 1700000000000}}.'

SOURCE_OPTIONS = OptionTable(
    OWNER,
    (
        Option("kafka.bootstrap.servers", "Brokers to start from, as host:port, separated by commas.", required=True),
        Option("subscribe", "Topics, separated by commas."),
        Option(
            "subscribePattern",
            "Regular expression (Python's), found anywhere in a topic's name as in Spark; ^ and $ bind it to the whole "
            "name.",
        ),
        Option("assign", 'Partitions, as {"topic": [0, 1]}.'),
        Option(
            "startingOffsets",
            'earliest, latest, or {"topic": {"0": 23, "1": -1}} with -1 for latest and -2 for earliest. Counts for a '
            "new checkpoint; partitions that appear later start at their earliest.",
            "latest for a stream, earliest for a batch",
        ),
        Option("startingOffsetsByTimestamp", _PER_TIME),
        Option("startingTimestamp", "Milliseconds since 1970, for all partitions."),
        Option(
            "startingOffsetsByTimestampStrategy",
            "What to do with a partition that has no record at or after the time: error or latest.",
            "error",
        ),
        Option("endingOffsets", 'Batch only: latest, or {"topic": {"0": 50, "1": -1}}.', "latest"),
        Option("endingOffsetsByTimestamp", f"Batch only. {_PER_TIME}"),
        Option("endingTimestamp", "Batch only. Milliseconds since 1970, for all partitions."),
        Option("maxOffsetsPerTrigger", "About how many offsets one batch takes at most.", "no bound"),
        Option(
            "minOffsetsPerTrigger",
            "A batch waits until so many offsets are there, at most maxTriggerDelay; with available-now it does not.",
        ),
        Option("maxTriggerDelay", "How long a batch waits for minOffsetsPerTrigger: 90s, 15m, 1h.", "15m"),
        Option("maxRecordsPerPartition", "Cut a batch into tasks of at most so many offsets.", "no bound"),
        Option("minPartitions", "Cut a batch into at least so many tasks.", "one per Kafka partition with records"),
        Option(
            "failOnDataLoss", "Stop when records are gone before they were read; false: go on, with a warning.", "true"
        ),
        Option("includeHeaders", "Add the column headers.", "false"),
        Option(
            "commitOffsetsToGroup",
            "Consumer group that is told how far the pipeline is, after each batch, so that tools can show its lag. "
            "Nothing is ever read from it.",
        ),
        Option(
            "checkpointLocation",
            "The query's, once more: a topic that is deleted and made again while the query is stopped is noticed. "
            "delivered.Pipeline sets it.",
        ),
        Option(
            "kafka.isolation.level",
            "read_committed: of aborted transactions nothing is read, and an open one hides what follows it in its "
            "partition until it ends; read_uncommitted, Spark's default: everything at once.",
            "read_committed",
        ),
        Option("kafka.group.id", "Group id that brokers see, for permissions. The consumers join no group."),
        Option("groupIdPrefix", "Of the group id that brokers see, unless kafka.group.id is given.", "delivered"),
        *(Option(name, f"Accepted as in Spark, without effect: {why}") for name, why in _NO_EFFECT.items()),
    ),
    passthrough=("kafka.",),
)

_RESERVED = {
    "auto.offset.reset": "write startingOffsets",
    "enable.auto.commit": "write commitOffsetsToGroup",
    "enable.auto.offset.store": "write commitOffsetsToGroup",
    "enable.partition.eof": "the source sets it",
    "key.deserializer": "keys are bytes; cast the column",
    "value.deserializer": "values are bytes; cast the column",
    "interceptor.classes": "there is no Java client",
}


@dataclass(frozen=True)
class SourceOptions:
    """
    Attributes:
        topics, pattern, partitions: exactly one is set: which partitions are read.
        starting, ending: None: the default, which differs between stream and batch.
        timestamp_strict: a partition without a record at or after the starting time is an error.
        client: librdkafka's settings, as `client_options` gives them; secrets are references still.
        rows_min: a batch waits for so many offsets, at most `delay_s_max` seconds.
        piece_rows_max: offsets in one task.
        group: consumer group that is told the progress.
    """

    client: Mapping[str, str] = field(repr=False)  # may hold passwords
    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    partitions: tuple[Partition, ...] | None = None
    starting: Where | None = None
    ending: Where | None = None
    timestamp_strict: bool = True
    rows_max: int | None = None
    rows_min: int | None = None
    delay_s_max: float = 900.0
    piece_rows_max: int | None = None
    pieces_min: int | None = None
    fail_on_data_loss: bool = True
    headers: bool = False
    group: str | None = None

    @property
    def servers(self) -> str:
        """For messages."""
        return self.client["bootstrap.servers"]

    @property
    def committed_only(self) -> bool:
        return self.client.get("isolation.level", "read_committed") == "read_committed"

    @property
    def what(self) -> str:
        """What is read, for messages."""
        if self.topics is not None:
            return ",".join(self.topics)
        if self.pattern is not None:
            return f"topics like {self.pattern}"
        return ",".join(f"{t}-{n}" for t, n in self.partitions or ())


def parse(given: Mapping[str, str]) -> SourceOptions:
    """Read a source's options, keys in any case.

    Raises:
        UsageError: an option is unknown, missing, contradicts another, or has a value out of its bounds.
    """
    values = SOURCE_OPTIONS.restore({k: v for k, v in given.items() if k.lower() != "path"})
    check_client(OWNER, values, _RESERVED)
    which = [name for name in _WHICH if name in values]
    if len(which) != 1:
        raise UsageError(
            "OPTION_MISSING" if not which else "OPTION_CONFLICT",
            f"{OWNER} needs exactly one of {', '.join(_WHICH)}; it has {', '.join(which) or 'none'}.",
            next_step='add .option("subscribe", "topic")' if not which else f"keep one of {', '.join(which)}",
        )
    for name in _NO_EFFECT.keys() & values.keys():
        whole_number(OWNER, name, values[name], 0)
    return SourceOptions(
        client=_client(values),
        topics=_topics(values.get("subscribe")),
        pattern=_pattern(values.get("subscribePattern")),
        partitions=parse_assign(OWNER, "assign", values["assign"]) if "assign" in values else None,
        starting=_where(values, "starting", forbidden=None),
        ending=_where(values, "ending", forbidden=EARLIEST),
        timestamp_strict=choice(
            OWNER,
            "startingOffsetsByTimestampStrategy",
            values.get("startingOffsetsByTimestampStrategy", "error"),
            ["error", "latest"],
        )
        == "error",
        rows_max=_count(values, "maxOffsetsPerTrigger"),
        rows_min=_rows_min(values),
        delay_s_max=_duration_s("maxTriggerDelay", values.get("maxTriggerDelay", "15m")),
        piece_rows_max=_count(values, "maxRecordsPerPartition"),
        pieces_min=_count(values, "minPartitions"),
        fail_on_data_loss=flag(OWNER, "failOnDataLoss", values.get("failOnDataLoss", "true")),
        headers=flag(OWNER, "includeHeaders", values.get("includeHeaders", "false")),
        group=_group(values.get("commitOffsetsToGroup")),
    )


def _client(values: Mapping[str, str]) -> dict[str, str]:
    settings = client_options(values)
    if "groupIdPrefix" in values:
        settings.setdefault("group.id", values["groupIdPrefix"] + "-reader")
    return settings


def _rows_min(values: Mapping[str, str]) -> int | None:
    low, high = _count(values, "minOffsetsPerTrigger"), _count(values, "maxOffsetsPerTrigger")
    if low is not None and high is not None and low > high:
        raise UsageError(
            "OPTION_CONFLICT",
            f"{OWNER}: option 'minOffsetsPerTrigger' is {low}, above 'maxOffsetsPerTrigger', {high}.",
            next_step="lower the one or raise the other",
        )
    return low


_UNITS_S = {"ms": 0.001, "": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def _duration_s(name: str, text: str) -> float:
    found = re.fullmatch(r"(\d+)\s*(ms|s|m|min|h|d|)", text.strip().lower())
    if found is None:
        raise UsageError(
            "OPTION_VALUE", f"{OWNER}: option {name!r} is {text!r}; it must be a time like 90s, 15m or 1h."
        )
    return int(found[1]) * _UNITS_S[found[2]]


def _where(values: Mapping[str, str], side: str, forbidden: int | None) -> Where | None:
    """A time for all partitions comes before times per partition, and these before offsets, as in Spark.

    Positions that a stream began with once come before everything: the rest is what they were made from.
    """
    offsets = values.get(f"{side}Offsets")
    if offsets is not None and (before := parse_offsets(OWNER, f"{side}Offsets", offsets)).stored is not None:
        return before
    names = [f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"]
    readers = [parse_timestamp, parse_timestamps, parse_offsets]
    for name, read in zip(names, readers, strict=True):
        if name in values:
            where = read(OWNER, name, values[name])
            if forbidden is not None and forbidden in (where.everywhere, *where.each.values()):
                word = "earliest (-2)" if forbidden == EARLIEST else "latest (-1)"
                raise UsageError("OPTION_VALUE", f"{OWNER}: option {name!r} is {values[name]!r}; it cannot be {word}.")
            return where
    return None


def refuse_latest_start(where: Where) -> None:
    """A batch cannot start at the latest offsets: it would be empty by chance."""
    if LATEST in (where.everywhere, *where.each.values()):
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option {where.option!r} is latest (-1) for a batch read; only a stream can start there.",
            next_step='write .option("startingOffsets", "earliest"), or use readStream',
        )


def _topics(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(t.strip() for t in text.split(",") if t.strip()))
    if not names:
        raise UsageError("OPTION_VALUE", f"{OWNER}: option 'subscribe' is {text!r}; it names no topic.")
    return names


def _pattern(text: str | None) -> str | None:
    if text is None:
        return None
    pattern = text.strip()
    if not pattern:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'subscribePattern' is {text!r}; it finds no topic.",
            next_step='write a regular expression, for instance .option("subscribePattern", "^orders-")',
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            "OPTION_VALUE", f"{OWNER}: option 'subscribePattern' is {text!r}, no regular expression: {error}."
        ) from None
    return pattern


def _count(values: Mapping[str, str], name: str) -> int | None:
    return whole_number(OWNER, name, values[name], 1) if name in values else None


def _group(text: str | None) -> str | None:
    if text is not None and not text.strip():
        raise UsageError("OPTION_VALUE", f"{OWNER}: option 'commitOffsetsToGroup' is empty.")
    return text
