"""`delivered dead-letters`: what did not get into its sink; write it again once the cause is fixed, or drop it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delivered.cli.command import (
    Commands,
    FileArgument,
    Output,
    OutputOption,
    SetOption,
    answer,
    note,
    plain_table,
    read,
    say,
    say_json,
    show_warnings,
    working,
)
from delivered.entry import Pipeline
from delivered.model.errors import UsageError
from delivered.model.limits import DEAD_LETTERS_MAX
from delivered.model.secrets import one_line

if TYPE_CHECKING:
    from delivered.operate.dead_letter_batches import Settlement

app = Commands(help="List a pipeline's dead letters, write them again, or drop them.", no_args_is_help=True)

IdsArgument = Annotated[list[str], typer.Argument(help="Ids, as shown by `list`.", show_default=False)]
AllOption = Annotated[bool, typer.Option("--all", help="Every open letter.")]
_SHOWN = 60


@app.command("list")
def list_(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    every: Annotated[bool, typer.Option("--all", help="Also those that were retried or dropped.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=DEAD_LETTERS_MAX, help="How many to list.")] = 1_000,
    output: OutputOption = Output.TEXT,
) -> None:
    """List dead letters of the pipeline's checkpoint that are open, in the order in which they are stored."""
    from delivered.operate.dead_letters import dead_letters

    with working("reading the dead letters"):
        listed = dead_letters(read(file, set_), settled=every, limit=limit)
    table = plain_table("id", "sink", "batch", "from", "status", "reason", "record")
    for n in listed:
        origin = "a retry" if n.again else "" if n.offset is None else f"{n.topic or ''} {n.partition} @ {n.offset}"
        texts = (one_line(text) for text in (origin.strip(), n.status, n.reason, n.record[:_SHOWN]))
        table.add_row(one_line(n.id), n.sink, str(n.batch), *texts)
    nothing = "no dead letters" if every else "no dead letters are open"
    answer(output, [asdict(n) for n in listed], table if listed else nothing)
    if output is Output.TEXT and len(listed) == limit:
        note(f"the first {limit:,}: more with --limit")


@app.command()
def retry(
    file: FileArgument,
    ids: IdsArgument = [],  # noqa: B006
    every: AllOption = False,
    set_: SetOption = [],  # noqa: B006
    output: OutputOption = Output.TEXT,
) -> int:
    """Write dead letters to the sinks that rejected them, once each; exit code 1 if some are rejected again."""
    from delivered.operate.dead_letters import retry as retry_letters

    return _settle("retried", retry_letters, file, ids, every, set_, output)


@app.command()
def drop(
    file: FileArgument,
    ids: IdsArgument = [],  # noqa: B006
    every: AllOption = False,
    set_: SetOption = [],  # noqa: B006
    output: OutputOption = Output.TEXT,
) -> int:
    """Record that dead letters will not be retried. The letters themselves stay where they are."""
    from delivered.operate.dead_letters import drop as drop_letters

    return _settle("dropped", drop_letters, file, ids, every, set_, output)


def _settle(
    did: str,
    settle: Callable[[Pipeline, Collection[str] | None], Settlement],
    file: Path,
    ids: list[str],
    every: bool,
    set_: list[str],
    output: Output,
) -> int:
    from delivered.crash import install_from_environment

    if bool(ids) == every:
        raise UsageError(
            "DEAD_LETTER_IDS", arguments="both ids and --all" if every else "neither ids nor --all", file=file
        )
    install_from_environment()
    show_warnings()
    with working("writing"):
        done = settle(read(file, set_), ids or None)
    if output is Output.JSON:
        say_json({did: dict(done.settled), "rejected": done.rejected, "left_out": done.left_out, "more": done.more})
    else:
        say("; ".join(f"{n:,} {did} at {sink}" for sink, n in done.settled.items()) or f"nothing {did}")
        if done.left_out:
            say(f"The table did not accept {done.left_out:,} of them: delivered dead-letters list {file}")
        for name, reason in done.rejected.items():
            say(f"{name}: still rejected, {reason}")
        if done.more:
            say("More are open: repeat the command.")
    return 1 if done.rejected or done.left_out else 0
