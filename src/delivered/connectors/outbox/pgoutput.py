"""Messages of PostgreSQL's output plugin pgoutput, protocol version 1: complete transactions, in order of commits.

https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

from delivered.model.errors import InvariantBroken
from delivered.model.rows import INT64

BYTEA = 17
_EPOCH_US = 946_684_800_000_000
"""2000-01-01, from which PostgreSQL counts, in µs since 1970."""


class _Unchanged:
    """A large value that an update left alone: it is not in the log."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()
Value = bytes | None | _Unchanged
"""As PostgreSQL writes it as text, in UTF-8; None: NULL."""
Row = tuple[Value, ...]


class Op(StrEnum):
    INSERT = auto()
    UPDATE = auto()
    DELETE = auto()
    TRUNCATE = auto()


@dataclass(frozen=True)
class Relation:
    """A table as it was when the change was written.

    Attributes:
        keys: whether a column belongs to the replica identity.
        types: oids; of a domain over bytea, that of bytea.
        modifiers: of the types: length, precision; -1: none.
    """

    oid: int
    schema: str
    name: str
    columns: tuple[str, ...]
    keys: tuple[bool, ...]
    types: tuple[int, ...]
    modifiers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Begin:
    """
    Attributes:
        lsn: where the transaction's commit record begins.
        time_us: of the commit, since 1970.
    """

    lsn: int
    time_us: int


@dataclass(frozen=True)
class Change:
    """
    Attributes:
        old: the row before it, if the log has it: only the key's columns, unless the replica identity is FULL.
        new: None for a delete.
    """

    op: Op
    relation: Relation
    old: Row | None = None
    new: Row | None = None


def unhexed(value: bytes) -> bytes:
    """A bytea from its text. Raises InvariantBroken: it is none."""
    try:
        if value[:2] != b"\\x":
            raise ValueError("no \\x at its start")
        return bytes.fromhex(value[2:].decode("ascii"))
    except ValueError as error:
        raise InvariantBroken("PGOUTPUT.BYTEA", value=value[:64], error=error) from None


class Decoder:
    """Knows the tables that were described so far in one decoding session."""

    def __init__(self) -> None:
        self.relations: dict[int, Relation] = {}
        self._bytea: set[int] = set()
        self._data = b""
        self._at = 0

    def decode(self, data: bytes) -> list[Begin | Change]:
        """The changes in one message; several for TRUNCATE, none for messages of other kinds.

        Raises:
            InvariantBroken: the message is not of this protocol.
        """
        self._data, self._at = data, 1
        try:
            return self._decoded(data[:1])
        except (struct.error, KeyError, IndexError, ValueError) as error:
            raise InvariantBroken("PGOUTPUT.MESSAGE", message_bytes=data[:64], error=error) from error

    def _decoded(self, kind: bytes) -> list[Begin | Change]:
        match kind:
            case b"B":
                lsn, time = self._take(">QqI")[:2]
                if not INT64[0] <= time + _EPOCH_US <= INT64[1] or lsn > INT64[1]:
                    raise ValueError("a position or time that no server has")
                return [Begin(lsn, time + _EPOCH_US)]
            case b"R":
                self._relation()
            case b"I":
                relation = self._known()
                self._expect(b"N")
                return [Change(Op.INSERT, relation, None, self._row(relation, last=True))]
            case b"U":
                relation, old = self._known(), None
                mark = self._byte()
                if mark in (b"K", b"O"):
                    old, mark = self._row(relation), self._byte()
                if mark != b"N":
                    raise ValueError(mark)
                return [Change(Op.UPDATE, relation, old, self._row(relation, last=True))]
            case b"D":
                relation = self._known()
                if self._byte() not in (b"K", b"O"):
                    raise ValueError(self._data[self._at - 1])
                return [Change(Op.DELETE, relation, self._row(relation, last=True))]
            case b"T":
                count, _ = self._take(">IB")
                return [Change(Op.TRUNCATE, self._known()) for _ in range(count)]
            case b"Y":
                # Names the type below a domain.
                (oid,) = self._take(">I")
                if (self._name() or "pg_catalog", self._name()) == ("pg_catalog", "bytea"):
                    self._bytea.add(oid)
            case b"C" | b"O" | b"M":
                pass
            case _:
                raise ValueError(kind)
        return []

    def _relation(self) -> None:
        (oid,) = self._take(">I")
        schema, name = self._name(), self._name()
        _, count = self._take(">BH")
        columns, keys, types, modifiers = [], [], [], []
        for _ in range(count):
            (flags,) = self._take(">B")
            columns.append(self._name())
            type_, modifier = self._take(">Ii")
            keys.append(bool(flags & 1))
            types.append(BYTEA if type_ in self._bytea else type_)
            modifiers.append(modifier)
        self.relations[oid] = Relation(
            oid, schema or "pg_catalog", name, tuple(columns), tuple(keys), tuple(types), tuple(modifiers)
        )

    def _known(self) -> Relation:
        return self.relations[self._take(">I")[0]]

    def _row(self, relation: Relation, last: bool = False) -> Row:
        """Args: last: nothing follows it."""
        data, at = self._data, self._at
        count = int.from_bytes(data[at : at + 2], "big")
        at += 2
        if count != len(relation.columns):
            raise ValueError(f"{count} values of {len(relation.columns)} columns")
        values: list[Value] = []
        for _ in range(count):
            kind = data[at]
            at += 1
            if kind == 0x74:  # t: text
                length = int.from_bytes(data[at : at + 4], "big")
                at += 4
                value = data[at : at + length]
                if len(value) != length or at > len(data):
                    raise ValueError("truncated")
                values.append(value)
                at += length
            elif kind == 0x6E:  # n
                values.append(None)
            elif kind == 0x75:  # u
                values.append(UNCHANGED)
            else:
                raise ValueError(kind)
        if last and at != len(data):
            raise ValueError(f"{len(data) - at} bytes behind the last value")
        self._at = at
        return tuple(values)

    def _take(self, form: str) -> tuple[int, ...]:
        fields = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return fields

    def _name(self) -> str:
        end = self._data.index(b"\0", self._at)
        name = self._data[self._at : end].decode()
        self._at = end + 1
        return name

    def _byte(self) -> bytes:
        self._at += 1
        return self._data[self._at - 1 : self._at]

    def _expect(self, mark: bytes) -> None:
        if (byte := self._byte()) != mark:
            raise ValueError(byte)
