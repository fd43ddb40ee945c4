"""`delivered plan`, `adopt`, `run`, `receive`, `replay` and `rebuild`: pipelines and receivers in the foreground, with
progress, until they end or are stopped; and `init`, which writes a pipeline that runs as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer
from rich.text import Text

from delivered.cli.command import (
    CheckpointOption,
    FileArgument,
    GuaranteeOption,
    LogFormat,
    MasterOption,
    Output,
    OutputOption,
    SetOption,
    SparkLogOption,
    answer,
    log_as,
    log_line,
    messages,
    next_here,
    note,
    on_terminal,
    read,
    relay,
    say,
    say_json,
    show_warnings,
    spoken,
    stamp,
    stop_on_signal,
    working,
)
from delivered.machine import without_pandas
from delivered.model.errors import DeliveredError, MissingExtra, UsageError
from delivered.model.limits import OUTAGE_PATIENCE_S, RECEIVERS_MAX
from delivered.model.patience import Outages, StoppedWaiting, patiently
from delivered.model.rows import OnBadRow
from delivered.model.step import LOG_FORMAT, WARNING_MARK, as_json, is_line_of_ours, work_for
from delivered.model.translate import cause_of, translated
from delivered.pipeline.file import endpoint_of, load_file, parse_override

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delivered.entry import Pipeline
    from delivered.operate.continuous import ContinuousAudit
    from delivered.pipeline.progress import Progress
    from delivered.receiver import Counts
    from delivered.spark.listener import QueryMetrics


WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait two minutes for an unreachable server, or fail at once.")
]
StopTimeoutOption = Annotated[
    float, typer.Option(min=0, help="Seconds that a stop (SIGTERM, Ctrl-C) waits for the running batch.")
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        envvar=LOG_FORMAT, help="Of log lines on standard error, of receivers and of Spark's log: text or json."
    ),
]
TakeoverOption = Annotated[bool, typer.Option("--takeover", help="Fence another driver that is running this pipeline.")]

_JAVA_ENDS_S = 10.0
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_LINE_EVERY_S = 2.0
_LEDGER_EVERY_S = 1.0
_SUMMED = (
    *("received", "entered", "repeated", "quarantined", "acknowledged", "unacknowledged"),
    *("appends", "tries", "retired", "paused", "reconnected"),
)
"""Counts of a receiver that are shown as sums."""


def plan(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    guarantee: GuaranteeOption = None,
    checkpoint: CheckpointOption = None,
    master: MasterOption = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Contact neither servers nor checkpoint nor Spark.")
    ] = False,
    takeover: TakeoverOption = False,
    output: OutputOption = Output.TEXT,
) -> int:
    """Show a pipeline's steps and the assumptions of its guarantee, or why it is refused (exit code 2)."""
    from delivered.pipeline.facts import UNCHECKED, gather
    from delivered.planner import Refusal, make_plan, to_json

    pipeline = read(file, set_, guarantee=guarantee, checkpoint=checkpoint, master=master)
    light = contextlib.nullcontext() if pipeline.transform.function is not None else without_pandas()
    with working(f"checking source and sink of {pipeline.name}"), light:
        request = gather(pipeline, None, offline=offline, takeover=takeover)
        outcome = make_plan(request)
    if not isinstance(outcome, Refusal) and any(f.code == UNCHECKED for f in request.transform.findings):
        with (
            working("asking Spark about the SQL"),
            quiet_spark(pipeline, SparkLog.of(pipeline, None)) as spark,
        ):
            outcome = pipeline.plan(spark, takeover=takeover)
    outcome = spoken(outcome)
    if isinstance(outcome, Refusal):
        here = next_here(outcome.code, outcome.reason, outcome.way_out)
        outcome = replace(outcome, way_out=here or outcome.way_out)
    answer(output, to_json(outcome), str(outcome))
    return outcome.error.exit_code if isinstance(outcome, Refusal) else 0


