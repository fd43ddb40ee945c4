"""Schemas of records: Avro, Protobuf and JSON Schema, in the wire format of a schema registry; their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from delivered.kits.options import not_blank, password_in_url
from delivered.model.errors import UsageError
from delivered.model.options import (
    Option,
    Options,
    OptionType,
    Unfit,
    choice,
    integer,
    is_loopback,
    resolve_secret,
    several,
    split_url,
)

PREFIX = "schema.registry."
URL = f"{PREFIX}url"
LOGIN = f"{PREFIX}basic.auth.user.info"
TRUSTED = f"{PREFIX}ssl.ca.location"
COLUMNS = ("key", "value")


class Format(StrEnum):
    BYTES = "bytes"
    AVRO = "avro"
    PROTOBUF = "protobuf"
    JSON_SCHEMA = "json_schema"


class Strategy(StrEnum):
    """How the registry's clients name a subject."""

    TOPIC = "topic"
    RECORD = "record"
    TOPIC_RECORD = "topic_record"


@dataclass(frozen=True)
class Side:
    """What the options say of one column.

    Attributes:
        column: "key" or "value".
        record: full name of the record or message type; None: a schema's first one.
        subject: instead of the strategy's.
        version: None: the subject's newest.
        declared: text of a schema, or file:PATH.
    """

    column: str
    format: Format = Format.BYTES
    strategy: Strategy = Strategy.TOPIC
    record: str | None = None
    subject: str | None = None
    version: int | None = None
    declared: str | None = None

    def subject_of(self, owner: str, topic: str | None) -> str:
        """
        Args:
            topic: the only one; None: there are several, or rows name theirs.

        Raises:
            UsageError: the strategy needs what is not known.
        """
        if self.subject is not None:
            return self.subject
        needs_record = self.strategy is not Strategy.TOPIC
        if needs_record and self.record is None:
            raise UsageError("SCHEMA_SUBJECT.RECORD_NAME", owner=owner, column=self.column, strategy=self.strategy)
        if self.strategy is Strategy.RECORD:
            return str(self.record)
        if topic is None:
            raise UsageError("SCHEMA_SUBJECT.TOPIC", owner=owner, strategy=self.strategy, column=self.column)
        return f"{topic}-{self.record}" if needs_record else f"{topic}-{self.column}"

    def declared_text(self) -> str | None:
        """Raises UsageError: the file cannot be read here."""
        return None if self.declared is None else resolve_secret(f"{self.column}.schema", self.declared)


def _url(text: str) -> str:
    for each in text.split(","):
        if not each.strip().lower().startswith(("http://", "https://")):
            raise Unfit.build("OPTION_VALUE.REGISTRY_URL", url=each.rpartition("@")[2])
        parts = split_url(each.strip())
        if parts.password is not None:
            raise password_in_url("env:REGISTRY_USER_INFO")
    return text


_URL = OptionType(_url)


def _declared(text: str) -> str:
    if text.startswith("file:") and not Path(text.removeprefix("file:")).is_absolute():
        raise Unfit.build("OPTION_VALUE.PATH_RELATIVE", text=text)
    return text


def version_option(column: str) -> str:
    return f"{column}.schema.version"


def _options(column: str) -> tuple[Option, ...]:
    return (
        Option(
            f"{column}.format",
            f"Of the {column}: bytes; or avro, protobuf or json_schema, in the wire format of Confluent's schema "
            "registry. The column then has the schema's type.",
            "bytes",
            type=choice(Format),
            example="avro",
        ),
        Option(
            f"{column}.subject.name.strategy",
            f"Name of the {column}'s subject: topic (<topic>-{column}), record (the record's full name), or "
            "topic_record (<topic>-<record>).",
            "topic",
            type=choice(Strategy),
            example="topic",
        ),
        Option(
            f"{column}.record.name",
            f"Full name of the {column}'s record or message type. Default for Protobuf: the schema's first message.",
            example="shop.Order",
        ),
        Option(f"{column}.subject", f"Subject of the {column}, instead of the strategy's.", example=f"orders-{column}"),
        Option(
            version_option(column),
            f"Version of the {column}'s subject that is read or written. Default: the newest when the query starts.",
            type=integer(1),
            example="2",
        ),
        Option(
            f"{column}.schema",
            f"Schema of the {column}, as text or file:PATH, instead of a version. A sink registers it at the start if "
            "the subject lacks it; one that the registry refuses stops the start.",
            type=OptionType(_declared),
            example="file:/data/order.avsc",
        ),
    )


