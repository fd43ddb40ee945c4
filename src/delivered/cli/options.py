"""Arguments and options that commands share, and the pipeline that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from delivered.pipeline.file import parse_override
from delivered.spark.pipeline import Pipeline

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
TakeoverOption = Annotated[bool, typer.Option("--takeover", help="Fence another driver that is running this pipeline.")]


def read(file: Path, sets: list[str], **named: Any) -> Pipeline:
    """A pipeline file with overrides from the command line. Raises UsageError."""
    overrides = dict(parse_override(s) for s in sets)
    overrides.update({k: v for k, v in named.items() if v is not None})
    return Pipeline.from_file(file, overrides)
