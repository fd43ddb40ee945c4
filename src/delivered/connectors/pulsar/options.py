"""Options of `delivered_pulsar`, checked once and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from delivered.connectors.pulsar.positions import EARLIEST, LATEST, Where, parse_offsets, parse_timestamp
from delivered.model.errors import UsageError
from delivered.model.options import Option, OptionTable, choice, flag, whole_number

OWNER = "delivered_pulsar source"
PREFIX = "persistent://public/default/"
"""Of topics with a short name."""

PLACE = (
    Option("url", "pulsar://host:6650, or pulsar+ssl://; several hosts with commas.", required=True),
    Option("adminUrl", "http://host:8080, or https://: the brokers' HTTP service.", required=True),
    Option("token", "JSON Web Token for both; read anew for every connection.", secret=True),
    Option(
        "tlsTrustCertsFile",
        "PEM file with the certificates to trust, for pulsar+ssl and https.",
        "those that the system trusts",
    ),
)

SOURCE_OPTIONS = OptionTable(
    OWNER,
    (
        *PLACE,
        Option("topics", "Topics, separated by commas; short names are of public/default.", required=True),
        Option(
            "startingOffsets",
            'earliest, latest, or {"topic": {"0": "12:34"}} with the message that was read last: ledger:entry, '
            "ledger:entry:index, or a message id as clients serialize it, in base64; the partition of a topic without "
            "partitions is -1. Counts for a new checkpoint; partitions that appear later start at their earliest.",
            "latest for a stream, earliest for a batch",
        ),
        Option("startingTimestamp", "Milliseconds since 1970: the first message published then or later."),
        Option("endingOffsets", "Batch only: latest, or as startingOffsets.", "latest"),
        Option("maxOffsetsPerTrigger", "About how many messages one batch takes at most.", "no bound"),
        Option(
            "failOnDataLoss", "Stop when messages are gone before they were read; false: go on, with a warning.", "true"
        ),
        Option("includeHeaders", "Add the column headers: the properties of a message.", "false"),
        Option(
            "schema",
            "bytes, or topic: value is a struct by the JSON or Avro schema that is registered for the topic.",
            "bytes",
        ),
        Option(
            "schemaVersion",
            "With schema=topic, and one topic: the version that gives the columns; older and newer messages are read "
            "as that one.",
            "the newest when the query starts",
        ),
        Option(
            "subscription",
            "Subscription that is moved after each batch, so that Pulsar keeps what the pipeline has not read, and "
            "tools show its backlog. Nothing is ever read through it.",
        ),
    ),
)


@dataclass(frozen=True)
class Place:
    """
    Attributes:
        token: may be a reference; see `tokens`.
        trusted: PEM file of certificates; None: the system's; see `trust`.
    """

    url: str
    admin_url: str
    token: str | None = field(repr=False)
    trusted: str | None


@dataclass(frozen=True)
class SourceOptions(Place):
    """
    Attributes:
        topics: full names.
        starting, ending: None: the default, which differs between stream and batch.
        subscription: that is told the progress.
        typed: value is a struct by the topic's schema, of this `version`; None: the newest.
        canonical: then it is that struct as text, for the audit of a sink.
    """

    topics: tuple[str, ...]
    starting: Where | None = None
    ending: Where | None = None
    rows_max: int | None = None
    fail_on_data_loss: bool = True
    headers: bool = False
    subscription: str | None = None
    typed: bool = False
    version: int | None = None
    canonical: bool = False

    @property
    def what(self) -> str:
        """What is read, for people."""
        return ",".join(short_name(t) for t in self.topics)


def parse(given: Mapping[str, str]) -> SourceOptions:
    """Read a source's options, keys in any case.

    Raises:
        UsageError: an option is unknown, missing, contradicts another, or has a value out of its bounds.
    """
    values = SOURCE_OPTIONS.restore({k: v for k, v in given.items() if k.lower() != "path"})
    topics = tuple(dict.fromkeys(full_name(OWNER, t.strip()) for t in values["topics"].split(",") if t.strip()))
    if not topics:
        raise UsageError("OPTION_VALUE", f"{OWNER}: option 'topics' is {values['topics']!r}; it names no topic.")
    ending = parse_offsets(OWNER, "endingOffsets", values["endingOffsets"]) if "endingOffsets" in values else None
    if ending is not None and EARLIEST in (ending.everywhere, *ending.each.values()):
        raise UsageError("OPTION_VALUE", f"{OWNER}: option 'endingOffsets' cannot be earliest.")
    subscription = values.get("subscription")
    if subscription is not None and not subscription.strip():
        raise UsageError("OPTION_VALUE", f"{OWNER}: option 'subscription' is empty.")
    rows = values.get("maxOffsetsPerTrigger")
    typed, version = _schema(values, topics)
    at = place(OWNER, values)
    return SourceOptions(
        url=at.url,
        admin_url=at.admin_url,
        token=at.token,
        trusted=at.trusted,
        topics=topics,
        starting=_starting(values),
        ending=ending,
        rows_max=None if rows is None else whole_number(OWNER, "maxOffsetsPerTrigger", rows, 1),
        fail_on_data_loss=flag(OWNER, "failOnDataLoss", values.get("failOnDataLoss", "true")),
        headers=flag(OWNER, "includeHeaders", values.get("includeHeaders", "false")),
        subscription=subscription,
        typed=typed,
        version=version,
    )


def _schema(values: Mapping[str, str], topics: tuple[str, ...]) -> tuple[bool, int | None]:
    typed = choice(OWNER, "schema", values.get("schema", "bytes"), ("bytes", "topic")) == "topic"
    if "schemaVersion" not in values:
        return typed, None
    if not typed or len(topics) > 1:
        raise UsageError(
            "OPTION_CONFLICT",
            f"{OWNER}: option 'schemaVersion' is for one topic and schema=topic.",
            next_step="take it out, or read one topic with .option('schema', 'topic')",
        )
    return typed, whole_number(OWNER, "schemaVersion", values["schemaVersion"], 0)


def _starting(values: Mapping[str, str]) -> Where | None:
    """A time comes before offsets, as in Spark; but positions that a stream began with once come before all."""
    offsets = values.get("startingOffsets")
    found = None if offsets is None else parse_offsets(OWNER, "startingOffsets", offsets)
    if "startingTimestamp" in values and (found is None or not found.stored):
        return parse_timestamp(OWNER, "startingTimestamp", values["startingTimestamp"])
    return found


def refuse_latest_start(where: Where) -> None:
    """A batch cannot start at the latest message: it would be empty by chance."""
    if LATEST in (where.everywhere, *where.each.values()):
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option {where.option!r} is latest for a batch read; only a stream can start there.",
            next_step='write .option("startingOffsets", "earliest"), or use readStream',
        )


def place(owner: str, values: Mapping[str, str]) -> Place:
    """Raises UsageError for a URL that is none, or with a password in it, or certificates where there is no TLS."""
    found = Place(
        url=_checked_url(owner, "url", values["url"], ("pulsar", "pulsar+ssl"), "pulsar://host:6650"),
        admin_url=_checked_url(owner, "adminUrl", values["adminUrl"], ("http", "https"), "http://host:8080"),
        token=values.get("token"),
        trusted=values.get("tlsTrustCertsFile"),
    )
    if found.trusted is not None and not found.url.startswith("pulsar+ssl") and not found.admin_url.startswith("https"):
        raise UsageError(
            "OPTION_CONFLICT",
            f"{owner}: option 'tlsTrustCertsFile' is set, and neither url ({found.url}) nor adminUrl "
            f"({found.admin_url}) is spoken to over TLS.",
            next_step="write pulsar+ssl://host:6651 and https://host:8443, or take tlsTrustCertsFile out",
        )
    return found


def full_name(owner: str, topic: str) -> str:
    """`persistent://tenant/namespace/topic`.

    Raises:
        UsageError: it is no topic that keeps its messages, or a part of one.
    """
    found = topic if "://" in topic else f"{PREFIX}{topic}"
    if not re.fullmatch(r"persistent://[^/\s]+/[^/\s]+/[^/\s]+", found) or re.search(r"-partition-\d+$", found):
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: {topic!r} cannot be used as a topic here; it must be a name, or persistent://tenant/namespace/"
            "name, without -partition-N.",
            next_step="correct the name of the topic",
        )
    return found


def short_name(topic: str) -> str:
    return topic.removeprefix(PREFIX)


def _checked_url(owner: str, option: str, url: str, schemes: tuple[str, ...], example: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in schemes and bool(parts.netloc) and "@" not in parts.netloc
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: option {option!r} ends with {url.rpartition('@')[2]!r}; it must be like {example}, without user "
            "and password.",
        )
    return url.rstrip("/")
