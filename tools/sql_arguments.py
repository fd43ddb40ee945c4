"""How many arguments Spark's functions take, asked of Spark; into src/delivered/pipeline/sql-arguments.json.

    python -m tools.sql_arguments           once with each version of Spark: what any of them takes is kept

`pipeline/sql.py` reads it, so that `delivered plan` refuses a wrong number without starting Spark.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

FILE = Path(__file__).parents[1] / "src" / "delivered" / "pipeline" / "sql-arguments.json"
MOST = 9
"""Arguments that are tried; a function that takes so many may take any number."""


def takes(spark: SparkSession, function: str, count: int) -> bool:
    """Whether Spark does not refuse this many arguments; it may refuse them for another reason."""
    arguments = ", ".join(["NULL"] * count)
    try:
        spark.sql(f"SELECT `{function}`({arguments})")
    except Py4JJavaError:  # 3.5, of some types: a failure that is not about the number
        return True
    except PySparkException as why:
        return not str(why.getErrorClass()).startswith("WRONG_NUM_ARGS")
    return True


def main() -> None:
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    names: list[Any] = [row[0] for row in spark.sql("SHOW SYSTEM FUNCTIONS").collect()]
    found = {n: [k for k in range(MOST + 1) if takes(spark, n, k)] for n in names if n.isidentifier()}
    stored = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name, counts in found.items():
        stored[name] = sorted({*stored.get(name, ()), *counts})
    lines = ",\n".join(f"{json.dumps(n)}: {json.dumps(stored[n])}" for n in sorted(stored))
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{spark.version}: {len(found)} functions, {sum(len(c) <= MOST for c in found.values())} with bounds")
    spark.stop()


if __name__ == "__main__":
    main()
