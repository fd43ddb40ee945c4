"""One driver and the sinks of one pipeline: one ledger, one committer, the targets that they write to; and whether the
driver that owns a ledger is alive."""

from __future__ import annotations

import heapq
import logging
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import psutil

from delivered.contract.connector import build
from delivered.contract.sink import Committer, OpenTransaction, Shards, Sink
from delivered.engine import Sinks
from delivered.ledger import Change, Head, Ledger, Store, state_of
from delivered.model.capability import Guarantee, LedgerPlace
from delivered.model.errors import DeliveredError, InvariantBroken, TargetChanged
from delivered.model.identity import OtherLedger, Scope, Target, Work
from delivered.model.work import Decision, LedgerState, Ok, Outcome, Owner, Prepared, Tolerance, Unknown

FORGET_EVERY = 64
"""Interval, in batches, at which markers of other sinks are deleted."""

log = logging.getLogger(__name__)

_NO_TOLERANCE = Tolerance()

_IN_WORDS = re.compile(r".*(?:with (?:id|oid|UUID)|generation) (\S+)", re.DOTALL)
"""Decisions of earlier versions also contain the name, which has several spellings: "topic t with id 3f0c"."""


@dataclass
class Swept:
    """
    Attributes:
        at_s: of time.monotonic(), when orphans were aborted last.
    """

    at_s: float = float("-inf")


@dataclass(frozen=True)
class Context:
    """
    Attributes:
        ledger, committers: of the sinks, opened for `scope`.
        sinks: their names, as in `Prepared.sink`.
        owner: this driver. Two processes of one driver share its id.
        transform: fingerprint of the transform that produces the rows; empty: unknown.
    """

    scope: Scope
    guarantee: Guarantee
    owner: Owner
    ledger: Ledger
    committers: Committers
    sinks: frozenset[str]
    tolerance: Tolerance = Tolerance()
    transform: str = ""
    swept: Swept = field(default_factory=Swept, compare=False)

    @classmethod
    def open(
        cls,
        sinks: Sinks,
        scope: Scope,
        guarantee: Guarantee,
        owner: Owner,
        tolerance: Tolerance = _NO_TOLERANCE,
        transform: str = "",
    ) -> Context:
        """Connects on first use."""
        ledger, committers = open_shared_ledger(sinks, scope), open_committers(sinks, scope, guarantee)
        return cls(scope, guarantee, owner, ledger, committers, sinks.names, tolerance, transform)

    def close(self) -> None:
        self.ledger.close()
        self.committers.close()


def open_shared_ledger(sinks: Sinks, scope: Scope) -> Ledger:
    """The ledger of this scope, kept by the deciding sink for all. Connects on first use."""
    others = [(m.sink, replace(scope, sink=m.name)) for m in sinks.members if m is not sinks.decider]
    store = SharedStore(scope, sinks.decider.sink.store(scope), others)
    return Ledger(store, scope, carries_rows=sinks.place.carries_rows)


def open_committers(sinks: Sinks, scope: Scope, guarantee: Guarantee) -> Committers:
    own = {m.name: build(Committer, m.sink.committer, replace(scope, sink=m.name)) for m in sinks.members}
    return Committers(own, scope, guarantee)


def open_ledger(sink: Sink, scope: Scope) -> Ledger:
    """The ledger at one sink."""
    return Ledger(sink.store(scope), scope, carries_rows=LedgerPlace.among([sink.capability()]).carries_rows)


