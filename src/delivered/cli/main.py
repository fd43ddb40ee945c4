"""The commands."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from delivered.cli import explain, status
from delivered.cli.audit import audit
from delivered.cli.command import Commands, say
from delivered.cli.doctor import doctor
from delivered.cli.evidence import evidence_app
from delivered.cli.example import init
from delivered.cli.lab import brokers_app, verify
from delivered.cli.operate import dead_letters_app, sagas_app, transactions_app
from delivered.cli.run import adopt, plan, rebuild, receive, replay, run

app = Commands(
    help="Delivery guarantees for PySpark Structured Streaming: choose, explain, run, audit.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(evidence_app, name="evidence")
app.add_typer(transactions_app, name="transactions")
app.add_typer(dead_letters_app, name="dead-letters")
app.add_typer(dead_letters_app, name="letters", hidden=True)  # short for it
app.add_typer(sagas_app, name="sagas")
app.add_typer(brokers_app, name="brokers")
for function in (
    *(audit, replay, rebuild, explain.explain),
    *(status.status, status.top, status.watch, status.metrics, status.report, status.ui),
    *(init, plan, adopt, run, receive, doctor, verify),
):
    app.command()(function)


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


if __name__ == "__main__":
    app()
