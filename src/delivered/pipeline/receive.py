"""Runs receivers until stopped, in this process or several; they report themselves next to their log."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import psutil

from delivered.contract.source import ReceiverReport
from delivered.engine.context import is_running, new_owner
from delivered.model.errors import DeliveredError, Unreachable, UsageError
from delivered.model.limits import OUTAGE_PATIENCE_S, RECEIVER_SILENT_S, RECEIVERS_MAX
from delivered.model.options import check_argument, resolve_secrets
from delivered.model.patience import StoppedWaiting, patiently
from delivered.model.step import JsonLines, as_json
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.registry import connector, find_received
from delivered.receiver import QUARANTINE_SUFFIX, Counts, ReceiveLoop

# Receivers report themselves next to the log that they fill, so that operators see whether they live.
#
# A receiver that stops as asked removes its report. One that dies leaves it, until another receiver takes its place:
# each start removes the report of one that died. Proves nothing, and never stops a receiver.

MESSAGES = ("received", "entered", "repeated", "quarantined", "acknowledged", "unacknowledged")
_COUNTED = (*MESSAGES, "paused", "reconnected")
_EVERY_S = 2.0
_EVERY_REMOTE_S = 10.0
"""For a log in an object store, where each report is a request."""


def is_dead(report: ReceiverReport) -> bool:
    """Whether a receiver is dead, or has said nothing for `RECEIVER_SILENT_S`: it hangs, or its machine is down.

    By two machines' clocks, for display: a receiver whose report was removed reports again.
    """
    silent = time.time() - report.at_ms / 1000 > RECEIVER_SILENT_S
    return silent or is_running(report.owner) is False


class Presence:
    """This process, as a receiver of a log. Used by the thread that receives.

    Args:
        log: path or URL of the log, which exists.
    """

    def __init__(self, log: str, storage: Mapping[str, str]) -> None:
        from delivered.connectors.log import open_receivers

        self._receivers = open_receivers(log, storage)
        self._every_s = _EVERY_S if self._receivers.local else _EVERY_REMOTE_S
        self._report = ReceiverReport(new_owner(psutil.Process()), 0)
        self._due = 0.0

    def join(self) -> None:
        """Report, and take the place of one that died."""
        self.report(Counts())
        with self._tolerant():
            dead = next(filter(is_dead, self._receivers.read()), None)
            if dead is not None:
                self._receivers.remove(dead)

    def report(self, counts: Counts) -> None:
        """Report, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        counted = {name: getattr(counts, name) for name in _COUNTED}
        self._report = replace(self._report, at_ms=int(time.time() * 1000), counts=counted)
        with self._tolerant():
            self._receivers.write(self._report)

    def leave(self) -> None:
        with self._tolerant():
            self._receivers.remove(self._report)

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            _LOG.debug("receiver %s: its report was not kept: %s", self._report.name, error)


# Runs receivers until stopped: one in this process, or several in separate processes.
#
# delivered.receive(endpoint("rabbitmq", url=..., queue=..., log="/data/orders-log"), stop=...)

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_RESTART_S_MAX = 30.0
_STOP_TIMEOUT_S = 60.0
_REPORT_S = 0.5
_LATENCIES_REPORTED = 1_000
Report = Callable[[int, Counts], None]


def receive(
    source: Endpoint,
    processes: int = 1,
    stop: Callable[[], bool] | None = None,
    idle_s: float | None = None,
    report: Report | None = None,
    *,
    patience_s: float = OUTAGE_PATIENCE_S,
) -> None:
    """Receive into the log of `source` until `stop()` is true; what was received by then is persisted and acknowledged.

    Args:
        source: a queue: endpoint("rabbitmq", ...).
        processes: if more than one, each is a separate process; one that dies is restarted.
        idle_s: also end if nothing arrived for this long; None: keep running.
        report: called after every append, with the receiver's number and its counts so far.
        patience_s: how long to wait for an unreachable server; 0: not at all.

    Raises:
        UsageError: not a queue, a bad option, or the queue cannot be received from.
        Unreachable: the server stayed unreachable.
        DeliveredError: the log or the queue failed. Only messages in the log were acknowledged.
    """
    check_argument(
        "delivered.receive", "source", source, Endpoint, "an endpoint", 'delivered.endpoint("rabbitmq", ...)'
    )
    check_argument("delivered.receive", "processes", processes, int, "a number", "..., processes=2")
    for name, function in {"stop": stop, "report": report}.items():
        check_argument("delivered.receive", name, function, (Callable, NoneType), "a function", f"..., {name}=function")  # type: ignore[arg-type]
    check_argument("delivered.receive", "idle_s", idle_s, (int, float, NoneType), "in seconds", "..., idle_s=60")
    check_argument("delivered.receive", "patience_s", patience_s, (int, float), "in seconds", "..., patience_s=60")
    if not 1 <= processes <= RECEIVERS_MAX:
        raise UsageError("RECEIVERS", processes=processes, receivers_max=RECEIVERS_MAX)
    asked_to_stop = _never if stop is None else stop
    if not _await(source, patience_s, asked_to_stop):
        return
    if processes == 1:
        receive_one(source.system, source.options, 0, asked_to_stop, idle_s, report)
        return
    _Processes(source, processes, idle_s).run(asked_to_stop, report)


