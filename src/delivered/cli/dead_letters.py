"""`delivered dead-letters`: what did not get into its sink; write it again once the cause is fixed, or drop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

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
    show_warnings,
    working,
)
from delivered.model.errors import UsageError
from delivered.model.limits import DEAD_LETTERS_MAX
from delivered.model.secrets import one_line

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


def _settle_by(did: str) -> Callable[..., int]:
    """A command that retries or drops dead letters."""

    def settle(
        file: FileArgument,
        ids: IdsArgument = [],  # noqa: B006
        every: AllOption = False,
        set_: SetOption = [],  # noqa: B006
        output: OutputOption = Output.TEXT,
    ) -> int:
        from delivered.crash import install_from_environment
        from delivered.operate.dead_letters import drop, retry

        if bool(ids) == every:
            arguments = "both ids and --all" if every else "neither ids nor --all"
            raise UsageError("DEAD_LETTER_IDS", arguments=arguments, file=file)
        install_from_environment()
        show_warnings()
        with working("writing"):
            done = (retry if did == "retried" else drop)(read(file, set_), ids or None)
        lines = ["; ".join(f"{n:,} {did} at {sink}" for sink, n in done.settled.items()) or f"nothing {did}"]
        if done.skipped:
            lines.append(f"The table did not accept {done.skipped:,} of them: delivered dead-letters list {file}")
        lines += [f"{name}: still rejected, {reason}" for name, reason in done.rejected.items()]
        lines += ["More are open: repeat the command."] if done.more else []
        data = {did: dict(done.settled), "rejected": done.rejected, "left_out": done.skipped, "more": done.more}
        answer(output, data, "\n".join(lines))
        return 1 if done.rejected or done.skipped else 0

    return settle


for _name, _did, _help in (
    (
        *("retry", "retried"),
        "Write dead letters to the sinks that rejected them, once each; exit code 1 if some are rejected again.",
    ),
    ("drop", "dropped", "Record that dead letters will not be retried; they stay where they are."),
):
    _settle = _settle_by(_did)
    _settle.__doc__ = _help
    app.command(_name)(_settle)