def adopt(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006
    from_checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint of a query with Spark's own Kafka source.")
    ] = None,
    from_group: Annotated[str | None, typer.Option(help="Consumer group.")] = None,
    from_timestamp: Annotated[int | None, typer.Option(min=0, help="Milliseconds since 1970.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write the start; without it, only show it.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Start a pipeline where another job stopped: show where, and with --yes keep it in the new checkpoint."""
    pipeline = read(file, set_)
    with working("asking the source, the sink and the old job"):
        adoption = pipeline.adopt(checkpoint=from_checkpoint, group=from_group, timestamp_ms=from_timestamp, write=yes)
    if output is Output.JSON:
        say_json(adoption.to_json())
        return
    say(f"from {adoption.origin}")
    for name, (offset, ahead) in adoption.partitions.items():
        say(f"  {name}: starts at offset {offset:,}, {ahead:,} offsets ahead")
    for text in adoption.notes:
        say(f"- {text}")
    did = f"written to {adoption.checkpoint}. Next: delivered run {file}"
    say(did if adoption.written else f"nothing written. To write it to {adoption.checkpoint}: repeat with --yes")


def run(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006
    guarantee: GuaranteeOption = None,
    checkpoint: CheckpointOption = None,
    master: MasterOption = None,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Stop once everything available at the start is delivered.")
    ] = False,
    takeover: TakeoverOption = False,
    receivers: Annotated[
        int, typer.Option(min=0, max=RECEIVERS_MAX, help="Also run this many receivers of the source's queue.")
    ] = 0,
    wait: WaitOption = True,
    stop_timeout: StopTimeoutOption = 120.0,
    spark_log: Annotated[
        str | None, typer.Option(help="File for Spark's own log; - for standard error. Default: a temporary file.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics."),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    output: OutputOption = Output.TEXT,
) -> int:
    """Run a pipeline until it is stopped; SIGTERM or Ctrl-C lets the running batch finish."""
    log_as(log_format)
    trigger = "available_now" if available_now else None
    pipeline = read(file, set_, guarantee=guarantee, checkpoint=checkpoint, master=master, trigger=trigger)
    more: dict[str, Any] = {"wait": wait, "metrics_port": metrics_port}
    if not receivers:
        return run_pipeline(pipeline, takeover, stop_timeout, spark_log, output, **more)
    from delivered.pipeline.receive import queue_among, run_receivers

    show_warnings()
    patience_s = OUTAGE_PATIENCE_S if wait else 0.0
    with run_receivers(queue_among(pipeline.sources), receivers, patience_s=patience_s) as raise_failure:
        return run_pipeline(pipeline, takeover, stop_timeout, spark_log, output, raise_failure, **more)


def receive(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006
    processes: Annotated[int, typer.Option(min=1, max=RECEIVERS_MAX, help="Number of receiver processes.")] = 1,
    idle_seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after this long without a message. Default: never.")
    ] = None,
    wait: WaitOption = True,
    log_format: LogFormatOption = LogFormat.TEXT,
    output: OutputOption = Output.TEXT,
) -> None:
    """Receive a queue into the durable log of a pipeline's source until stopped: persist, then acknowledge."""
    from delivered.crash import install_from_environment
    from delivered.pipeline.receive import queue_among, quiet_client
    from delivered.pipeline.receive import receive as run_receivers

    log_as(log_format)
    install_from_environment()
    quiet_client(warnings=False)
    show_warnings()
    queues = load_file(file, dict(map(parse_override, set_))).endpoints
    endpoint = queue_among({name: endpoint_of(entry, file.parent) for name, entry in queues.items()})
    stop = stop_on_signal()
    shown = _ReceiverProgress(output)
    started = time.monotonic()
    log_line(f"receiving {endpoint.options.get('queue', endpoint.label)} into {endpoint.options.get('log')}")
    patience_s = OUTAGE_PATIENCE_S if wait else 0.0
    run_receivers(endpoint, processes, stop.is_set, idle_seconds, shown.report, patience_s=patience_s)
    shown.end(time.monotonic() - started)


def replay(
    file: FileArgument,
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help="ISO 8601, milliseconds, earliest, or offsets as JSON.")
    ],
    into: Annotated[
        str, typer.Option(metavar="SINK", help="Another table or topic of the sink; or a sink: '{format: ...}'.")
    ],
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="As --from; latest: what is there now.")] = "latest",
    sink: Annotated[str | None, typer.Option(metavar="NAME", help="Whose rows, if the file has several.")] = None,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    master: MasterOption = None,
    wait: WaitOption = True,
    stop_timeout: StopTimeoutOption = 120.0,
    spark_log: SparkLogOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Deliver records of a time once more, into another sink, while the pipeline runs. Run again, it continues."""
    from delivered.operate.replay import parse_sink

    pipeline = read(file, set_, master=master)
    target = parse_sink(into, file.parent) if into.lstrip().startswith("{") else into
    with working("looking up the records of that time"):
        replayed = pipeline.replay(start, end, target, sink=sink)
    return run_pipeline(replayed, False, stop_timeout, spark_log, output, wait=wait)


def rebuild(
    file: FileArgument,
    into: Annotated[str, typer.Option(metavar="TABLE", help="The new table, in the place of the old one.")],
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="As for replay. Default: where the pipeline's first batch began."),
    ] = None,
    accept_differences: Annotated[
        bool, typer.Option("--accept-differences", help="Swap although the tables differ: the transform was corrected.")
    ] = False,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    master: MasterOption = None,
    wait: WaitOption = True,
    stop_timeout: StopTimeoutOption = 120.0,
    spark_log: SparkLogOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Make the sink's table again from the source, compare both, and swap them. After a kill, run it again."""
    from delivered.audit.evidence import Verdict

    pipeline = read(file, set_, master=master)
    with working("looking up where the pipeline began and where it is"):
        rebuilt = pipeline.rebuild(into, start=start)
    outcome: dict[str, Any] = {}
    if not rebuilt.done:
        run_pipeline(rebuilt.pipeline, False, stop_timeout, spark_log, output, wait=wait)
        rebuilt.check_stopped()
        with working("starting Spark") as progress, quiet_spark(pipeline, SparkLog.of(pipeline, spark_log)) as spark:
            report = rebuilt.pipeline.audit(spark, progress=progress, full=True)
        with working("comparing both tables"):
            compared = rebuilt.compare()
        if report.verdict is Verdict.BROKEN:
            raise DeliveredError("REBUILD_BROKEN", into=into, breaches="; ".join(report.breaches))
        if not compared.equal and not accept_differences:
            raise DeliveredError("REBUILD_DIFFERS", compared=compared)
        with working("swapping the tables"):
            rebuilt.swap()
        outcome = {"audit": report.verdict.value, "equal": compared.equal, "comparison": str(compared)}
    if output is Output.JSON:
        say_json({"table": rebuilt.table, "former_rows": rebuilt.kept, "swapped": True, **outcome}, one_line=True)
        return
    if outcome:
        say(f"{outcome['comparison']}; audit of the new one: {outcome['audit']}")
    say(f"{rebuilt.table} is the new table; its former rows are in {rebuilt.kept}")


