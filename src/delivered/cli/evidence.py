"""`delivered evidence`: a pipeline's seals in one file, and the check of such a file."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delivered.cli.command import (
    Commands,
    FileArgument,
    MasterOption,
    Output,
    OutputOption,
    SetOption,
    SparkLogOption,
    console,
    note,
    read,
    say,
    say_json,
    spoken,
    working,
)
from delivered.entry import Pipeline
from delivered.model.errors import UsageError
from delivered.model.options import is_reference, resolve_secret
from delivered.model.secrets import one_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delivered.audit.evidence_file import Evidence, Fault


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
    # Under its name only once it is complete.
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        partial.write_text(evidence.text, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
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
    from delivered.audit.request import found_by
    from delivered.audit.seal import State
    from delivered.model.identity import batches_text

    sealed = [(chain, chain.sealed) for chain in evidence.chains]
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
