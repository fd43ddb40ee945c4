"""`delivered verify`: break pipelines on purpose, judge them from outside, keep the evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from delivered.cli.command import Output, OutputOption, note, say
from delivered.model.errors import MissingExtra, UsageError
from delivered.terminal import printer

if TYPE_CHECKING:
    from delivered_lab.verify.case import Result
    from delivered_lab.verify.matrix import Choice, Store
    from delivered_lab.verify.report import RunLog


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
    from delivered_lab.verify.matrix import SPARK, Choice, Store, cases, own_cases, run_matrix, worst
    from delivered_lab.verify.report import RunLog
    from delivered_lab.verify.services import ENDS, SERVICES
    from delivered_lab.verify.systems import SOURCE_KINDS
    from delivered_lab.verify.template import load
    from delivered_lab.verify.workloads import WORKLOADS

    for name in source:
        if name not in SOURCE_KINDS:
            raise UsageError("SOURCE_UNKNOWN", name=name, known=", ".join(SOURCE_KINDS))
    if source and file is not None:
        raise UsageError("VERIFY_SOURCE", source=source[0], file=file)
    if service not in (*SERVICES, *ENDS):
        known = ", ".join((*SERVICES, *ENDS))
        raise UsageError("SERVICE_UNKNOWN", service=service, known=known)
    for name in workload:
        if name not in WORKLOADS:
            raise UsageError("WORKLOAD_UNKNOWN", name=name, known=", ".join(WORKLOADS))
    sources, workloads = tuple(source), tuple(workload)
    choice = Choice(tuple(only), seed, quick, audit_too, service, jobs, minutes, faults, per_place, sources, workloads)
    folder = folder.resolve()
    template = load(file) if file is not None else None
    if template is not None and template.needs_spark and choice.service != SPARK:
        raise UsageError("VERIFY_SERVICE", file=file, service=choice.service)
    if listing:
        for case in cases(choice) if template is None else own_cases(choice, template):
            behind = f"{case.source} to " if case.source else ""
            say(f"{behind}{case.sink}/{case.guarantee.value}/{case.workload}/{case.fault.name}  {case.fault.text}")
        return 0

    store = Store(out)
    if resume:
        store.load()
    log = RunLog(folder, _as_options(file, choice))

    def keep(result: Result, number: int, of: int) -> None:
        log.add(result)
        what = f"{result.between}/{result.guarantee}/{result.workload}/{result.fault}"
        why = f": {'; '.join(result.reasons)}" if result.reasons else ""
        note(f"{number}/{of}  {result.verdict:8} {what}  {result.fired} faults, {result.seconds:.0f} s{why}")

    results = run_matrix(choice, store, folder, resume=resume, say=note, done=keep, template=template)
    page = out.with_suffix(".html")
    listed = _write_pages(store, page, log)
    everything = list(store.results.values())
    if output is Output.JSON:
        say(json.dumps([r.to_json() for r in everything], indent=1, ensure_ascii=False))
    else:
        _show(everything)
        say(f"results: {out}" + (f"; page: {page}" if page.exists() else "") + (f"; runs: {listed}" if listed else ""))
    if not results and not everything:
        note("no matching cases")
        return 2
    return worst(everything).exit_code


def _as_options(file: Path | None, choice: Choice) -> str:
    """How this run differs from the default, as options."""
    options = [str(file)] if file is not None else []
    options += [f"--only {pattern}" for pattern in choice.only]
    options += [f"--workload {name}" for name in choice.workloads]
    options += ["--quick"] if choice.quick else []
    options += [f"--faults {choice.faults}"] if choice.faults is not None else []
    options += [f"--source {name}" for name in choice.sources]
    options += [f"--per-place {choice.per_place}"] if choice.per_place is not None else []
    return " ".join([*options, f"--seed {choice.seed}", f"--service {choice.service}"])


def _write_pages(store: Store, page: Path, log: RunLog) -> Path | None:
    """Write the page of the store, the page of this run and the list of runs; returns the last."""
    from delivered_lab.verify.report import write_report

    try:
        write_report(list(store.results.values()), page)
        return log.end()
    except MissingExtra as error:
        note(f"no page was written: {error}")
        return None


def _show(results: list[Result]) -> None:
    """One line per sink and guarantee, then every case that did not hold."""
    from delivered_lab.verify.judge import Verdict

    table = Table(title="delivered verify")
    for name in ("sink", "guarantee", "service", "cases", "faults", *Verdict, "lost", "duplicated"):
        table.add_column(str(name), justify="left" if name in ("sink", "guarantee", "service") else "right")
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for r in results:
        groups.setdefault((r.between, r.guarantee, r.service), []).append(r)
    for key, group in sorted(groups.items()):
        counts = [str(sum(r.verdict == v.value for r in group)) for v in Verdict]
        lost, duplicated = sum(r.lost for r in group), sum(r.duplicated for r in group)
        fired = sum(r.fired for r in group)
        table.add_row(*key, str(len(group)), str(fired), *counts, str(lost), str(duplicated))
    printer(width=120).print(table)
    for r in results:
        if r.verdict != Verdict.HELD.value:
            say(f"{r.verdict}: {r.between}/{r.guarantee}/{r.workload}/{r.fault}: {'; '.join(r.reasons)}")
            say(f"  history: {r.folder}/history.jsonl; again: {r.again}")
