"""What a pipeline asks for, the facts gathered about it, and the rules that refuse it. Pure: callers query servers.

One function per reason to refuse. The first reason is the answer, so `RULES` goes from the request itself to the state
of the live systems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from delivered.contract.source import Finding
from delivered.model.capability import Commit, Dedup, Guarantee, LedgerPlace, SinkCapability, SourceCapability
from delivered.model.errors import PREFIX, DeliveredError
from delivered.model.identity import SOURCE, by_source
from delivered.model.limits import BROKER_TRANSACTION_TIMEOUT_S_DEFAULT
from delivered.model.options import shown, starting_at, without_newest
from delivered.model.rows import OnBadRow
from delivered.model.work import Owner
from delivered.planner.answer import Reason, seconds


class Trigger(StrEnum):
    """When Spark starts batches."""

    AVAILABLE_NOW = "available_now"
    PROCESSING_TIME = "processing_time"
    CONTINUOUS = "continuous"
    REAL_TIME = "real_time"


@dataclass(frozen=True)
class SourceFacts:
    """
    Attributes:
        name: distinguishes this source from others of the pipeline; empty: it is the only one.
        label: system and what is read from it, for display: "kafka orders".
        findings: what preflight found at the live source; empty if it did not run.
    """

    label: str
    capability: SourceCapability
    findings: tuple[Finding, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class SinkFacts:
    """
    Attributes:
        name: distinguishes this sink from others of the pipeline.
        checked: what preflight looked at in its target.
    """

    name: str
    label: str
    capability: SinkCapability
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()


@dataclass(frozen=True)
class TransformFacts:
    """
    Attributes:
        kind: "none", "sql", "python" (DataFrame -> DataFrame) or "arrow" (record batch -> record batch).
        text: the SQL, or the function's name.
        stateful: it keeps state between batches, as declared or detected.
        deterministic: the same input gives the same rows; None: not declared.
        changing: nondeterministic functions that it calls: "uuid()".
        findings: of checking it against the source's columns, and its columns against the sinks.
    """

    kind: str = "none"
    text: str = ""
    stateful: bool = False
    deterministic: bool | None = None
    changing: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    def seen(self, changing: tuple[str, ...], stateful: bool = False) -> TransformFacts:
        """Completed with what its code shows. Declared values take precedence."""
        if self.deterministic is not None:
            changing = ()
        deterministic = False if changing else self.deterministic
        stateful = stateful or self.stateful
        return replace(self, stateful=stateful, deterministic=deterministic, changing=(*self.changing, *changing))


@dataclass(frozen=True)
class Execution:
    """
    Attributes:
        async_progress: Spark logs a batch's offsets while or after it runs.
        cluster: executors run on other machines than the driver.
        batch_s_max: how long a batch may take, as the user declared it; None: not declared.
    """

    trigger: Trigger = Trigger.AVAILABLE_NOW
    async_progress: bool = False
    cluster: bool = False
    batch_s_max: float | None = None


@dataclass(frozen=True)
class EarlierFacts:
    """What another checkpoint of the same pipeline wrote to this sink, up to `batch`."""

    incarnation: str
    batch: int
    offsets: str


@dataclass(frozen=True)
class CheckpointFacts:
    """
    Attributes:
        incarnation: None: the checkpoint is new.
        newest: the newest batch whose offsets Spark logged; None: none.
        ledger_newest: the newest batch that the ledger holds for this incarnation; None: none, or not read.
        owner: another live driver that owns the ledger; None: there is none.
        takeover: the user wants that driver fenced.
        earlier: what the ledger has of another checkpoint, if it has nothing of this one; else None.
        accepts_new: the user accepts that this checkpoint starts over.
        transform_changed: first and newest batch that ran with another transform than the current one; None: the newest
            one ran with the current one, or it is unknown.
        renamed: its batches are in the ledger under another name of pipeline or sink.
        refusals: what else would stop the next batch before its first write, by guarantee.
        unwritable: why Spark could not write it; None: it could, or it is unknown.
        ledger_behind: the ledger has lost decided batches, and the user did not accept that.
        ledger_offsets: where the ledger's last decided batch of this incarnation ended; empty: there is none.
        ledger_others: further sinks that it was decided for.
        prepared_at: sinks at which that batch's rows were prepared before its decision.
        ledger_missing: the ledger has none of the checkpoint's batches, and the user did not accept that.
        offsets_text: the sources' offsets of the newest batch, as Spark logged them; empty: none.
        unfinished: Spark has not committed that batch.
        other_decider: the sink that decided this checkpoint's batches, if the pipeline no longer has it and the ledger
            of the deciding one may lack the newest batch; else None.
        removed: where sources ended that were removed from the query earlier, by name.
        other_dedup: the checkpoint's dedup, for display, if the pipeline's differs; else None.
    """

    location: str
    incarnation: str | None = None
    newest: int | None = None
    ledger_newest: int | None = None
    owner: Owner | None = None
    takeover: bool = False
    earlier: EarlierFacts | None = None
    accepts_new: bool = False
    other_dedup: str | None = None
    unwritable: str | None = None
    renamed: DeliveredError | None = None
    ledger_missing: bool = False
    ledger_behind: bool = False
    ledger_offsets: str = ""
    ledger_others: tuple[str, ...] = ()
    prepared_at: frozenset[str] = frozenset()
    transform_changed: tuple[int, int] | None = None
    offsets_text: str = ""
    unfinished: bool = False
    other_decider: str | None = None
    removed: Mapping[str, str] = field(default_factory=dict)
    refusals: Mapping[Guarantee, DeliveredError] = field(default_factory=dict)

    @property
    def offsets(self) -> dict[str, str]:
        """Of the newest batch, by source."""
        return by_source(self.offsets_text)


@dataclass(frozen=True)
class Alternatives:
    """Systems that a refusal recommends.

    Attributes:
        transactional: their sinks can prepare a batch until it is decided; key_tables: they can keep a dedup's keys.
    """

    transactional: tuple[str, ...] = ()
    key_tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A pipeline, and what is known about it.

    Attributes:
        on_bad_row: what happens to a row that is invalid for a sink.
        dead_letters: name of the dead-letter sink, which is the last one; None: there is none.
        dedup: which duplicates in the source are dropped; None: none.
        alternatives: asked by a refusal that names them, as it imports every connector.
        output_mode: of the query, as Spark spells it.
    """

    pipeline: str
    guarantee: Guarantee
    sources: tuple[SourceFacts, ...]
    sinks: tuple[SinkFacts, ...]
    checkpoint: CheckpointFacts
    transform: TransformFacts = TransformFacts()
    execution: Execution = Execution()
    on_bad_row: OnBadRow = OnBadRow.FAIL
    dead_letters: str | None = None
    dedup: Dedup | None = None
    alternatives: Callable[[], Alternatives] = Alternatives
    output_mode: str = "append"

    @property
    def ledger(self) -> LedgerPlace:
        return LedgerPlace.among([s.capability for s in self.sinks])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of every source and sink, and of the transform."""
        parts: tuple[SourceFacts | SinkFacts | TransformFacts, ...] = (*self.sources, *self.sinks, self.transform)
        return tuple(f for part in parts for f in part.findings)

    @property
    def decider(self) -> SinkFacts:
        """The sink that keeps the ledger."""
        return self.sinks[self.ledger.sink]

    def by_count(self, one: str, several: str) -> str:
        """What a sentence says if there is one sink, or if there are several."""
        return one if len(self.sinks) == 1 else several

    @property
    def keeps_state(self) -> bool:
        """Whether Spark's checkpoint holds state of the query."""
        return self.transform.stateful or (self.dedup is not None and not self.dedup.in_table)


