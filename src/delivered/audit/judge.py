"""What the counts of an audit prove, together with the ledger: from a job's result to the report. And what a
recomputation cannot show about a query that ran in many batches. Pure.

There are two methods to recompute. One batch over the complete source range is cheap, and gives what the query gave if
its result depends on the rows alone. A replay runs the transform as a stream again, in the batches that the ledger
keeps. A result may depend on more than either repeats: the clock, the order of rows, tables as they were. Each such
dependency is a caveat, with the damage that it explains as well as a fault would. Damage that a caveat explains is
never a breach.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self

from delivered.audit.evidence import (
    NOBODY,
    Counts,
    Damage,
    DedupCounts,
    Fingerprints,
    LedgerAccount,
    PartitionLine,
    Sample,
)
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest, Earlier, Recompute, SourceRange, parsed, plain
from delivered.model.capability import Dedup, Guarantee, OnConflict, WriteMode
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Account

_NOTHING = Account()

PARTITIONS_MAX = 1_000
"""Source partitions that are reported individually."""


@dataclass(frozen=True)
class Result:
    """What a job counted.

    Attributes:
        null_ids: records whose id expression gave null; they are identified by all their columns instead.
        partitions_left_off: source partitions beyond `PARTITIONS_MAX`; they are in `counts`.
        delivered: of all but those in progress.
    """

    counts: Counts
    partitions: tuple[PartitionLine, ...] = ()
    samples: tuple[Sample, ...] = ()
    sent: Fingerprint = Fingerprint()
    delivered: Fingerprint = Fingerprint()
    null_ids: int = 0
    partitions_left_off: int = 0

    @classmethod
    def of_lines(cls, lines: Iterable[PartitionLine], samples: Sequence[Sample] = (), null_ids: int = 0) -> Self:
        """The sums of all lines, of which there may be several of one partition."""
        by_name: dict[str, PartitionLine] = {}
        for line in lines:
            name = line.partition
            by_name[name] = line + by_name[name] if name in by_name else line
        return cls(
            counts=sum((line.counts for line in by_name.values()), Counts()),
            partitions=tuple(by_name[name] for name in sorted(by_name)[:PARTITIONS_MAX]),
            samples=tuple(samples),
            sent=sum((line.sent_fingerprint for line in by_name.values()), Fingerprint()),
            delivered=sum((line.delivered_fingerprint for line in by_name.values()), Fingerprint()),
            null_ids=null_ids,
            partitions_left_off=max(0, len(by_name) - PARTITIONS_MAX),
        )


def report_of_ledger(request: AuditRequest, ledger: LedgerAccount, why: str) -> AuditReport:
    """If source and sink cannot be compared: the pipeline's own account, which proves nothing."""
    visible = ledger.visible
    total, given_up = (visible.total.count, visible.given_up.count) if visible is not None else (0, 0)
    note = f"the ledger says that {total:,} rows were delivered and {given_up:,} given up; nobody looked"
    return AuditReport(
        pipeline=request.pipeline,
        sink=request.named_sink,
        guarantee=request.guarantee,
        incarnation=ledger.incarnation,
        range_to=json.dumps(plain(parsed(visible.offsets))) if visible is not None else "",
        given_up=given_up,
        history=ledger.history,
        transactions=ledger.transactions,
        unknowns=(why,),
        notes=(*ledger.notes, note),
    )