class SharedStore:
    """The ledger's store, at one sink, for all sinks. See `delivered.ledger.Store`.

    A change of sinks may change which ledger decides, and another one may change it back. Until the deciding ledger has
    the newest decision of this checkpoint, the ledgers of the other sinks count: their state is read, projected to the
    deciding ledger's sink, and carried over. Their owners are fenced, as a driver may still be running with the
    previous sinks.
    """

    def __init__(self, scope: Scope, deciding: Store, others: Sequence[tuple[Sink, Scope]]) -> None:
        self._scope = scope
        self._deciding = deciding
        self._others = others
        self._ledgers = [Ledger(sink.store(theirs), theirs) for sink, theirs in others]
        self._all: Sequence[Store | Ledger] = (deciding, *self._ledgers)
        self._decides = not others
        """The deciding ledger has this incarnation's newest decision, and no ledger one of another incarnation that
        followed it; since a claim, no other one can."""

    @property
    def where(self) -> str:
        return self._deciding.where

    def read(self) -> LedgerState:
        return self._carried_on(self._deciding.read())

    def peek(self) -> LedgerState:
        return self._carried_on(self._deciding.peek())

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        """Claims the deciding ledger first: a driver superseded there fences nobody elsewhere."""
        owners: list[Owner] = []
        self._decides = not self._ledgers

        def recorded(head: Head) -> Owner:
            owners.append(successor(head))
            return owners[-1]

        outcome = self._deciding.take(recorded)
        if isinstance(outcome, Ok) and self._ledgers and self._deciding.read().epoch == outcome.value:
            for ledger in self._ledgers:
                if ledger.look().owner is not None:
                    ledger.claim(owners[-1])
        return outcome

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        decided: list[int] = []

        def recorded(head: Head) -> Change | None:
            change = rule(head)
            decided[:] = [] if change is None or change.decision is None else [change.decision.batch]
            return change

        outcome = self._deciding.write(recorded)
        if isinstance(outcome, Ok) and decided and decided[0] % FORGET_EVERY == 0:
            self._forget(decided[0])
        return outcome

    def history(self) -> Iterable[Decision]:
        return self._deciding.history()

    def others(self) -> Sequence[OtherLedger]:
        """All but those of this pipeline's sinks."""
        own = {scope.sink for _, scope in self._others}
        return [o for o in self._deciding.others() if not (o.pipeline == self._scope.pipeline and o.sink in own)]

    def last_seal(self, sink: str) -> str | None:
        return next((text for of in self._all if (text := of.last_seal(sink)) is not None), None)

    def seals(self, sink: str, first: int = 0) -> Iterable[str]:
        return self._sealed(sink).seals(sink, first)

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        """A chain goes on in the ledger in which it began, also if another one decides now."""
        return self._sealed(sink).add_seal(sink, number, text)

    def _sealed(self, sink: str) -> Store | Ledger:
        """The ledger that holds this sink's seals."""
        return next((of for of in self._all if of.last_seal(sink) is not None), self._deciding)

    def close(self) -> None:
        self._deciding.close()
        for ledger in self._ledgers:
            ledger.close()

    def _carried_on(self, state: LedgerState) -> LedgerState:
        if self._decides:
            return state
        states = [state, *(ledger.look() for ledger in self._ledgers)]
        name = self._scope.sink
        started = max((s.started for s in states if s.started is not None), key=lambda b: b.batch, default=None)
        merged = replace(state_of(self._scope, None, 0, _merge(states, name), {}, lambda _: None), started=started)
        self._decides = state.last is not None and merged.last == state.last and not merged.followed
        carried = -1 if state.last is None else state.last.batch
        return replace(
            state, last=merged.last, started=started, earlier=merged.earlier, followed=merged.followed, carried=carried
        )

    def _forget(self, batch: int) -> None:
        """Delete markers of batches before a decided one, which are visible everywhere."""
        for sink, scope in self._others:
            committer = sink.committer(scope)
            try:
                committer.forget(batch)
            except DeliveredError as error:
                log.warning("sink %s: markers before batch %d were not forgotten: %s", scope.sink, batch, error)
            finally:
                committer.close()


def _merge(states: Sequence[LedgerState], sink: str) -> list[Decision]:
    """The newest decision of each incarnation in any of the ledgers, as the sink's own, oldest first.

    Sequences increase across the ledgers, as a claim reads all of them. Records of an earlier release, which lack them,
    keep the order of their ledger; those of different ledgers are merged by time.
    """
    newest: dict[str, Decision] = {}
    for d in heapq.merge(
        *(s.oldest_first for s in states), key=lambda d: (d.sequence, d.decided_at_ms * (not d.sequence))
    ):
        known = newest.get(d.scope.incarnation)
        if known is None or (known.batch, known.revision) < (d.batch, d.revision):
            newest.pop(d.scope.incarnation, None)
            newest[d.scope.incarnation] = d.for_sink(sink)
    return [*newest.values()]


