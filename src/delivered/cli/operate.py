"""What an operator ends by hand: `delivered transactions`, `delivered dead-letters` and `delivered sagas`."""

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
    FileArgument,
    Output,
    OutputOption,
    SetOption,
    answer,
    note,
    plain_table,
    read,
    show_warnings,
    stop_on_signal,
    working,
)
from delivered.model.errors import UsageError, one_line
from delivered.model.limits import DEAD_LETTERS_MAX, OPEN_TRANSACTION_OLD_S
from delivered.model.options import is_reference

if TYPE_CHECKING:
    from delivered.entry import Pipeline
    from delivered.patterns.saga import Log


transactions_app = Commands(help="List and end a pipeline's open transactions at its sink.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(help="The id, as shown by `list`.", show_default=False)]
ForceOption = Annotated[bool, typer.Option("--force", help="Even if it contradicts the ledger.")]


@transactions_app.command("list")
def list_transactions(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    output: OutputOption = Output.TEXT,
) -> None:
    """List this pipeline's open transactions, oldest first, and whether the ledger decided them."""
    from delivered.operate.transactions import open_transactions

    with working("querying the sink"):
        transactions = open_transactions(read(file, set_))
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
            "or repeat the killed retry, replay or rebuild, which applies decided transactions and aborts the rest; or "
            "end them: delivered transactions apply|abort"
        )


@transactions_app.command()
def abort(
    file: FileArgument,
    id: IdArgument,  # noqa: A002
    force: ForceOption = False,
    set_: SetOption = [],  # noqa: B006
    output: OutputOption = Output.TEXT,
) -> None:
    """Abort an undecided transaction. Refused if the ledger decided it: its rows would be lost."""
    _end_transaction(read(file, set_), id, False, force, output)


@transactions_app.command()
def apply(
    file: FileArgument,
    id: IdArgument,  # noqa: A002
    force: ForceOption = False,
    set_: SetOption = [],  # noqa: B006
    output: OutputOption = Output.TEXT,
) -> None:
    """Commit a decided transaction. Refused if it is undecided: its rows would be duplicated."""
    _end_transaction(read(file, set_), id, True, force, output)


def _end_transaction(pipeline: Pipeline, transaction: str, commit: bool, force: bool, output: Output) -> None:
    from delivered.operate.transactions import end_transaction

    with working("querying the sink"):
        end_transaction(pipeline, transaction, commit=commit, force=force)
    did = "applied" if commit else "aborted"
    answer(output, {"id": transaction, "did": did}, f"{transaction}: {did}")


dead_letters_app = Commands(
    help="List a pipeline's dead letters, write them again, or drop them.", no_args_is_help=True
)

IdsArgument = Annotated[list[str], typer.Argument(help="Ids, as shown by `list`.", show_default=False)]
AllOption = Annotated[bool, typer.Option("--all", help="Every open letter.")]
_SHOWN = 60


@dead_letters_app.command("list")
def list_dead_letters(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    every: Annotated[bool, typer.Option("--all", help="Also those that were retried or dropped.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=DEAD_LETTERS_MAX, help="How many to list.")] = 1_000,
    output: OutputOption = Output.TEXT,
) -> None:
    """List dead letters of the pipeline's checkpoint that are open, in the order in which they are stored."""
    from delivered.checkpoint.history import looked_at
    from delivered.operate.dead_letters import dead_letters

    pipeline = read(file, set_)
    with working("reading the dead letters"):
        sinks = pipeline.status().sinks  # first: what comes meanwhile has not been seen
        listed = dead_letters(pipeline, settled=every, limit=limit)
    looked_at(pipeline.checkpoint, sinks)
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
        lines = done.lines(did, f"delivered dead-letters list {file}")
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
    dead_letters_app.command(_name)(_settle)


sagas_app = Commands(help="Run sagas, list them, and resolve stuck ones.", no_args_is_help=True)

LISTED_MAX = 1_000

LogOption = Annotated[
    str, typer.Option("--log", help="SQLite file, or postgresql://... or mysql://..., without a password.")
]
PasswordOption = Annotated[str | None, typer.Option(help="Password of the log's database: env:NAME or file:PATH.")]
SagaIdArgument = Annotated[str, typer.Argument(help="The saga's id, as shown by `list`.", show_default=False)]
SagaOption = Annotated[str | None, typer.Option(help="The saga's name, if two have this id.")]


def _saga_log(where: str, password: str | None) -> Log:
    from delivered.patterns.saga import Log

    if password is not None and not is_reference(password):
        raise UsageError("SAGA_PASSWORD")
    return Log(where, password)


@sagas_app.command()
def create(log: LogOption, password: PasswordOption = None, output: OutputOption = Output.TEXT) -> None:
    """Make the tables of a saga log, unless they are there."""
    _saga_log(log, password).create()
    answer(output, {"log": log}, f"{log}: ready for sagas")


@sagas_app.command()
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
    rested = run_sagas(_saga_log(log, password), *declared, forever=not until_rest, threads=threads, stop=stop)
    text = ", ".join(f"{n} {s}" for s, n in sorted(rested.items())) or "no sagas came to rest"
    answer(output, {s.value: n for s, n in rested.items()}, text)


@sagas_app.command("list")
def list_sagas(
    log: LogOption,
    password: PasswordOption = None,
    every: Annotated[bool, typer.Option("--all", help="Also those that are complete or compensated.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List sagas that are stuck or not at rest, oldest first."""
    from delivered.patterns.saga import Status

    wanted = [s for s in Status if every or s not in (Status.COMPLETE, Status.COMPENSATED)]
    with contextlib.closing(_saga_log(log, password).open()) as opened:
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
            "undo the step manually, then delivered sagas done ID; or leave it as it is: delivered sagas skip ID"
        )


def _resolve_by(event: str) -> Callable[..., None]:
    """A command that answers a stuck compensation with this event."""

    def resolve(
        id: SagaIdArgument,  # noqa: A002
        log: LogOption,
        saga: SagaOption = None,
        password: PasswordOption = None,
        output: OutputOption = Output.TEXT,
    ) -> None:
        from delivered.patterns.saga.definition import Event

        with contextlib.closing(_saga_log(log, password).open()) as opened:
            row = opened.resolve(id, Event(event), saga)
        did = {"saga": row.saga, "id": row.id, "step": row.step, "did": event}
        text = f"{row.saga} {row.id}: undo of {row.step}: {event}; a worker continues (delivered sagas run)"
        answer(output, did, text)

    return resolve


for _name, _event, _help in (
    ("retry", "retry", "Try a stuck saga's compensation again, with its attempts counted from the start."),
    ("skip", "skipped", "Leave what a stuck saga's step did as it is, and continue with the compensations before it."),
    ("done", "done", "Record that you undid the stuck saga's step manually; the compensations before it continue."),
):
    _resolve = _resolve_by(_event)
    _resolve.__doc__ = _help
    sagas_app.command(_name)(_resolve)


@sagas_app.command()
def clean(
    log: LogOption,
    older_than: Annotated[float, typer.Option(min=0, help="Days since a saga came to rest.")],
    password: PasswordOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Delete sagas that are complete or compensated; an id that comes again afterwards begins a new one."""
    from delivered.patterns.saga.log import CLEANED_MAX

    deleted, last = 0, CLEANED_MAX
    with contextlib.closing(_saga_log(log, password).open()) as opened:
        while last == CLEANED_MAX:
            last = opened.clean(older_than * 86_400)
            deleted += last
    answer(output, {"deleted": deleted}, f"{deleted} sagas deleted")
