"""The commands."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer

from delivered.cli import audit, dead_letters, explain, rebuild, replay, sagas, servers, status, transactions
from delivered.cli.options import (
    CheckpointOption,
    FileArgument,
    GuaranteeOption,
    LogFormat,
    LogFormatOption,
    MasterOption,
    SetOption,
    StopTimeoutOption,
    TakeoverOption,
    WaitOption,
    log_as,
    read,
)
from delivered.cli.output import Output, OutputOption, command, say, say_json, spoken, tell_warnings, working
from delivered.model.errors import UsageError
from delivered.model.limits import OUTAGE_PATIENCE_S, RECEIVERS_MAX
from delivered.pipeline.file import parse_override

app = typer.Typer(
    help="Delivery guarantees for PySpark Structured Streaming: choose, explain, run, audit.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(transactions.app, name="transactions")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(dead_letters.app, name="letters", hidden=True)  # short for it
app.add_typer(sagas.app, name="sagas")
app.add_typer(servers.app, name="brokers")
app.command()(audit.audit)
app.command()(replay.replay)
app.command()(rebuild.rebuild)
app.command()(explain.explain)
app.command()(status.status)
app.command()(status.top)
app.command()(status.metrics)
app.command()(status.report)
app.command()(status.ui)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"delivered {installed_version('delivered')}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


@app.command()
@command
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("delivered-example"),
    output: OutputOption = Output.TEXT,
) -> None:
    """Write a ready-to-run example: a log of orders into SQLite, no server needed."""
    from delivered.cli.example import write_example

    file, records = write_example(folder)
    if output is Output.JSON:
        say_json({"file": str(file), "records": records})
        return
    say(f"{file}: a pipeline, and {records} records for it to deliver")
    say(f"Next: delivered plan {file}; delivered run {file}; delivered audit {file}")


@app.command()
@command
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
    from delivered.cli.run import SparkLog, quiet_spark
    from delivered.planner import Refusal, to_json

    pipeline = read(file, set_, guarantee=guarantee, checkpoint=checkpoint, master=master)
    with working(f"checking source and sink of {pipeline.name}"):
        answer = pipeline.plan(offline=offline, takeover=takeover)
    if not offline and pipeline.transform.kind == "sql" and not isinstance(answer, Refusal):
        with (
            working("checking the SQL against the source's columns"),
            quiet_spark(pipeline, SparkLog.of(pipeline, None)) as spark,
        ):
            answer = pipeline.plan(spark, takeover=takeover)
    answer = spoken(answer)
    if output is Output.JSON:
        say_json(to_json(answer))
    else:
        say(str(answer))
    return answer.error.exit_code if isinstance(answer, Refusal) else 0


@app.command()
@command
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


@app.command()
@command
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
    from delivered.cli.run import run_pipeline

    log_as(log_format)
    trigger = "available_now" if available_now else None
    pipeline = read(file, set_, guarantee=guarantee, checkpoint=checkpoint, master=master, trigger=trigger)
    more: dict[str, Any] = {"wait": wait, "metrics_port": metrics_port}
    if not receivers:
        return run_pipeline(pipeline, takeover, stop_timeout, spark_log, output, **more)
    from delivered.pipeline.receive import queue_among, receiving

    tell_warnings()
    patience_s = OUTAGE_PATIENCE_S if wait else 0.0
    with receiving(queue_among(pipeline.sources), receivers, patience_s=patience_s) as raise_failure:
        return run_pipeline(pipeline, takeover, stop_timeout, spark_log, output, raise_failure, **more)


@app.command()
@command
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
) -> int:
    """Receive a queue into the durable log of a pipeline's source until stopped: persist, then acknowledge."""
    from delivered.cli.receive import receive_file

    log_as(log_format)
    return receive_file(file, dict(parse_override(s) for s in set_), processes, idle_seconds, output, wait=wait)