class Committers:
    """The committers of a pipeline's sinks; a participant's is found by its sink.

    Attributes:
        by_name: by sink, in the order in which they are applied.
    """

    def __init__(self, committers: Mapping[str, Committer], scope: Scope, guarantee: Guarantee) -> None:
        self._scope = scope
        self._guarantee = guarantee
        self.by_name = committers
        self._is_set_up = False

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        return self._named(work.scope.sink).commit(work, prepared)

    def commit_all(self, shards: Shards) -> list[Outcome[None]]:
        """See `delivered.contract.sink.Committer`: by sink, for those that can."""
        outcomes: list[Outcome[None]] = [Unknown("not asked yet")] * len(shards)
        for sink, committer in self.by_name.items():
            own = [i for i, (work, _) in enumerate(shards) if work.scope.sink == sink]
            if own:
                for i, outcome in zip(own, committer.commit_all([shards[i] for i in own]), strict=True):
                    outcomes[i] = outcome
        return outcomes

    def settle_ends(self, decided: Shards, earlier: Callable[[], Sequence[Prepared]]) -> Outcome[int]:
        """See `delivered.contract.sink.Committer`: of every sink that does."""
        count = 0
        for sink, committer in self.by_name.items():
            match committer.settle_ends(_shards_at(sink, decided), partial(_earlier_at, sink, earlier)):
                case Ok(lost):
                    count += lost
                case other:
                    return other
        return Ok(count)

    def ends_hold(self, applied: Sequence[Prepared]) -> bool:
        """See `delivered.contract.sink.Committer`."""
        return all(
            committer.ends_hold([p for p in applied if p.sink == sink]) for sink, committer in self.by_name.items()
        )

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        return self._named(work.scope.sink).was_committed(work, prepared)

    def visible_shards(self, batch: int) -> dict[str, Sequence[int]]:
        """By sink, those with any. See `delivered.contract.sink.Committer`."""
        every = {sink: committer.visible_shards(batch) for sink, committer in self.by_name.items()}
        return {sink: shards for sink, shards in every.items() if shards}

    def abort(self, prepared: Prepared) -> Outcome[None]:
        return self._named(prepared.sink).abort(prepared)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Abort every sink's orphans, even if another sink is unreachable: open transactions block readers."""
        self._set_up()
        count = 0
        failure: Outcome[int] | None = None
        for sink, committer in self.by_name.items():
            match committer.abort_orphans([p for p in keep if p.sink == sink]):
                case Ok(aborted):
                    count += aborted
                case other:
                    failure = failure or other
        return failure or Ok(count)

    def targets(self) -> dict[str, Target]:
        """See `delivered.contract.sink.Committer`: of every sink that has it."""
        every = [committer.targets() for committer in self.by_name.values()]
        return {sink: target for targets in every for sink, target in targets.items()}

    def open_transactions(self) -> list[OpenTransaction]:
        """Of every sink that holds them."""
        return [
            transaction for committer in self.by_name.values() for transaction in committer.open_transactions() or ()
        ]

    def close(self) -> None:
        for committer in self.by_name.values():
            committer.close()

    def _set_up(self) -> None:
        if self._is_set_up:
            return
        for sink, committer in self.by_name.items():
            committer.set_up(self._guarantee, decides=sink == self._scope.sink)
        self._is_set_up = True

    def _named(self, name: str) -> Committer:
        found = self.by_name.get(name)
        if found is None:
            raise InvariantBroken("SINK_UNKNOWN", name=name, pipeline=self._scope.pipeline, known=sorted(self.by_name))
        return found


def find_known_targets(context: Context, last: Decision | None) -> Mapping[str, str]:
    """Targets of any batch but a start's first: those of the last decision, if it has any."""
    return last.targets if last is not None and last.targets else _target_ids(_read_targets(context))


def find_decided_targets(context: Context, last: Decision | None, planned: Mapping[str, str]) -> Mapping[str, str]:
    """Targets for a batch's decision, as planned; read again if its tasks may have created some."""
    return planned if planned and last is not None else {**_target_ids(_read_targets(context)), **planned}