Rule = Callable[[Request], Reason | None]


def some_sink(request: Request) -> Reason | None:
    if request.sinks:
        return None
    return Reason.build("SINKS_NONE")


def names_differ(request: Request) -> Reason | None:
    names = [s.name for s in request.sinks]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is None:
        return None
    return Reason.build("SINK_NAME_TWICE.PLAN", twice=twice)


def one_last_resource(request: Request) -> Reason | None:
    unable = [s for s in request.sinks if s.capability.commit is Commit.ONE_TRANSACTION]
    if request.guarantee is not Guarantee.EXACTLY_ONCE or len(unable) < 2:
        return None
    sinks = " and ".join(f"{s.name} ({s.capability.system})" for s in unable)
    return Reason.build("SINKS_CANNOT_PREPARE", sinks=sinks)


def drops_what_may_be_lost(request: Request) -> Reason | None:
    if request.on_bad_row is not OnBadRow.DROP or request.guarantee is Guarantee.AT_MOST_ONCE:
        return None
    return Reason.build("BAD_ROW_DROP", guarantee=request.guarantee.value)


def complete_in_one_transaction(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if s.capability.write.complete), None)
    exact, complete = request.guarantee is Guarantee.EXACTLY_ONCE, request.output_mode == "complete"
    if sink is None or (complete and exact and sink.capability.commit is Commit.ONE_TRANSACTION):
        return None
    why = f"under {'mechanism two_phase' if exact else request.guarantee.value} no single transaction does that"
    why = why if complete else "the query delivers only some rows with every batch, so earlier ones would be lost"
    return Reason.build("MODE_COMPLETE.SINK", label=sink.label, reason=why)