def report_of_result(
    request: AuditRequest,
    ledger: LedgerAccount,
    read: SourceRange,
    newest_batch: int,
    result: Result,
    ordered: bool,
    before: Account = _NOTHING,
) -> AuditReport:
    """
    Args:
        newest_batch: that started, by the checkpoint.
        ordered: the source partition and the order of each record are known.
        before: the ledger's running totals where the range starts.
    """
    visible = ledger.visible
    share = Account(visible.total, visible.given_up) - before if visible is not None else Account()
    given_up = share.given_up
    notes, unknowns, route = list(ledger.notes), [], request.sink.routed_by
    if read.undecided is not None:
        notes.append(f"batch {newest_batch} started and is not decided; its records may be in the sink and need not be")
    if not ordered:
        notes.append("the transform moves rows between partitions: source partitions and order are not reported")
    if result.null_ids:
        notes.append(f"{result.null_ids} records have no id; they are identified by all their columns")
    if result.partitions_left_off:
        notes.append(f"{result.partitions_left_off} more source partitions are in the totals alone")
    if visible is None:
        unknowns.append("the ledger holds no decided batch of this checkpoint: nothing was promised yet")
    if request.guarantee is Guarantee.AT_MOST_ONCE and ledger.history.faults and result.counts.lost:
        unknowns.append("the count of what was given up comes from a ledger whose batches do not follow each other")
    return AuditReport(
        pipeline=request.pipeline,
        sink=request.named_sink,
        guarantee=request.guarantee,
        incarnation=ledger.incarnation,
        range_from=json.dumps(plain(read.start)),
        range_to=json.dumps(plain(read.end)) if read.end is not None else "",
        counts=result.counts,
        given_up=given_up.count,
        partitions=result.partitions,
        samples=result.samples,
        fingerprints=Fingerprints(
            result.sent, share.total if visible is not None else None, given_up, result.delivered
        ),
        history=ledger.history,
        transactions=ledger.transactions,
        unknowns=tuple(unknowns),
        notes=tuple(notes),
        id_says=(f"`{request.id}`" if request.id else "all columns") + (f" and {route}" if route else ""),
    )


def contradictions(report: AuditReport) -> list[str]:
    """Why the audit itself must be wrong, whatever the pipeline did."""
    reasons = []
    counts, prints = report.counts, report.fingerprints
    if not counts.adds_up:
        reasons.append(f"the audit contradicts itself: {counts} do not add up")
    clean = counts == Counts(sent=counts.sent, delivered=counts.sent, reordered=counts.reordered)
    if clean and prints is not None and prints.sent != prints.delivered:
        reasons.append("the audit contradicts itself: no record differs, and the fingerprints do")
    return reasons


def judge(report: AuditReport, *, versions_known: bool) -> AuditReport:
    """The report, with what its counts cannot prove.

    Args:
        versions_known: every recomputed batch is known to have run with the transform used here.
    """
    counts = report.counts
    if report.handed_all and report.breaches:
        one_for_one = not counts.duplicated and counts.lost == counts.unexpected
        if not versions_known or one_for_one:
            why = (
                "the transform is not deterministic, or the source's records changed"
                if versions_known
                else "the ledger does not record which transform the batches ran with; it may not be this one"
            )
            unknown = (
                "the sink holds exactly what the tasks handed to it, by count and fingerprint, but the source, reread "
                f"through the transform, yields other records: {why}"
            )
            if report.fingerprints is not None and report.fingerprints.sent == report.fingerprints.delivered:
                unknown = (
                    f"the sink holds all records, by count and fingerprint, but {counts.lost:,} of them elsewhere than "
                    "their rows say: the transform is not deterministic, or somebody moved or copied records"
                )
            return replace(report, judged=False, unknowns=(*report.unknowns, unknown))
    unexplained = counts.unexpected - report.undeleted
    if not unexplained or report.all_own or Damage.UNEXPECTED in report.uncertain:
        return report
    unknown = (
        f"{unexplained:,} records match nothing that was sent, and the ledger does not account for them: possibly "
        "foreign. If others write to this sink, set audit: own to SQL that is true for this pipeline's records; if "
        "nobody else does, set own: 'true'"
    )
    return replace(report, unknowns=(*report.unknowns, unknown))


