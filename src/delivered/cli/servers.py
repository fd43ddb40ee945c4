"""`delivered brokers`: real servers for development, on 127.0.0.1."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from delivered.cli.output import Output, OutputOption, command, say, say_json, working
from delivered.model.errors import UsageError
from delivered_lab import brokers

app = typer.Typer(help="Start and stop real servers for development, on 127.0.0.1.", no_args_is_help=True)

KindArgument = Annotated[str, typer.Argument(help=f"One of: {', '.join(brokers.KINDS)}.")]
FolderOption = Annotated[Path | None, typer.Option(help="Data folder. Default: in the user's cache.")]


@app.command()
@command
def start(
    kind: KindArgument = "kafka",
    folder: FolderOption = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port for clients. Default: a free port.")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Kafka and Pulsar: also listen with TLS.")] = False,
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the server's configuration.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Start a server and wait until it is ready; downloads it the first time."""
    properties = _properties(given or [])
    with working(f"starting {kind}") as progress:
        broker = brokers.start(kind, folder, tls=tls, properties=properties, port=port, say=progress)
    _show(brokers.status(broker.folder), output)


@app.command()
@command
def topic(
    names: Annotated[list[str], typer.Argument(help="Topics to create; existing ones are left unchanged.")],
    partitions: Annotated[int, typer.Option(min=1, max=1_000)] = 4,
    folder: FolderOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Create topics on the Kafka started by `brokers start kafka`."""
    from delivered_lab.brokers.kafka import make_topics

    bootstrap = _kafka(folder)
    made = make_topics(bootstrap, names, partitions)
    if output is Output.JSON:
        say_json({"bootstrap": bootstrap, "made": made})
        return
    for name in names:
        say(f"{name}: {f'created, {partitions} partitions' if name in made else 'already exists'}")


@app.command()
@command
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
    if output is Output.JSON:
        say_json({"topic": topic, "records": records})
    else:
        say(f"{topic}: {records:,} records sent, all acknowledged")


@app.command(name="read")
@command
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
            say(f"{partition}/{offset}  {_shown(key)}  {_shown(value)}")
    if output is Output.JSON:
        say_json({"topic": topic, "records": count})
    else:
        say(f"{topic}: {count:,} committed records")


@app.command()
@command
def fetch(
    kinds: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Download servers into the user's cache, so that they start offline."""
    chosen = kinds or list(brokers.KINDS)
    with working("downloading") as progress:
        brokers.prefetch(chosen, say=progress)
    if output is Output.JSON:
        say_json({"kinds": chosen, "folder": str(brokers.cache_folder())})
    else:
        say(f"{', '.join(chosen)}: in {brokers.cache_folder()}, or with the package")


@app.command()
@command
def stop(kind: KindArgument = "kafka", folder: FolderOption = None, output: OutputOption = Output.TEXT) -> None:
    """Stop a server; its data is kept."""
    place = _place(kind, folder)
    with working(f"stopping {kind}"):
        stopped = brokers.stop(place)
    if output is Output.JSON:
        say_json({"kind": kind, "folder": str(place), "stopped": stopped})
    else:
        say(f"{kind} in {place}: {'stopped' if stopped else 'was not running'}")


@app.command()
@command
def status(kind: KindArgument = "kafka", folder: FolderOption = None, output: OutputOption = Output.TEXT) -> int:
    """Show whether a server is up, and its address (exit code 1 if not)."""
    with working(f"checking {kind}"):
        servers = brokers.status(_place(kind, folder))
    _show(servers, output)
    return 0 if servers.answering else 1


def _kafka(folder: Path | None) -> str:
    return brokers.attach(_place("kafka", folder)).bootstrap


def _shown(value: bytes | None) -> str:
    return "null" if value is None else value.decode(errors="replace")[:200]


def _properties(pairs: list[str]) -> dict[str, str]:

    bad = next((x for x in pairs if not x.partition("=")[0] or "=" not in x), None)
    if bad is not None:
        raise UsageError(
            "OPTION_VALUE", f"--set {bad!r} is not NAME=VALUE.", next_step="write it as in --set num.partitions=4"
        )
    return {name: value for name, _, value in (x.partition("=") for x in pairs)}


def _place(kind: str, folder: Path | None) -> Path:
    brokers.require_kind(kind)
    return folder if folder is not None else brokers.default_folder(kind)


def _show(status: Any, output: Output) -> None:
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