def conditions_in_the_decision(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if s.capability.write.conditional), None)
    if sink is None or request.guarantee is Guarantee.EXACTLY_ONCE:
        return None
    return Reason.build("MODE_CONDITIONAL", label=sink.label, guarantee=request.guarantee.value)


def micro_batches(request: Request) -> Reason | None:
    trigger = request.execution.trigger
    if trigger not in (Trigger.CONTINUOUS, Trigger.REAL_TIME):
        return None
    mode = "Continuous processing" if trigger is Trigger.CONTINUOUS else "Real-time mode"
    return Reason.build("TRIGGER_NOT_MICRO_BATCH", mode=mode, guarantee=request.guarantee.value)


def offsets_logged_first(request: Request) -> Reason | None:
    if not request.execution.async_progress or request.guarantee is Guarantee.AT_LEAST_ONCE:
        return None
    return Reason.build("ASYNC_PROGRESS.PIPELINE", guarantee=request.guarantee.value)


def source_replays(request: Request) -> Reason | None:
    source = next((s for s in request.sources if not s.capability.replayable), None)
    if source is None or request.guarantee is Guarantee.AT_MOST_ONCE:
        return None
    why = source.capability.why_not or "it does not return the same records for the same offsets"
    return Reason.build("SOURCE_NOT_REPLAYABLE", guarantee=request.guarantee.value, label=source.label, reason=why)


def source_recognises(request: Request) -> Reason | None:
    source = next((s for s in request.sources if s.capability.repeats), None)
    if source is None or request.guarantee is Guarantee.AT_LEAST_ONCE:
        return None
    return Reason.build(
        "SOURCE_REPEATS", guarantee=request.guarantee.value, label=source.label, repeats=source.capability.repeats
    )


def late_records_known(request: Request) -> Reason | None:
    dedup = request.dedup
    if dedup is None or dedup.drops_late or dedup.in_table:
        return None
    promise = {
        Guarantee.AT_MOST_ONCE: "at_most_once counts what it gives up, but nothing counts these",
        Guarantee.AT_LEAST_ONCE: "at_least_once promises that none is lost",
        Guarantee.EXACTLY_ONCE: "exactly_once promises that none is lost",
    }
    return Reason.build("DEDUP_LATE", within=dedup.within, time=dedup.time, promise=promise[request.guarantee])


