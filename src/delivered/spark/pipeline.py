"""`delivered.Pipeline`: what can be done with a pipeline as the user names it.

Imports no pyspark: a pipeline is made, and planned offline, where Spark need not be installed. What needs it is
imported when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from delivered.pipeline.definition import Definition
from delivered.pipeline.facts import gather
from delivered.planner import Plan, Refusal, make_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from delivered.audit.report import AuditReport


class Pipeline(Definition):
    __doc__ = Definition.__doc__

    def plan(
        self, spark: SparkSession | None = None, *, offline: bool = False, takeover: bool = False
    ) -> Plan | Refusal:
        """What the pipeline will do and what its guarantee rests on; or why it cannot be had, and what can.

        Starts no Spark. Changes nothing in source, sink and checkpoint; a connector may set up its own ledger.

        Args:
            offline: ask neither servers nor checkpoint.
            takeover: plan for fencing another driver that lives.

        Raises:
            UsageError: bad options.
            Unreachable: a server or the checkpoint gave no answer.
        """
        session = None
        if spark is not None:
            from delivered.spark.check import session_facts

            session = session_facts(self, spark)
        return make_plan(gather(self, session, offline=offline, takeover=takeover))

    def start(self, spark: SparkSession | None = None, *, takeover: bool = False) -> StreamingQuery:
        """Plan, then start the query.

        Args:
            spark: None: the active session, or a new one.
            takeover: fence another driver that runs this pipeline.

        Raises:
            Refused: the plan is a refusal.
            UsageError, Unreachable: as `plan`.
        """
        from delivered.spark.start import start

        plan = self.plan(spark, takeover=takeover)
        if isinstance(plan, Refusal):
            raise plan.error
        return start(self, spark)

    def stop(self, query: StreamingQuery, timeout_s: float = 120.0, waiting: Callable[[], None] | None = None) -> bool:
        """Let the running batch finish, then stop the query. Returns whether it stopped between two batches.

        Args:
            query: from `start`.
            timeout_s: after so long the query is stopped in mid-batch, which recovery bears.
            waiting: called about every 50 ms.
        """
        from delivered.spark.start import stop_between_batches

        return stop_between_batches(query, timeout_s, waiting)

    def audit(
        self,
        spark: SparkSession | None = None,
        *,
        sink: str | None = None,
        samples_max: int = 20,
        sink_from: Mapping[str, Any] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> AuditReport:
        """Read the source range and the sink back as a Spark job, and say what became of every record.

        Args:
            sink: name of the one to follow, where there are several: each is held against its own rows and columns.
            samples_max: damaged records listed, per class.
            sink_from: offsets of the sink to read it from; what stands before them belongs to others, or to an earlier
                checkpoint. Kafka: {"topic": {"0": 12}}; SQLite: {"rowid": 12}. None: all that the sink holds.
            progress: called with what is being done, a few times.

        Raises:
            UsageError: bad options, several sinks and none named, or a source of Spark's own.
        """
        from delivered.spark.audit import audit_sink

        return audit_sink(self, spark, sink, samples_max, sink_from, progress)
