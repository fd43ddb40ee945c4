"""Options of the Pulsar sink, checked once and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from delivered.connectors.pulsar.options import PLACE, Place, full_name, place, short_name
from delivered.model.options import Option, OptionTable, choice, flag, whole_number

OWNER = "delivered_pulsar sink"
COMPRESSIONS = ("none", "lz4", "zlib", "zstd", "snappy")

BYTES_MAX = (5 << 20) - (10 << 10)
"""The brokers' default for maxMessageSize, less what goes with a message."""

SINK_OPTIONS = OptionTable(
    OWNER,
    (
        *PLACE,
        Option("topic", "Where messages are published; a short name is of public/default.", required=True),
        Option("compression", f"One of: {', '.join(COMPRESSIONS)}.", "none"),
        Option(
            "chunking", "true: cut messages above the broker's limit into chunks; then nothing is batched.", "false"
        ),
        Option(
            "messageBytesMax",
            "Without chunking, a message of more bytes (key, value and properties) is refused; not above the brokers' "
            "maxMessageSize.",
            str(BYTES_MAX),
        ),
        Option(
            "schema",
            "bytes, or avro or json: value is a struct, written by a schema that is registered for the topic.",
            "bytes",
        ),
        Option("ledger", "SQLite file of the driver in which batches are recorded.", required=True),
    ),
)


@dataclass(frozen=True)
class PulsarSinkOptions(Place):
    """
    Attributes:
        topic: full name.
        bytes_max: of one message; None: it goes in chunks.
        ledger: path of a SQLite file.
        schema: kind by which the struct value is written, AVRO or JSON; None: value is bytes.
    """

    topic: str
    compression: str
    bytes_max: int | None
    ledger: str
    schema: str | None = None

    @property
    def label(self) -> str:
        """For people."""
        return short_name(self.topic)

    @property
    def default_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "_", f"pulsar.{self.label}")[:64]


def parse_sink(given: Mapping[str, str]) -> PulsarSinkOptions:
    """Raises UsageError for an unknown option, or a value out of bounds."""
    values = SINK_OPTIONS.restore(given)
    at = place(OWNER, values)
    chunking = flag(OWNER, "chunking", values.get("chunking", "false"))
    schema = choice(OWNER, "schema", values.get("schema", "bytes"), ("bytes", "avro", "json"))
    longest = values.get("messageBytesMax", str(BYTES_MAX))
    return PulsarSinkOptions(
        url=at.url,
        admin_url=at.admin_url,
        token=at.token,
        trusted=at.trusted,
        topic=full_name(OWNER, values["topic"]),
        compression=choice(OWNER, "compression", values.get("compression", "none"), COMPRESSIONS),
        bytes_max=None if chunking else whole_number(OWNER, "messageBytesMax", longest, 1),
        ledger=values["ledger"],
        schema=None if schema == "bytes" else schema.upper(),
    )