def key_table_without_ledger(request: Request) -> Reason | None:
    dedup = request.dedup
    if dedup is None or not dedup.in_table or request.decider.capability.remembers:
        return None
    able = [s.name for s in request.sinks if s.capability.remembers]
    among = f"; {' and '.join(able)} could, but {'does' if len(able) == 1 else 'do'} not decide" if able else ""
    return Reason.build(
        "DEDUP_MEMORY.DECIDER",
        sink=request.decider.label,
        among=among,
        alternatives=_any(request.alternatives().key_tables),
    )


def dedup_in_batches(request: Request) -> Reason | None:
    if request.dedup is None or not request.execution.async_progress:
        return None
    return Reason.build("ASYNC_PROGRESS.DEDUP")


def dedup_unchanged(request: Request) -> Reason | None:
    facts = request.checkpoint
    if facts.other_dedup is None:
        return None
    now = f"dedup {request.dedup.says}" if request.dedup is not None else "no dedup"
    return Reason.build("DEDUP_CHANGED.PLAN", location=facts.location, other_dedup=facts.other_dedup, current=now)


def sink_commits(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if s.capability.commit is Commit.NONE), None)
    if request.guarantee is not Guarantee.EXACTLY_ONCE or sink is None:
        return None
    return Reason.build("SINK_CANNOT_COMMIT", label=sink.label, alternatives=_any(request.alternatives().transactional))


def sink_sends_once(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if not s.capability.can_disable_retries), None)
    if request.guarantee is not Guarantee.AT_MOST_ONCE or sink is None:
        return None
    return Reason.build("SINK_RESENDS", label=sink.label)


def local_source(request: Request) -> Reason | None:
    source = next((s for s in request.sources if s.capability.local), None)
    if not request.execution.cluster or source is None:
        return None
    return Reason.build("SOURCE_LOCAL", label=source.label)


def local_sink(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if s.capability.local), None)
    if not request.execution.cluster or sink is None:
        return None
    return Reason.build("SINK_LOCAL", label=sink.label)


def promise_outlives_batch(request: Request) -> Reason | None:
    batch = request.execution.batch_s_max
    promises = [s for s in request.sinks if s.capability.prepared_timeout_s is not None]
    if request.guarantee is not Guarantee.EXACTLY_ONCE or batch is None or not promises:
        return None
    sink = min(promises, key=lambda s: s.capability.prepared_timeout_s or 0)
    promise = sink.capability.prepared_timeout_s
    if promise is None or promise > batch:
        return None
    longer = "raise transactionTimeout above it"
    shorter = "make batches smaller (maxOffsetsPerTrigger) and declare a shorter batch_time_max"
    return Reason.build(
        "TRANSACTION_TIMEOUT_TOO_SHORT.BROKER_DEFAULT"
        if batch < BROKER_TRANSACTION_TIMEOUT_S_DEFAULT
        else "TRANSACTION_TIMEOUT_TOO_SHORT.BROKER_LIMIT",
        batch_time=seconds(batch),
        timeout=seconds(promise),
        longer=longer,
        shorter=shorter,
    )


def unowned(request: Request) -> Reason | None:
    owner = request.checkpoint.owner
    if owner is None or request.checkpoint.takeover:
        return None
    return Reason.build("CHECKPOINT_OWNED", pipeline=request.pipeline, process=owner.process, host=owner.host)


def decider_kept(request: Request) -> Reason | None:
    """Without the sink that decided, another ledger would be asked: it may lack the newest batch."""
    facts, now = request.checkpoint, request.decider.name
    former = facts.other_decider
    if former is None:
        return None
    ends = f"ends at batch {facts.ledger_newest}" if facts.ledger_newest is not None else "has no batch of it"
    return Reason.build(
        "DECIDER_REMOVED",
        former=former,
        location=facts.location,
        newest=facts.newest,
        unfinished=" (not finished)" if facts.unfinished else "",
        decider=now,
        ends=ends,
    )


