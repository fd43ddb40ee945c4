"""What `delivered_lab` does for users.

`delivered brokers`: real servers for development, on 127.0.0.1. `delivered verify`: break pipelines on purpose, judge
them from outside, keep the evidence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from delivered.cli.command import Commands, Output, OutputOption, answer, note, say, say_json, working
from delivered.model.errors import MissingExtra, UsageError
from delivered.terminal import printer
from delivered_lab import brokers

if TYPE_CHECKING:
    from delivered_lab.verify.case import Result
    from delivered_lab.verify.matrix import Choice, Store
    from delivered_lab.verify.report import RunLog


brokers_app = Commands(help="Start and stop real servers for development, on 127.0.0.1.", no_args_is_help=True)

KindArgument = Annotated[str, typer.Argument(help=f"One of: {', '.join(brokers.KINDS)}.")]
FolderOption = Annotated[Path | None, typer.Option(help="Data folder. Default: in the user's cache.")]


@brokers_app.command()
def start(
    kind: KindArgument = "kafka",
    folder: FolderOption = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port for clients. Default: a free port.")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Kafka and Pulsar: also listen with TLS.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the server's configuration.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Start a server and wait until it is ready; downloads it the first time."""
    properties = _properties(set_ or [])
    with working(f"starting {kind}") as progress:
        broker = brokers.start(kind, folder, tls=tls, properties=properties, port=port, say=progress)
    _show_server(brokers.status(broker.folder), output)


