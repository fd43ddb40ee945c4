"""`delivered status`, `top` and `metrics`: what pipelines do, asked from outside."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from delivered.cli.command import (
    Output,
    OutputOption,
    console,
    note,
    plain_table,
    say,
    say_json,
    show_warnings,
    spoken,
    stamp,
    stop_on_signal,
    write_file,
)
from delivered.model.errors import UsageError
from delivered.model.limits import NOTIFY_EVERY_S
from delivered.model.options import is_reference, resolve_secret
from delivered.operate.asking import files, look, look_at
from delivered.operate.page import look_with_flow
from delivered.operate.status import Driver, Status, lag_text, not_ready, receivers_text, sealed_text, span, unanswered
from delivered.pipeline.file import load_file

PathsArgument = Annotated[
    list[Path], typer.Argument(help="Pipeline files, or folders of them. Default: this folder.", show_default=False)
]
VerifiedOption = Annotated[
    Path | None, typer.Option(exists=True, help="Also show these results of `delivered verify`: build/verify.json.")
]
_STYLE = {Driver.RUNNING: "green", Driver.STOPPED: "yellow"}


def named_files(paths: Sequence[Path]) -> list[Path]:
    """As `files`; what is not there when a command starts is misspelt, and refused. Later it is a problem to show."""
    for path in paths:
        if not path.exists():
            load_file(path)
    return files(paths)


def status(
    paths: PathsArgument = [Path()],  # noqa: B006
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="For a readiness probe: exit code 0 if each pipeline has a driver running on this host, or no lag; "
            "1 if not, or if it is stalled; 3 if a server did not answer. Prints the reason.",
        ),
    ] = False,
    output: OutputOption = Output.TEXT,
) -> int:
    """Show every pipeline's guarantee, position, lag, open transactions, last audit; exit 1 if one needs attention.

    Asks ledgers, sinks and sources; needs neither Spark nor a running driver.
    """
    statuses = look(named_files(paths))
    if check:
        return _check(statuses)
    if output is Output.JSON:
        say_json([spoken(s).to_json() for s in statuses])
    else:
        shown = console()
        shown.print(table(statuses))
        for line in problems(statuses):
            shown.print(line)
    return 1 if any(s.problems for s in statuses) else 0


def _check(statuses: Sequence[Status]) -> int:
    reasons = {s.pipeline: why for s in statuses if (why := not_ready(s)) is not None}
    for name, why in reasons.items():
        say(f"{name}: {spoken(why)}")
    return 0 if not reasons else 3 if any(map(unanswered, statuses)) else 1


def top(
    paths: PathsArgument = [Path()],  # noqa: B006
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 2.0,
    looks: Annotated[int | None, typer.Option(min=1, help="Stop after this many. Default: until Ctrl-C.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show what `status` shows, every two seconds, with trends of lag and rate; as JSON lines with --output json."""
    named, stop = named_files(paths), stop_on_signal()
    shown = console()
    trends = Trends()
    with Live(console=shown, auto_refresh=False, screen=False, transient=False) as live:
        while not stop.is_set():
            statuses = look(named)
            if output is Output.JSON:
                for s in statuses:
                    say_json({"time": stamp(), **spoken(s).to_json()}, one_line=True)
            else:
                trends.add(statuses, time.monotonic())
                live.update(Group(table(statuses, trends), *problems(statuses)), refresh=True)
            looks = looks - 1 if looks is not None else None
            if looks == 0:
                break
            stop.wait(every)


