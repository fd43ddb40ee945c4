"""Executor side: shards in memory, staged or visible at once."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from delivered.connectors.memory.world import Opened, Participant, State, World
from delivered.model.errors import PromiseBroken
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.prepared import Promise

Canonical = Callable[[pa.RecordBatch], pa.RecordBatch]


class StagingWriter:
    """exactly_once: rows stay in a participant of their own until it is decided."""

    def __init__(self, world: World, work: Work, canonical: Canonical) -> None:
        self._world = world
        self._canonical = canonical
        self._participant: Participant = world.open(work)

    def stage(self, batch: pa.RecordBatch) -> None:
        self._world.gate()
        self._participant.rows.append(self._canonical(batch))

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        self._world.gate()
        if self._participant.state is not State.OPEN:
            raise PromiseBroken(
                "PREPARE_FAILED",
                f"Shard {self._participant.work.shard} was aborted while it was written.",
                next_step="nothing: the task runs again",
            )
        self._participant.state = State.PREPARED
        return Promise(Opened(self._participant.id, fingerprint.count))

    def abort(self) -> None:
        """Leaves prepared rows alone: like a prepared transaction, they are the driver's to end."""
        self._world.gate()
        if self._participant.state is State.OPEN:
            self._participant.state = State.ABORTED


class SendingWriter:
    """at_least_once, at_most_once: staged rows are visible at once."""

    def __init__(self, world: World, work: Work, canonical: Canonical) -> None:
        self._world = world
        self._canonical = canonical
        self._work = work

    def stage(self, batch: pa.RecordBatch) -> None:
        self._world.show(self._work, [self._canonical(batch)])

    def prepare(self, fingerprint: Fingerprint) -> Promise:  # noqa: ARG002
        self._world.gate()
        return Promise()

    def abort(self) -> None:
        """Nothing to do: sent rows cannot be withdrawn."""
