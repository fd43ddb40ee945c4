"""`delivered.Pipeline`, the public API of a pipeline.

Imports pyspark only where it is called: pipelines can be declared, and planned offline, without Spark.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from delivered import html
from delivered.checkpoint import is_done, read_logged
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.rows import OnBadRow
from delivered.model.translate import translated
from delivered.pipeline.definition import SHARE, Cadence, Definition, changes
from delivered.pipeline.facts import gather
from delivered.pipeline.progress import Progress, Reports, watch
from delivered.planner import Plan, Refusal, make_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from delivered.audit.evidence_file import Bound, Evidence
    from delivered.audit.recheck import Rechecked
    from delivered.audit.report import AuditReport
    from delivered.audit.request import KeyShare, Sealing
    from delivered.audit.seal import Seal
    from delivered.operate.continuous import ContinuousAudit
    from delivered.operate.replay import Rebuild
    from delivered.operate.status import Status
    from delivered.pipeline.endpoint import Endpoint
    from delivered.pipeline.start import Adoption


log = logging.getLogger(__name__)

_EVERY_S = 1.0
"""Between two looks at a query that a notebook's cell shows."""
RESTART_STOP_S = 120.0
"""How long a restart lets the former query's batch run on."""


class Pipeline(Definition):
    __doc__ = Definition.__doc__

    def _repr_html_(self) -> str:
        """What it is made of, for a notebook. Asks nobody; names no option, so no secret."""
        from delivered.operate.page import flow_of

        lines: list[tuple[str, object]] = [("checkpoint", html.element("code", self.checkpoint))]
        if text := self.transform.facts().text:
            lines.append(("transform", html.element("code", text)))
        lines.append(("trigger", self.trigger.interval or "available_now"))
        lines += [("output mode", self.output_mode)] * (self.output_mode != "append")
        lines += [("dedup", self.dedup.by_text)] if self.dedup is not None else []
        lines += [("rows that a sink refuses", self.on_bad_row.value)] * (self.on_bad_row is not OnBadRow.FAIL)
        head = html.element("p", html.element("b", self.name))
        return html.fragment(head, flow_of(self).html(self.name, self.guarantee.value), html.table((), lines))

    def status(self) -> Status:
        """What `delivered status` shows: asked from checkpoint, ledger, sinks and sources, for 3 s at most. Never
        raises if a server does not answer: the status then says so. Needs no Spark."""
        from delivered.operate.asking import status

        return status(self)

    def plan(
        self, spark: SparkSession | None = None, *, offline: bool = False, takeover: bool = False
    ) -> Plan | Refusal:
        """What the pipeline will do and what its guarantee assumes; or why it is refused, and which one is possible.

        Does not start Spark. Changes nothing in source, sink and checkpoint; a connector may create its ledger.

        Args:
            offline: contact neither servers nor the checkpoint.
            takeover: plan to fence another live driver.

        Raises:
            UsageError: invalid options.
            Refused: Spark's newest log files in the checkpoint are cut off.
            Unreachable: a server or the checkpoint did not answer.
        """
        session = None
        if spark is not None:
            from delivered.spark.check import session_facts

            session = session_facts(self, spark)
        return make_plan(gather(self, session, offline=offline, takeover=takeover))

    def adopt(
        self,
        *,
        checkpoint: str | Path | None = None,
        group: str | None = None,
        timestamp_ms: int | None = None,
        write: bool = True,
    ) -> Adoption:
        """Start the first run where another job stopped. Does not start Spark.

        Writes one file into this pipeline's checkpoint. Changes nothing in the source, the sink or the old job.

        Args:
            checkpoint: of a query with Spark's own Kafka source: its last committed batch.
            group: a consumer group: its committed offsets.
            timestamp_ms: milliseconds since 1970: the first record of each partition at or after it.
            write: False: only report what would be done.

        Raises:
            UsageError: not exactly one origin, or a source that does not support takeover.
            Refused: the old job has not ended or finished, the pipeline has already started, or records would be
                skipped.
            Unreachable: a server or a checkpoint did not answer.
        """
        from delivered.pipeline.start import adopt

        return adopt(self, checkpoint=checkpoint, group=group, timestamp_ms=timestamp_ms, write=write)

    def replay(self, start: str, end: str, into: Endpoint | str, *, sink: str | None = None) -> Self:
        """A pipeline that delivers the source's records between two times into another sink, and then ends.

        It has a name, checkpoint and ledger of its own, and acknowledges nothing: this pipeline may keep running. The
        same arguments give the same pipeline: if it was killed, start it again. Does not start Spark.

        Args:
            start, end: ISO 8601, milliseconds since 1970, "earliest", "latest", or offsets as JSON. From the first
                record of each partition of the start or later, to before the first one of the end or later.
            into: a sink; or the name of another table or topic for this pipeline's sink.
            sink: whose rows and columns, if there are several.

        Raises:
            UsageError: a bad time, a range that ends before it starts, or this pipeline's own target.
            Refused: the source cannot be replayed, or no longer holds the records.
            Unreachable: a server or a checkpoint did not answer.
        """
        from delivered.operate.replay import replay

        return replay(self, start, end, into, sink)

    def rebuild(self, into: str, *, start: str | None = None) -> Rebuild[Self]:
        """Make this pipeline's table again from the source, next to the old one. Does not start Spark.

        Start the result's `pipeline` until it ends, `compare` both tables, and `swap` them: `delivered rebuild` does.
        The same arguments give the same rebuild: after a kill, call it again.

        Args:
            into: name of the new table, in the same database and schema.
            start: where the source is read from, as in `replay`. Default: where this pipeline's first batch began.

        Raises:
            UsageError: a bad name, or no batch was decided.
            Refused: the sink cannot swap two tables, there are several sinks, or the source cannot be replayed or no
                longer holds the first records.
            Unreachable: a server or a checkpoint did not answer.
        """
        from delivered.operate.replay import rebuild

        return rebuild(self, into, start)

    def start(
        self, spark: SparkSession | None = None, *, takeover: bool = False, restart: bool | None = None
    ) -> StreamingQuery:
        """Plan, then start the query. In a notebook, the cell shows its progress.

        Args:
            spark: default: the active session, or a new one.
            takeover: fence another driver that runs this pipeline.
            restart: first stop a query of this checkpoint or name that this process started, between two batches.
                Default: in a notebook, where a cell runs again with changed code.

        Raises:
            Refused: the plan is a refusal. A former query was stopped nevertheless.
            UsageError: a query on this checkpoint runs, and `restart` is False. Others, and Unreachable, as `plan`.
        """
        from delivered.checkpoint.history import keeping_failed_start
        from delivered.spark.internals import recent_reports
        from delivered.spark.start import running, start, stop_between_batches

        notebook = is_notebook()
        stop_former = notebook if restart is None else restart
        former, notes = running(self), list[str]()
        if not stop_former and any(r.pipeline.checkpoint == self.checkpoint for r in former):
            raise UsageError("QUERY_RUNS", checkpoint=self.checkpoint)
        for one in former if stop_former else ():
            between = stop_between_batches(one.query, RESTART_STOP_S)
            notes += _allowed(one.pipeline, self, between)
        with keeping_failed_start(self.checkpoint):
            plan = self.plan(spark, takeover=takeover)
            if isinstance(plan, Refusal):
                if notebook:
                    _show_refusal(plan, notes)
                raise plan.error
            query = start(self, spark)
        if notebook:
            _show(self, plan, query, recent_reports, [*notes, *plan.warnings])
        for note in notes:
            log.info("%s: %s", self.name, note)
        return query

    def stop(self, query: StreamingQuery, timeout_s: float = 120.0, waiting: Callable[[], None] | None = None) -> bool:
        """Let the running batch finish, then stop the query. Returns whether it stopped between two batches.

        Args:
            query: from `start`.
            timeout_s: afterwards the query is stopped mid-batch; recovery completes or repeats the batch.
            waiting: called about every 50 ms.
        """
        from delivered.spark.start import stop_between_batches

        return stop_between_batches(query, timeout_s, waiting)

    @overload
    def audit(
        self,
        spark: SparkSession | Callable[[], SparkSession] | None = None,
        *,
        sink: str | None = None,
        samples_max: int = 20,
        sink_from: Mapping[str, Any] | None = None,
        progress: Callable[[str], None] | None = None,
        recompute: bool = False,
        full: bool = False,
        since: int | None = None,
        from_now: bool = False,
        keys: str | None = None,
    ) -> AuditReport: ...

    @overload
    def audit(
        self,
        spark: SparkSession | Callable[[], SparkSession] | None = None,
        *,
        every: str,
        share: str | float = SHARE,
        sink: str | None = None,
    ) -> ContinuousAudit: ...

    def audit(
        self,
        spark: SparkSession | Callable[[], SparkSession] | None = None,
        *,
        sink: str | None = None,
        samples_max: int = 20,
        sink_from: Mapping[str, Any] | None = None,
        progress: Callable[[str], None] | None = None,
        recompute: bool = False,
        full: bool = False,
        since: int | None = None,
        from_now: bool = False,
        keys: str | None = None,
        every: str | None = None,
        share: str | float = SHARE,
    ) -> AuditReport | ContinuousAudit:
        """Compare the source range with the sink, account for every record, and seal what was proved.

        Continues from the last seal: what was sealed before is not read again. A small range of a pipeline without SQL
        is compared in this process, everything else in a Spark job: `progress` gets which, and why.

        Args:
            spark: for the job, and then it is one; or a function that starts it, called only if there has to be one.
                Default: the active session or a new one, if there has to be one.
            sink: name of the sink to audit, if there are several.
            samples_max: damaged records listed per class.
            sink_from: offsets in the sink to start from; earlier records belong to other writers or to an earlier
                checkpoint. Kafka: {"topic": {"0": 12}}; SQLite: {"rowid": 12}. Default: all of it.
            progress: called at each step with its description.
            recompute: run the transform over the complete source range, and compare the rows with the sink's by key:
                for queries that keep state, output modes update and complete, and upserts.
            full: read everything once more, and seal it.
            since: continue from the seal before this batch.
            from_now: compare nothing, and seal everything up to now as never audited.
            keys: compare only a share of the keys: "1/1000", another one each time; "7/1000" or "#1/1000", this one.
                Its seal is of that share.
            every: audit all sinks again and again, at this interval, on a thread of this process, until the result's
                `stop()`: "15 min". An audit starts only while the query is not behind and no other audit runs.
            share: of the time that these audits may take: "10 %".

        Raises:
            UsageError: invalid options, several sinks and none named, or one of Spark's own sources.
        """
        from delivered.audit.request import KeyShare, check_since, sealing
        from delivered.checkpoint import read_logged

        if every is not None:
            spark = spark() if callable(spark) else spark
            return self.auditing(spark, Cadence.parse(every, share), None if sink is None else [sink]).start()
        shared = None if keys is None else KeyShare.parse(keys)
        how = sealing(
            full=full,
            since=since,
            from_now=from_now,
            sink_from=sink_from is not None,
            keys=shared is not None,
            recompute=recompute,
        )
        if since is not None:
            check_since(since, read_logged(self.checkpoint)[1])
        report = self._audited(spark, sink, samples_max, sink_from, progress, recompute, how, shared)
        self._keep(report)
        return report

    def auditing(
        self,
        spark: SparkSession | None,
        cadence: Cadence,
        sinks: Sequence[str] | None = None,
        *,
        own: bool = False,
    ) -> ContinuousAudit:
        """Audits that run beside a query of this process; not started yet. Spark runs what needs it.

        Args:
            sinks: default: all.
            own: in a session of their own, which has none of the user's views.
        """
        from delivered.audit.request import sealing
        from delivered.audit.spark.audit import AuditSession, load_of
        from delivered.operate.continuous import (
            ContinuousAudit,
            Load,
            Schedule,
            record_failure,
            sealed_s,
            seals_now,
            unsealed,
        )
        from delivered.spark.start import ready, running

        session = AuditSession(ready(self, spark), self.name, own=own)

        def loaded() -> Load:
            queries = [load_of(r.query) for r in running(self)]
            return next((q for q in queries if q.behind or not q.idle), Load(idle=True, behind=False))

        def unless_stopping(_: str) -> None:
            if audits.stopping:
                raise UsageError("AUDIT_STOPPED")

        def audit() -> None:
            with session.low_priority() as low:
                for sink in (n for n in unsealed(self) if sinks is None or n in sinks):
                    try:
                        report = self._audited(lambda: low, sink, progress=unless_stopping, how=sealing())
                    except Exception as error:
                        if not audits.stopping:
                            record_failure(self, [sink], error)
                        continue
                    if audits.stopping:
                        return
                    self._keep(report)
                    log.info("%s: audit of %s: %s", self.name, sink, report.verdict.value)

        schedule = Schedule(cadence, time.monotonic(), sealed_s(seals_now(self)))
        audits = ContinuousAudit(schedule, audit, loaded, session.cancel)
        return audits

    def _audited(
        self,
        spark: SparkSession | Callable[[], SparkSession] | None,
        sink: str | None,
        samples_max: int = 20,
        sink_from: Mapping[str, Any] | None = None,
        progress: Callable[[str], None] | None = None,
        recompute: bool = False,
        how: Sealing | None = None,
        keys: KeyShare | None = None,
    ) -> AuditReport:
        from delivered.audit.local import audit_here
        from delivered.audit.request import NeedsSpark

        if keys is None and (spark is None or callable(spark)):
            try:
                return audit_here(self, sink, samples_max, sink_from, progress, recompute, how)
            except NeedsSpark as why:
                if progress is not None:
                    progress(f"starting Spark: {why}")
        spark = spark() if callable(spark) else spark
        from delivered.audit.spark.audit import audit_sink

        return audit_sink(self, spark, sink, samples_max, sink_from, progress, recompute, how, keys)

    def _keep(self, report: AuditReport) -> None:
        """For status and page; and for a catalog."""
        from delivered.checkpoint.history import add_audit

        add_audit(self.checkpoint, {"at_ms": time.time_ns() // 1_000_000, **report.summary()})
        if self.lineage:
            from delivered.operate.lineage import Lineage, new_run

            Lineage(self, new_run(), job=".audit").audited(report.summary())

    def evidence(self, *, sink: str | None = None, start: Bound | None = None, end: Bound | None = None) -> Evidence:
        """The seals of this pipeline's audits, for a file: `evidence.text`. Does not start Spark.

        Args:
            sink: only its seals. Default: those of every sink.
            start, end: the number of a batch of the newest checkpoint, or a time at which a seal was made; both
                included. Default: all.

        Raises:
            UsageError: no such sink.
            Refused: there is no seal, or none in the range.
            Unreachable: the ledger or the checkpoint did not answer.
        """
        from delivered.operate.evidence import gather_evidence
        from delivered.planner import to_json

        try:
            plan = self.plan(takeover=True)
        except DeliveredError:
            # Sources and sinks may be down or removed; the seals are not.
            plan = self.plan(offline=True)
        return gather_evidence(self, to_json(plan), sink, start, end)

    def recheck(
        self,
        evidence: Evidence,
        spark: SparkSession | Callable[[], SparkSession] | None = None,
        *,
        batches: range | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> dict[str, list[Rechecked]]:
        """Compare sealed batches with source and sinks once more, as far as these still have the records. By sink.

        Seals nothing. First check the file, and that the ledger has its seals.

        Args:
            spark: as in `audit`.
            batches: of the newest checkpoint. Default: all in the evidence.
            progress: called at each step with its description.

        Raises:
            UsageError: a sink that the pipeline does not have, or one of Spark's own sources.
            Unreachable: the ledger or the checkpoint did not answer.
        """
        from delivered.audit.recheck import Chosen, not_compared
        from delivered.operate.evidence import sealed_by

        found = {}
        for chain in evidence.chains:
            seals = sealed_by(self, chain.sink)
            wanted = Chosen(chain.first, chain.last, batches, seals[-1].scope.incarnation if seals else "")
            try:
                found[chain.sink] = self._rechecked(spark, chain.sink, seals, wanted, progress or (lambda _: None))
            except Refused as error:
                found[chain.sink] = not_compared(seals, wanted, error.message)
        return found

    def _rechecked(
        self,
        spark: SparkSession | Callable[[], SparkSession] | None,
        sink: str,
        seals: Sequence[Seal],
        wanted: Callable[[Seal], bool],
        say: Callable[[str], None],
    ) -> list[Rechecked]:
        from delivered.audit.local import recheck_here
        from delivered.audit.request import NeedsSpark

        if spark is None or callable(spark):
            try:
                return recheck_here(self, sink, seals, wanted, say)
            except NeedsSpark as why:
                say(f"starting Spark: {why}")
        spark = spark() if callable(spark) else spark
        from delivered.audit.spark.audit import recheck_sink

        return recheck_sink(self, spark, sink, seals, wanted, say)


# What a notebook's cell shows of a query that it started: its progress until it ends. Elsewhere, nothing.


def is_notebook() -> bool:
    """Whether this process is a notebook's kernel. Imports nothing."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@dataclass(frozen=True)
class CellView:
    """What the cell shows at one moment."""

    head: str
    state: str
    progress: Progress | None = None
    notes: Sequence[str] = ()
    failure: DeliveredError | None = None

    def __repr__(self) -> str:
        figures = f"  {self.progress.text}" if self.progress is not None else ""
        lines = [f"{self.head}: {self.state}{figures}", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines + [f"  {self.failure}"] * (self.failure is not None))

    def _repr_html_(self) -> str:
        css = "broken" if self.failure is not None else "held" if self.state == "running" else "soft"
        head = html.joined((self.head, ": ", html.element("b", self.state, css)))
        parts = [html.element("p", head), html.bullets(self.notes) if self.notes else ""]
        if (p := self.progress) is not None:
            figures = [("batch", "none yet" if p.batch is None else p.batch), ("here", p.totals)]
            figures.append(("records/s", f"{p.rate:,.0f}"))
            figures += [("lag, offsets", f"{p.lag:,}")] if p.lag is not None else []
            parts.append(html.figures(figures + [("step", p.step)] * (self.state == "running")))
        if (f := self.failure) is not None:
            parts.append(html.problem(f.code, f.message, f.next_step))
        return html.fragment(*parts)


def _allowed(before: Definition, now: Definition, between: bool) -> list[str]:
    """What the former query left, and what its checkpoint makes of the changes.

    Args:
        between: it was stopped between two batches.
    """
    _, newest = read_logged(now.checkpoint)
    following = 0 if newest is None else newest + is_done(now.checkpoint, newest)
    how = "between two batches" if between else "in the middle of a batch, which is finished or repeated now"
    same = before.checkpoint == now.checkpoint
    goes_on = f"this one goes on at batch {following}" if same else "this one has another checkpoint"
    return [f"the former query was stopped {how}; {goes_on}", *changes(before, now)]


def _show(pipeline: Definition, plan: Plan, query: StreamingQuery, recent: Reports, notes: Sequence[str]) -> None:
    """Show the query in this cell until it ends, from a thread of its own. Args: recent: its reports, newest first."""
    head = f"{pipeline.name}: {pipeline.guarantee.value} by {plan.mechanism}"
    cell = _display(CellView(head, "running", notes=notes), display_id=True)
    arguments = (pipeline, query, recent, head, notes, cell)
    threading.Thread(target=_follow, name=f"delivered-{pipeline.name}", args=arguments, daemon=True).start()


def _show_refusal(refusal: Refusal, notes: Sequence[str]) -> None:
    """Show in this cell what the refusal leaves: the error that is raised says only why."""
    _display(CellView(f"{refusal.pipeline}: {refusal.guarantee.value}", "refused", None, notes, refusal.error))


def _display(view: CellView, **more: bool) -> Any:
    return sys.modules["IPython.display"].display(view, **more)


def _follow(
    pipeline: Definition, query: StreamingQuery, recent: Reports, head: str, notes: Sequence[str], cell: Any
) -> None:
    try:
        with watch(pipeline, query, recent) as progress:
            while not _ended(query):
                progress.refresh()
                cell.update(CellView(head, "running", progress, notes))
            progress.refresh()
            failure = _failure(query)
            cell.update(CellView(head, "ended" if failure is None else "failed", progress, notes, failure))
    except Exception as error:  # the query goes on without it
        log.warning("%s: its progress cannot be shown: %s", pipeline.name, error)


def _ended(query: StreamingQuery) -> bool:
    """Waits for it, a moment."""
    try:
        return bool(query.awaitTermination(_EVERY_S))  # type: ignore[arg-type]
    except Exception:
        return True


def _failure(query: StreamingQuery) -> DeliveredError | None:
    with contextlib.suppress(Exception):  # its session was stopped
        error = query.exception()
        if error is not None:
            return translated(error) or DeliveredError("QUERY_FAILED.NOTEBOOK", cause=str(error).splitlines()[0])
    return None
