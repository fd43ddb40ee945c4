"""Several sinks that share every batch: each has its own client, and all are read and judged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from delivered_lab.verify.systems.base import Poll, Row, SinkClient, SinkKind, System


class GroupClient:
    """
    Args:
        members: by name in the pipeline file, in its order.
    """

    system = "group"
    batch_atomic = False
    """All or nothing, but not at one moment."""

    def __init__(self, members: Mapping[str, SinkClient]) -> None:
        self.members = dict(members)

    def create(self) -> None:
        for member in self.members.values():
            member.create()

    def options(self) -> dict[str, Any]:
        raise TypeError("a group of sinks has several options: see sink_entries")

    def read(self) -> list[Row]:
        return [replace(row, sink=name) for name, member in self.members.items() for row in member.read()]

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        lock = threading.Lock()

        def one(name: str) -> None:
            def tell(poll: Poll) -> None:
                with lock:
                    seen(Poll([replace(row, sink=name) for row in poll.rows], snapshot=False))

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


def sink_names(sink: SinkClient) -> tuple[str, ...]:
    """As in `Row.sink`: one empty name for a single sink."""
    return tuple(sink.members) if isinstance(sink, GroupClient) else ("",)


def sink_entries(sink: SinkClient) -> list[dict[str, Any]]:
    """Sinks in the pipeline file."""
    if isinstance(sink, GroupClient):
        return [{"name": name, **member.options()} for name, member in sink.members.items()]
    return [sink.options()]


def at_sink(sink: str, name: str) -> str:
    """Sinks of a group get the same effects; each sink's effect is distinct."""
    return f"{sink}: {name}" if sink else name


# Two prepare; Delta, which cannot, decides as the last resource.
_MEMBERS = ("kafka", "postgres-2pc", "delta")
_NAME = "kafka-postgres-delta"
SYSTEM = System((SinkKind(_NAME, "", None, server="kafka", source="kafka", two_phase=True, members=_MEMBERS),))
