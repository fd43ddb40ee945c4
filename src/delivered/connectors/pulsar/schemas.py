"""A topic's registered schemas, and the column `value` decoded by them.

Each message names the version it was written with. A query converts all to the version it was planned with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from delivered.connectors.pulsar.admin import Admin, Registered
from delivered.connectors.pulsar.positions import short_name
from delivered.kits.schemas.avro import AVRO, KINDS, Shape, Unmappable, Unreadable, read_avro, read_json, shape_of
from delivered.kits.schemas.bounds import in_words
from delivered.kits.schemas.codec import array_of
from delivered.model.errors import BadRecord, DeliveredError, UsageError

NAMES_NONE = -1
"""Version of a message without a schema."""


def registered(admin: Admin, owner: str, topic: str, version: int | None) -> Registered:
    """A topic's schema, checked to have columns.

    Args:
        version: None: the newest.

    Raises:
        UsageError: there is none, or it has no columns.
    """
    found = admin.schema(topic, version)
    if found is None:
        which = "no schema" if version is None else f"no version {version} of its schema"
        raise UsageError(
            "SCHEMA_MISSING",
            f"{owner}: there is {which} registered for {short_name(topic)!r}.",
            next_step="check `pulsar-admin schemas get`; set schema to bytes to read raw messages",
        )
    shape(owner, topic, found)
    return found


def shape(owner: str, topic: str, found: Registered) -> Shape:
    """Raises UsageError if the schema has no columns."""
    what = f"version {found.version} of the {found.kind} schema of {short_name(topic)!r}"
    try:
        if found.kind not in KINDS:
            raise Unmappable(f"only {' and '.join(KINDS)} have")
        return shape_of(found.kind, found.text)
    except Unmappable as error:
        raise UsageError(
            "SCHEMA_UNMAPPABLE",
            f"{owner}: {what} has no columns: {error}.",
            next_step="set schema to bytes, and decode the value yourself",
        ) from None


class Values:
    """Decodes values of one topic on an executor."""

    def __init__(
        self,
        owner: str,
        topic: str,
        planned: Registered,
        ask: Callable[[int], Registered | None],
        text: Callable[[pa.Array], pa.Array] | None = None,
    ) -> None:
        """
        Args:
            ask: for the schema of a version.
            text: encodes the structs as bytes; None: they stay structs.
        """
        self._owner = owner
        self._topic = topic
        self._planned = planned
        self._ask = ask
        self._reader = shape(owner, topic, planned)
        self._text = text
        self._known = {planned.version: self._reader}

    @property
    def type(self) -> pa.DataType:
        return self._reader.arrow if self._text is None else pa.binary()

    def column(
        self, values: Sequence[bytes | None], versions: Sequence[int], places: Sequence[tuple[int, int, int] | None]
    ) -> tuple[pa.Array, dict[int, BadRecord]]:
        """The decoded values, and those that cannot be read, by their number; they are null.

        Args:
            versions: schema version of each value.
            places: ledger, entry, index in the batch, for errors; None: unknown.
        """
        found: list[Any] = []
        bad: dict[int, str] = {}
        for value, version in zip(values, versions, strict=True):
            try:
                found.append(None if value is None else self._read(value, version))
            except DeliveredError:
                raise
            except Exception as error:  # whatever decoding raises is this message's fault
                bad[len(found)] = in_words(error)
                found.append(None)
        made, unfit = array_of(found, self._reader.filled, self._reader.arrow)
        errors = {at: self._bad(places[at], versions[at], why) for at, why in sorted((bad | unfit).items())}
        return made if self._text is None else self._text(made), errors

    def _read(self, value: bytes, version: int) -> object:
        writer = self._known.get(version) or self._written(version)
        if self._planned.kind == AVRO:
            return read_avro(value, writer, self._reader)
        return read_json(value, self._reader)

    def _written(self, version: int) -> Shape:
        if version == NAMES_NONE:
            raise Unreadable("it was sent without a schema, as bytes")
        found = self._ask(version)
        if found is None:
            raise Unreadable("that version is no longer registered")
        if found.kind != self._planned.kind:
            raise Unreadable(f"that version is {found.kind}")
        try:
            writer = shape_of(found.kind, found.text)
        except Unmappable as error:
            raise Unreadable(f"that version has no columns: {error}") from None
        for path, meaning in writer.meanings.items():
            now = self._reader.meanings.get(path, meaning)
            if now != meaning:
                raise Unreadable(
                    f"there, field {path[1:]!r} is {meaning or 'a plain number'}; in version {self._planned.version}, "
                    f"which the query reads, {now or 'a plain number'}"
                )
        self._known[version] = writer
        return writer

    def _bad(self, place: tuple[int, int, int] | None, version: int, why: str) -> BadRecord:
        which = "a message"
        if place is not None:
            which = f"message {':'.join(str(n) for n in (place if place[2] >= 0 else place[:2]))}"
        names = "no version" if version == NAMES_NONE else f"version {version}"
        return BadRecord(
            "MESSAGE_UNREADABLE",
            f"{self._owner}: {which} of {short_name(self._topic)} names {names} of the {self._planned.kind} "
            f"schema, and cannot be read by it: {why}.",
            next_step="nothing was skipped; set on_bad_row: dead_letter with a dead_letter sink, which keeps it; "
            "or read with schema=bytes to inspect it",
        )
