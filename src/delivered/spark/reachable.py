"""at_most_once: whether executors reach the driver's arbiter, before a query starts.

Otherwise its first tasks would notice. They would send nothing, but the ledger would hold their batch as one that may
have been sent, and the next start would give it up.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from pyspark.sql import SparkSession

from delivered.model.errors import Unreachable
from delivered.model.guarantee import Guarantee
from delivered.model.work import PORT, Arbiter, DriverAddress
from delivered.spark.jvm import is_connect
from delivered.spark.owners import owners

log = logging.getLogger(__name__)


def check_executors(spark: SparkSession, options: Mapping[str, str]) -> None:
    """Let a task on each core ask the arbiter something. Not over Spark Connect, whose client runs no arbiter.

    Args:
        options: the query's, keys in any case; under another guarantee nothing is asked.

    Raises:
        Unreachable: one of them had no answer.
    """
    from delivered.engine.arbiter import listening

    owner = owners.get(spark)
    guarantee = next((v for k, v in options.items() if k.lower() == "guarantee"), "")
    if guarantee.strip().lower() != Guarantee.AT_MOST_ONCE.value or owner is None or is_connect(spark):
        return
    arbiter, context = listening(owner, DriverAddress.of(spark.conf.get)), spark.sparkContext
    cores = context.defaultParallelism
    try:
        failed = context.parallelize(range(cores), cores).mapPartitions(partial(_ask, arbiter)).collect()
    except Exception as error:
        log.debug("skipped the check of executors: %s", error)  # what they cannot run, the query reports
        return
    if failed:
        host, reason = failed[0]
        raise Unreachable(
            "GRANT_UNREACHABLE",
            f"A task on {host!r} could not ask the driver at {arbiter.host}:{arbiter.port} whether it may send: "
            f"{reason}. Under at_most_once, a task sends only with the driver's grant. The query was not started.",
            next_step=f"let executors connect to the driver's host on that port ({PORT} fixes it), and check "
            "spark.driver.host and spark.driver.bindAddress; then start again",
        )


def _ask(arbiter: Arbiter, _: Iterable[int]) -> Iterator[tuple[str, str]]:
    from delivered.engine.grants import check_reachable

    try:
        check_reachable(arbiter)
    except OSError as error:
        yield socket.gethostname(), str(error)