def account_for_earlier(report: AuditReport, earlier: Earlier, adds_columns: bool = False) -> AuditReport:
    """The report on a sink that also holds records of batches that cannot be recomputed.

    The ledger has their count and fingerprint. That many unmatched records are theirs; and since all others are known,
    the sink holds all of theirs if the sums agree.

    Args:
        adds_columns: the sink may have added columns since: then their rows have other fingerprints than the ledger's.
    """
    counts, handed, known = report.counts, earlier.handed.count, not earlier.counted
    unexpected = min(counts.unexpected, handed)
    # A record of theirs may equal a recomputed one: the source held it twice.
    repeated = min(counts.duplicated, handed - unexpected)
    theirs = unexpected + repeated
    counts = replace(
        counts, unexpected=counts.unexpected - unexpected, duplicated=counts.duplicated - repeated, earlier=theirs
    )
    prints = report.fingerprints
    if prints is not None:
        prints = replace(prints, sent=prints.sent + earlier.handed + earlier.given_up) if known else None
    clean = counts == Counts(counts.sent, counts.sent + theirs, reordered=counts.reordered, earlier=theirs)
    differs = clean and theirs == handed and known and prints is not None and prints.delivered != prints.sent
    explained = [d for d in (Damage.UNEXPECTED, Damage.DUPLICATED) if not counts.of(d)]
    proved = clean and theirs == handed and known and not differs
    evidence = "all of them by count and fingerprint" if proved else "by count"
    reason = (
        f"{earlier.clause}. According to the ledger, they handed {handed:,} records to the sink; it holds {theirs:,}, "
        f"{evidence}"
    )
    if differs and adds_columns:
        differs = False
        reason += " alone: with mergeSchema, rows may have columns that the ledger's fingerprints lack"

    def without_theirs(line: PartitionLine) -> PartitionLine:
        if line.partition != NOBODY:
            return line
        own = min(unexpected, line.counts.unexpected)
        return replace(line, counts=replace(line.counts, unexpected=line.counts.unexpected - own, earlier=own))

    return replace(
        report,
        counts=counts,
        partitions=tuple(map(without_theirs, report.partitions)),
        samples=tuple(s for s in report.samples if s.damage not in explained),
        fingerprints=prints,
        earlier=replace(earlier, missing=handed - theirs, differs=differs),
        unknowns=(*report.unknowns, reason),
    )


def account_for_late(report: AuditReport, late: int, *, expired: bool) -> AuditReport:
    """The report on a sink with rows of sealed batches that came after their seal, and were not there before.

    Args:
        late: how many; they were counted as in progress.
        expired: the sink's retention may have removed first copies.
    """
    counts = report.counts
    counts = replace(counts, in_progress=counts.in_progress - late, earlier=counts.earlier + late)
    report = replace(report, counts=counts, late=late)
    why = f"{late:,} records of sealed batches are in the sink behind their seal, and "
    if expired:
        why += "the sink's retention removed what would show whether they are second copies"
        return replace(report, unknowns=(*report.unknowns, why))
    why += "were not in it before: dead letters that were retried, or lost rows that were restored"
    return replace(report, notes=(*report.notes, why))


def account_for_dead_letters(report: AuditReport, still_open: int, *, by_row: bool) -> AuditReport:
    """The report on a sink that did not get all rows which it accepts today: their dead letters are open, or dropped.

    Args:
        still_open: dead letters of all batches that are rows of this sink and were not retried, at most.
        by_row: the sink keeps each row. Else a dead letter may also be why there is an older row of its key.
    """
    prints, counts = report.fingerprints, report.counts
    undeleted = report.undeleted if report.undeleted == counts.unexpected else 0
    if by_row and prints is not None and prints.ledger is not None:
        refused = min(prints.sent.count - prints.ledger.count - prints.given_up.count, still_open)
        differing, explained = counts.lost, [Damage.LOST]
        why = f"the lost records may be dead letters: the sink accepts {refused:,} more records now than the batches "
        why += "handed to it; `delivered dead-letters list --all` shows which ones were not retried"
    else:
        refused, differing = still_open, counts.lost + counts.altered + undeleted
        explained = [Damage.LOST, Damage.ALTERED, *([Damage.UNEXPECTED] if undeleted else [])]
        why = f"the rows that differ may be those of dead letters: {refused:,} were not retried, by the ledger; "
        why += "`delivered dead-letters list --all` shows them"
    if not 0 < differing <= refused:
        return report
    left = 0 if Damage.UNEXPECTED in explained else report.undeleted
    uncertain, unknowns = (*report.uncertain, *explained), (*report.unknowns, why)
    return replace(report, uncertain=uncertain, undeleted=left, unknowns=unknowns)