def check_targets(context: Context, last: Decision | None) -> Mapping[str, str]:
    """Query the sinks' targets, and compare them with this incarnation's last decision.

    A topic or table that was dropped and recreated has the same name but none of the delivered records. An external
    ledger cannot notice that, so each decision contains the targets' identities.

    Runs on the driver, at the first batch of a start, before anything is applied. Accepts sinks that the last decision
    does not name, and decisions of versions that stored no targets.

    Raises:
        TargetChanged: a target was recreated, or is missing, and the user did not accept that.
    """
    now = _read_targets(context)
    if last is None or context.tolerance.new_target:
        return _target_ids(now)
    sinks = context.sinks
    for sink, before in sorted(last.targets.items()):
        if sink in sinks and not (sink in now and same_target(before, now[sink])):
            written_to = before if _IN_WORDS.fullmatch(before) else f"a target with id {before}"
            state = (
                f"its target is now {now[sink]}: it was dropped or recreated, and lacks what was delivered before"
                if sink in now
                else "none with that id is there now: it was dropped; or it is a table of SQLite or MySQL, whose id is "
                "a comment in its definition, which a migration may have removed"
            )
            raise TargetChanged(
                "TARGET_CHANGED",
                sink=sink,
                pipeline=context.scope.pipeline,
                batch=last.batch,
                written_to=written_to,
                state=state,
                records=last.account(sink).total.count,
            )
    return _target_ids(now)


def same_target(before: str, now: Target) -> bool:
    """Whether a decision's target is the current one."""
    if (words := _IN_WORDS.fullmatch(before)) is not None:
        return words[1] == now.id.partition("@")[0]
    return before == now.id


def _target_ids(targets: Mapping[str, Target]) -> Mapping[str, str]:
    return {sink: target.id for sink, target in targets.items()}


def _read_targets(context: Context) -> Mapping[str, Target]:
    return context.committers.targets()


def _shards_at(sink: str, shards: Shards) -> Shards:
    return [(work, p) for work, p in shards if p.sink == sink]


def _earlier_at(sink: str, earlier: Callable[[], Sequence[Prepared]]) -> Sequence[Prepared]:
    return [p for p in earlier() if p.sink == sink]


# The one driver that may decide: its id, and the process that shows whether it is alive.

_START_TOLERANCE_MS = 2_000


def new_owner(jvm: psutil.Process | None) -> Owner:
    """A new, unique owner.

    Args:
        jvm: of the driver; None: it is remote (Spark Connect), and each of its processes finds it itself.
    """
    owner = Owner(uuid.uuid4().hex)
    return owner if jvm is None else _place(owner, jvm)


def locate(owner: Owner) -> Owner:
    """The same owner, with host and process of its JVM filled in. Runs in a process of the driver."""
    return replace(owner, host=socket.gethostname()) if owner.process else _place(owner, _find_jvm())


def find_living(owner: Owner | None, jvm: psutil.Process | None = None) -> Owner | None:
    """The owner, if it is another live driver on this machine. Drivers on other machines are not visible, but fenced
    by the ledger.

    Args:
        jvm: of the session that will run the pipeline.
    """
    if owner is None or not is_running(owner) or owner.process in _own_processes():
        return None
    return None if jvm is not None and owner.process == jvm.pid else owner


def is_running(owner: Owner | None) -> bool | None:
    """Whether the owner's process lives; None: it was on another machine, or there is none."""
    if owner is None or owner.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(owner.process)
        return is_start_of(process, owner.started_ms) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _place(owner: Owner, process: psutil.Process) -> Owner:
    return replace(owner, host=socket.gethostname(), process=process.pid, started_ms=started_ms(process))


def started_ms(process: psutil.Process) -> int:
    """When a process started; on Linux since the machine's boot: its time since 1970 changes when the clock is set."""
    now = psutil.Process(process.pid)  # an older object keeps the time of a clock that was set since
    return int((now.create_time() - (psutil.boot_time() if psutil.LINUX else 0)) * 1000)


def is_start_of(process: psutil.Process, at_ms: int) -> bool:
    """Whether the process started then, and did not just take over the number of one that did.

    Args:
        at_ms: by `started_ms`; by an earlier release, since 1970.
    """
    known = (started_ms(process), process.create_time() * 1000)
    return any(abs(started - at_ms) < _START_TOLERANCE_MS for started in known)


@cache
def _find_jvm() -> psutil.Process:
    """The JVM that is an ancestor of this worker, else this process. Looked up once: workers that outlive Python's
    daemon have no such ancestor."""
    own = psutil.Process(os.getpid())
    return next((p for p in own.parents() if p.name().startswith("java")), own)


def _own_processes() -> set[int]:
    """This process, the JVM it started, and the JVM that started it (spark-submit)."""
    own = psutil.Process(os.getpid())
    return {own.pid, *(p.pid for p in own.children(recursive=True)), *(p.pid for p in own.parents())}
