"""`delivered rebuild`: a table made anew, compared with the old one, and put in its place."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from delivered.cli.options import FileArgument, MasterOption, SetOption, StopTimeoutOption, WaitOption, read
from delivered.cli.output import Output, OutputOption, command, say, say_json, working
from delivered.model.errors import DeliveredError


@command
def rebuild(
    file: FileArgument,
    into: Annotated[str, typer.Option(metavar="TABLE", help="The new table, in the place of the old one.")],
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="As for replay. Default: where the pipeline's first batch began."),
    ] = None,
    accept_differences: Annotated[
        bool, typer.Option("--accept-differences", help="Swap although the tables differ: the transform was corrected.")
    ] = False,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    master: MasterOption = None,
    wait: WaitOption = True,
    stop_timeout: StopTimeoutOption = 120.0,
    spark_log: Annotated[str | None, typer.Option(help="As for run.")] = None,
    output: OutputOption = Output.TEXT,
) -> int:
    """Make the sink's table anew from the source, compare both, and swap them. Run again after a kill, it continues."""
    from delivered.audit.classes import Verdict
    from delivered.cli.run import SparkLog, quiet_spark, run_pipeline

    pipeline = read(file, set_, master=master)
    with working("looking up where the pipeline began and where it is"):
        made = pipeline.rebuild(into, start=start)
    told: dict[str, Any] = {}
    if not made.done:
        run_pipeline(made.pipeline, False, stop_timeout, spark_log, output, wait=wait)
        made.check_stopped()
        with working("starting Spark") as progress, quiet_spark(pipeline, SparkLog.of(pipeline, spark_log)) as spark:
            report = made.pipeline.audit(spark, progress=progress)
        with working("comparing both tables"):
            compared = made.compare()
        if report.verdict is Verdict.BROKEN:
            raise DeliveredError(
                "REBUILD_BROKEN",
                f"The new table {into!r} is not what the source says: {'; '.join(report.breaches)}. Nothing was "
                "swapped.",
                next_step=f"drop {into!r}, and rebuild into another name",
            )
        if not compared.equal and not accept_differences:
            raise DeliveredError(
                "REBUILD_DIFFERS",
                f"The tables differ: {compared}. Nothing was swapped.",
                next_step="if the transform was corrected, this is expected: repeat with --accept-differences; else "
                "delivered audit says which of the old rows are lost or doubled",
            )
        with working("swapping the tables"):
            made.swap()
        told = {"audit": report.verdict.value, "equal": compared.equal, "comparison": str(compared)}
    if output is Output.JSON:
        say_json({"table": made.table, "former_rows": made.kept, "swapped": True, **told}, one_line=True)
        return 0
    if told:
        say(f"{told['comparison']}; audit of the new one: {told['audit']}")
    say(f"{made.table} is the new table; its former rows are in {made.kept}")
    return 0
