"""What `delivered plan` knows of Spark without starting it, asked of Spark: the arguments of functions, and settings.

    python -m tools.sql_arguments           once with each version of Spark: what any of them takes is kept

How many arguments a function takes is stored in src/delivered/pipeline/sql-arguments.json, which `pipeline/sql.py`
reads; the names of settings in spark-settings.txt next to it, which `pipeline/facts.py` reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

FILE = Path(__file__).parents[1] / "src" / "delivered" / "pipeline" / "sql-arguments.json"
SETTINGS = FILE.with_name("spark-settings.txt")
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


def settings(spark: SparkSession) -> list[str]:
    """The names of all settings, the internal ones too, which no statement of SQL lists."""
    jvm: Any = spark._jvm
    of = jvm.java.lang.Class.forName("org.apache.spark.internal.config.ConfigEntry$")
    (known,) = (field for field in of.getDeclaredFields() if field.getName() == "knownConfigs")
    known.setAccessible(True)
    return [str(name) for name in known.get(of.getField("MODULE$").get(None)).keySet()]


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
    names = sorted({*settings(spark), *(SETTINGS.read_text(encoding="utf-8").split() if SETTINGS.exists() else ())})
    SETTINGS.write_text("\n".join(names) + "\n", encoding="utf-8")
    bounded = sum(len(c) <= MOST for c in found.values())
    print(f"{spark.version}: {len(found)} functions, {bounded} with bounds; {len(names)} settings")
    spark.stop()


if __name__ == "__main__":
    main()
