"""Arguments and options that commands share, and the pipeline that they name."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from delivered.entry import Pipeline
from delivered.model.step import LOG_FORMAT
from delivered.pipeline.file import parse_override


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


FileArgument = Annotated[Path, typer.Argument(help="The pipeline file.", show_default=False)]
SetOption = Annotated[
    list[str],
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a value of the file, for example source.path=/in."),
]
GuaranteeOption = Annotated[str | None, typer.Option(help="at_most_once, at_least_once or exactly_once.")]
CheckpointOption = Annotated[str | None, typer.Option(help="Override the file's checkpoint.")]
MasterOption = Annotated[str | None, typer.Option(help="Spark master, for example local[4].")]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait two minutes for an unreachable server, or fail at once.")
]
StopTimeoutOption = Annotated[
    float, typer.Option(min=0, help="Seconds that a stop (SIGTERM, Ctrl-C) waits for the running batch.")
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        envvar=LOG_FORMAT, help="Of log lines on standard error, of receivers and of Spark's log: text or json."
    ),
]
TakeoverOption = Annotated[bool, typer.Option("--takeover", help="Fence another driver that is running this pipeline.")]


def log_as(chosen: LogFormat) -> None:
    """From now on, in this process and those that it starts."""
    os.environ[LOG_FORMAT] = chosen.value


def read(file: Path, sets: list[str], **named: Any) -> Pipeline:
    """A pipeline file with overrides from the command line. Raises UsageError."""
    overrides = dict(parse_override(s) for s in sets)
    overrides.update({k: v for k, v in named.items() if v is not None})
    return Pipeline.from_file(file, overrides)