def account_for_compaction(report: AuditReport, source: Sequence[str], sink: Sequence[str]) -> AuditReport:
    """The report on records any of which source or sink may have removed, by their settings.

    Args:
        source, sink: why, as of `SourceDriver.compacted` and `BoundedScan.compacted`; empty: it did not.
    """
    counts, prints, unknowns = report.counts, report.fingerprints, list(report.unknowns)
    uncertain = list(report.uncertain)
    if sink and counts.lost:
        uncertain.append(Damage.LOST)
        unknowns.append(f"the lost records may be older ones of their keys: {'; '.join(sink)}")
    damage = [d for d in (Damage.DUPLICATED, Damage.ALTERED, Damage.UNEXPECTED) if counts.of(d)]
    if source and prints is not None and prints.ledger is not None:  # else nobody counted rows
        removed = prints.ledger.count - prints.sent.count
        damage = [d for d in damage if counts.of(d) <= removed]
    if source and damage:
        uncertain += damage
        unknowns.append(
            f"the {', '.join(damage)} records may be those that the source no longer has: {'; '.join(source)}"
        )
    return replace(report, uncertain=tuple(uncertain), unknowns=tuple(unknowns))


def account_for_retries(report: AuditReport, retried: int) -> AuditReport:
    """The report on a sink with rows of dead letters that were retried, which the transform of today, or of their
    batch, does not yield. Their fingerprints are those of other ledgers.

    Args:
        retried: rows that retries wrote to the sink.
    """
    if not 0 < report.counts.unexpected <= retried:
        return report
    why = f"the unexpected records may be dead letters: retries wrote {retried:,} to the sink, by their ledgers"
    return replace(report, uncertain=(*report.uncertain, Damage.UNEXPECTED), unknowns=(*report.unknowns, why))


def account_for_removed(report: AuditReport) -> AuditReport:
    """The report on a sink to which rows are added, if neither it nor the source has all that the ledger counts."""
    counts, prints = report.counts, report.fingerprints
    if counts.damaged or counts.earlier or prints is None or prints.ledger is None:
        return report
    removed = prints.ledger.count - prints.sent.count
    if removed <= 0:
        return report
    why = (
        f"the batches handed {removed:,} more records to the sink, by the ledger, than it and the source hold now: "
        "they were removed from both, or the ledger was edited"
    )
    return replace(report, unknowns=(*report.unknowns, why))


def account_for_dedup(report: AuditReport, dedup: Dedup, counts: DedupCounts) -> AuditReport:
    """The report on a pipeline that drops the source's duplicates."""
    notes = [
        *report.notes,
        f"the pipeline drops repeats, {dedup.says}: of {counts.records:,} records in the source "
        f"{counts.deduplicated:,} repeat another one and must not be in the sink as well; source partitions "
        "and order are not reported",
    ]
    if counts.unclear and dedup.in_table:
        notes.append(
            f"{counts.unclear:,} keys may be in the sink as often as in the source, or less often: their records lie "
            f"further apart than {dedup.within}, or the first ones had expired before the last came"
        )
    elif counts.unclear:
        notes.append(
            f"{counts.unclear:,} keys may be in the sink as often as in the source, or less often, or not at all: "
            f"{counts.late:,} of them may have been dropped as late, the others' records lie further apart than "
            f"{dedup.within}"
        )
    if counts.unlike:
        notes.append(
            f"{counts.unlike:,} ids have copies that differ: that exactly one of them is there was checked, not which"
        )
    if counts.unlike_unclear:
        notes.append(f"{counts.unlike_unclear:,} ids have copies that the transform turns into more records or fewer")
    unknowns = report.unknowns
    if counts.records and not counts.judged:
        unknown = f"of none of the {counts.unclear:,} keys in the source it is certain that it must be in the sink"
        unknowns = (*unknowns, unknown)
    # Ledger and sink include uncertain records, the source does not.
    uncertain = counts.unclear or counts.unlike or counts.unlike_unclear
    prints = None if uncertain else report.fingerprints
    return replace(report, dedup=counts, notes=tuple(notes), unknowns=unknowns, fingerprints=prints)


