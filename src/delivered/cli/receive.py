"""`delivered receive`: receivers in the foreground, with progress, until stopped."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivered.cli.output import Output, log_line, say, say_json, stamp, tell_warnings
from delivered.model.limits import OUTAGE_PATIENCE_S
from delivered.pipeline.file import load_file

if TYPE_CHECKING:
    from delivered.source.receive import Counts

_LINE_EVERY_S = 2.0
_SUMMED = (
    *("received", "entered", "repeated", "quarantined", "acknowledged", "unacknowledged"),
    *("appends", "tries", "retired", "paused", "reconnected"),
)


def receive_file(
    file: Path, overrides: dict[str, Any], processes: int, idle_s: float | None, output: Output, *, wait: bool = True
) -> int:
    """Run the receivers of a pipeline file's source; returns the exit code.

    Args:
        wait: for an unreachable server.
    """
    from delivered.crash import install_from_environment
    from delivered.pipeline.endpoint import Endpoint, as_text
    from delivered.pipeline.receive import queue_among, quiet_client, receive

    install_from_environment()
    quiet_client(warnings=False)
    tell_warnings()
    queues = load_file(file, overrides).endpoints
    endpoint = queue_among(
        {n: Endpoint(e.format, {k: as_text(k, v) for k, v in (e.model_extra or {}).items()}) for n, e in queues.items()}
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    shown = _Shown(output)
    began = time.monotonic()
    log_line(f"receiving {endpoint.options.get('queue', endpoint.label)} into {endpoint.options.get('log')}")
    patience_s = OUTAGE_PATIENCE_S if wait else 0.0
    receive(endpoint, processes, stop.is_set, idle_s, shown.report, patience_s=patience_s)
    shown.end(time.monotonic() - began)
    return 0


class _Shown:
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