@contextlib.contextmanager
def run_receivers(
    source: Endpoint,
    processes: int,
    *,
    patience_s: float = OUTAGE_PATIENCE_S,
) -> Iterator[Callable[[], None]]:
    """Receivers next to a pipeline that runs in this process. Yields a function that raises the error that ended them.

    The log exists once this is entered, so that the pipeline can be planned.
    """
    from delivered.connectors.log import open_journal

    _await(source, patience_s, _never)
    made = find_received(source.system, source.options).options
    open_journal(made.log, resolve_secrets("storage.", made.storage), 1).close()
    stop, failed = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            _Processes(source, processes, None).run(stop.is_set, None)
        except Exception as error:
            failed.append(error)

    def raise_failure() -> None:
        if failed:
            raise failed[0]

    thread = threading.Thread(target=run, name="delivered-receivers")
    thread.start()
    try:
        yield raise_failure
    finally:
        stop.set()
        thread.join()


def queue_among(sources: Mapping[str, Endpoint]) -> Endpoint:
    """The source that receivers fill: the only one, or the only queue.

    Raises:
        UsageError: there are several queues, or none.
    """
    queues = {n: e for n, e in sources.items() if not e.is_spark_own and connector(e.system).queues is not None}
    candidates = sources if len(sources) == 1 else queues
    if len(candidates) != 1:
        raise UsageError(
            "RECEIVE_SOURCES",
            sources=", ".join(sources),
            queues=", ".join(queues) if queues else "none",
            are="are queues" if queues else "is one",
        )
    queue = next(iter(candidates.values()))
    connector(queue.system).received()
    return queue


def _await(source: Endpoint, patience_s: float, stop: Callable[[], bool]) -> bool:
    """`check`, once the server is reachable; False: stopped before."""
    try:
        patiently(source.label, lambda: check(source), patience_s=patience_s, stop=stop)
    except StoppedWaiting:
        return False
    return True


def check(source: Endpoint) -> None:
    """Check that the queue can be received from; log warnings.

    Raises:
        Unreachable: the server is unreachable.
        UsageError: it cannot be received from.
    """
    for finding in find_received(source.system, source.options).queue.preflight():
        if finding.transient:
            raise Unreachable(finding.code, finding.message, finding.next_step)
        if finding.refuses:
            raise UsageError(finding.code, finding.message, finding.next_step)
        _LOG.warning("%s", finding)


def receive_one(
    system: str,
    options: Mapping[str, str],
    number: int,
    stop: Callable[[], bool],
    idle_s: float | None = None,
    report: Report | None = None,
) -> Counts:
    """One receiver, in this process. Number 0 also maintains the log."""
    source = find_received(system, options)
    made = source.options
    storage = resolve_secrets("storage.", made.storage)
    from delivered.connectors.log import open_journal, open_receivers

    settings = {"readers": made.readers, "keep_s": made.keep_s, "upkeep": number == 0}
    window = {"window_size": made.window, "dedup_for_ms": made.dedup_for_ms}
    journal = open_journal(made.log, storage, partitions=made.partitions, **window, **settings)
    queue = f"{source.system} {source.queue.id_scope}"
    if (former := open_receivers(made.log, storage).queue(queue)) != queue:
        raise UsageError("LOG_OF_ANOTHER_QUEUE", log=made.log, former=former, queue=queue)
    bad = made.log.rstrip("/") + QUARANTINE_SUFFIX
    quarantine = open_journal(bad, storage, **window) if made.quarantine else None
    loop = ReceiveLoop(source.queue.receiver, journal, made.limits(), quarantine)
    idle, presence = _Idle(loop, idle_s), Presence(made.log, storage)

    def over() -> bool:  # the loop asks several times a second, whatever it waits for
        presence.report(loop.counts)
        return stop() or idle.over()

    presence.join()
    counts = loop.run(over, None if report is None else lambda counts: report(number, counts))
    presence.leave()
    return counts


