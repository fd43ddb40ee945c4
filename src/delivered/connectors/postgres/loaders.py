"""Dates and times of rows that the client returns: those that Python has not are numbers, and infinity is text.

They are for dead letters and messages; see `model.bad_row.plain_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.types.datetime import DateLoader, TimestampLoader, TimestamptzLoader

from delivered.kits.sql.moments import days, micros

if TYPE_CHECKING:
    from psycopg.abc import AdaptContext, Loader


def register(context: AdaptContext) -> None:
    for name, loader in _LOADERS.items():
        context.adapters.register_loader(name, loader)


def _loader(base: type[Any], parse: Callable[[str], int]) -> type[Loader]:
    class Beyond(base):  # type: ignore[misc]
        def load(self, data: Any) -> Any:
            try:
                return super().load(data)
            except psycopg.DataError:
                text = bytes(data).decode()
                try:
                    return parse(text)
                except ValueError:
                    return text

    return Beyond


_LOADERS: dict[str, type[Loader]] = {
    "date": _loader(DateLoader, days),
    "timestamp": _loader(TimestampLoader, lambda text: micros(text, zoned=False)),
    "timestamptz": _loader(TimestamptzLoader, lambda text: micros(text, zoned=True)),
}