@dataclass
class StopRequest:
    """Stop requests by signal: the first one stops between batches, the second one at once."""

    stop: threading.Event = field(default_factory=threading.Event)
    now: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        stop_on_signal(lambda: (self.now if self.stop.is_set() else self.stop).set())


def run_pipeline(
    pipeline: Pipeline,
    takeover: bool,
    stop_timeout: float,
    spark_log: str | None,
    output: Output,
    supervise: Callable[[], None] = lambda: None,
    *,
    wait: bool = True,
    metrics_port: int | None = None,
) -> int:
    """Run it, and report its problems to its webhook, as `_run_pipeline`."""
    run_it = partial(
        _run_pipeline, pipeline, takeover, stop_timeout, spark_log, output, supervise, wait=wait, port=metrics_port
    )
    if pipeline.notify is None:
        return run_it()
    from delivered.operate.notify import notifying

    with notifying(pipeline):
        return run_it()


def _run_pipeline(
    pipeline: Pipeline,
    takeover: bool,
    stop_timeout: float,
    spark_log: str | None,
    output: Output,
    supervise: Callable[[], None],
    *,
    wait: bool,
    port: int | None,
) -> int:
    """Run it; returns the exit code. Raises the cause of a failed query as a `DeliveredError`.

    Args:
        supervise: raises if something that runs next to the query failed, which ends the query.
        wait: for an unreachable server, as long as its restart may take.
        port: serve the pipeline's status and Spark's figures there, for Prometheus.
    """
    from delivered.checkpoint.history import keeping_failed_start
    from delivered.pipeline.progress import watch
    from delivered.planner import Refusal
    from delivered.spark.internals import recent_reports
    from delivered.spark.start import recorded

    work_for(pipeline.name)
    request = StopRequest()
    request.listen()
    outages = Outages()
    show_warnings(outages)
    with (
        keeping_failed_start(pipeline.checkpoint),
        working(f"checking source and sink of {pipeline.name}"),
    ):
        try:
            plan = patiently(
                f"a server of {pipeline.name}",
                lambda: pipeline.plan(takeover=takeover),
                away=lambda answer: answer.error if isinstance(answer, Refusal) and answer.transient else None,
                patience_s=OUTAGE_PATIENCE_S if wait else 0.0,
                stop=request.stop.is_set,
            )
        except StoppedWaiting:
            return 0
        if isinstance(plan, Refusal):
            raise plan.error
    if output is Output.TEXT:
        say(f"{pipeline.name}: {pipeline.guarantee.value} by {plan.mechanism}")
    started = time.monotonic()
    log = SparkLog.of(pipeline, spark_log)
    with contextlib.ExitStack() as stack:
        queries = None if port is None else stack.enter_context(_metrics(pipeline, port))
        with working("starting Spark"):
            spark = stack.enter_context(quiet_spark(pipeline, log))
        request.listen()  # again: a new SparkContext takes over SIGINT to cancel running jobs
        if request.stop.is_set():
            return 0
        if queries is not None:
            spark.streams.addListener(queries)
        stack.callback(recorded)
        query = pipeline.start(spark, takeover=takeover)
        audits = None
        if pipeline.audit_every is not None:
            audits = stack.enter_context(pipeline.auditing(spark, pipeline.audit_every, own=True))
        with watch(pipeline, query, recent_reports) as progress:
            show = _QueryProgress(output, _WorkerLines(log.path, outages))
            idle = _until_done(pipeline, query, progress, show, request, stop_timeout, supervise, audits)
            progress.refresh()
            failure = query.exception()
            show.end()
        if failure is not None:
            raise _own_error(failure, log, pipeline)  # inside, so that the log file it names is kept
    _summary(pipeline, progress, time.monotonic() - started, idle, output)
    return 0


