"""Reasons to refuse, one function each. The first that applies wins, so they are ordered from the request itself to the
state of the live systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from delivered.model.bad_row import OnBadRow
from delivered.model.capability import Commit
from delivered.model.guarantee import Guarantee
from delivered.model.limits import BROKER_TRANSACTION_TIMEOUT_S_DEFAULT
from delivered.model.options import shown, starting_at, without_newest
from delivered.planner.answer import Reason, seconds
from delivered.planner.group import decider_kept
from delivered.planner.request import Request, Trigger
from delivered.planner.sources import sources_known

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
        alternatives=_any(request.alternatives.key_tables),
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
    return Reason.build("SINK_CANNOT_COMMIT", label=sink.label, alternatives=_any(request.alternatives.transactional))


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


def owner_gone(request: Request) -> Reason | None:
    owner = request.checkpoint.owner
    if owner is None or request.checkpoint.takeover:
        return None
    return Reason.build("CHECKPOINT_OWNED", pipeline=request.pipeline, process=owner.process, host=owner.host)


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
    return Reason.build("CHECKPOINT_UNWRITABLE", location=facts.location, unwritable=facts.unwritable)


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


def preflight_passed(request: Request) -> Reason | None:
    for finding in sorted(request.findings, key=lambda f: f.transient):
        if finding.refuses and finding.only in (None, request.guarantee):
            way_out = finding.next_step or "fix what the message describes"
            return Reason(finding.code, finding.message, way_out, finding.transient)
    return None


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
    owner_gone,
    dedup_unchanged,
    sources_known,
    checkpoint_writable,
    decider_kept,
    ledger_not_ahead,
    ledger_there,
    ledger_not_behind,
    checkpoint_known,
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


def _any(systems: Sequence[str]) -> str:
    """ "a, b or c"."""
    return " or ".join(filter(None, (", ".join(systems[:-1]), *systems[-1:])))
