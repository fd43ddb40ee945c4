"""The ledger's store in memory: one owner, one epoch per claim, decisions as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from delivered.connectors.memory.world import Answer, Opened, State, World
from delivered.ledger.ledger import state_of
from delivered.ledger.store import Change, Head
from delivered.model.errors import DeliveredError
from delivered.model.identity import OtherLedger, Scope, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, LedgerState, Owner


class MemoryStore:
    """See `delivered.ledger.store.Store`."""

    where = "in memory"

    def __init__(self, world: World, scope: Scope) -> None:
        self._world = world
        self._scope = scope
        self._room = world.room(scope)

    def read(self) -> LedgerState:
        self._world.gate()
        with self._world.lock:
            room = self._room
            return state_of(self._scope, room.owner, room.epoch, reversed(room.newest()), room.begun, lambda _: None)

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
        # The open transaction holds no lock: a driver paused here blocks nobody.
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
            OtherLedger(*name, same_incarnation=bool(room.of(incarnation)) or incarnation in room.begun)
            for name, room in rooms.items()
        )

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
            lambda: room.begun.get(incarnation),
        )

    def _put(self, change: Change) -> Outcome[None]:
        """Write rows and record atomically."""
        if change.begun is not None:
            self._room.begun[self._scope.incarnation] = change.begun
        staged = []
        for p in change.move:
            found = self._world.participants.get(Opened.of(p).id)
            if found is None or found.state is not State.PREPARED:
                return Failed(f"the staged rows of shard {p.shard} are gone")
            if found.work.scope.sink != self._scope.sink:
                return Failed(f"the rows of shard {p.shard} lie at {found.work.scope.sink!r}, out of reach from here")
            staged.append(found)
        if change.decision is not None:
            self._room.decisions.append(change.decision.to_json())
        for found in staged:
            self._world.settle(found)
        return Ok(None)
