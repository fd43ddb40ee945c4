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
    return Reason("SINKS_NONE", "The pipeline names no sink.", "name at least one sink")


def names_differ(request: Request) -> Reason | None:
    names = [s.name for s in request.sinks]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is None:
        return None
    return Reason(
        "SINK_NAME_TWICE",
        f"Two sinks of the pipeline are named {twice!r}: each would take the other's transactions for its own.",
        "give each sink a unique name (name: ...)",
    )


def one_last_resource(request: Request) -> Reason | None:
    unable = [s for s in request.sinks if s.capability.commit is Commit.ONE_TRANSACTION]
    if request.guarantee is not Guarantee.EXACTLY_ONCE or len(unable) < 2:
        return None
    sinks = " and ".join(f"{s.name} ({s.capability.system})" for s in unable)
    return Reason(
        "SINKS_CANNOT_PREPARE",
        f"The sinks {sinks} commit a batch in their own transaction and cannot prepare it first. One such sink can "
        "decide for all the others; of two, one could commit while the other rolls back, and only one would hold the "
        "batch.",
        "let all but one of them prepare (mysql, postgres: mechanism two_phase), or move all but one to separate "
        "pipelines with their own checkpoints",
    )


def drops_what_may_be_lost(request: Request) -> Reason | None:
    if request.on_bad_row is not OnBadRow.DROP or request.guarantee is Guarantee.AT_MOST_ONCE:
        return None
    return Reason(
        "BAD_ROW_DROP",
        f"on_bad_row: drop loses rows on purpose, but {request.guarantee.value} promises that none is lost.",
        "send bad rows to a dead-letter sink (on_bad_row: dead_letter)",
    )


def complete_in_one_transaction(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if s.capability.write.complete), None)
    exact, complete = request.guarantee is Guarantee.EXACTLY_ONCE, request.output_mode == "complete"
    if sink is None or (complete and exact and sink.capability.commit is Commit.ONE_TRANSACTION):
        return None
    why = f"under {'mechanism two_phase' if exact else request.guarantee.value} no single transaction does that"
    why = why if complete else "the query delivers only some rows with every batch, so earlier ones would be lost"
    return Reason(
        "MODE_COMPLETE",
        f"Mode complete replaces all rows of {sink.label} with every batch; {why}.",
        "choose output_mode complete, exactly_once and mechanism one_transaction; or the sink's mode upsert",
    )


def conditions_in_the_decision(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if s.capability.write.conditional), None)
    if sink is None or request.guarantee is Guarantee.EXACTLY_ONCE:
        return None
    return Reason(
        "MODE_CONDITIONAL",
        f"The rows stored in {sink.label} decide which rows are written (mode insert, expectedVersion or "
        f"onConstraint). Under {request.guarantee.value} a batch that runs again finds its own rows there, and would "
        "count them as conflicts.",
        "choose exactly_once, or the sink's mode upsert",
    )


def micro_batches(request: Request) -> Reason | None:
    trigger = request.execution.trigger
    if trigger not in (Trigger.CONTINUOUS, Trigger.REAL_TIME):
        return None
    mode = "Continuous processing" if trigger is Trigger.CONTINUOUS else "Real-time mode"
    return Reason(
        "TRIGGER_NOT_MICRO_BATCH",
        f"{mode} logs a batch's offsets after its records are sent; a rerun may hold different records, so "
        f"{request.guarantee.value} cannot be guaranteed per batch.",
        "use the available_now or processing_time trigger",
    )


def offsets_logged_first(request: Request) -> Reason | None:
    if not request.execution.async_progress or request.guarantee is Guarantee.AT_LEAST_ONCE:
        return None
    return Reason(
        "ASYNC_PROGRESS",
        "Asynchronous progress tracking logs offsets after the batch; a rerun may read different records, so "
        f"{request.guarantee.value} cannot hold.",
        "remove asyncProgressTrackingEnabled",
    )


def source_replays(request: Request) -> Reason | None:
    source = next((s for s in request.sources if not s.capability.replayable), None)
    if source is None or request.guarantee is Guarantee.AT_MOST_ONCE:
        return None
    why = source.capability.why_not or "it does not return the same records for the same offsets"
    return Reason(
        "SOURCE_NOT_REPLAYABLE",
        f"{request.guarantee.value} needs a source that can be replayed after a crash, and {source.label} cannot be: "
        f"{why}.",
        "write the records to Kafka or another durable log first, and read them from there",
    )


