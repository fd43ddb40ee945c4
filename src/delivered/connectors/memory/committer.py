"""Commits and aborts participants in memory."""

from __future__ import annotations

from collections.abc import Sequence

from delivered.connectors.memory.world import Answer, Opened, Participant, State, World
from delivered.contract.sink import Committer
from delivered.model.capability import Commit
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.prepared import Prepared


class MemoryCommitter(Committer):
    def __init__(self, world: World, scope: Scope, commit: Commit) -> None:
        self._world = world
        self._scope = scope
        self._commit = commit

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        self._world.gate()
        answer = self._world.next_answer("apply")
        if answer is Answer.NOT_SENT:
            return Unknown("the request was not sent")
        with self._world.lock:
            participant = self._find(prepared)
            if participant is None or participant.state is State.ABORTED:
                return Failed(f"the promise of shard {work.shard} is gone")
            if participant.state is not State.APPLIED:
                if self._commit is Commit.ONE_TRANSACTION:
                    return Failed(f"shard {work.shard} was not part of the transaction that decided")
                self._world.settle(participant)
        return Unknown("the answer was lost") if answer else Ok(None)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - the world knows the shard
        return self._world.marker(work) == (work.scope.incarnation, work.batch)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        self._world.gate()
        self._world.land()
        participant = self._find(prepared)
        if participant is not None and participant.state in (State.OPEN, State.PREPARED):
            participant.state = State.ABORTED
        return Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        self._world.gate()
        if self._world.next_answer("abort_orphans"):
            return Unknown("the answer was lost")
        kept = {Opened.of(p).id for p in keep if p.handle}
        own = (self._scope.pipeline, self._scope.sink)
        with self._world.lock:
            gone = [
                p
                for p in self._world.unsettled()
                if (p.work.scope.pipeline, p.work.scope.sink) == own and p.id not in kept
            ]
            for participant in gone:
                participant.state = State.ABORTED
        return Ok(len(gone))

    def targets(self) -> dict[str, Target]:
        """See `delivered.contract.sink.Committer`."""
        return {self._scope.sink: Target("world", "1")}

    def close(self) -> None:
        """Nothing to close."""

    def _find(self, prepared: Prepared) -> Participant | None:
        return self._world.participants.get(Opened.of(prepared).id)
