"""`delivered replay`: records of a time once more, into another sink."""

from __future__ import annotations

from typing import Annotated

import typer

from delivered.cli.options import FileArgument, MasterOption, SetOption, StopTimeoutOption, WaitOption, read
from delivered.cli.output import Output, OutputOption, command, working


@command
def replay(
    file: FileArgument,
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help="ISO 8601, milliseconds, earliest, or offsets as JSON.")
    ],
    into: Annotated[
        str, typer.Option(metavar="SINK", help="Another table or topic of the sink; or a sink: '{format: ...}'.")
    ],
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="As --from; latest: what is there now.")] = "latest",
    sink: Annotated[str | None, typer.Option(metavar="NAME", help="Whose rows, if the file has several.")] = None,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    master: MasterOption = None,
    wait: WaitOption = True,
    stop_timeout: StopTimeoutOption = 120.0,
    spark_log: Annotated[str | None, typer.Option(help="As for run.")] = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Deliver records of a time once more, into another sink, while the pipeline runs. Run again, it continues."""
    from delivered.cli.run import run_pipeline
    from delivered.operate.replay import parse_sink

    pipeline = read(file, set_, master=master)
    target = parse_sink(into, file.parent) if into.lstrip().startswith("{") else into
    with working("looking up the records of that time"):
        made = pipeline.replay(start, end, target, sink=sink)
    return run_pipeline(made, False, stop_timeout, spark_log, output, wait=wait)
