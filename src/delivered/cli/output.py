"""Text and JSON, errors and exit codes: 0 ok, 1 failed, 2 usage, 3 unknown."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar, cast

import typer
from rich.console import Console
from rich.text import Text

from delivered.model.errors import DeliveredError
from delivered.model.options import in_file_words
from delivered.model.secrets import one_line, plain, without_passwords
from delivered.model.step import JsonLines, as_json
from delivered.model.translate import translated
from delivered.terminal import printer

P = ParamSpec("P")
T = TypeVar("T")


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text or json.")]

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


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if as_json():
            _write(record)
        else:
            log_line(without_passwords(record.getMessage()))


def tell_warnings() -> None:
    """Print this package's warnings from now on: nothing else configures logging in this process."""
    logger = logging.getLogger("delivered")
    if not any(isinstance(h, _Lines) for h in logger.handlers):
        logger.addHandler(_Lines(logging.WARNING))


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
    found: Any = value
    if isinstance(found, str) and not isinstance(found, StrEnum):
        found = in_file_words(found)
    elif isinstance(found, tuple | list):
        found = type(found)(map(spoken, found))
    elif is_dataclass(found) and not isinstance(found, type):
        found = replace(found, **{f.name: spoken(getattr(found, f.name)) for f in fields(found) if f.init})
    return cast("T", found)


def command(function: Callable[P, int | None]) -> Callable[P, None]:
    """Turn a function into a command: its result is the exit code, its errors become one clear message."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json_output = kwargs.get("output") is Output.JSON
        try:
            code = function(*args, **kwargs) or 0
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:
            # The reader of our output is gone; send everything from now on, at exit too, to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 141
        except KeyboardInterrupt:
            messages().print("interrupted")
            code = 130
        except Exception as error:
            code = fail(error, as_json_output)
        raise typer.Exit(code)

    return run


def fail(error: Exception, as_json_output: bool) -> int:
    """Show an error; return its exit code."""
    if os.environ.get("DELIVERED_TRACEBACK"):
        messages().print_exception()
    own = _ours(error)
    message = spoken(own.message)[:_MESSAGE_LENGTH_MAX]
    next_step = spoken(own.next_step) if own.next_step else None
    shown_error = DeliveredError(own.code.removeprefix("DELIVERED_"), message, next_step)
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


def _ours(error: Exception) -> DeliveredError:
    found = translated(error)
    if found is not None:
        return found
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return DeliveredError(
        "UNEXPECTED",
        f"{type(error).__name__}: {first}",
        next_step="set DELIVERED_TRACEBACK=1 to see where it happened",
    )