def ledger_not_ahead(request: Request) -> Reason | None:
    facts = request.checkpoint
    if facts.ledger_newest is None or (facts.newest is not None and facts.ledger_newest <= facts.newest):
        return None
    logged = "holds none" if facts.newest is None else f"ends at batch {facts.newest}"
    return Reason.build(
        "LEDGER_AHEAD.PLAN", ledger_batch=facts.ledger_newest, incarnation=facts.incarnation, logged=logged
    )


def checkpoint_writable(request: Request) -> Reason | None:
    facts = request.checkpoint
    if facts.unwritable is None:
        return None
    return Reason.build("CHECKPOINT_UNWRITABLE", location=facts.location, reason=facts.unwritable)


def ledger_named(request: Request) -> Reason | None:
    error = request.checkpoint.renamed
    if error is None:
        return None
    return Reason(error.code.removeprefix(PREFIX), error.message, error.next_step or "")


def ledger_there(request: Request) -> Reason | None:
    facts = request.checkpoint
    if not facts.ledger_missing:
        return None
    return Reason.build(
        "LEDGER_MISSING.PLAN",
        location=facts.location,
        newest=facts.newest,
        incarnation=facts.incarnation,
        sink=request.decider.name,
        pipeline=request.pipeline,
    )


def ledger_not_behind(request: Request) -> Reason | None:
    facts = request.checkpoint
    if not facts.ledger_behind:
        return None
    return Reason.build(
        "LEDGER_BEHIND.PLAN",
        location=facts.location,
        batch=facts.newest,
        sink=request.decider.name,
        ledger_batch=facts.ledger_newest,
        action=without_newest(facts.ledger_offsets, facts.ledger_others),
    )


def checkpoint_known(request: Request) -> Reason | None:
    facts = request.checkpoint
    earlier = facts.earlier
    if earlier is None or facts.accepts_new or request.guarantee is Guarantee.AT_LEAST_ONCE:
        return None
    return Reason.build(
        "CHECKPOINT_NEW.PLAN",
        location=facts.location,
        pipeline=request.pipeline,
        batch=earlier.batch,
        sink=request.decider.name,
        earlier_incarnation=earlier.incarnation,
        offsets=shown(earlier.offsets),
        starting_offsets=starting_at(earlier.offsets),
    )


def next_batch_accepted(request: Request) -> Reason | None:
    """What a batch checks that the rules before do not: a stricter guarantee, other targets or sinks over a batch in
    flight."""
    error = request.checkpoint.refusals.get(request.guarantee)
    if error is None or any(rule(request) is not None for rule in _OF_LEDGERS):
        return None
    return Reason(error.code.removeprefix(PREFIX), error.message, error.next_step or "")


def preflight_passed(request: Request) -> Reason | None:
    for finding in sorted(request.findings, key=lambda f: f.transient):
        if finding.refuses and finding.only in (None, request.guarantee):
            way_out = finding.next_step or "fix what the message describes"
            return Reason(finding.code, finding.message, way_out, finding.transient)
    return None


def sources_known(request: Request) -> Reason | None:
    """Spark's offset log identifies sources by name; without names it cannot show which one was added or removed."""
    facts = request.checkpoint
    now, before = _source_names(request), set(facts.offsets)
    if not before or (_unnamed(now) and _unnamed(before)):
        return None
    if _unnamed(now) or _unnamed(before):
        is_named, was_named = _listed(now), _listed(before)
        return Reason.build(
            "SOURCES_UNNAMED",
            sources="source" if _unnamed(now) else f"the named sources {is_named}",
            location=facts.location,
            before="source" if _unnamed(before) else f"the named sources {was_named}",
            starting_offsets=starting_at(facts.offsets_text),
        )
    back = sorted((now - before) & set(facts.removed))
    if back:
        end = facts.removed[back[0]]
        return Reason.build("SOURCE_RETURNED", source=back[0], end=shown(end), starting_offsets=starting_at(end))
    if now != before and facts.unfinished:
        return Reason.build(
            "SOURCES_UNFINISHED",
            newest=facts.newest,
            before=_listed(before),
            current=_listed(now),
            alternative=_undone(request),
        )
    return None


