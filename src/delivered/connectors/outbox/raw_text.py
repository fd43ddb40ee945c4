"""What PostgreSQL's client cannot read: texts that are not UTF-8, and times that Python has not.

Texts of a database with the encoding SQL_ASCII are any bytes, which the server refuses to send as UTF-8. They are read
and written as they are: bytes that are not UTF-8 become lone surrogates in Python, and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivered.source.columns import id_bytes, id_text

if TYPE_CHECKING:
    import psycopg

_OF_ANY_BYTES = "SQL_ASCII"
_TEXTS = ("text", "varchar", "bpchar", "name", 0)
"""Types whose values are strings; 0: all that the client does not know."""


def raw_texts(connection: psycopg.Connection[Any]) -> None:
    """Read and write texts as bytes, if the database has no encoding. Outside any transaction."""
    if connection.info.parameter_status("server_encoding") != _OF_ANY_BYTES:
        return
    from psycopg.adapt import Loader
    from psycopg.pq import Format
    from psycopg.types.string import StrDumperUnknown

    class Load(Loader):
        def load(self, data: Any) -> str | None:
            return id_text(bytes(data))

    class LoadBinary(Load):
        format = Format.BINARY

    class Dump(StrDumperUnknown):
        def dump(self, obj: str) -> bytes:
            return id_bytes(obj)

    connection.execute(f"SET client_encoding = {_OF_ANY_BYTES}")
    if not connection.autocommit:
        connection.commit()  # a rollback would set it back
    for name in _TEXTS:
        for loader in (Load, LoadBinary):
            connection.adapters.register_loader(name, loader)
    connection.adapters.register_dumper(str, Dump)


def beyond_python(connection: psycopg.Connection[Any]) -> None:
    """Read dates and times that Python has not, such as infinity, as text."""
    from psycopg import DataError
    from psycopg.types import datetime as times

    def reading(kind: type[Any]) -> type[Any]:
        class Load(kind):  # type: ignore[misc]
            def load(self, data: Any) -> Any:
                try:
                    return super().load(data)
                except DataError:
                    return bytes(data).decode()

        return Load

    loaders = {
        "date": times.DateLoader, "time": times.TimeLoader, "timetz": times.TimetzLoader,
        "timestamp": times.TimestampLoader, "timestamptz": times.TimestamptzLoader, "interval": times.IntervalLoader,
    }  # fmt: skip
    for name, kind in loaders.items():
        connection.adapters.register_loader(name, reading(kind))