def watch(
    paths: PathsArgument = [Path()],  # noqa: B006
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two looks.")] = NOTIFY_EVERY_S,
    looks: Annotated[int | None, typer.Option(min=1, help="Stop after this many. Default: until Ctrl-C.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print each problem when it appears and when it has ended, and report it to the webhook of its pipeline's file.

    What was reported is kept in the checkpoint: a restart repeats nothing. A file without `notify` is watched, too.
    """
    from delivered.operate.notify import Message, Notifier

    named, stop = named_files(paths), stop_on_signal()
    show_warnings()
    notifiers: dict[str, Notifier] = {}

    def print_line(message: Message) -> None:
        if output is Output.JSON:
            say_json({"time": stamp(), **spoken(message).to_json()}, one_line=True)
        else:
            step = f" Next: {spoken(message.next_step)}" if message.next_step and not message.has_ended else ""
            say(f"{stamp()} {message.title}: {spoken(message.text)}{step}")

    while not stop.is_set():
        for now, pipeline in look_at(named, lambda pipeline: pipeline):
            if pipeline is None:
                continue  # its file cannot be read: `status` says why
            notifier = notifiers.setdefault(
                pipeline.checkpoint, Notifier(pipeline.name, pipeline.checkpoint, pipeline.notify)
            )
            for message in notifier.look(now):
                print_line(message)
        looks = looks - 1 if looks is not None else None
        if looks == 0:
            break
        stop.wait(every)


def metrics(
    paths: PathsArgument = [Path()],  # noqa: B006
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve http://127.0.0.1:PORT/metrics. Default: print once.")
    ] = None,
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    otlp: Annotated[
        str | None, typer.Option(help="Send to this OpenTelemetry collector, by OTLP over HTTP: http://host:4318.")
    ] = None,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two exports with --otlp.")] = 15.0,
) -> None:
    """Metrics for Prometheus, asked from ledgers, sinks and sources at each scrape; no driver need run."""
    from delivered.operate.metrics import serving, text

    named = named_files(paths)
    if port is None and otlp is None:
        say(text(look(named)).rstrip("\n"))
        return
    stop = stop_on_signal()
    with contextlib.ExitStack() as stack:
        if port is not None:
            opened = stack.enter_context(serving(lambda: look(named), port, address))
            note(f"serving http://{address}:{opened}/metrics")
        if otlp is not None:
            from delivered.operate.metrics import exporting, otlp_reader

            stack.enter_context(exporting(lambda: look(named), otlp_reader(otlp, every)))
            note(f"sending to {otlp} every {every:g} s")
        stop.wait()


def report(
    paths: PathsArgument = [Path()],  # noqa: B006
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("pipelines.html"),
    verified: VerifiedOption = None,
) -> None:
    """Write pipelines as one HTML file: problems, batches by step, open transactions, audits."""
    from delivered.operate.page import page

    more = _verified(verified, part=True) if verified is not None else ""
    write_file(out, page(look_with_flow(named_files(paths)), more=more))
    say(str(out))


def _verified(file: Path, part: bool = False) -> str:
    """The verifier's page, or its content as part of another one."""
    from delivered_lab.verify.matrix import Store
    from delivered_lab.verify.report import page, section

    store = Store(file)
    store.load()
    return (section if part else page)(list(store.results.values()))


def ui(
    paths: PathsArgument = [Path()],  # noqa: B006
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8090,
    address: Annotated[str, typer.Option(help="Address to listen on; another one needs --token.")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            help="env:NAME or file:PATH of a token that requests must carry, as ?token= or a bearer. Default: a new "
            "one, in the address that is printed."
        ),
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="A host name by which the page is reached: of a proxy that passes it on.")
    ] = None,
    actions: Annotated[
        bool | None,
        typer.Option(
            "--actions/--no-actions",
            help="Whether the pages can end transactions and settle dead letters. Default: if only this machine "
            "reaches them.",
            show_default=False,
        ),
    ] = None,
    verified: VerifiedOption = None,
) -> None:
    """Serve the status as web pages, an overview and one page for each pipeline, which reload every 5 s."""
    from delivered.operate.server import LOCAL, check_port, serve

    address_text = f"http://{f'[{address}]' if ':' in address else address}:{port}/"
    chosen, pipelines = None if token is None else _token(token), named_files(paths)
    new = secrets.token_urlsafe(24) if token is None and address in LOCAL else None
    check_port(address, port)
    note(f"serving {address_text}{f'?token={new}' if new else ''}")
    serve(
        pipelines,
        port,
        address=address,
        token=new if chosen is None else chosen,
        hosts=host or (),
        actions=actions,
        verified=None if verified is None else partial(_verified, verified),
    )


def _token(reference: str) -> str:
    """Raises UsageError: it is the token itself, which other users of this machine could read in the process list."""
    if not is_reference(reference):
        raise UsageError("UI_TOKEN.REFERENCE")
    return resolve_secret("token", reference)


_TREND_S = 60.0
_TREND_MIN = 0.1
"""The share by which a figure changes over the looks of the last minute; less is shown as steady."""


class Trends:
    """Of each pipeline, from the looks of the last minute: records a second, and which way lag and rate go."""

    def __init__(self) -> None:
        self._looks: dict[str, deque[tuple[float, int | None, int | None]]] = defaultdict(deque)

    def add(self, statuses: Sequence[Status], now_s: float) -> None:
        for s in statuses:
            looks = self._looks[s.pipeline]
            looks.append((now_s, s.records, s.lag_to_end))
            while now_s - looks[0][0] > _TREND_S:
                looks.popleft()

    def rate(self, pipeline: str) -> float | None:
        """Between the last two looks; None: unknown."""
        rates = self._rates(pipeline)
        return rates[-1] if rates else None

    def rate_arrow(self, pipeline: str) -> str:
        return _arrow(self._rates(pipeline))

    def lag_arrow(self, pipeline: str) -> str:
        return _arrow([float(lag) for _, _, lag in self._looks[pipeline] if lag is not None])

    def _rates(self, pipeline: str) -> list[float]:
        known = [(at, records) for at, records, _ in self._looks[pipeline] if records is not None]
        return [max(0, b[1] - a[1]) / max(b[0] - a[0], 1e-3) for a, b in pairwise(known)]


def _arrow(values: Sequence[float]) -> str:
    """Of the older half of the looks against the newer one; empty: too few."""
    if len(values) < 4:
        return ""
    half = len(values) // 2
    before, after = median(values[:half]), median(values[-half:])
    least = max(1.0, _TREND_MIN * max(before, after))
    return "↑" if after - before > least else "↓" if before - after > least else "→"


def table(statuses: Sequence[Status], trends: Trends | None = None) -> Table:
    """One line a pipeline."""
    columns = ["pipeline", "guarantee", "driver", "batch", "decided", "records", "lag", "open", "last audit"]
    if trends is not None:
        columns.insert(6, "records/s")
    received = any(s.receivers for s in statuses)
    sealed = any(seals.is_watched for s in statuses for seals in s.seals.values())
    if sealed:
        columns.append("sealed")
    if received:
        columns.append("receivers")
    shown = plain_table(*columns)
    for s in statuses:
        broken = {p.code for p in s.problems}
        cells = [
            Text(s.pipeline, style="bold red" if broken else ""),
            Text(s.guarantee),
            Text(s.driver.value, style=_STYLE.get(s.driver, "")),
            Text("" if s.batch is None else str(s.batch)),
            Text("" if s.decided_age_s is None else f"{span(s.decided_age_s)} ago"),
            Text("unknown" if s.records is None else f"{s.records:,}"),
            Text(_lag(s, trends), style="red" if "DELIVERED_FALLING_BEHIND" in broken else ""),
            Text(_open(s), style="red" if any("_TRANSACTION_" in c for c in broken) else ""),
            Text(_audit(s), style="red" if "DELIVERED_AUDIT_BROKEN" in broken else ""),
        ]
        if trends is not None:
            rate = trends.rate(s.pipeline)
            cells.insert(6, Text("" if rate is None else f"{rate:,.0f} {trends.rate_arrow(s.pipeline)}".rstrip()))
        if sealed:
            cells.append(Text(_sealed(s), style="red" if any("SEAL" in c for c in broken) else ""))
        if received:
            cells.append(Text(_receivers(s), style="red" if "DELIVERED_RECEIVER_GONE" in broken else ""))
        shown.add_row(*cells)
    return shown


def problems(statuses: Sequence[Status]) -> list[Text]:
    """A line for each problem, with what fixes it."""
    lines = []
    for s in statuses:
        for p in spoken(s.problems):
            line = Text(f"{s.pipeline}: ", style="bold")
            line.append(f"[{p.code}] ", style="bold red")
            line.append(p.text, style="not bold")
            line.append(f"\n    Next: {p.next_step}" if p.next_step else "", style="not bold")
            lines.append(line)
    return lines


def _lag(s: Status, trends: Trends | None) -> str:
    if s.lag_total is None:
        return ""
    waits = f" ({span(s.lag_s_max)})" if s.lag_total and s.lag_s_max is not None else ""
    arrow = trends.lag_arrow(s.pipeline) if trends is not None else ""
    return f"{lag_text(s)}{waits} {arrow}".rstrip()


def _receivers(s: Status) -> str:
    return receivers_text([r for of in s.receivers.values() for r in of])


def _open(s: Status) -> str:
    if s.transactions is None:
        return "-"
    ages = [t.age_s for t in s.transactions if t.age_s is not None]
    return f"{len(s.transactions)}" + (f" ({span(max(ages))})" if ages else "")


def _audit(s: Status) -> str:
    if not s.audits:
        return "-"
    worst = min(s.audits.values(), key=lambda a: ("broken", "unknown", "held").index(a["verdict"]))
    at = datetime.fromtimestamp(worst["at_ms"] / 1000, UTC)
    return f"{worst['verdict']} {at:%Y-%m-%d %H:%M}Z"


def _sealed(s: Status) -> str:
    """Of the sink whose last seal is the oldest."""
    watched = [seals for seals in s.seals.values() if seals.is_watched]
    if not watched:
        return "-"
    oldest = max(watched, key=lambda seals: float("inf") if seals.age_s is None else seals.age_s)
    return sealed_text(oldest)