@brokers_app.command()
def topic(
    names: Annotated[list[str], typer.Argument(help="Topics to create; existing ones are left unchanged.")],
    partitions: Annotated[int, typer.Option(min=1, max=1_000)] = 4,
    folder: FolderOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Create topics on the Kafka started by `brokers start kafka`."""
    from delivered_lab.brokers.kafka import make_topics

    bootstrap = _kafka(folder)
    created = make_topics(bootstrap, names, partitions)
    text = (f"{n}: {f'created, {partitions} partitions' if n in created else 'already exists'}" for n in names)
    answer(output, {"bootstrap": bootstrap, "made": created}, "\n".join(text))


@brokers_app.command()
def produce(
    topic: Annotated[str, typer.Argument(help="An existing topic.")],
    records: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Number of records: orders as JSON, with a key.")
    ] = 1_000,
    folder: FolderOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Send sample records to a topic of that Kafka."""
    from delivered_lab.brokers import kafka

    kafka.produce(_kafka(folder), topic, records)
    answer(output, {"topic": topic, "records": records}, f"{topic}: {records:,} records sent, all acknowledged")


@brokers_app.command(name="read")
def read_topic(
    topic: Annotated[str, typer.Argument(help="An existing topic.")],
    show: Annotated[int, typer.Option(min=0, help="Records to print; all are counted.")] = 3,
    folder: FolderOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Read a topic of that Kafka from start to end, with read_committed."""
    from delivered_lab.brokers.kafka import consume

    count = 0
    for partition, offset, key, value in consume(_kafka(folder), topic):
        count += 1
        if count <= show and output is Output.TEXT:
            say(f"{partition}/{offset}  {_as_text(key)}  {_as_text(value)}")
    answer(output, {"topic": topic, "records": count}, f"{topic}: {count:,} committed records")


@brokers_app.command()
def fetch(
    kinds: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Download servers into the user's cache, so that they start offline."""
    chosen = kinds or list(brokers.KINDS)
    with working("downloading") as progress:
        brokers.prefetch(chosen, say=progress)
    folder = brokers.cache_folder()
    answer(output, {"kinds": chosen, "folder": str(folder)}, f"{', '.join(chosen)}: in {folder}, or with the package")


@brokers_app.command()
def stop(kind: KindArgument = "kafka", folder: FolderOption = None, output: OutputOption = Output.TEXT) -> None:
    """Stop a server; its data is kept."""
    place = _place(kind, folder)
    with working(f"stopping {kind}"):
        stopped = brokers.stop(place)
    text = f"{kind} in {place}: {'stopped' if stopped else 'was not running'}"
    answer(output, {"kind": kind, "folder": str(place), "stopped": stopped}, text)


@brokers_app.command()
def status(kind: KindArgument = "kafka", folder: FolderOption = None, output: OutputOption = Output.TEXT) -> int:
    """Show whether a server is up, and its address (exit code 1 if not)."""
    with working(f"checking {kind}"):
        servers = brokers.status(_place(kind, folder))
    _show_server(servers, output)
    return 0 if servers.answering else 1


def _kafka(folder: Path | None) -> str:
    return brokers.attach(_place("kafka", folder)).bootstrap


def _as_text(value: bytes | None) -> str:
    return "null" if value is None else value.decode(errors="replace")[:200]


def _properties(pairs: list[str]) -> dict[str, str]:
    bad = next((x for x in pairs if not x.partition("=")[0] or "=" not in x), None)
    if bad is not None:
        raise UsageError("OPTION_VALUE.SET", text=bad)
    return {name: value for name, _, value in (x.partition("=") for x in pairs)}


def _place(kind: str, folder: Path | None) -> Path:
    brokers.require_kind(kind)
    return folder if folder is not None else brokers.default_folder(kind)


def _show_server(status: Any, output: Output) -> None:
    if output is Output.JSON:
        say_json({k: (str(v) if isinstance(v, Path) else v) for k, v in status.__dict__.items()})
        return
    if status.bootstrap is None:
        say(f"no server was ever started in {status.folder}")
        return
    state = "is up" if status.answering else "is running, but does not answer" if status.running else "is stopped"
    process = f" (process {status.pid})" if status.pid else ""
    say(f"{status.kind} {state}: {status.url}{process}, data in {status.folder}")
    for protocol, address in status.listeners.items():
        if address != status.bootstrap:
            say(f"  {protocol} {address}")
    if not status.answering:
        return
    say(f"  pipeline  {status.pipeline}")
    for what, text in status.first_steps.items():
        say(f"  {what:9} {text}")


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
    resume: Annotated[bool, typer.Option("--resume", help="Skip cases that have a verdict of this code.")] = False,
    stored: Annotated[
        Path | None,
        typer.Option(help="Published results (docs/verified.json): what they lack, or have of older code, runs first."),
    ] = None,
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
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Through Spark, start every run as a user does, and measure how soon it is back after a kill. "
            "Default: drivers that were started ahead take the runs.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Results as JSON; an HTML page is written next to it.")] = Path(
        "build/verify.json"
    ),
    folder: Annotated[Path, typer.Option(help="Folder for histories and output of every case.")] = Path("build/verify"),
    listing: Annotated[bool, typer.Option("--list", help="Only list the cases.")] = False,
    output: OutputOption = Output.TEXT,
) -> int:
    """Inject faults at every failure point and judge from outside whether the guarantee held."""
    from delivered_lab.verify.fixture import load_template
    from delivered_lab.verify.matrix import SPARK, Choice, Store, cases, own_cases, read_cases, run_matrix, worst
    from delivered_lab.verify.report import RunLog
    from delivered_lab.verify.services import ENDS, SERVICES
    from delivered_lab.verify.systems import SOURCE_KINDS
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
    choice = Choice(
        tuple(only), seed, quick, audit_too, service, jobs, minutes, faults, per_place, sources, workloads, fresh
    )
    folder = folder.resolve()
    template = load_template(file) if file is not None else None
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

    published = read_cases(stored) if stored is not None else None
    results = run_matrix(choice, store, folder, resume=resume, say=note, done=keep, template=template, known=published)
    page = out.with_suffix(".html")
    listed = _write_pages(store, page, log)
    everything = list(store.results.values())
    if output is Output.JSON:
        say(json.dumps([r.to_json() for r in everything], indent=1, ensure_ascii=False))
    else:
        _show_results(everything)
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
    options += ["--fresh"] if choice.fresh else []
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


def _show_results(results: list[Result]) -> None:
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
