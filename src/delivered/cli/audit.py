"""`delivered audit`: one pipeline, or a chain of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delivered.cli.command import (
    CheckpointOption,
    GuaranteeOption,
    LogFormat,
    MasterOption,
    Output,
    OutputOption,
    SetOption,
    SparkLogOption,
    console,
    log_as,
    log_line,
    read,
    say,
    stop_on_signal,
    working,
)
from delivered.cli.run import LogFormatOption
from delivered.machine import without_pandas
from delivered.model.errors import OutcomeUnknown, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 1.0
"""How often --follow looks which audits are due."""


def audit(
    files: Annotated[
        list[Path],
        typer.Argument(help="Pipeline file; with --chain, two or more; with --follow, also folders.", metavar="FILE"),
    ],
    set_: SetOption = [],  # noqa: B006
    guarantee: GuaranteeOption = None,
    checkpoint: CheckpointOption = None,
    master: MasterOption = None,
    sink: Annotated[str | None, typer.Option(metavar="NAME", help="Audit this sink only. Default: all sinks.")] = None,
    samples: Annotated[int, typer.Option(min=0, max=10_000, help="Damaged records to list, per class.")] = 20,
    sink_from: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Sink offsets to start reading from, if the sink holds foreign records."),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Run the transform over the source range again and compare by key."),
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Read everything once more, and seal it.")] = False,
    since: Annotated[
        int | None, typer.Option(metavar="BATCH", help="Continue from the seal before this batch.")
    ] = None,
    from_now: Annotated[
        bool,
        typer.Option(
            "--from-now", help="Compare nothing: seal everything up to now as never audited, and continue from here."
        ),
    ] = False,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="1/N",
            help="Compare only one of N shares of a table's keys, by hash: 1/1000, another one each time; 7/1000, the "
            "seventh (the first: '#1/1000'). The report gives the probability that wrong keys would have been found.",
        ),
    ] = None,
    chain: Annotated[
        bool,
        typer.Option(
            "--chain",
            help="Audit pipelines that read each other's sinks, in the order of the data: per hop, and from "
            "the first source to the last sink.",
        ),
    ] = False,
    in_spark: Annotated[
        bool,
        typer.Option("--spark", help="Use Spark even for a small range without SQL, which needs none."),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Audit these pipelines again and again, each by its `audit: {every: ...}`, until stopped. Continues "
            "from the last seals; several of these processes do no harm.",
        ),
    ] = False,
    every: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --follow: instead of the files' own. Example: 15 min.")
    ] = None,
    share: Annotated[
        str | None, typer.Option(help="With --every: share of the time that audits of a pipeline may take.")
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    spark_log: SparkLogOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Read source and sink back from the last seal on, list lost, duplicated and altered records, and seal what was
    proved; exit code 1 if the guarantee was violated, 3 if unknown."""
    from delivered.audit.report import render
    from delivered.audit.request import KeyShare, check_since, sealing
    from delivered.checkpoint.folder import read_logged
    from delivered.cli.run import SparkLog, quiet_spark

    one: dict[str, object] = {"--set": set_, "--guarantee": guarantee, "--checkpoint": checkpoint}
    one |= {"--sink-from": sink_from, "--recompute": recompute, "--keys": keys}
    one |= {"--since": since is not None, "--from-now": from_now}
    if follow:
        one |= {"--sink": sink, "--chain": chain, "--full": full, "--spark": in_spark}
        if wrong := _chosen({**one, "--output json": output is Output.JSON}):
            raise UsageError("FOLLOW_OPTION", wrong=wrong)
        if share is not None and every is None:
            raise UsageError("FOLLOW_MISSING")
        return _follow(files, every, share, master, log_format)
    if every is not None or share is not None:
        raise UsageError("FOLLOW_MISSING")
    if chain:
        if wrong := _chosen(one):
            raise UsageError("CHAIN_OPTION", wrong=wrong)
        return _audit_chain(files, master, sink, samples, full, spark_log, output)
    if len(files) > 1:
        raise UsageError("AUDIT_FILES", file_count=len(files))
    pipeline = read(files[0], set_, guarantee=guarantee, checkpoint=checkpoint, master=master)
    start = _offsets("--sink-from", sink_from)
    if start is not None and sink is None and len(pipeline.sinks) > 1:
        raise UsageError("AUDIT_SINK.SINK_FROM")
    if keys is not None:
        KeyShare.parse(keys)
    sealing(
        full=full,
        since=since,
        from_now=from_now,
        sink_from=start is not None,
        keys=keys is not None,
        recompute=recompute,
    )
    if sink in (None, *pipeline.sink_names):  # another is refused by its name
        newest = read_logged(pipeline.checkpoint)[1]
        if newest is None:
            raise OutcomeUnknown("CHECKPOINT_MISSING.AUDIT", location=pipeline.checkpoint, file=files[0])
        if since is not None:
            check_since(since, newest)
    with working("starting") as progress, ExitStack() as session, ExitStack() as light:
        if pipeline.transform.function is None:  # others may use it
            light.enter_context(without_pandas())

        @cache
        def spark() -> SparkSession:
            light.close()
            return session.enter_context(quiet_spark(pipeline, SparkLog.of(pipeline, spark_log)))

        if in_spark:
            progress("starting Spark")
        reports = [
            pipeline.audit(
                spark() if in_spark else spark,
                sink=name,
                samples_max=samples,
                sink_from=start,
                progress=progress,
                recompute=recompute,
                full=full,
                since=since,
                from_now=from_now,
                keys=keys,
            )
            for name in ([sink] if sink else pipeline.sink_names)
        ]
    if output is Output.JSON:
        say(reports[0].to_json() if len(reports) == 1 else json.dumps([r.to_dict() for r in reports], indent=2))
    else:
        for report in reports:
            console().print(render(report))
    codes = {r.exit_code for r in reports}
    return 1 if 1 in codes else max(codes)


