"""`delivered audit`: one pipeline, or a chain of them. `delivered evidence`: a pipeline's seals in one file, and the
check of such a file.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delivered.cli.command import (
    CheckpointOption,
    Commands,
    FileArgument,
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
    note,
    read,
    say,
    say_json,
    spoken,
    stop_on_signal,
    working,
    write_file,
)
from delivered.cli.run import LogFormatOption
from delivered.machine import without_pandas
from delivered.model.errors import OutcomeUnknown, Refused, UsageError, one_line
from delivered.model.options import is_reference, resolve_secret

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delivered.audit.evidence_file import Evidence, Fault
    from delivered.entry import Pipeline


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
    from delivered.checkpoint import read_logged
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
    from delivered.operate.asking import files
    from delivered.operate.continuous import AuditProcess, Follower
    from delivered.pipeline.definition import Cadence

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


class _Evidence(typer.core.TyperGroup):
    """`delivered evidence orders.yaml` writes: the command `write` needs no name."""

    unnamed = "write"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named or not args else [self.unnamed, *args])


evidence_app = Commands(
    cls=_Evidence,
    help="`delivered evidence PIPELINE.yaml` writes a pipeline's seals into one file; `check` checks such a file.",
    no_args_is_help=True,
)

_NONE = "none"
_KEY_HELP = "A PEM file, file:PATH, or env:NAME of a variable that holds the key."


@evidence_app.command("write")
def write(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    sink: Annotated[str | None, typer.Option(metavar="NAME", help="Only this sink. Default: all sinks.")] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="BATCH|TIME", help="First batch, or when it was sealed. Default: the first."),
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="BATCH|TIME", help="Last batch, or when it was sealed. Default: the newest.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: standard output.")] = None,
    sign: Annotated[
        str | None, typer.Option(metavar="KEY", help=f"Sign it with this private Ed25519 key. {_KEY_HELP}")
    ] = None,
) -> None:
    """Write the seals of a pipeline's audits into one JSON file, with plan, versions and positions. Needs no Spark."""
    from delivered.audit.evidence_file import parse_bound
    from delivered.audit.evidence_file import sign as signed

    start = parse_bound("--from", from_) if from_ is not None else None
    end = parse_bound("--to", to) if to is not None else None
    pipeline = read(file, set_)
    key = _key("--sign", sign) if sign is not None else None
    with working(f"reading the seals of {pipeline.name}"):
        evidence = pipeline.evidence(sink=sink, start=start, end=end)
    if key is not None and sign is not None:
        evidence = signed(evidence, key, sign)
    if out is None:
        sys.stdout.write(evidence.text)
        return
    try:
        write_file(out, evidence.text)
    except OSError as error:
        raise UsageError("EVIDENCE_WRITE", file=out, error=error.strerror) from None
    for chain in evidence.chains:
        note(f"{out}: {chain.sink}, seals {chain.first} to {chain.last}")


