"""Apache Pulsar through its C++ client: a replayable source, and a sink."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from delivered.contract.connector import Connector, Factory
from delivered.contract.source import Offsets, foreign_offsets
from delivered.kits.options import (
    DATABASE_FILE,
    TlsOptions,
    data_loss_option,
    headers_option,
    message_id_columns,
    not_blank,
    queue_sink_name,
    refuse_rest,
    rows_max_option,
)
from delivered.model.errors import UsageError
from delivered.model.options import (
    FLAG,
    Option,
    OptionType,
    Unfit,
    check_netloc,
    choice,
    integer,
    is_loopback,
    option,
    several,
)

# Positions in the partitions of topics, as in options and checkpoints.
#
# A position is the last message read, identified by its entry. An entry is what a producer sent at once: a message, a
# batch, or a chunk of a message.

PREFIX = "persistent://public/default/"
"""Namespace of short topic names."""

Partition = tuple[str, int]
"""Full topic name and partition number; -1: the topic has no partitions."""

_TEXT = re.compile(r"(-1|\d+):(-1|\d+)(?::(\d+))?(?:>(\d+))?")


def full_name(owner: str, topic: str) -> str:
    """`persistent://tenant/namespace/topic`. Raises UsageError: the topic is not persistent, or a partition."""
    name = topic if "://" in topic else f"{PREFIX}{topic}"
    if not re.fullmatch(r"persistent://[^/\s]+/[^/\s]+/[^/\s]+", name) or re.search(r"-partition-\d+$", name):
        raise UsageError("OPTION_VALUE.PULSAR_TOPIC", owner=owner, topic=topic)
    return name


def short_name(topic: str) -> str:
    return topic.removeprefix(PREFIX)


def physical(partition: Partition) -> str:
    """The partition's topic name."""
    topic, number = partition
    return topic if number < 0 else f"{topic}-partition-{number}"


_TURN_ROWS = 1_000


class Router:
    """Keys to partitions as in the Java client; rows without a key round-robin."""

    def __init__(self) -> None:
        self._turn = 0

    def partition(self, key: str | None, partitions: int) -> int:
        if key:
            return _java_hash(key) % partitions
        self._turn += 1
        return self._turn // _TURN_ROWS % partitions


@lru_cache(maxsize=65_536)
def _java_hash(key: str) -> int:
    hash_ = 0
    units = key.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(units), 2):
        hash_ = (31 * hash_ + (units[at] << 8 | units[at + 1])) & 0xFFFFFFFF
    return hash_ & 0x7FFFFFFF


@dataclass(frozen=True)
class Position:
    """
    Attributes:
        index: of the message in its batch; None: the entry was read to its end.
        follower: the next ledger, known only if `ledger` is closed and was read to its end.
    """

    ledger: int
    entry: int
    index: int | None = None
    follower: int | None = None

    @property
    def order(self) -> tuple[int, int, float]:
        return (self.ledger, self.entry, math.inf if self.index is None else self.index)

    def __str__(self) -> str:
        index = "" if self.index is None else f":{self.index}"
        follower = "" if self.follower is None else f">{self.follower}"
        return f"{self.ledger}:{self.entry}{index}{follower}"

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Raises ValueError if the text is not a position."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(text)
        index, follower = (None if x is None else int(x) for x in match.group(3, 4))
        return cls(int(match[1]), int(match[2]), index, follower)


START = Position(-1, -1)
"""Before the first message."""


Ledgers = Sequence[tuple[int, int]]
"""Id and number of entries of each, oldest first."""


def ranges(start: Position, end: Position, ledgers: Ledgers) -> list[tuple[int, int, int]]:
    """(ledger, first entry, last entry + 1) of the ranges after `start`, up to `end`."""
    pieces = []
    for ledger, count in ledgers:
        if ledger < start.ledger or ledger > end.ledger:
            continue
        first = 0
        if ledger == start.ledger:
            first = start.entry + (1 if start.index is None else 0)
        stop = end.entry + 1 if ledger == end.ledger else count
        if first < stop:
            pieces.append((ledger, first, stop))
    return pieces


def rest(start: Position, end: Position, ledgers: Ledgers) -> int:
    """Number of entries after `start`, up to `end`."""
    return sum(stop - first for _, first, stop in ranges(start, end, ledgers))


@dataclass(frozen=True)
class Timestamp:
    """The first message published at or after a time.

    Attributes:
        ms: since 1970.
    """

    ms: int


