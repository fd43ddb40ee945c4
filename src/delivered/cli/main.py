"""The commands, by name. Each one's module is imported when it is run: `--help` and mistakes need none of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Place(NamedTuple):
    """Where a command is.

    Attributes:
        module: in `delivered.cli`.
        name: of a function, or of a group of commands.
        help: its first sentence, as there; a test compares them.
    """

    module: str
    name: str
    help: str
    hidden: bool = False


COMMANDS: dict[str, Place] = {
    "audit": Place(
        "audit",
        "audit",
        "Read source and sink back from the last seal on, list lost, duplicated and altered records, and seal what "
        "was proved; exit code 1 if the guarantee was violated, 3 if unknown.",
    ),
    "replay": Place(
        "run", "replay", "Deliver records of a time once more, into another sink, while the pipeline runs."
    ),
    "rebuild": Place("run", "rebuild", "Make the sink's table again from the source, compare both, and swap them."),
    "explain": Place(
        "doctor", "explain", "Explain an error code: what it means, what causes it, and what to run next."
    ),
    "status": Place(
        "status",
        "status",
        "Show every pipeline's guarantee, position, lag, open transactions, last audit; exit 1 if one needs attention.",
    ),
    "top": Place(
        "status",
        "top",
        "Show what `status` shows, every two seconds, with trends of lag and rate; as JSON lines with --output json.",
    ),
    "watch": Place(
        "status",
        "watch",
        "Print each problem when it appears and when it has ended, and report it to the webhook of its "
        "pipeline's file.",
    ),
    "metrics": Place(
        "status",
        "metrics",
        "Metrics for Prometheus, asked from ledgers, sinks and sources at each scrape; no driver need run.",
    ),
    "report": Place(
        "status", "report", "Write pipelines as one HTML file: problems, batches by step, open transactions, audits."
    ),
    "ui": Place(
        "status",
        "ui",
        "Serve the status as web pages, an overview and one page for each pipeline, which reload every 5 s.",
    ),
    "init": Place("run", "init", "Write a ready-to-run example: a log of orders into SQLite, no server needed."),
    "plan": Place(
        "run",
        "plan",
        "Show a pipeline's steps and the assumptions of its guarantee, or why it is refused (exit code 2).",
    ),
    "adopt": Place(
        "run",
        "adopt",
        "Start a pipeline where another job stopped: show where, and with --yes keep it in the new checkpoint.",
    ),
    "run": Place("run", "run", "Run a pipeline until it is stopped; SIGTERM or Ctrl-C lets the running batch finish."),
    "receive": Place(
        "run",
        "receive",
        "Receive a queue into the durable log of a pipeline's source until stopped: persist, then acknowledge.",
    ),
    "doctor": Place(
        "doctor", "doctor", "Check this machine for what a pipeline needs; every problem comes with its next step."
    ),
    "verify": Place(
        "lab", "verify", "Inject faults at every failure point and judge from outside whether the guarantee held."
    ),
    "evidence": Place(
        "audit",
        "evidence_app",
        "`delivered evidence PIPELINE.yaml` writes a pipeline's seals into one file; `check` checks such a file.",
    ),
    "transactions": Place("operate", "transactions_app", "List and end a pipeline's open transactions at its sink."),
    "dead-letters": Place(
        "operate", "dead_letters_app", "List a pipeline's dead letters, write them again, or drop them."
    ),
    "letters": Place(
        "operate", "dead_letters_app", "List a pipeline's dead letters, write them again, or drop them.", hidden=True
    ),
    "sagas": Place("operate", "sagas_app", "Run sagas, list them, and resolve stuck ones."),
    "brokers": Place("lab", "brokers_app", "Start and stop real servers for development, on 127.0.0.1."),
}


class _Loading(Mapping[str, Any]):
    """Commands by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        place = COMMANDS[name]
        from delivered.cli.command import Commands

        found = getattr(import_module(f"delivered.cli.{place.module}"), place.name)
        alone = Commands(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.callback()(lambda: None)  # makes it a group
        if isinstance(found, typer.Typer):
            alone.add_typer(found, name=name, hidden=place.hidden)
        else:
            alone.command(name)(found)
        return typer.main.get_command(alone).commands[name]  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[str]:
        return (name for name, place in COMMANDS.items() if not place.hidden)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Loading()  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        loading = self.commands
        self.commands = {n: TyperCommand(n, help=p.help, hidden=p.hidden) for n, p in COMMANDS.items()}
        super().format_commands(ctx, formatter)
        self.commands = loading


def _open_standard_streams() -> None:
    """Open those that are closed to /dev/null. The next file that is opened takes a free number: a database would be
    standard output, and what a child process prints would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


_open_standard_streams()

app = typer.Typer(
    cls=_Group,
    help="Delivery guarantees for PySpark Structured Streaming: choose, explain, run, audit.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"delivered {version('delivered')}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


if __name__ == "__main__":
    app()
