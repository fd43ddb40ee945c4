"""The ledger's store in memory: one owner, one epoch per claim, decisions as text; and its committer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.support.memory.world import Answer, Opened, Participant, State, World

from delivered.contract.sink import Committer
from delivered.ledger import Change, Head, not_next, state_of
from delivered.model.capability import Commit
from delivered.model.errors import DeliveredError
from delivered.model.identity import OtherLedger, Scope, Target, Work, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Failed, LedgerState, Ok, Outcome, Owner, Prepared, Unknown


class MemoryStore:
    """See `delivered.ledger.Store`."""

    where = "in memory"

    def __init__(self, world: World, scope: Scope) -> None:
        self._world = world
        self._scope = scope
        self._room = world.room(scope)

    def read(self) -> LedgerState:
        self._world.gate()
        with self._world.lock:
            room = self._room
            return state_of(self._scope, room.owner, room.epoch, reversed(room.newest()), room.started, lambda _: None)

    def peek(self) -> LedgerState:
        return self.read()

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        self._world.gate()
        with self._world.lock:
            self._room.owner = successor(self._head())
            self._room.epoch += 1
            return Ok(self._room.epoch)

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        self._world.gate()
        with self._world.lock:
            change = rule(self._head())
        if change is None:
            return Ok(None)
        # The open transaction holds no lock: a driver paused here blocks no other.
        for p in change.move:
            facts = {"batch": change.decision.batch if change.decision else None, "shard": p.shard}
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, **facts)
            reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)
        self._world.gate()

        def arrive() -> Outcome[None]:
            try:
                with self._world.lock:
                    now = rule(self._head())
                    return self._put(now) if now is not None else Ok(None)
            except DeliveredError as error:  # fenced
                return Failed(str(error))

        answer = self._world.next_answer("begin" if change.decision is None else "decide")
        if answer is Answer.LATE:
            self._world.keep_under_way(arrive)
        if answer in (Answer.LATE, Answer.NOT_SENT):
            return Unknown("no answer")
        outcome = arrive()
        return Unknown("the answer was lost") if answer is Answer.LOST else outcome

    def history(self) -> Sequence[Decision]:
        return self._room.of(self._scope.incarnation)[-LEDGER_HISTORY_BATCHES:]

    def others(self) -> list[OtherLedger]:
        own, incarnation = (self._scope.pipeline, self._scope.sink), self._scope.incarnation
        rooms = {name: room for name, room in self._world.rooms.items() if name != own and room.owner is not None}
        return named_first(
            OtherLedger(*name, same_incarnation=bool(room.of(incarnation)) or incarnation in room.started)
            for name, room in rooms.items()
        )

    def last_seal(self, sink: str) -> str | None:
        return next(reversed(self._seals(sink)), None)

    def seals(self, sink: str, first: int = 0) -> Sequence[str]:
        return self._seals(sink)[first:]

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        self._world.gate()
        with self._world.lock:
            seals = self._seals(sink)
            if seals[number : number + 1] == [text]:
                return Ok(None)
            if number != len(seals):
                return not_next(sink, number, len(seals) - 1)
            seals.append(text)
        return Ok(None)

    def _seals(self, sink: str) -> list[str]:
        return self._room.seals.setdefault(sink, [])

    def close(self) -> None:
        """Nothing to close."""

    def _head(self) -> Head:
        room, incarnation = self._room, self._scope.incarnation
        last = next(reversed(room.of(incarnation)), None)
        return Head(
            room.owner,
            room.epoch,
            None if last is None else last.batch,
            lambda: last,
            lambda: room.started.get(incarnation),
        )

    def _put(self, change: Change) -> Outcome[None]:
        """Write rows and record atomically."""
        if change.started is not None:
            self._room.started[self._scope.incarnation] = change.started
        staged = []
        for p in change.move:
            participant = self._world.participants.get(Opened.of(p).id)
            if participant is None or participant.state is not State.PREPARED:
                return Failed(f"the staged rows of shard {p.shard} are missing")
            if participant.work.scope.sink != self._scope.sink:
                return Failed(
                    f"the rows of shard {p.shard} lie at {participant.work.scope.sink!r}, out of reach from here"
                )
            staged.append(participant)
        if change.decision is not None:
            self._room.decisions.append(change.decision.to_json())
        for participant in staged:
            self._world.settle(participant)
        return Ok(None)


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
                return Failed(f"the promise of shard {work.shard} has expired")
            if participant.state is not State.APPLIED:
                if self._commit is Commit.ONE_TRANSACTION:
                    return Failed(f"shard {work.shard} was not part of the transaction that decided")
                self._world.settle(participant)
        return Unknown("the answer was lost") if answer else Ok(None)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
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
            orphans = [
                p
                for p in self._world.unsettled()
                if (p.work.scope.pipeline, p.work.scope.sink) == own and p.id not in kept
            ]
            for participant in orphans:
                participant.state = State.ABORTED
        return Ok(len(orphans))

    def targets(self) -> dict[str, Target]:
        """See `delivered.contract.sink.Committer`."""
        return {self._scope.sink: Target("world", "1")}

    def close(self) -> None:
        """Nothing to close."""

    def _find(self, prepared: Prepared) -> Participant | None:
        return self._world.participants.get(Opened.of(prepared).id)