def source_recognises(request: Request) -> Reason | None:
    source = next((s for s in request.sources if s.capability.repeats), None)
    if source is None or request.guarantee is Guarantee.AT_LEAST_ONCE:
        return None
    return Reason(
        "SOURCE_REPEATS",
        f"{request.guarantee.value} needs a source that holds every message once, and {source.label} cannot ensure "
        f"that: {source.capability.repeats}.",
        "have the producers set a message id, and remove messageId=none (or name its header: idHeader); or choose "
        "at_least_once",
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
    return Reason(
        "DEDUP_LATE",
        f"dedup expires keys by record time: a record more than {dedup.within} older ({dedup.time}) than the newest "
        "record of the previous batches is dropped as late, even if it is the first of its key, and "
        f"{promise[request.guarantee]}. One lagging partition, or one record with a timestamp in the future, is "
        "enough.",
        "choose `within` longer than the skew between the source's partitions, and accept the loss of late records: "
        'late: drop (delivered.dedup(..., late="drop"))',
    )


def key_table_without_ledger(request: Request) -> Reason | None:
    dedup = request.dedup
    if dedup is None or not dedup.in_table or request.decider.capability.remembers:
        return None
    able = [s.name for s in request.sinks if s.capability.remembers]
    among = f"; {' and '.join(able)} could, but {'does' if len(able) == 1 else 'do'} not decide" if able else ""
    return Reason(
        "DEDUP_MEMORY",
        f"dedup uses memory: table, so keys must change in the transaction that decides a batch, but the deciding "
        f"sink, {request.decider.label}, cannot hold a key table{among}.",
        f"let a sink of {_any(request.alternatives.key_tables)} decide (with mechanism one_transaction it always does, "
        "else list it first), or keep the keys in Spark's state: memory: state",
    )


def dedup_in_batches(request: Request) -> Reason | None:
    if request.dedup is None or not request.execution.async_progress:
        return None
    return Reason(
        "ASYNC_PROGRESS",
        "Asynchronous progress tracking logs offsets after the batch, but dedup keeps state per batch: after a crash "
        "the two would not match.",
        "remove asyncProgressTrackingEnabled, or dedup",
    )


def dedup_unchanged(request: Request) -> Reason | None:
    facts = request.checkpoint
    if facts.other_dedup is None:
        return None
    now = f"dedup {request.dedup.says}" if request.dedup is not None else "no dedup"
    return Reason(
        "DEDUP_CHANGED",
        f"The checkpoint {facts.location!r} was started with {facts.other_dedup}, but the pipeline now has {now}: the "
        "checkpoint's state cannot be reused. Nothing was changed.",
        "restore the previous setting; or start a new checkpoint at the offsets where this one ended, which remembers "
        "no earlier keys",
    )


def sink_commits(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if s.capability.commit is Commit.NONE), None)
    if request.guarantee is not Guarantee.EXACTLY_ONCE or sink is None:
        return None
    return Reason(
        "SINK_CANNOT_COMMIT",
        f"exactly_once needs a sink that can hold a batch back until it is decided, and {sink.label} makes writes "
        "visible at once.",
        f"write to a sink with transactions: {_any(request.alternatives.transactional)}",
    )


def sink_sends_once(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if not s.capability.can_disable_retries), None)
    if request.guarantee is not Guarantee.AT_MOST_ONCE or sink is None:
        return None
    return Reason(
        "SINK_RESENDS",
        f"at_most_once needs a sink that never sends a record again on its own, and {sink.label} may.",
        "choose at_least_once, or write to a sink that can disable retries",
    )


def local_source(request: Request) -> Reason | None:
    source = next((s for s in request.sources if s.capability.local), None)
    if not request.execution.cluster or source is None:
        return None
    return Reason(
        "SOURCE_LOCAL",
        f"The source {source.label} uses files on one machine, but the executors run on others.",
        "put the source on storage that every machine can reach, or run with a local master",
    )


