"""A ledger in memory: one owner, one epoch per claim, decisions as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from delivered.connectors.memory.world import Answer, State, World
from delivered.model.capability import Commit
from delivered.model.errors import Fenced
from delivered.model.guarantee import Guarantee
from delivered.model.identity import OtherLedger, Scope, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES, OWNERS_REMEMBERED
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Begun, Decision, LedgerState, Owner


class MemoryLedger:
    def __init__(self, world: World, scope: Scope, commit: Commit) -> None:
        self._world = world
        self._scope = scope
        self._commit = commit
        self._room = world.room(scope)
        self._epoch = 0

    def claim(self, owner: Owner) -> LedgerState:
        self._world.gate()
        room = self._room
        with self._world.lock:
            if owner.id in room.superseded:
                raise self._fenced(owner.id)
            if room.owner is not None and room.owner.id != owner.id:
                room.superseded = (room.owner.id, *room.superseded)[:OWNERS_REMEMBERED]
            room.owner = owner
            room.epoch += 1
            self._epoch = room.epoch
            return self._state()

    def resume(self, owner_id: str) -> LedgerState:
        self._world.gate()
        with self._world.lock:
            if self._room.owner is None or self._room.owner.id != owner_id:
                raise self._fenced(owner_id)
            self._epoch = self._room.epoch
            return self._state()

    def look(self) -> LedgerState:
        self._world.gate()
        with self._world.lock:
            return self._state()

    def begin(self, begun: Begun) -> Outcome[None]:
        def write() -> Failed | None:
            self._room.begun[self._scope.incarnation] = begun
            return None

        return self._write("begin", write)

    def decide(self, decision: Decision) -> Outcome[None]:
        text = decision.to_json()
        if self._commit is Commit.ONE_TRANSACTION and decision.guarantee is Guarantee.EXACTLY_ONCE:
            for p in decision.to_move:
                # The transaction is open here and holds no lock: a driver that is paused in it blocks nobody.
                reach(StepId.COMMIT_APPLY, Moment.BEFORE, batch=decision.batch, shard=p.shard)
                reach(StepId.COMMIT_APPLY, Moment.AFTER, batch=decision.batch, shard=p.shard)
            return self._write("decide", lambda: self._in_one_transaction(decision, text))
        return self._write("decide", lambda: self._append(decision, text))

    def history(self) -> Iterable[Decision]:
        return self._room.of(self._scope.incarnation)[-LEDGER_HISTORY_BATCHES:]

    def others(self) -> list[OtherLedger]:
        """See `delivered.contract_target.KnowsOthers`."""
        mine, incarnation = (self._scope.pipeline, self._scope.sink), self._scope.incarnation
        rooms = {name: room for name, room in self._world.rooms.items() if name != mine and room.owner is not None}
        return named_first(
            OtherLedger(*name, same_incarnation=bool(room.of(incarnation)) or incarnation in room.begun)
            for name, room in rooms.items()
        )

    def close(self) -> None:
        """Nothing is open."""

    def _write(self, method: str, write: Callable[[], Failed | None]) -> Outcome[None]:
        self._world.gate()
        epoch = self._epoch

        def arrive() -> Failed | None:
            with self._world.lock:
                if self._room.epoch != epoch:
                    return Failed(f"claim {epoch} is outdated by claim {self._room.epoch}")
                return write()

        answer = self._world.next_answer(method)
        if answer is Answer.LATE:
            self._world.keep_under_way(arrive)
        if answer in (Answer.LATE, Answer.NOT_SENT):
            return Unknown("no answer")
        failed = arrive()
        if answer is Answer.LOST:
            return Unknown("the answer was lost")
        return failed or Ok(None)

    def _append(self, decision: Decision, text: str) -> Failed | None:
        last = next(reversed(self._room.of(self._scope.incarnation)), None)
        if last is not None and (last.batch, last.revision) >= (decision.batch, decision.revision):
            return Failed(f"batch {last.batch}, revision {last.revision} is decided already")
        self._room.decisions.append(text)
        return None

    def _in_one_transaction(self, decision: Decision, text: str) -> Failed | None:
        """Rows and record together, or neither."""
        staged = []
        for p in decision.to_move:
            found = self._world.participants.get(int(p.handle["id"]))
            if found is None or found.state is not State.PREPARED:
                return Failed(f"the staged rows of shard {p.shard} are gone")
            if found.work.scope.sink != self._scope.sink:
                return Failed(f"the rows of shard {p.shard} lie at {found.work.scope.sink!r}, out of reach from here")
            staged.append(found)
        failed = self._append(decision, text)
        if failed is None:
            for found in staged:
                self._world.settle(found)
        return failed

    def _state(self) -> LedgerState:
        room, incarnation = self._room, self._scope.incarnation
        decisions = room.of(incarnation)
        return LedgerState(
            owner=room.owner,
            last=decisions[-1] if decisions else None,
            begun=room.begun.get(incarnation),
            earlier=tuple(room.newest_of_others(incarnation)),
            earlier_begun=tuple(room.begun_by_others(incarnation)),
            epoch=room.epoch,
        )

    def _fenced(self, owner_id: str) -> Fenced:
        owner = self._room.owner
        return Fenced(
            "FENCED",
            f"Driver {owner_id} does not own the ledger of {self._scope.pipeline!r}, sink {self._scope.sink!r}; its "
            f"owner is {owner.id if owner else 'nobody yet'}.",
            next_step="stop this driver; one pipeline has one driver",
        )
