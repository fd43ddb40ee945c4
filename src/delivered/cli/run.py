"""`delivered run`: a pipeline in the foreground, with progress, until it ends or is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from delivered.cli.output import (
    Output,
    log_line,
    messages,
    note,
    on_terminal,
    relay,
    say,
    say_json,
    stamp,
    tell_warnings,
    working,
)
from delivered.model.bad_row import OnBadRow
from delivered.model.errors import DeliveredError
from delivered.model.limits import OUTAGE_PATIENCE_S
from delivered.model.patience import StoppedWaiting, patiently
from delivered.model.step import as_json, is_line_of_ours, work_for
from delivered.model.translate import WARNING_MARK, translated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delivered.entry import Pipeline
    from delivered.pipeline.progress import Progress

_POLL_S = 0.2
_LINE_EVERY_S = 2.0
_LEDGER_EVERY_S = 1.0


@dataclass
class StopRequest:
    """Stop requests by signal: the first one stops between batches, the second one at once."""

    stop: threading.Event
    now: threading.Event

    def signalled(self, *_: object) -> None:
        (self.now if self.stop.is_set() else self.stop).set()


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
    """Run it; returns the exit code. Raises the cause of a failed query as a `DeliveredError`.

    Args:
        supervise: raises if something that runs next to the query failed, which ends the query.
        wait: for an unreachable server, as long as its restart may take.
        metrics_port: serve the pipeline's status and Spark's figures there, for Prometheus.
    """
    from delivered.pipeline.progress import watch
    from delivered.planner import Refusal

    work_for(pipeline.name)
    request = StopRequest(threading.Event(), threading.Event())
    _listen(request)
    tell_warnings()
    with working(f"checking source and sink of {pipeline.name}"):
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
    began = time.monotonic()
    log = SparkLog.of(pipeline, spark_log)
    with contextlib.ExitStack() as stack:
        with working("starting Spark"):
            spark = stack.enter_context(quiet_spark(pipeline, log))
        _listen(request)  # again: a new SparkContext takes over SIGINT to cancel running jobs
        if request.stop.is_set():
            return 0
        if metrics_port is not None:
            stack.enter_context(_metrics(pipeline, spark, metrics_port))
        query = pipeline.start(spark, takeover=takeover)
        with watch(pipeline, query) as progress:
            show = _Shown(output, _Warnings(log.path))
            idle = _until_done(pipeline, query, progress, show, request, stop_timeout, supervise)
            progress.refresh()
            failure = query.exception()
            show.end()
        if failure is not None:
            raise _own_error(failure, log, pipeline)  # inside, so that the log file it names is kept
    _summary(pipeline, progress, time.monotonic() - began, idle, output)
    return 0


@contextlib.contextmanager
def _metrics(pipeline: Pipeline, spark: SparkSession, port: int) -> Iterator[None]:
    from delivered.operate.metrics import serving
    from delivered.operate.status import status
    from delivered.spark.listener import QueryMetrics

    spark.streams.addListener(queries := QueryMetrics({pipeline.name: pipeline.checkpoint}))
    with serving(lambda: [status(pipeline)], port, more=[queries]) as opened:
        note(f"serving http://127.0.0.1:{opened}/metrics")
        yield


def _listen(request: StopRequest) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request.signalled)


def _until_done(
    pipeline: Pipeline,
    query: Any,
    progress: Progress,
    show: _Shown,
    request: StopRequest,
    stop_timeout: float,
    supervise: Callable[[], None],
) -> bool:
    """Watch until the query has ended or was stopped on request. Returns False if a batch was cut off."""
    while query.isActive:
        if request.stop.wait(_POLL_S):
            log_line("stopping after the current batch; signal again to stop now")
            deadline = time.monotonic() + stop_timeout

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


class _Warnings:
    """Workers' messages for the user: their lines in Spark's log, unless that is shown anyway."""

    def __init__(self, log: Path | None) -> None:
        self._file = log.open("rb") if log is not None else None
        self._rest = b""
        if self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def new(self) -> list[str]:
        """Lines since the last call; the same line from several processes is shown once."""
        if self._file is None:
            return []
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        texts = (line.decode(errors="replace") for line in lines)
        if as_json():
            return list(dict.fromkeys(text for text in texts if is_line_of_ours(text)))
        return list(dict.fromkeys(text.partition(WARNING_MARK)[2] for text in texts if WARNING_MARK in text))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Shown:
    """Progress: one updating line on a terminal; JSON lines for programs; else only what the user should know."""

    def __init__(self, output: Output, warnings: _Warnings) -> None:
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
        say_json(
            {
                **progress.to_json(),
                "event": "stopped",
                "time": stamp(),
                "between_batches": idle,
                "seconds": round(seconds, 3),
            },
            one_line=True,
        )
        return
    say(f"{pipeline.name}: {progress.totals} in {seconds:.1f} s")
    if not idle:
        say("The current batch was interrupted; the next start finishes or repeats it.")


def _own_error(failure: Any, log: SparkLog, pipeline: Pipeline) -> Exception:
    """A failed query's own error, with a pointer to Spark's log."""

    own_error = translated(failure)
    if own_error is not None:
        return own_error
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    cause = next((line for line in reversed(lines) if "Error" in line and not line.startswith("at ")), lines[0])
    where = log.path or "standard error"
    told_apart = ""
    if pipeline.on_bad_row is not OnBadRow.FAIL and pipeline.transform.kind in ("sql", "python"):
        told_apart = (
            "; if a row is to blame: Spark does not tell which, so on_bad_row does not cover it. Use try_ functions "
            "(try_cast, try_divide), or a function over Arrow batches (docs/dead-letters.md)"
        )
    next_step = f"read Spark's log in {where}; then run again{told_apart}"
    return DeliveredError("QUERY_FAILED", cause[:2_000], next_step=next_step)


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
    from delivered.spark.start import new_session

    path = log.path
    # Processes started from here on inherit the mask: the JVM and its workers finish their batch on Ctrl-C, which the
    # terminal sends to all of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _stderr_to(path):
            spark = new_session(pipeline)
    except BaseException:
        if path is not None:
            note(f"Spark's log: {path}")
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield spark
    except BaseException:
        if path is not None:
            note(f"Spark's log: {path}")
        raise
    else:
        if log.temporary and path is not None:
            path.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(Exception):
            spark.stop()


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
