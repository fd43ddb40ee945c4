"""Apache Pulsar through its C++ client: a replayable source, and a sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from delivered.connectors.pulsar.positions import (
    EARLIEST,
    LATEST,
    Where,
    full_name,
    parse_offsets,
    parse_timestamp,
    short_name,
)
from delivered.contract.connector import Connector, Factory
from delivered.kits.options import (
    DATABASE_FILE,
    TlsOptions,
    data_loss_option,
    headers_option,
    message_id_columns,
    not_blank,
    queue_sink_name,
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