def _chosen(options: Mapping[str, object]) -> str:
    return ", ".join(name for name, value in options.items() if value)


def _follow(paths: list[Path], every: str | None, share: str | None, master: str | None, log_format: LogFormat) -> int:
    from delivered.model.schedule import Cadence
    from delivered.operate.asking import files
    from delivered.operate.continuous import AuditProcess, Follower

    log_as(log_format)
    cadence = None if every is None else Cadence.parse(every, share)
    files(paths)  # a folder without pipelines is refused at the start; later it is waited for
    process = AuditProcess(() if master is None else ("--master", master))
    stop = threading.Event()

    def stopped() -> None:
        stop.set()
        process.end()

    stop_on_signal(stopped)
    follower = Follower(paths, process, log_line, cadence)
    log_line(f"following {', '.join(map(str, paths))}")
    while not stop.wait(_POLL_S):
        follower.step(stop.is_set)
    return 0


def _audit_chain(
    files: list[Path],
    master: str | None,
    sink: str | None,
    samples: int,
    full: bool,
    spark_log: str | None,
    output: Output,
) -> int:
    from delivered.audit.report import render
    from delivered.audit.spark.chain import audit_chain, links_of
    from delivered.cli.run import SparkLog, quiet_spark

    pipelines = [read(file, [], master=master) for file in files]
    links_of(pipelines)
    last = pipelines[-1]
    with working("starting Spark") as progress, quiet_spark(last, SparkLog.of(last, spark_log)) as spark:
        report = audit_chain(pipelines, spark, sink=sink, samples_max=samples, progress=progress, full=full)
    if output is Output.JSON:
        say(report.to_json())
    else:
        console().print(render(report))
    return report.exit_code


def _offsets(option: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        offsets = json.loads(text)
    except ValueError:
        offsets = None
    if not isinstance(offsets, dict):
        raise UsageError("OFFSETS_VALUE", option=option, text=text)
    return offsets