def _side(column: str, owner: str, values: Mapping[str, str]) -> Side:
    words = {
        o.name.removeprefix(f"{column}."): o.parse(owner, values[o.name]) for o in _options(column) if o.name in values
    }
    side = Side(
        column,
        words.get("format", Format.BYTES),
        words.get("subject.name.strategy", Strategy.TOPIC),
        words.get("record.name"),
        words.get("subject"),
        words.get("schema.version"),
        words.get("schema"),
    )
    if side.format is Format.BYTES and len(words) > ("format" in words):
        other = next(n for n in words if n != "format")
        raise UsageError("OPTION_CONFLICT.SCHEMA_BYTES", owner=owner, column=column, other=other)
    if side.version is not None and side.declared is not None:
        raise UsageError("OPTION_CONFLICT.SCHEMA_TWICE", owner=owner, column=column)
    return side


def _settings(owner: str, values: Mapping[str, str]) -> dict[str, str]:
    if URL in values:
        _URL.parse(owner, URL, values[URL])
    if TRUSTED in values:
        OptionType(not_blank).parse(owner, TRUSTED, values[TRUSTED])
    return {k.removeprefix(PREFIX): v for k, v in values.items() if k.startswith(PREFIX)}


def _field(column: str) -> Any:
    return several(partial(_side, column), *_options(column), default=Side(column))


class FormatOptions(Options):
    """
    Attributes:
        registry: settings of confluent-kafka's registry client; secrets are not resolved yet.
    """

    key: Side = _field("key")
    value: Side = _field("value")
    registry: Mapping[str, str] = several(
        _settings,
        Option(URL, "URL of the schema registry.", type=_URL, example="http://localhost:8081"),
        Option(LOGIN, "user:password for the registry.", secret=True, example="env:REGISTRY_USER_INFO"),
        Option(
            TRUSTED,
            "PEM file with trusted certificates, for https; it must exist on the driver and on every executor.",
            type=OptionType(not_blank),
            example="/etc/ssl/registry-ca.pem",
        ),
        passthrough=(PREFIX,),
        secret=True,
    )

    @property
    def sides(self) -> tuple[Side, ...]:
        """Columns with a schema."""
        return tuple(s for s in (self.key, self.value) if s.format is not Format.BYTES)

    @property
    def url(self) -> str:
        return self.registry["url"]

    @property
    def in_clear(self) -> tuple[str, ...]:
        hosts = [urlsplit(u) for u in self.registry.get("url", "").split(",")]
        far = next((u.hostname for u in hosts if u.scheme == "http" and not is_loopback(u.hostname)), None)
        if far is None or not any(name.startswith(("basic.auth.", "bearer.auth.")) for name in self.registry):
            return ()
        return (f"the login of the schema registry is sent in clear to {far}; write https://",)

    def check(self, owner: str) -> None:
        if self.sides and "url" not in self.registry:
            raise UsageError(
                "OPTION_MISSING.REGISTRY",
                owner=owner,
                url_option=URL,
                column=self.sides[0].column,
                format=self.sides[0].format,
            )
        tls = next((name for name in self.registry if name.startswith("ssl.")), None)
        if tls is not None and "https://" not in self.registry.get("url", "").lower():
            name, url = PREFIX + tls, "https://host:8081"
            raise UsageError("OPTION_CONFLICT.TLS_UNUSED", owner=owner, option=name, url=url)
        if self.registry and not self.sides:
            raise UsageError("OPTION_CONFLICT.REGISTRY_UNUSED", owner=owner, option=next(iter(self.registry)))