@evidence_app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="The evidence file.", show_default=False)],
    pipeline: Annotated[
        Path | None,
        typer.Argument(help="The pipeline file: compare with the seals in its ledger, too.", show_default=False),
    ] = None,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help=f"Check the signature by this public key. {_KEY_HELP}")
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="BATCHES",
            help="With a pipeline file: compare these sealed batches with source and sink once more, for example "
            "120-180; all: those that are still there; none.",
        ),
    ] = "all",
    master: MasterOption = None,
    spark_log: SparkLogOption = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Check that an evidence file is as it was written, and its chain of seals intact; exit code 1 if not."""
    from delivered.audit.evidence_file import check_signature, read_evidence

    batches = _batches(recompute)
    if batches is not None and pipeline is None:
        raise UsageError("EVIDENCE_ALONE", batches=recompute, file=file)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UsageError("EVIDENCE_FILE", file=file, error=error.strerror) from None
    evidence, found = read_evidence(raw, str(file))
    faults, says = list(found), list[str]()
    if key is not None:
        fault = check_signature(evidence, _key("--key", key), key)
        faults += [fault] if fault is not None else []
        says += [] if fault is not None else ["the signature is of that key"]
    elif evidence.signature is not None:
        says.append("the file is signed, which was not checked: pass --key")
    if pipeline is not None:
        from delivered.operate.evidence import compare_with_ledger

        definition = read(pipeline, set_, master=master)
        with working(f"reading the seals of {definition.name}"):
            differs, same = compare_with_ledger(evidence, definition)
        faults += differs
        says += same
        if recompute != _NONE and faults:
            says.append("nothing was compared once more: the seals are not those of the ledger")
        elif recompute != _NONE:
            differs, same = _compared_again(definition, evidence, batches, spark_log)
            faults += differs
            says += same
    _report(output, evidence, faults, says)
    return 1 if faults else 0


def _compared_again(
    pipeline: Pipeline, evidence: Evidence, batches: range | None, spark_log: str | None
) -> tuple[list[Fault], list[str]]:
    """Sealed batches that differ, and those that do not."""
    from delivered.audit.evidence_file import Fault, Kind
    from delivered.audit.recheck import Again
    from delivered.cli.run import SparkLog, quiet_spark

    faults: list[Fault] = []
    says: list[str] = []
    with working("starting") as progress, ExitStack() as session:

        @cache
        def spark() -> SparkSession:
            return session.enter_context(quiet_spark(pipeline, SparkLog.of(pipeline, spark_log)))

        again = pipeline.recheck(evidence, spark, batches=batches, progress=progress)
    for sink, found in again.items():
        if not found:
            says.append(f"{sink}: nothing was compared: the newest seals of these batches are not in the file")
        for one in found:
            if one.outcome is Again.DIFFERS:
                faults.append(Fault(Kind.DIFFERS, str(one), sink))
            else:
                says.append(f"{sink}: {one}")
    return faults, says


def _batches(text: str) -> range | None:
    """Of `--recompute`; None: all, or none."""
    if text in ("all", _NONE):
        return None
    first, _, last = text.partition("-")
    if not (first.isascii() and first.isdigit()) or (last and not (last.isascii() and last.isdigit())):
        raise UsageError("EVIDENCE_BATCHES", text=text)
    batches = range(int(first), int(last or first) + 1)
    if not batches:
        raise UsageError("EVIDENCE_BATCHES", text=text)
    return batches


def _report(output: Output, evidence: Evidence, faults: list[Fault], says: list[str]) -> None:
    from delivered.audit.evidence_file import Kind
    from delivered.audit.request import found_by
    from delivered.audit.seal import State
    from delivered.model.identity import batches_text

    sealed = []
    for chain in evidence.chains:
        try:
            sealed.append((chain, chain.sealed))
        except Refused:  # by a later version, if nobody changed the file
            if not any(fault.kind is Kind.CHANGED and not fault.sink for fault in faults):
                raise
    if output is Output.JSON:
        say_json(
            {
                "pipeline": evidence.pipeline,
                "intact": not faults,
                "faults": [{"kind": f.kind.value, "sink": f.sink, "text": f.text} for f in faults],
                "says": says,
                "sinks": {chain.sink: of.to_json() for chain, of in sealed},
            }
        )
        return
    say(one_line(f"{evidence.pipeline}: {'not intact' if faults else 'intact'}"))
    for fault in faults:
        console().print(one_line(f"  {fault.kind.value}: {fault}"), style="red", markup=False)
    for text in says:
        say(one_line(f"  {text}"))
    for chain, of in sealed:
        say(one_line(f"{chain.sink}, seals {chain.first} to {chain.last}:"))
        for r in of.ranges:
            say(one_line(f"  batches {r.batches}: {r.state.value}, {r.records:,} records by the ledger"))
            for reason in r.reasons:
                say(one_line(f"    {spoken(reason)}"))
        for seal in of.shares:
            batches = batches_text(seal.first, seal.last)
            say(one_line(f"  {seal.share}, {batches}: {seal.state.value}, {found_by(seal.keys or {})}"))
            for reason in (*seal.breaches, *seal.unknowns):
                say(one_line(f"    {spoken(reason)}"))
        for r in of.superseded:
            if r.state is not State.HELD:
                say(one_line(f"  batches {r.batches}: {r.state.value}, before they were compared again"))


def _key(option: str, reference: str) -> bytes:
    value = reference if is_reference(reference) else f"file:{reference}"
    return resolve_secret(option, value).encode()
