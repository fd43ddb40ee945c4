"""`delivered sagas`: run sagas, list them, and resolve stuck ones."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delivered.cli.command import (
    Commands,
    Output,
    OutputOption,
    answer,
    note,
    plain_table,
    show_warnings,
    stop_on_signal,
)
from delivered.model.errors import UsageError
from delivered.model.options import is_reference
from delivered.model.secrets import one_line

if TYPE_CHECKING:
    from delivered.patterns.saga import Log

app = Commands(help="Run sagas, list them, and resolve stuck ones.", no_args_is_help=True)

LISTED_MAX = 1_000

LogOption = Annotated[
    str, typer.Option("--log", help="SQLite file, or postgresql://... or mysql://..., without a password.")
]
PasswordOption = Annotated[str | None, typer.Option(help="Password of the log's database: env:NAME or file:PATH.")]
IdArgument = Annotated[str, typer.Argument(help="The saga's id, as shown by `list`.", show_default=False)]
SagaOption = Annotated[str | None, typer.Option(help="The saga's name, if two have this id.")]


def _log(where: str, password: str | None) -> Log:
    from delivered.patterns.saga import Log

    if password is not None and not is_reference(password):
        raise UsageError("SAGA_PASSWORD")
    return Log(where, password)


@app.command()
def create(log: LogOption, password: PasswordOption = None, output: OutputOption = Output.TEXT) -> None:
    """Make the tables of a saga log, unless they are there."""
    _log(log, password).create()
    answer(output, {"log": log}, f"{log}: ready for sagas")


@app.command()
def run(
    sagas: Annotated[list[str], typer.Argument(help="Where a saga is declared, as module:name.", show_default=False)],
    log: LogOption,
    password: PasswordOption = None,
    until_rest: Annotated[bool, typer.Option("--until-rest", help="Stop once every saga is at rest.")] = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Sagas that run at the same time.")] = 4,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run sagas until stopped; SIGTERM or Ctrl-C lets running calls finish. Any number of workers may run."""
    from delivered.crash import install_from_environment
    from delivered.patterns.saga import run as run_sagas
    from delivered.patterns.saga.definition import load

    install_from_environment()
    show_warnings()
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    declared = [load(name) for name in sagas]
    stop = stop_on_signal()
    rested = run_sagas(_log(log, password), *declared, forever=not until_rest, threads=threads, stop=stop)
    text = ", ".join(f"{n} {s}" for s, n in sorted(rested.items())) or "no sagas came to rest"
    answer(output, {s.value: n for s, n in rested.items()}, text)


@app.command("list")
def list_(
    log: LogOption,
    password: PasswordOption = None,
    every: Annotated[bool, typer.Option("--all", help="Also those that are complete or compensated.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List sagas that are stuck or not at rest, oldest first."""
    from delivered.patterns.saga import Status

    wanted = [s for s in Status if every or s not in (Status.COMPLETE, Status.COMPENSATED)]
    with contextlib.closing(_log(log, password).open()) as opened:
        rows = opened.rows(wanted, LISTED_MAX)
    table = plain_table("saga", "id", "status", "step", "age", "error")
    for r in rows:
        table.add_row(r.saga, one_line(r.id), r.status, r.step, f"{r.age_s:.0f} s", one_line(r.error))
    nothing = "no sagas" if every else "no sagas are stuck or under way"
    answer(output, [asdict(r) for r in rows], table if rows else nothing)
    stuck = sum(r.status is Status.STUCK for r in rows)
    if stuck and output is Output.TEXT:
        note(
            f"{stuck} stuck: a compensation failed too often. Next: fix its cause, then delivered sagas retry ID; or "
            "undo the step by hand, then delivered sagas done ID; or leave it as it is: delivered sagas skip ID"
        )


def _resolve_by(event: str) -> Callable[..., None]:
    """A command that answers a stuck compensation with this event."""

    def resolve(
        id: IdArgument,  # noqa: A002
        log: LogOption,
        saga: SagaOption = None,
        password: PasswordOption = None,
        output: OutputOption = Output.TEXT,
    ) -> None:
        from delivered.patterns.saga.progress import Event

        with contextlib.closing(_log(log, password).open()) as opened:
            row = opened.resolve(id, Event(event), saga)
        did = {"saga": row.saga, "id": row.id, "step": row.step, "did": event}
        text = f"{row.saga} {row.id}: undo of {row.step}: {event}; a worker goes on (delivered sagas run)"
        answer(output, did, text)

    return resolve


for _name, _event, _help in (
    ("retry", "retry", "Try a stuck saga's compensation again, with its attempts counted from the start."),
    ("skip", "skipped", "Leave what a stuck saga's step did as it is, and go on with the compensations before it."),
    ("done", "done", "Record that you have undone the stuck saga's step by hand; the compensations before it go on."),
):
    _resolve = _resolve_by(_event)
    _resolve.__doc__ = _help
    app.command(_name)(_resolve)


@app.command()
def clean(
    log: LogOption,
    older_than: Annotated[float, typer.Option(min=0, help="Days since a saga came to rest.")],
    password: PasswordOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Delete sagas that are complete or compensated; an id that comes again afterwards begins a new one."""
    from delivered.patterns.saga.log import CLEANED_MAX

    deleted, last = 0, CLEANED_MAX
    with contextlib.closing(_log(log, password).open()) as opened:
        while last == CLEANED_MAX:
            last = opened.clean(older_than * 86_400)
            deleted += last
    answer(output, {"deleted": deleted}, f"{deleted} sagas deleted")
