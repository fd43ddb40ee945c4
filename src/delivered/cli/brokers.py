"""`delivered brokers`: real servers for development, on 127.0.0.1."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from delivered.cli.command import Commands, Output, OutputOption, answer, say, say_json, working
from delivered.model.errors import UsageError
from delivered_lab import brokers

app = Commands(help="Start and stop real servers for development, on 127.0.0.1.", no_args_is_help=True)

KindArgument = Annotated[str, typer.Argument(help=f"One of: {', '.join(brokers.KINDS)}.")]
FolderOption = Annotated[Path | None, typer.Option(help="Data folder. Default: in the user's cache.")]


@app.command()
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
    _show(brokers.status(broker.folder), output)


@app.command()
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


@app.command()
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


@app.command(name="read")
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


@app.command()
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


@app.command()
def stop(kind: KindArgument = "kafka", folder: FolderOption = None, output: OutputOption = Output.TEXT) -> None:
    """Stop a server; its data is kept."""
    place = _place(kind, folder)
    with working(f"stopping {kind}"):
        stopped = brokers.stop(place)
    text = f"{kind} in {place}: {'stopped' if stopped else 'was not running'}"
    answer(output, {"kind": kind, "folder": str(place), "stopped": stopped}, text)


@app.command()
def status(kind: KindArgument = "kafka", folder: FolderOption = None, output: OutputOption = Output.TEXT) -> int:
    """Show whether a server is up, and its address (exit code 1 if not)."""
    with working(f"checking {kind}"):
        servers = brokers.status(_place(kind, folder))
    _show(servers, output)
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
