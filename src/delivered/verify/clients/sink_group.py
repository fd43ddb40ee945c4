"""SinkGroup sinks that share every batch: each with its own client, all of them read and judged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from delivered.verify.clients.base import Drain, Look, Row


class SinkGroup:
    """
    Args:
        members: by their names in the pipeline file, in its order.
    """

    system = "several"
    batch_atomic = False
    """All or nothing, but not at one moment."""

    def __init__(self, members: Mapping[str, Drain]) -> None:
        self.members = dict(members)

    def create(self) -> None:
        for member in self.members.values():
            member.create()

    def options(self) -> dict[str, Any]:
        raise TypeError("several sinks have several options: see sinks_of")

    def read(self) -> list[Row]:
        return [replace(row, sink=name) for name, member in self.members.items() for row in member.read()]

    def follow(self, seen: Callable[[Look], None], stop: threading.Event) -> None:
        lock = threading.Lock()

        def one(name: str) -> None:
            def tell(look: Look) -> None:
                with lock:
                    seen(Look([replace(row, sink=name) for row in look.rows], whole=False))

            self.members[name].follow(tell, stop)

        with ThreadPoolExecutor(len(self.members)) as pool:
            for done in [pool.submit(one, name) for name in self.members]:
                done.result()

    def open_transactions(self, pipeline: str) -> list[str]:
        return [
            f"{name}: {text}" for name, member in self.members.items() for text in member.open_transactions(pipeline)
        ]

    def remove(self) -> None:
        for member in self.members.values():
            member.remove()


def names_of(drain: Drain) -> tuple[str, ...]:
    """As in `Row.sink`: one empty name if there is one sink."""
    return tuple(drain.members) if isinstance(drain, SinkGroup) else ("",)


def sinks_of(drain: Drain) -> list[dict[str, Any]]:
    """Of the pipeline file."""
    if isinstance(drain, SinkGroup):
        return [{"name": name, **member.options()} for name, member in drain.members.items()]
    return [drain.options()]


def at_sink(sink: str, name: str) -> str:
    """SinkGroup sinks of a batch get the same effects: at each of them it is one of its own."""
    return f"{sink}: {name}" if sink else name
