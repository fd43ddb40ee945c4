"""The commands."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from delivered.cli import brokers, dead_letters, explain, sagas, status, transactions
from delivered.cli.audit import audit
from delivered.cli.command import Commands, say
from delivered.cli.doctor import doctor
from delivered.cli.example import init
from delivered.cli.run import adopt, plan, rebuild, receive, replay, run
from delivered.cli.verify import verify

app = Commands(
    help="Delivery guarantees for PySpark Structured Streaming: choose, explain, run, audit.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(transactions.app, name="transactions")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(dead_letters.app, name="letters", hidden=True)  # short for it
app.add_typer(sagas.app, name="sagas")
app.add_typer(brokers.app, name="brokers")
for function in (
    *(audit, replay, rebuild, explain.explain),
    *(status.status, status.top, status.metrics, status.report, status.ui),
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