@contextlib.contextmanager
def _metrics(pipeline: Pipeline, port: int) -> Iterator[QueryMetrics]:
    """Serve them; yields the listener that gets those of queries. Before Spark starts: it refuses at once."""
    from delivered.operate.asking import status
    from delivered.operate.metrics import serving
    from delivered.spark.listener import QueryMetrics

    queries = QueryMetrics({pipeline.name: pipeline.checkpoint})
    with serving(lambda: [status(pipeline)], port, more=[queries]) as opened:
        note(f"serving http://127.0.0.1:{opened}/metrics")
        yield queries


def _until_done(
    pipeline: Pipeline,
    query: Any,
    progress: Progress,
    show: _QueryProgress,
    request: StopRequest,
    stop_timeout: float,
    supervise: Callable[[], None],
    audits: ContinuousAudit | None,
) -> bool:
    """Watch until the query has ended or was stopped on request. Returns False if a batch was cut off."""
    from delivered.operate.continuous import STOP_S_MAX

    while query.isActive:
        if request.stop.wait(_POLL_S):
            log_line("stopping after the current batch; signal again to stop now")
            deadline = time.monotonic() + stop_timeout
            if audits is not None:
                audits.stop(min(stop_timeout, STOP_S_MAX))  # its jobs would take cores from the batch

            def waiting() -> None:
                show.line(progress)
                if request.now.is_set():
                    raise _StopNow

            try:
                return pipeline.stop(query, max(0.0, deadline - time.monotonic()), waiting)
            except _StopNow:
                query.stop()
                return False
        supervise()
        progress.refresh(every_s=_LEDGER_EVERY_S)
        show.line(progress)
    return True


