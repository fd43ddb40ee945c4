"""What commands share: arguments and options, text and JSON, errors and exit codes.

Exit codes: 0 ok, 1 failed, 2 usage, 3 unknown.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, cast

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from delivered.model.errors import PREFIX, DeliveredError, one_line, plain, without_passwords
from delivered.model.options import in_file_words
from delivered.model.patience import Outages
from delivered.model.step import LOG_FORMAT, JsonLines, as_json
from delivered.model.translate import translated
from delivered.terminal import printer

if TYPE_CHECKING:
    from delivered.entry import Pipeline

P = ParamSpec("P")
T = TypeVar("T")


_MISSING_TOPIC = frozenset(("TOPIC_MISSING", "TOPIC_UNKNOWN"))
"""Codes whose next step is shorter with a development server on this machine."""


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text or json.")]
FileArgument = Annotated[Path, typer.Argument(help="The pipeline file.", show_default=False, metavar="PIPELINE.yaml")]
SetOption = Annotated[
    list[str],
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a value of the file, for example source.path=/in."),
]
GuaranteeOption = Annotated[str | None, typer.Option(help="at_most_once, at_least_once or exactly_once.")]
CheckpointOption = Annotated[str | None, typer.Option(help="Override the file's checkpoint.")]
MasterOption = Annotated[str | None, typer.Option(help="Spark master, for example local[4].")]
SparkLogOption = Annotated[str | None, typer.Option(help="As for run.")]

_MESSAGE_LENGTH_MAX = 4_000


def console() -> Console:
    """For results. Wide when not a terminal, so that log lines are not wrapped."""
    return printer(soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def messages() -> Console:
    """For progress and errors. Log lines are not for a terminal's eyes, so it is none then."""
    return printer(soft_wrap=True, stderr=True, force_terminal=False if as_json() else None)


def on_terminal() -> bool:
    """Whether progress and errors are read as they come. Not rich's `is_terminal`: FORCE_COLOR, which CI and notebooks
    set, makes a file a terminal to it."""
    return sys.stderr.isatty() and not as_json()


def say(text: str) -> None:
    """A result, of one line or several."""
    sys.stdout.write(plain(text) + "\n")
    sys.stdout.flush()


def say_json(data: Any, *, one_line: bool = False) -> None:
    say(json.dumps(data, indent=None if one_line else 2, default=str))


def answer(output: Output, data: Any, shown: str | RenderableType) -> None:
    """A command's result: as JSON, or as text or a table."""
    if output is Output.JSON:
        say_json(data)
    elif isinstance(shown, str):
        say(shown)
    else:
        console().print(shown)


def write_file(out: Path, text: str) -> None:
    """Write a command's result: under its name only once it is complete.

    Raises:
        OSError: it could not be written; what was there before still is.
    """
    if out.exists() and not out.is_file():  # /dev/stdout
        out.write_text(text, encoding="utf-8")
        return
    target = out.resolve()
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(out)) from None


def plain_table(*columns: str) -> Table:
    """A table without lines, for results."""
    return Table(*columns, box=None, pad_edge=False)


def note(text: str) -> None:
    """One line of progress; never part of the result."""
    if as_json():
        _write(_record(logging.INFO, text))
        return
    messages().print(text, style="dim")


def log_line(text: str) -> None:
    """As `note`, with a timestamp unless on a terminal: logs are read later."""
    note(text if as_json() or on_terminal() else f"{stamp()} {text}")


def _record(level: int, text: str, error: Exception | None = None) -> logging.LogRecord:
    exception = (type(error), error, None) if error is not None else None
    return logging.LogRecord("delivered.cli", level, "", 0, text, None, exception)


def _write(record: logging.LogRecord) -> None:
    sys.stderr.write(JsonLines().format(record) + "\n")
    sys.stderr.flush()


def relay(line: str) -> None:
    """A log line of another process."""
    if as_json():
        sys.stderr.write(one_line(line) + "\n")
    else:
        log_line(one_line(line))


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if as_json():
            _write(record)
        else:
            log_line(without_passwords(record.getMessage()))


def show_warnings(outages: Outages | None = None) -> None:
    """Print this package's warnings from now on: nothing else configures logging in this process.

    Args:
        outages: those of other processes, with which this one's are shown as one; replaces those of an earlier call.
    """
    shown = outages or Outages()
    logger = logging.getLogger("delivered")
    for handler in [h for h in logger.handlers if isinstance(h, _Warnings)]:
        logger.removeHandler(handler)
    handler = _Warnings(logging.WARNING)
    handler.addFilter(lambda record: shown.is_new(os.getpid(), record.getMessage()))
    logger.addHandler(handler)


def stamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show that work is in progress: a spinner on a terminal, else one line per change."""
    if not on_terminal():
        yield note
        return
    with messages().status(Text(text)) as status:
        yield lambda now: status.update(Text(now))


def spoken(value: T) -> T:
    """Texts, alone or nested, in the vocabulary of a pipeline file, which command line users write."""
    said: Any = value
    if isinstance(said, str) and not isinstance(said, StrEnum):
        said = in_file_words(said)
    elif isinstance(said, tuple | list):
        said = type(said)(map(spoken, said))
    elif is_dataclass(said) and not isinstance(said, type):
        said = replace(said, **{f.name: spoken(getattr(said, f.name)) for f in fields(said) if f.init})
    return cast("T", said)


def read(file: Path, sets: list[str], **named: Any) -> Pipeline:
    """A pipeline file with overrides from the command line. Raises UsageError."""
    from delivered.entry import Pipeline
    from delivered.pipeline.file import parse_override

    overrides = dict(map(parse_override, sets))
    overrides.update({k: v for k, v in named.items() if v is not None})
    return Pipeline.from_file(file, overrides)


def log_as(chosen: LogFormat) -> None:
    """From now on, in this process and those that it starts."""
    os.environ[LOG_FORMAT] = chosen.value


def stop_on_signal(signalled: Callable[[], object] | None = None) -> threading.Event:
    """An event that SIGTERM and Ctrl-C set. Args: signalled: called instead."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: (signalled or stop.set)())
    return stop


class Commands(typer.Typer):
    """Commands that are functions: the result is the exit code, and errors become one clear message."""

    def command(self, name: str | None = None) -> Callable[[Callable[P, int | None]], Callable[P, None]]:  # type: ignore[override]
        register = super().command(name)
        return lambda function: register(_reporting_errors(function))


def _reporting_errors(function: Callable[P, int | None]) -> Callable[P, None]:

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json_output = kwargs.get("output") is Output.JSON
        try:
            code = function(*args, **kwargs) or 0
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:
            # The reader of our output has closed it; send everything from now on, at exit too, to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 141
        except KeyboardInterrupt:
            messages().print("interrupted")
            code = 130
        except Exception as error:
            code = _fail(error, as_json_output)
        raise typer.Exit(code)

    return run


def _fail(error: Exception, as_json_output: bool) -> int:
    """Show an error; return its exit code."""
    if os.environ.get("DELIVERED_TRACEBACK"):
        messages().print_exception()
    own = _ours(error)
    message = spoken(own.message)[:_MESSAGE_LENGTH_MAX]
    code = own.code.removeprefix(PREFIX)
    next_step = next_here(code, own.message, spoken(own.next_step) if own.next_step else None)
    shown_error = DeliveredError(code, message, next_step)
    if as_json_output:
        say_json({"error": {"code": own.code, "message": message, "next": next_step}})
    if as_json():
        _write(_record(logging.ERROR, message, shown_error))
    elif not as_json_output:
        shown = messages()
        shown.print(f"[{own.code}]", style="bold red", end=" ")
        shown.print(message)
        if next_step:
            shown.print("Next:", style="bold", end=" ")
            shown.print(next_step)
    return own.exit_code


def next_here(code: str, message: str, step: str | None) -> str | None:
    """The next step of an error; also the command that creates a topic, if it is missing on our development Kafka.

    Args:
        code: without the prefix.
    """
    topic = re.search(r"'([^']+)'", message)
    if code not in _MISSING_TOPIC or topic is None:
        return step
    from delivered_lab import brokers

    here = brokers.status(brokers.default_folder("kafka"))
    if not (here.answering and here.bootstrap and here.bootstrap in message):
        return step
    command = f"delivered brokers topic {topic[1]}"
    return f"{step}; on this development broker: {command}" if step else command


def _ours(error: Exception) -> DeliveredError:
    own = translated(error)
    if own is not None:
        return own
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return DeliveredError("FILE_UNUSABLE", path=error.filename, reason=error.strerror)
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return DeliveredError("UNEXPECTED.COMMAND", error_type=type(error).__name__, error=first)
