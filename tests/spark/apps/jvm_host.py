"""Owns a JVM whose session is used by one process after the other, as by the kernels of a notebook service; or a
server of Spark Connect.

python -m tests.spark.apps.jvm_host FILE            writes what the environment of such a process needs
python -m tests.spark.apps.jvm_host FILE PORT       serves Spark Connect there
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from tests.spark.apps.portable import make_session

_CONNECT = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
}


def main() -> None:
    file, ports = Path(sys.argv[1]), sys.argv[2:]
    if ports:
        make_session(**_CONNECT, **{"spark.connect.grpc.binding.port": ports[0]})
        environment = {"SPARK_REMOTE": f"sc://127.0.0.1:{ports[0]}"}
    else:
        context: Any = make_session().sparkContext
        gateway = context._gateway.gateway_parameters
        environment = {"PYSPARK_GATEWAY_PORT": str(gateway.port), "PYSPARK_GATEWAY_SECRET": gateway.auth_token}
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({**environment, "PYSPARK_PYTHON": os.environ["PYSPARK_PYTHON"]}))
    draft.rename(file)
    threading.Event().wait()


if __name__ == "__main__":
    main()