def account_for_upserts(report: AuditReport, mode: WriteMode, unclear: int) -> AuditReport:
    """The report on a sink that keeps one row per key."""
    notes = [
        *report.notes,
        f"the sink keeps one row of each key ({mode.keys_text}): compared is the row with the greatest {mode.version} "
        "of the source range, without keys whose last row deletes; rows in between are in the ledger's total alone",
    ]
    if unclear:
        notes.append(f"{unclear} keys are not judged: deleted and perhaps brought back by an older row, or in progress")
    prints = report.fingerprints
    return replace(report, notes=tuple(notes), fingerprints=replace(prints, ledger=None) if prints else None)


def account_for_skipped(report: AuditReport, mode: WriteMode, ledger: LedgerAccount) -> AuditReport:
    """The report on a table that decides which rows are written: rows that it rejected are not lost.

    The counts come from the transactions that wrote the rows. They excuse that many differences, and no more.
    """
    if ledger.visible is None:
        return report
    counts, handed = report.counts, ledger.visible.total.count
    conflict, constraint = ledger.skipped.get("conflict", 0), ledger.skipped.get("constraint", 0)
    # With insert: keys of which no row was written. Such a key existed before, or violated a constraint.
    excused = max(counts.sent - (handed - conflict - constraint), 0) if mode.insert else constraint
    lost = min(counts.lost, constraint, excused)
    altered = min(counts.altered, excused - lost)
    note = f"the table allowed all but {conflict + constraint:,} rows, by the ledger: {conflict:,} conflicts, "
    notes = [f"{note}{constraint:,} broken constraints"]
    if mode.insert:
        notes.append(
            f"compared is the first row of each key ({mode.keys_text}); of keys in several source partitions, any"
        )
    if altered:
        notes.append(f"{altered:,} keys hold another row than was sent: it stood there before, by the ledger's count")
    if lost:
        notes.append(f"{lost:,} rows are missing because they broke a constraint, by the ledger's count")
    explained = {Damage.LOST: counts.lost == lost, Damage.ALTERED: counts.altered == altered}
    return replace(
        report,
        counts=replace(counts, sent=counts.sent - lost, lost=counts.lost - lost, altered=counts.altered - altered),
        samples=tuple(s for s in report.samples if not explained.get(s.damage)),
        notes=(*report.notes, *notes),
        fingerprints=None if lost or altered else report.fingerprints,
    )


def account_for_recompute(
    report: AuditReport,
    caveats: Iterable[Caveat],
    columns: Sequence[tuple[str, int]],
    identified: str,
    ran: str,
) -> AuditReport:
    """The report, with only the caveats that explain damage found.

    Args:
        columns: how many rows differ in a column.
        identified: what identifies a row.
        ran: how it was recomputed: "in 12 batches".
    """
    counts = report.counts
    weighty = [c for c in caveats if c.weighs(counts)]
    uncertain = tuple(damage for damage in Damage if any(damage in c.damage for c in weighty))
    notes = [*report.notes, f"recomputed {ran}; rows are compared by {identified}, with decimals compared exactly"]
    if columns:
        notes.append("rows differ in: " + ", ".join(f"{name} ({count:,})" for name, count in columns))
    unknowns = [*report.unknowns, *(f"a recomputation cannot tell: {c.why}" for c in weighty)]
    if counts.unexpected and not report.own and Damage.UNEXPECTED not in uncertain:
        unknowns.append(
            f"{counts.unexpected:,} rows have keys that the source does not yield: possibly foreign. If others write "
            "to this table, set audit: own to SQL that is true for this pipeline's rows; if nobody else does, set "
            "own: 'true'"
        )
    return replace(report, notes=tuple(notes), unknowns=tuple(unknowns), uncertain=uncertain)