@dataclass
class _Idle:
    """Detects that nothing has arrived for a while."""

    loop: Any
    after_s: float | None
    seen: int = -1
    since: float = 0.0

    def over(self) -> bool:
        if self.after_s is None:
            return False
        received = self.loop.counts.received
        if received != self.seen:
            self.seen, self.since = received, time.monotonic()
        return time.monotonic() - self.since > self.after_s


class _Processes:
    """Receiver processes. One that dies of a signal or a failing server is restarted; a usage error ends all.

    Each has its own pipe, for its counts and for the request to stop: nothing is shared, so a killed one holds no lock
    of the others. A pipe whose other end is closed is also a request to stop.
    """

    def __init__(self, source: Endpoint, count: int, idle_s: float | None) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._source = source
        self._idle_s = idle_s
        self._running: dict[int, tuple[Any, Any]] = {}
        self._starts = dict.fromkeys(range(count), 0)
        self._due = dict.fromkeys(range(count), 0.0)

    def run(self, stop: Callable[[], bool], report: Report | None) -> None:
        try:
            while not stop() and (self._running or self._due):
                self._start_due()
                self._drain(report)
                self._reap()
                time.sleep(_POLL_S)
        finally:
            self._end(report)

    def _start_due(self) -> None:
        for number, at in list(self._due.items()):
            if time.monotonic() < at:
                continue
            del self._due[number]
            ours, theirs = self._context.Pipe()
            arguments = (self._source.system, dict(self._source.options), number, self._idle_s, theirs)
            process = self._context.Process(target=_process, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._running[number] = (process, ours)

    def _reap(self) -> None:
        for number, (process, pipe) in list(self._running.items()):
            if process.is_alive():
                continue
            del self._running[number]
            pipe.close()
            code = process.exitcode
            if code == 0:
                continue  # idle
            if code == UsageError.exit_code:
                raise UsageError("RECEIVER_REFUSED", number=number)
            self._starts[number] += 1
            wait_s = min(_RESTART_S_MAX, 0.5 * 2 ** self._starts[number])
            _LOG.warning("receiver %d exited with %s; restarting in %.0f s", number, code, wait_s)
            self._due[number] = time.monotonic() + wait_s

    def _drain(self, report: Report | None) -> None:
        for number, (_, pipe) in self._running.items():
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll():
                    counts = pipe.recv()
                    if report is not None:
                        report(number, counts)

    def _end(self, report: Report | None) -> None:
        for _, pipe in self._running.values():
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while any(process.is_alive() for process, _ in self._running.values()) and time.monotonic() < deadline:
            self._drain(report)
            time.sleep(_POLL_S / 10)
        self._drain(report)
        for process, pipe in self._running.values():
            if process.is_alive():
                process.kill()
            process.join()
            pipe.close()


class _Parent:
    """The process that started this receiver, at the other end of a pipe."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._over = False
        self._reported_at = 0.0

    def stop(self) -> bool:
        if not self._over:
            try:
                self._over = self._pipe.poll()
            except OSError:
                self._over = True
        return self._over

    def report(self, counts: Counts, last: bool = False) -> None:
        if not last and time.monotonic() - self._reported_at < _REPORT_S:
            return
        self._reported_at = time.monotonic()
        with contextlib.suppress(OSError):
            self._pipe.send(replace(counts, latencies_s=counts.latencies_s[-_LATENCIES_REPORTED:]))


def _process(system: str, options: Mapping[str, str], number: int, idle_s: float | None, pipe: Any) -> None:
    from delivered.crash import install_from_environment

    install_from_environment()
    quiet_client()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent requests the stop
    parent = _Parent(pipe)
    try:
        counts = receive_one(system, options, number, parent.stop, idle_s, lambda _, c: parent.report(c))
        parent.report(counts, last=True)
    except DeliveredError as error:
        _LOG.error("receiver %d: %s", number, error)
        raise SystemExit(error.exit_code) from None


def quiet_client(warnings: bool = True) -> None:
    """For a separate process: log our warnings to standard error, but not those of client libraries, some of which
    print a stack trace for every refused or lost connection.

    Args:
        warnings: False: ours are shown elsewhere.
    """
    logging.getLogger().addHandler(logging.NullHandler())  # else Python itself prints warnings
    if warnings:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if as_json() else logging.Formatter("%(asctime)s %(message)s"))
        logging.getLogger("delivered").addHandler(handler)


def _never() -> bool:
    return False