class _StopNow(Exception):
    """A second signal."""


class _WorkerLines:
    """Workers' messages for the user: their lines in Spark's log, unless that is shown anyway."""

    def __init__(self, log: Path | None, outages: Outages) -> None:
        self.outages = outages
        self._file = log.open("rb") if log is not None else None
        self._rest = b""
        if self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def new(self) -> list[str]:
        """Lines since the last call; the same line from several processes is shown once, and so is an outage."""
        if self._file is None:
            return []
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        texts = (line.decode(errors="replace") for line in lines)
        if as_json():
            return list(dict.fromkeys(t for t in texts if is_line_of_ours(t) and self._is_new(*_logged_by(t))))
        marked = (text.partition(WARNING_MARK) for text in texts if WARNING_MARK in text)
        return list(dict.fromkeys(message for head, _, message in marked if self._is_new(_process(head), message)))

    def _is_new(self, process: int, message: str) -> bool:
        return self.outages.is_new(process, message)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _process(head: str) -> int:
    """Of what stands before a worker's message: time, and its process."""
    last = head.split()[-1:]
    return int(last[0]) if last and last[0].isdigit() else 0


def _logged_by(line: str) -> tuple[int, str]:
    """Process and message of a JSON line."""
    try:
        found = json.loads(line)
        return int(found.get("process", 0)), str(found["message"])
    except (ValueError, KeyError, TypeError):
        return 0, line


class _QueryProgress:
    """Progress: one updating line on a terminal; JSON lines for programs; else only what the user should know."""

    def __init__(self, output: Output, warnings: _WorkerLines) -> None:
        self._output = output
        self._warnings = warnings
        self._status = None
        self._last: tuple[Any, ...] = ()
        self._at = 0.0
        if output is Output.TEXT and on_terminal():
            self._status = messages().status("waiting for records")
            self._status.start()

    def line(self, progress: Progress) -> None:
        for text in self._warnings.new():
            relay(text)
        for text in self._warnings.outages.ended():
            log_line(text)
        if self._status is not None:
            self._status.update(Text(progress.text))
            return
        now = progress.shown
        if self._output is Output.JSON and now != self._last and time.monotonic() - self._at >= _LINE_EVERY_S:
            self._last, self._at = now, time.monotonic()
            say_json({**progress.to_json(), "time": stamp()}, one_line=True)

    def end(self) -> None:
        self._warnings.close()
        if self._status is not None:
            self._status.stop()


def _summary(pipeline: Pipeline, progress: Progress, seconds: float, idle: bool, output: Output) -> None:
    if output is Output.JSON:
        ended = {"event": "stopped", "time": stamp(), "between_batches": idle, "seconds": round(seconds, 3)}
        say_json({**progress.to_json(), **ended}, one_line=True)
        return
    say(f"{pipeline.name}: {progress.totals} in {seconds:.1f} s")
    if not idle:
        say("The current batch was interrupted; the next start finishes or repeats it.")


def _own_error(failure: Any, log: SparkLog, pipeline: Pipeline) -> Exception:
    """A failed query's own error, with a pointer to Spark's log."""
    from delivered.spark.session import why_ended

    own_error = translated(failure) or why_ended()
    if own_error is not None:
        return own_error
    where = log.path or "standard error"
    bad_rows = pipeline.on_bad_row is not OnBadRow.FAIL and pipeline.transform.kind in ("sql", "python")
    return DeliveredError(
        "QUERY_FAILED.PERHAPS_A_ROW" if bad_rows else "QUERY_FAILED.RUN", cause=cause_of(failure), where=where
    )