def local_sink(request: Request) -> Reason | None:
    sink = next((s for s in request.sinks if s.capability.local), None)
    if not request.execution.cluster or sink is None:
        return None
    return Reason(
        "SINK_LOCAL",
        f"The sink {sink.label} uses files on one machine, but the executors run on others.",
        "write to a server, or run with a local master",
    )


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
    return Reason(
        "TRANSACTION_TIMEOUT_TOO_SHORT",
        f"A batch may take {seconds(batch)} as declared, but a transaction times out after {seconds(promise)}: it "
        "could expire before the batch is decided, on every attempt.",
        f"{longer}, or {shorter}" if batch < BROKER_TRANSACTION_TIMEOUT_S_DEFAULT else shorter,
    )


def owner_gone(request: Request) -> Reason | None:
    owner = request.checkpoint.owner
    if owner is None or request.checkpoint.takeover:
        return None
    return Reason(
        "CHECKPOINT_OWNED",
        f"Another driver is running pipeline {request.pipeline!r}: process {owner.process} on host {owner.host}. A "
        "second driver would fence it in mid-batch.",
        "stop that driver, or take over (--takeover, takeover=True), which fences it",
    )


def ledger_not_ahead(request: Request) -> Reason | None:
    facts = request.checkpoint
    if facts.ledger_newest is None or (facts.newest is not None and facts.ledger_newest <= facts.newest):
        return None
    logged = "holds none" if facts.newest is None else f"ends at batch {facts.newest}"
    return Reason(
        "LEDGER_AHEAD",
        f"The ledger holds batch {facts.ledger_newest} of incarnation {facts.incarnation}, but the checkpoint "
        f"{logged}: it was restored from an older copy. Continuing would skip or repeat records.",
        "restore the newest checkpoint; or start a new one at the last decided offsets, which `delivered audit` prints",
    )


def checkpoint_writable(request: Request) -> Reason | None:
    facts = request.checkpoint
    if facts.unwritable is None:
        return None
    return Reason(
        "CHECKPOINT_UNWRITABLE",
        f"The checkpoint {facts.location!r} cannot be written: {facts.unwritable}.",
        "use a folder that the driver's user can write to",
    )


def ledger_there(request: Request) -> Reason | None:
    facts = request.checkpoint
    if not facts.ledger_missing:
        return None
    return Reason(
        "LEDGER_MISSING",
        f"The checkpoint {facts.location!r} holds batch {facts.newest} (incarnation {facts.incarnation}), but the "
        f"ledger of sink {request.decider.name!r} holds no batch of it for pipeline {request.pipeline!r}. "
        "The sink may or may not hold these batches already.",
        "use the pipeline and sink names that the checkpoint was written with, or point the sink at that ledger; or, "
        'if this is the first start with a ledger, accept it once with .option("missingLedger", "accept")',
    )


def ledger_not_behind(request: Request) -> Reason | None:
    facts = request.checkpoint
    if not facts.ledger_behind:
        return None
    return Reason(
        "LEDGER_BEHIND",
        f"The checkpoint {facts.location!r} holds batch {facts.newest}, but the newest one in the ledger of sink "
        f"{request.decider.name!r} is {facts.ledger_newest}: the sink is missing the batches in between. The sink or "
        "its ledger was restored from an older copy, or a fail-over lost its last transactions.",
        without_newest(facts.ledger_offsets, facts.ledger_others),
    )


def checkpoint_known(request: Request) -> Reason | None:
    facts = request.checkpoint
    earlier = facts.earlier
    if earlier is None or facts.accepts_new or request.guarantee is Guarantee.AT_LEAST_ONCE:
        return None
    return Reason(
        "CHECKPOINT_NEW",
        f"The checkpoint {facts.location!r} is empty, but pipeline {request.pipeline!r} already wrote batch "
        f"{earlier.batch} to sink {request.decider.name!r} from another checkpoint (incarnation "
        f"{earlier.incarnation}). Rereading the source from the start would write records twice. The earlier "
        f"checkpoint ended at offsets {shown(earlier.offsets)}",
        f"restore the earlier checkpoint, or start where it ended with {starting_at(earlier.offsets)} and accept the "
        'new checkpoint with .option("newCheckpoint", "accept"), or rename the pipeline',
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