EARLIEST, LATEST = "earliest", "latest"
Spot = Position | Timestamp | str
"""A position, a time, EARLIEST or LATEST."""


@dataclass(frozen=True)
class Where:
    """Where to start or end reading.

    Attributes:
        everywhere: for all partitions; None: see `each`.
        option: where it was set, for errors.
        stored: positions from a driver's earlier `initial`, used as they are, whatever Pulsar has now.
    """

    option: str
    everywhere: Spot | None = None
    each: Mapping[Partition, Spot] = field(default_factory=dict)
    stored: bool = False

    def spot(self, partition: Partition) -> Spot | None:
        """None: not set for this partition."""
        return self.each.get(partition) if self.everywhere is None else self.everywhere


_MARK = "#positions"
# No full topic name starts with "#".


def to_json(at: Mapping[Partition, Position]) -> Offsets:
    """`{"persistent://public/default/orders": {"0": "12:34"}, "#positions": 1}`."""
    encoded: Offsets = {_MARK: 1}
    for (topic, number), position in sorted(at.items()):
        encoded.setdefault(topic, {})[str(number)] = str(position)
    return encoded


def from_json(encoded: Offsets) -> dict[Partition, Position]:
    """Raise InvariantBroken if a checkpoint holds something else."""
    try:
        return {
            (topic, int(n)): Position.from_text(text)
            for topic, partitions in encoded.items()
            if topic != _MARK
            for n, text in partitions.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise foreign_offsets("a Pulsar", encoded) from None


def parse_offsets(owner: str, option: str, text: str) -> Where:
    """Read "earliest", "latest", JSON like {"orders": {"0": "12:34"}}, or the result of a driver's `initial`."""
    word = text.strip().lower()
    if word in (EARLIEST, LATEST):
        return Where(option, word)
    wrong = UsageError("OPTION_VALUE.PULSAR_OFFSETS", owner=owner, option=option, text=text[:200])
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or not data:
            raise wrong
        each = {
            (full_name(owner, topic), int(number)): _spot(spot)
            for topic, partitions in data.items()
            if topic != _MARK
            for number, spot in partitions.items()
        }
    except (ValueError, AttributeError, TypeError, binascii.Error):
        raise wrong from None
    if not each:
        raise wrong
    return Where(option, each=each, stored=_MARK in data)


def parse_timestamp(owner: str, option: str, text: str) -> Where:
    """Read milliseconds since 1970, for all partitions."""
    if not re.fullmatch(r"\d{1,16}", text.strip()):
        raise UsageError("OPTION_VALUE.TIMESTAMP", owner=owner, option=option, text=text)
    return Where(option, Timestamp(int(text)))


def _spot(spot: Any) -> Spot:
    if not isinstance(spot, str):
        raise TypeError(spot)
    if spot.lower() in (EARLIEST, LATEST):
        return spot.lower()
    if _TEXT.fullmatch(spot):
        return Position.from_text(spot)
    numbers = fields(base64.b64decode(spot, validate=True))
    if 1 not in numbers or 2 not in numbers:
        raise ValueError(spot)
    return Position(numbers[1], numbers[2], numbers.get(4) if numbers.get(4, -1) >= 0 else None)


def fields(serialized: bytes) -> dict[int, int]:
    """The integers in a serialized message id: 1 ledger, 2 entry, 3 partition, 4 index in batch, 6 size of batch.

    Raises:
        ValueError: not a message id.
    """
    numbers: dict[int, int] = {}
    at = 0
    try:
        while at < len(serialized):
            tag, at = _varint(serialized, at)
            if tag & 7 == 0:
                value, at = _varint(serialized, at)
                numbers[tag >> 3] = value - (1 << 64) if value >> 63 else value
            elif tag & 7 == 2:  # the id of a first chunk
                size, at = _varint(serialized, at)
                at += size
            else:
                raise ValueError("not a message id")
    except IndexError:
        raise ValueError("not a message id") from None
    return numbers


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


# Options.

SOURCE = "delivered_pulsar source"
SINK = "delivered_pulsar sink"
BYTES_MAX = (5 << 20) - (10 << 10)
"""The brokers' default maxMessageSize, minus a message's metadata."""
_COUNT = integer(1)
TRANSACTION_TIMEOUT_S = 7 * 86_400
TRANSACTION_TIMEOUT_S_MAX = 10_000_000
"""The longest that was tried, with 4.0.4."""
COMPRESSIONS = ("none", "lz4", "zlib", "zstd", "snappy")


def _url(schemes: Sequence[str], example: str, several: bool) -> OptionType[str]:
    def read(url: str) -> str:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in schemes and bool(parts.netloc) and "@" not in parts.netloc
        except ValueError:
            usable = False
        if not usable:
            raise Unfit.build("OPTION_VALUE.PULSAR_URL", url=url.rpartition("@")[2], example=example)
        check_netloc(parts.netloc, several)
        refuse_rest(parts, names_max=0 if several else 99)
        return (
            f"{parts.scheme}://{url.partition('://')[2].rstrip('/')}"  # in lower case, as its start decides about TLS
        )

    return OptionType(read)


class Place(TlsOptions):
    """
    Attributes:
        token: may be a reference; see `tokens`.
    """

    url: str = option(
        "url",
        "pulsar://host:6650, or pulsar+ssl://; comma-separated if several.",
        _url(("pulsar", "pulsar+ssl"), "pulsar://host:6650", several=True),
        example="pulsar://localhost:6650",
    )
    admin_url: str = option(
        "adminUrl",
        "http://host:8080, or https://: the brokers' HTTP service.",
        _url(("http", "https"), "http://host:8080", several=False),
        example="http://localhost:8080",
    )
    token: str | None = option(
        "token", "JSON Web Token for url and adminUrl; reread for every connection.", default=None, secret=True
    )

    @property
    def in_clear(self) -> tuple[str, ...]:
        if self.token is None:
            return ()
        plain = [
            u for urls in (self.url, self.admin_url) for u in urls.split(",") if u.startswith(("pulsar://", "http://"))
        ]
        hosts = sorted({h for u in plain if not is_loopback(h := urlsplit(u).hostname) and h})
        return tuple(f"the token is sent in clear to {h}; write pulsar+ssl:// and https://" for h in hosts)

    def check(self, owner: str) -> None:
        used = self.url.startswith("pulsar+ssl") or self.admin_url.startswith("https")
        self.check_tls(owner, used, "pulsar+ssl://host:6651 and https://host:8443")


def _topics(owner: str, values: Mapping[str, str]) -> tuple[str, ...]:
    text = values["topics"]
    topics = tuple(dict.fromkeys(full_name(owner, t.strip()) for t in text.split(",") if t.strip()))
    if not topics:
        raise UsageError("OPTION_VALUE.PULSAR_TOPICS", owner=owner, text=text)
    return topics


def _starting(owner: str, values: Mapping[str, str]) -> Where | None:
    """As in Spark, a timestamp overrides offsets; stored positions of a stream's first start override both."""
    offsets = values.get("startingOffsets")
    where = None if offsets is None else parse_offsets(owner, "startingOffsets", offsets)
    if "startingTimestamp" in values and (where is None or not where.stored):
        return parse_timestamp(owner, "startingTimestamp", values["startingTimestamp"])
    return where


def _ending(owner: str, values: Mapping[str, str]) -> Where | None:
    where = parse_offsets(owner, "endingOffsets", values["endingOffsets"]) if "endingOffsets" in values else None
    if where is not None and EARLIEST in (where.everywhere, *where.each.values()):
        raise UsageError("OPTION_VALUE.PULSAR_END", owner=owner)
    return where


class SourceOptions(Place, owner=SOURCE, ignored=("path",)):
    """
    Attributes:
        topics: full names.
        starting, ending: None: the default, which differs between stream and batch.
        typed: value is a struct by the topic's schema, of this `version`; None: the newest.
        subscription: to advance.
        canonical: with `typed`, the struct as text, for the audit of a sink.
    """

    topics: tuple[str, ...] = several(
        _topics,
        Option("topics", "Comma-separated topics; short names are in public/default.", required=True, example="orders"),
    )
    starting: Where | None = several(
        _starting,
        Option(
            "startingOffsets",
            'earliest, latest, or {"topic": {"0": "12:34"}} with the last message read: ledger:entry, '
            "ledger:entry:index, or a message id as clients serialize it, in base64; the partition of a topic without "
            "partitions is -1. Applies to a new checkpoint; partitions added later start at their earliest message.",
            "latest for a stream, earliest for a batch",
        ),
        Option("startingTimestamp", "Milliseconds since 1970: the first message published then or later."),
        default=None,
    )
    ending: Where | None = several(
        _ending, Option("endingOffsets", "Batch only: latest, or as startingOffsets.", "latest"), default=None
    )
    rows_max: int | None = rows_max_option("messages")
    fail_on_data_loss: bool = data_loss_option("messages")
    headers: bool = headers_option("Add the column headers: the properties of a message.")
    typed: bool = option(
        "schema",
        "bytes, or topic: value is a struct with the topic's registered JSON or Avro schema.",
        choice({"bytes": False, "topic": True}),
        default=False,
    )
    version: int | None = option(
        "schemaVersion",
        "For schema=topic and a single topic: schema version of the columns; messages of other versions are converted "
        "to it.",
        integer(0),
        default=None,
        shown="the newest when the query starts",
        example="3",
    )
    subscription: str | None = option(
        "subscription",
        "Subscription that is advanced after each batch, so that Pulsar retains unread messages and tools show the "
        "backlog. It is never consumed from.",
        OptionType(not_blank),
        default=None,
        example="delivered",
    )
    canonical: bool = False

    def check(self, owner: str) -> None:
        if self.version is not None and (not self.typed or len(self.topics) > 1):
            raise UsageError("OPTION_CONFLICT.PULSAR_SCHEMA", owner=owner)
        super().check(owner)

    @property
    def what(self) -> str:
        """Describes what is read, for messages."""
        return ",".join(short_name(t) for t in self.topics)


def _bytes_max(owner: str, values: Mapping[str, str]) -> int | None:
    if FLAG.parse(owner, "chunking", values.get("chunking", "false")):
        return None
    return _COUNT.parse(owner, "messageBytesMax", values.get("messageBytesMax", str(BYTES_MAX)))


class PulsarSinkOptions(Place, owner=SINK):
    """
    Attributes:
        topic: full name.
        bytes_max: of one message; None: larger ones are chunked.
        schema: AVRO or JSON for a struct value; None: value is bytes.
        ledger: path of a SQLite file; None: in topics of Pulsar.
    """

    topic: str = several(
        lambda owner, values: full_name(owner, values["topic"]),
        Option("topic", "Topic to publish to; a short name is in public/default.", required=True, example="orders"),
    )
    compression: str = option(
        "compression", f"One of: {', '.join(COMPRESSIONS)}.", choice(COMPRESSIONS), default="none"
    )
    bytes_max: int | None = several(
        _bytes_max,
        Option(
            "chunking",
            "true: split messages above the broker's limit into chunks; disables batching.",
            "false",
            type=FLAG,
        ),
        Option(
            "messageBytesMax",
            "Without chunking, larger messages (bytes of value and properties, and twice those of the key) are "
            "rejected; not above the brokers' maxMessageSize.",
            str(BYTES_MAX),
            type=_COUNT,
        ),
        default=BYTES_MAX,
    )
    schema: str | None = option(
        "schema",
        "bytes, or avro or json: value is a struct, written with a schema registered for the topic.",
        choice({"bytes": None, "avro": "AVRO", "json": "JSON"}),
        default=None,
        shown="bytes",
    )
    message_id_columns: tuple[str, ...] = message_id_columns()
    transaction_timeout_s: int = option(
        "transactionTimeout",
        "For exactly_once: seconds after which brokers abort a transaction. Choose more than the pipeline is ever "
        "stopped for: until then, a transaction that it left open hides later messages from readers.",
        integer(1, TRANSACTION_TIMEOUT_S_MAX),
        default=TRANSACTION_TIMEOUT_S,
    )
    ledger: str | None = option(
        "ledger",
        "SQLite file on the driver that holds the ledger; without it, topics next to the sink's hold it.",
        DATABASE_FILE,
        default=None,
        example="/data/ledger.db",
    )

    @property
    def namespace(self) -> str:
        """`persistent://tenant/namespace`."""
        return self.topic.rpartition("/")[0]

    @property
    def label(self) -> str:
        """For people."""
        return short_name(self.topic)

    @property
    def sink_name(self) -> str:
        return queue_sink_name(f"pulsar.{self.label}")


def refuse_latest_start(where: Where) -> None:
    """A batch read cannot start at the latest message: it would almost always be empty."""
    if LATEST in (where.everywhere, *where.each.values()):
        raise UsageError("OPTION_VALUE.PULSAR_BATCH_LATEST", option=where.option)


CONNECTOR = Connector(
    "pulsar",
    "pulsar",
    sources=Factory(SourceOptions, "delivered.connectors.pulsar.source:PulsarSource"),
    sinks=Factory(PulsarSinkOptions, "delivered.connectors.pulsar.sink:PulsarSink"),
    external_ledger=True,
    holds_ledger=True,
    transactions="",
    messaging=True,
)