@dataclass(frozen=True)
class SparkLog:
    """Where Spark's own log goes.

    Attributes:
        path: the file; None: standard error.
        temporary: deleted on success.
    """

    path: Path | None
    temporary: bool = False

    @classmethod
    def of(cls, pipeline: Pipeline, place: str | None) -> SparkLog:
        """From the option --spark-log: a file; "-": standard error; None: a temporary file."""
        if place is None:
            handle, name = tempfile.mkstemp(prefix=f"delivered-{pipeline.name}-", suffix=".log")
            os.close(handle)
            return cls(Path(name), temporary=True)
        return cls(None if place == "-" else Path(place))


@contextlib.contextmanager
def quiet_spark(pipeline: Pipeline, log: SparkLog) -> Iterator[SparkSession]:
    """A session that logs to a file and is shielded from Ctrl-C on this terminal."""
    from delivered.spark.start import Jvm, new_session

    path = log.path
    # Processes started from here on inherit the mask: the JVM and its workers finish their batch on Ctrl-C, which the
    # terminal sends to all of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    logging.getLogger(
        "SQLQueryContextLogger"
    ).disabled = True  # PySpark's: the error again, as 8,000 characters of JSON
    try:
        with _stderr_to(path), _java_dies_with_us():
            spark = new_session(pipeline)
            jvm = Jvm(spark)
    except BaseException:
        if path is not None:
            note(f"Spark's log: {path}")
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        with _client_log_to(path) if path is not None else contextlib.nullcontext():
            yield spark
    except BaseException as error:
        if path is not None:
            note(f"Spark's log: {path}")
        if not isinstance(error, DeliveredError) and (death := jvm.death()) is not None:
            raise death from error
        raise
    else:
        if log.temporary and path is not None:
            path.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(Exception):
            spark.stop()
        _end_java()


