"""`delivered verify`: break pipelines on purpose, judge them from outside, keep the evidence."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from delivered.cli.output import Output, note, say
from delivered.model.errors import UsageError
from delivered.terminal import printer
from delivered_lab.verify.case import Result
from delivered_lab.verify.judge import Verdict
from delivered_lab.verify.matrix import SPARK, Choice, Store, cases, own_cases, run_matrix, worst
from delivered_lab.verify.report import RunLog
from delivered_lab.verify.template import load


def verify(
    file: Path | None, choice: Choice, out: Path, folder: Path, resume: bool, listing: bool, output: Output
) -> int:
    """Run the chosen cases; returns the exit code: 0 all held, 1 something broken, 3 unknown."""
    template = load(file) if file is not None else None
    if template is not None and template.needs_spark and choice.service != SPARK:
        raise UsageError(
            "VERIFY_SERVICE",
            f"The transform of {file} needs Spark, and --service is {choice.service!r}.",
            next_step="write --service spark",
        )
    if listing:
        for case in cases(choice) if template is None else own_cases(choice, template):
            behind = f"{case.source} to " if case.source else ""
            say(f"{behind}{case.sink}/{case.guarantee.value}/{case.workload}/{case.fault.name}  {case.fault.text}")
        return 0

    def done(result: Result, number: int, of: int) -> None:
        what = f"{result.between}/{result.guarantee}/{result.workload}/{result.fault}"
        why = f": {'; '.join(result.reasons)}" if result.reasons else ""
        note(f"{number}/{of}  {result.verdict:8} {what}  {result.fired} faults, {result.seconds:.0f} s{why}")

    store = Store(out)
    if resume:
        store.load()
    log = RunLog(folder, _as_options(file, choice))

    def keep(result: Result, number: int, of: int) -> None:
        log.add(result)
        done(result, number, of)

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
    from delivered.model.errors import MissingExtra
    from delivered_lab.verify.report import write_report

    try:
        write_report(list(store.results.values()), page)
        return log.end()
    except MissingExtra as error:
        note(f"no page was written: {error}")
        return None


def _show(results: list[Result]) -> None:
    """One line per sink and guarantee, then every case that did not hold."""
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