@app.command()
@command
def doctor(
    file: Annotated[Path | None, typer.Argument(help="Also check this pipeline's source and sink.")] = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Check this machine for what a pipeline needs; every problem comes with its next step."""
    from delivered.cli.doctor import Health, examine, show

    with working("checking this machine"):
        checks = examine(read(file, []) if file is not None else None)
    if output is Output.JSON:
        say_json([c.to_json() for c in checks])
    else:
        show(checks)
    return 1 if any(c.health is Health.BAD for c in checks) else 0


@app.command()
@command
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(help="Verify your own pipeline, on copies of 600 of its records. Default: every sink."),
    ] = None,
    only: Annotated[
        list[str],
        typer.Option(
            help="sink/guarantee/workload/fault, with * as wildcard; or just one of the four, or a failure point (F7)."
        ),
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="The same seed gives the same records and the same faults.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Only the most telling cases.")] = False,
    service: Annotated[
        str,
        typer.Option(
            help="spark: real pipelines; engine: without Spark, much faster; producer: applications with an outbox and "
            "their relay; consumer: consumers with an inbox, and sagas."
        ),
    ] = "spark",
    audit_too: Annotated[bool, typer.Option("--audit", help="Also run `delivered audit` after every case.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Skip cases that already have a verdict.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=16, help="Cases in parallel; each job has its own broker.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0, help="Start no case after this long.")] = None,
    faults: Annotated[
        int | None, typer.Option(min=1, help="Soak test: seed after seed, until this many faults were injected.")
    ] = None,
    per_place: Annotated[
        int | None,
        typer.Option(min=1, help="Only this many cases per failure point, guarantee and sink: the quickest."),
    ] = None,
    source: Annotated[
        list[str],
        typer.Option(
            help="Feed every sink from this source (pulsar, rabbitmq_stream, rabbitmq, ...), and inject faults there, "
            "too. Repeatable. Default: each sink's own source."
        ),
    ] = [],  # noqa: B006
    workload: Annotated[
        list[str], typer.Option(help="Only this workload (totals, sessions, join, ...: docs/verify.md). Repeatable.")
    ] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Results as JSON; an HTML page is written next to it.")] = Path(
        "build/verify.json"
    ),
    folder: Annotated[Path, typer.Option(help="Folder for histories and output of every case.")] = Path("build/verify"),
    listing: Annotated[bool, typer.Option("--list", help="Only list the cases.")] = False,
    output: OutputOption = Output.TEXT,
) -> int:
    """Inject faults at every failure point and judge from outside whether the guarantee held."""
    from delivered.cli.verify import verify as run_verify
    from delivered_lab.verify.matrix import Choice
    from delivered_lab.verify.services import ENDS, SERVICES
    from delivered_lab.verify.systems import SOURCE_KINDS
    from delivered_lab.verify.workloads import WORKLOADS

    for name in source:
        if name not in SOURCE_KINDS:
            raise UsageError(
                "SOURCE_UNKNOWN",
                f"--source is {name!r}; it must be one of {', '.join(SOURCE_KINDS)}.",
                next_step="use one of these",
            )
    if source and file is not None:
        raise UsageError(
            "VERIFY_SOURCE",
            f"--source is {source[0]!r}, but {file} has its own source.",
            next_step="leave --source out",
        )
    if service not in (*SERVICES, *ENDS):
        known = ", ".join((*SERVICES, *ENDS))
        raise UsageError(
            "SERVICE_UNKNOWN",
            f"--service is {service!r}; it must be one of {known}.",
            next_step="delivered verify --service engine",
        )
    for name in workload:
        if name not in WORKLOADS:
            raise UsageError(
                "WORKLOAD_UNKNOWN",
                f"--workload is {name!r}; it must be one of {', '.join(WORKLOADS)}.",
                next_step="delivered verify --list, which names them",
            )
    sources, workloads = tuple(source), tuple(workload)
    choice = Choice(tuple(only), seed, quick, audit_too, service, jobs, minutes, faults, per_place, sources, workloads)
    return run_verify(file, choice, out, folder.resolve(), resume, listing, output)


if __name__ == "__main__":
    app()