def _undone(request: Request) -> str:
    """How to undo a batch that Spark logged and then refused to run, as with other operators that keep state."""
    facts = request.checkpoint
    newest = facts.newest
    decided = newest is None or (facts.ledger_newest is not None and facts.ledger_newest >= newest)
    if decided or request.guarantee is not Guarantee.EXACTLY_ONCE:
        return ""
    return (
        f"; or, if Spark refuses to run the batch, delete offsets/{newest} and offsets/.{newest}.crc of the "
        "checkpoint: the batch is not decided, and no sink shows any of it"
    )


_OF_LEDGERS: tuple[Rule, ...] = (
    decider_kept,
    ledger_not_ahead,
    ledger_named,
    ledger_there,
    ledger_not_behind,
    checkpoint_known,
)

RULES: tuple[Rule, ...] = (
    some_sink,
    names_differ,
    drops_what_may_be_lost,
    complete_in_one_transaction,
    conditions_in_the_decision,
    micro_batches,
    offsets_logged_first,
    source_replays,
    source_recognises,
    late_records_known,
    key_table_without_ledger,
    dedup_in_batches,
    sink_commits,
    one_last_resource,
    sink_sends_once,
    local_source,
    local_sink,
    promise_outlives_batch,
    unowned,
    dedup_unchanged,
    sources_known,
    checkpoint_writable,
    *_OF_LEDGERS,
    next_batch_accepted,
    preflight_passed,
)


def reasons(request: Request) -> Iterator[Reason]:
    """Every reason to refuse, in the order of `RULES`. A pipeline without a sink yields only that one."""
    for rule in RULES:
        reason = rule(request)
        if reason is not None:
            yield reason
            if rule is some_sink:
                return


def source_warnings(request: Request) -> Iterator[str]:
    """Warnings: sources that are new to the checkpoint, and sources missing from the pipeline."""
    now, before = _source_names(request), request.checkpoint.offsets
    if not before or _unnamed(now):
        return
    for name in sorted(now - set(before)):
        yield f"the source {name} is new to this checkpoint: it begins at its startingOffsets, once"
    for name in sorted(set(before) - now):
        yield (
            f"the source {name} is removed: it ended at {shown(before[name])}. What it delivered stays; should it "
            "return, it needs another name and startingOffsets"
        )


def sink_warnings(request: Request) -> Iterator[str]:
    """Warnings: sinks that are removed over an undecided batch. Nobody aborts what its tasks prepared there."""
    facts = request.checkpoint
    if not facts.unfinished or facts.newest is None or (facts.ledger_newest or 0) >= facts.newest:
        return
    for name in sorted(facts.prepared_at - {s.name for s in request.sinks}):
        yield (
            f"the sink {name} is removed, and batch {facts.newest} is not decided: what its tasks prepared there stays "
            "open, and may hold back readers. Start once more with it, or see `delivered transactions list` with the "
            "previous definition"
        )


def _any(systems: Sequence[str]) -> str:
    """ "a, b or c"."""
    return " or ".join(filter(None, (", ".join(systems[:-1]), *systems[-1:])))


def _source_names(request: Request) -> set[str]:
    return {s.name or SOURCE for s in request.sources}


def _unnamed(names: Iterable[str]) -> bool:
    """Whether Spark's log identifies these sources by position."""
    return all(n == SOURCE or n.isdigit() for n in names)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
