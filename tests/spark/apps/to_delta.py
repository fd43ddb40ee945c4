"""A user's job: a pipeline file, run to the end of what is there, then audited in the same session."""

from __future__ import annotations

import sys
from pathlib import Path

import delivered


def main() -> None:
    file, verdict = Path(sys.argv[1]), Path(sys.argv[2])
    spark = delivered.session("to-delta", "local[2]")
    pipeline = delivered.Pipeline.from_file(file)
    pipeline.start(spark).awaitTermination()
    report = pipeline.audit(spark)
    verdict.write_text(f"{report.verdict.value}\n{report}")
    spark.stop()


if __name__ == "__main__":
    main()