ALL = (Damage.LOST, Damage.DUPLICATED, Damage.ALTERED, Damage.UNEXPECTED)
MISSING = (Damage.LOST, Damage.ALTERED)

_ONE_BATCH = frozenset(
    {
        *("Aggregate", "CTERelationDef", "CTERelationRef", "Distinct", "EventTimeWatermark", "Expand", "Filter"),
        *("Generate", "MapInArrow", "MapInPandas", "OneRowRelation", "Project", "PythonMapInArrow", "Range", "Sort"),
        *("StreamingRelationV2", "SubqueryAlias", "Union", "View", "WithCTE"),
    }
)
"""Operators whose result is the same in one batch and in many."""
_FUNCTIONS = frozenset(
    ("FlatMapGroupsInPandasWithState", "FlatMapGroupsWithState", "TransformWithState", "TransformWithStateInPySpark")
)
_DEDUPS = frozenset({"Deduplicate", "DeduplicateWithinWatermark"})
_REPLAYED = _ONE_BATCH | _FUNCTIONS | _DEDUPS | {"Join", "LocalRelation", "Repartition", "RepartitionByExpression"}
"""Operators whose result is the same whenever the batches are."""
_TABLES = frozenset({"HiveTableRelation", "InMemoryRelation", "LocalRelation", "LogicalRDD", "Relation", "RelationV2"})
_CLOCK = re.compile(r"\b(current_timestamp|current_date|current_time|localtimestamp|now)\s*\(", re.I)
_BY_ORDER = re.compile(
    r"\b(rand|randn|randstr|uuid|shuffle|monotonically_increasing_id|spark_partition_id|first|first_value|last|last_value|"
    r"any_value|collect_list|collect_set|listagg)\s*\(",
    re.I,
)
_LINE = re.compile(r"^[\s:+~!'-]*([A-Za-z]\w*)(.*)")
"""An operator of a plan; ~ marks those over a stream."""
_ABOVE = ("Filter", "MapInArrow", "MapInPandas", "PythonMapInArrow", "Generate")
_PROCESSING_TIME = re.compile(r"\bProcessingTime(Timeout)?\b")


class Method(Enum):
    ONE_BATCH = "one batch"
    REPLAY = "a replay"


@dataclass(frozen=True)
class Caveat:
    """A reason why a recomputation may find `damage` where nothing is wrong."""

    why: str
    damage: tuple[Damage, ...] = ALL
    always: bool = False
    """Also if no damage was found: the recomputation is not what ran."""

    def weighs(self, counts: Counts) -> bool:
        return self.always or any(counts.of(damage) for damage in self.damage)


def find_caveats(how: Recompute, plan: str, mode: WriteMode, method: Method) -> list[Caveat]:
    """Caveats known before a row is read.

    Args:
        plan: Spark's analyzed logical plan of the query, as text.
        mode: of the sink.
    """
    by_method = _of_one_batch if method is Method.ONE_BATCH else _of_replay
    return [*_of_values(how, plan), *_of_tables(how, plan), *_of_conditions(mode), *by_method(how, plan, mode)]


def _of_values(how: Recompute, plan: str) -> Iterator[Caveat]:
    if how.changing or how.deterministic is False:
        calls = ", ".join(how.changing) or "a function declared deterministic: false"
        yield Caveat(f"the transform calls {calls}, whose value changes between runs")
    known = {c.rstrip("()") for c in how.changing}
    if how.deterministic is None and (by_order := sorted({c.lower() for c in _BY_ORDER.findall(plan)} - known)):
        called = ", ".join(f"{c}()" for c in by_order)
        yield Caveat(f"the transform calls {called}, whose value changes between runs")
    if clocks := sorted({c.lower() for c in _CLOCK.findall(plan)} - known):
        yield Caveat(f"the transform calls {', '.join(c + '()' for c in clocks)}, which has another value now")
    if _PROCESSING_TIME.search(plan):
        yield Caveat("timers of processing time fire at another time now")


