"""`delivered transactions`: list a pipeline's open transactions at its sink, and end them by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delivered.cli.command import Commands, FileArgument, Output, OutputOption, answer, note, plain_table, working
from delivered.entry import Pipeline
from delivered.model.limits import OPEN_TRANSACTION_OLD_S

app = Commands(help="List and end a pipeline's open transactions at its sink.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(help="The id, as shown by `list`.", show_default=False)]
ForceOption = Annotated[bool, typer.Option("--force", help="Even if it contradicts the ledger.")]


@app.command("list")
def list_(file: FileArgument, output: OutputOption = Output.TEXT) -> None:
    """List this pipeline's open transactions, oldest first, and whether the ledger decided them."""
    from delivered.operate.transactions import open_transactions

    with working("querying the sink"):
        transactions = open_transactions(Pipeline.from_file(file))
    table = plain_table("id", "state", "age", "decided", "rows go to")
    for t in transactions:
        age = "" if t.age_s is None else f"{t.age_s / 3600:.1f} h" if t.age_s >= 3600 else f"{t.age_s:.0f} s"
        table.add_row(t.id, t.state, age, "yes" if t.decided else "no", ", ".join(t.targets))
    answer(output, [t.to_json() for t in transactions], table if transactions else "no open transactions")
    old = [t for t in transactions if t.old]
    if old and output is Output.TEXT:
        note(
            f"warning: {len(old)} open for more than half of their time-out, or, without one, for more than "
            f"{OPEN_TRANSACTION_OLD_S / 3600:.0f} h. Until they end, they block "
            "readers (Kafka), or hold locks (MySQL, PostgreSQL) and block VACUUM (PostgreSQL). Start the pipeline, "
            "which applies decided transactions and aborts the rest, or end them: delivered transactions apply|abort"
        )


@app.command()
def abort(file: FileArgument, id: IdArgument, force: ForceOption = False, output: OutputOption = Output.TEXT) -> None:  # noqa: A002
    """Abort an undecided transaction. Refused if the ledger decided it: its rows would be lost."""
    _end(file, id, False, force, output)


@app.command()
def apply(file: FileArgument, id: IdArgument, force: ForceOption = False, output: OutputOption = Output.TEXT) -> None:  # noqa: A002
    """Commit a decided transaction. Refused if it is undecided: its rows would be duplicated."""
    _end(file, id, True, force, output)


def _end(file: Path, transaction: str, commit: bool, force: bool, output: Output) -> None:
    from delivered.operate.transactions import end_transaction

    with working("querying the sink"):
        end_transaction(Pipeline.from_file(file), transaction, commit=commit, force=force)
    did = "applied" if commit else "aborted"
    answer(output, {"id": transaction, "did": did}, f"{transaction}: {did}")