@contextlib.contextmanager
def _java_dies_with_us() -> Iterator[None]:
    """Let the kernel kill a JVM that is started meanwhile as soon as this process is killed. By itself it notices, and
    then stops what runs in it, while who starts the pipeline again is refused.

    PySpark runs Python between fork and exec of its JVM, and so what is registered here. An exec keeps the setting.
    Only in the main thread: the kernel does so at the end of the thread that forked.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        yield
        return
    prctl, thread = ctypes.CDLL(None).prctl, threading.get_ident()

    def in_child() -> None:
        if threading.get_ident() == thread:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    os.register_at_fork(after_in_child=in_child)
    try:
        yield
    finally:
        thread = 0


def _end_java() -> None:
    """End the JVM that this process started, and wait for it: it would outlive this process by a moment, and who starts
    the pipeline again in that moment would be refused, because its driver runs."""
    started = [p for p in psutil.Process().children() if p.name().startswith("java")]
    for process in started:
        process.terminate()
    psutil.wait_procs(started, timeout=_JAVA_ENDS_S)


@contextlib.contextmanager
def _client_log_to(path: Path) -> Iterator[None]:
    """Add what libraries log by the root logger, as py4j does of a lost JVM, to Spark's log."""
    handler = logging.FileHandler(path, delay=True)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _stderr_to(path: Path | None) -> Iterator[None]:
    """Redirect standard error of this process, and of children started meanwhile, to a file."""
    if path is None:
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(file, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(file)


class _ReceiverProgress:
    def __init__(self, output: Output) -> None:
        self._output = output
        self._counts: dict[int, Counts] = {}
        self._at = 0.0

    def report(self, number: int, counts: Counts) -> None:
        self._counts[number] = counts
        if time.monotonic() - self._at < _LINE_EVERY_S:
            return
        self._at = time.monotonic()
        if self._output is Output.JSON:
            say_json({"event": "progress", "time": stamp(), **self.totals()}, one_line=True)
        else:
            log_line(self._text())

    def end(self, seconds: float) -> None:
        if self._output is Output.JSON:
            say_json({"event": "stopped", **self.totals(), "seconds": round(seconds, 3)}, one_line=True)
        else:
            say(f"{self._text()} in {seconds:.1f} s")

    def totals(self) -> dict[str, Any]:
        sums: dict[str, Any] = {name: sum(getattr(c, name) for c in self._counts.values()) for name in _SUMMED}
        latencies = sorted(s for c in self._counts.values() for s in c.latencies_s)
        if latencies:
            sums["latency_ms"] = {
                p: round(1000 * latencies[min(len(latencies) - 1, len(latencies) * q // 100)], 1)
                for p, q in (("p50", 50), ("p99", 99))
            }
        return sums

    def _text(self) -> str:
        now = self.totals()
        quarantine = f", {now['quarantined']:,} quarantined" if now["quarantined"] else ""
        latency = now.get("latency_ms")
        took = f"; {latency['p50']:.0f} ms p50, {latency['p99']:.0f} ms p99" if latency else ""
        return f"{now['entered']:,} messages logged, {now['repeated']:,} duplicates{quarantine}{took}"


RECORDS = 1_000
FILE = "orders.yaml"

_EXAMPLE = """\
# A log of orders into a SQLite table: ready to run, no server needed.
#   delivered plan {file}     its steps, and the assumptions of its guarantee
#   delivered run {file}      kill it at any time, and start it again
#   delivered audit {file}    checks that every order is in the table exactly once
# Paths are relative to this file.

pipeline: orders
guarantee: exactly_once          # or at_least_once, at_most_once
checkpoint: checkpoint
trigger: available_now           # or an interval, "10 seconds": run until stopped

source:
  format: log
  path: orders-log
  maxOffsetsPerTrigger: 250

transform:
  sql: >-
    SELECT CAST(key AS STRING) AS customer,
           get_json_object(CAST(value AS STRING), '$.id') AS id,
           CAST(get_json_object(CAST(value AS STRING), '$.amount') AS DOUBLE) AS amount
    FROM source
  deterministic: true            # the same input gives the same rows

sinks:
  - format: sqlite
    path: orders.db
    table: orders

audit:
  id: id                         # identifies a record
"""


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("delivered-example"),
    output: OutputOption = Output.TEXT,
) -> None:
    """Write a ready-to-run example: a log of orders into SQLite, no server needed."""
    file, records = write_example(folder)
    text = (
        f"{file}: a pipeline, and {records} records for it to deliver\n"
        f"Next: delivered plan {file}; delivered run {file}; delivered audit {file}"
    )
    answer(output, {"file": str(file), "records": records}, text)


def write_example(folder: Path) -> tuple[Path, int]:
    """Write file and input into `folder`; return the file and the number of records.

    Raises:
        UsageError: the file already exists.
        MissingExtra: a requirement of the pipeline is not installed; nothing was written.
    """
    import pyarrow as pa

    from delivered.connectors.log.produce import append

    for module in ("pyspark", "deltalake"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra("spark")

    file = folder / FILE
    if file.exists() or folder.is_file():
        raise UsageError("EXAMPLE_EXISTS", file=str(file if file.exists() else folder))
    folder.mkdir(parents=True, exist_ok=True)
    orders = [{"id": f"order-{i:04}", "amount": (i * 37) % 1000 / 10} for i in range(RECORDS)]
    rows = pa.table(
        {
            "key": pa.array([f"customer-{i % 17}".encode() for i in range(RECORDS)], pa.binary()),
            "value": pa.array([json.dumps(o).encode() for o in orders], pa.binary()),
        }
    )
    append(str(folder / "orders-log"), rows, partition_by=4, idempotence=("delivered-example", 1))
    # Last: a folder with the file is complete.
    file.write_text(_EXAMPLE.format(file=file), encoding="utf-8")
    return file, RECORDS