def _of_tables(how: Recompute, plan: str) -> Iterator[Caveat]:
    tables = {m[1] for m in _lines(plan) if m[1] in _TABLES and "<empty>" not in m[2]}
    if tables - ({"LocalRelation"} if how.sql else set()):
        yield Caveat(
            "the transform reads a table that is not a stream: it may have held other rows when the batches ran"
        )


def _of_conditions(mode: WriteMode) -> Iterator[Caveat]:
    if mode.insert:
        yield Caveat("a row that stood in the table before stays", (Damage.ALTERED,))
    if mode.on_constraint is not OnConflict.FAIL:
        yield Caveat("rows that broke a constraint are not written", MISSING)


def _of_operators(plan: str, exact: frozenset[str], depends: str) -> Iterator[Caveat]:
    names = operators(plan)
    others = sorted(set(names) - exact - _TABLES) if names else ["no operator that is known"]
    if others:
        yield Caveat(f"the transform's plan has {', '.join(others)}: what it gives depends {depends}")


def _of_replay(how: Recompute, plan: str, mode: WriteMode) -> Iterator[Caveat]:  # noqa: ARG001  (as _of_one_batch)
    yield from _of_operators(plan, _REPLAYED, "on more than its input")
    if not _FUNCTIONS.isdisjoint(operators(plan)) and how.deterministic is not True:
        yield Caveat(
            "a function with state may depend on the order of a key's rows within a batch; if this one does not, "
            "declare deterministic: true"
        )


def _of_one_batch(how: Recompute, plan: str, mode: WriteMode) -> Iterator[Caveat]:
    names, update = operators(plan), how.output_mode == "update"
    joins = {"Join"} if _joins_everything(plan, names) else set()
    yield from _of_operators(plan, _ONE_BATCH | joins, "on where batches ended")
    if names.count("Aggregate") > 1:
        yield Caveat("the transform aggregates aggregates, batch by batch")
    if update and not mode.upserts:
        yield Caveat("each batch delivers the rows that it changed")
    if mode.expected is not None:
        yield Caveat(f"a row is written only if the stored row has its {mode.expected} at that moment")
    if mode.replaces:
        yield Caveat(f"each batch replaces the rows of its values in {', '.join(mode.replaces)}")
    if update and "Aggregate" in names and any(n in _ABOVE for n in names[: names.index("Aggregate")]):
        yield Caveat(
            "rows are filtered after the aggregation: a key that no longer passes keeps its last row in the table",
            (Damage.UNEXPECTED,),
        )
    greatest = mode.version if mode.expected is None else None
    # A count(*) grows with every row of its key.
    if update and greatest is not None and not re.search(rf"\bcount\(1\) AS {re.escape(greatest)}#", plan):
        yield Caveat(
            f"a row replaces another one only if its {greatest} is greater: of equal ones the first stays",
            (Damage.ALTERED,),
        )


def _lines(plan: str) -> list[re.Match[str]]:
    return [m for line in plan.splitlines() if (m := _LINE.match(line)) and not line.startswith("==")]


def operators(plan: str) -> list[str]:
    """The plan's operators, from the result down."""
    return [m[1] for m in _lines(plan)]


def _joins_everything(plan: str, names: Sequence[str]) -> bool:
    """Whether joins find each pair of rows, whenever these came."""
    kinds = {m[2].split(",")[0].strip() for m in _lines(plan) if m[1] == "Join"}
    return kinds <= {"Inner", "Cross"} and "EventTimeWatermark" not in names


def keeps_first(plan: str) -> bool:
    """Whether of several rows the first one stays."""
    return not _DEDUPS.isdisjoint(operators(plan))
