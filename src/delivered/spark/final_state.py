"""What an upsert must leave in its sink: of each key the row with the greatest version, or none if that one deletes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from delivered.audit.report import AuditReport
from delivered.model.capability import WriteMode
from delivered.model.errors import Refused

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_AT, _PARTITION, _GONE, _ROW = "__delivered_at", "__delivered_partition", "__delivered_gone", "__delivered_row"


@dataclass(frozen=True)
class FinalState:
    """
    Attributes:
        rows: that must be in the sink, without the column that deletes.
        unclear: ids, as `id_sql` makes them, of keys of which the source alone does not tell what must be there.
        gone: ids of keys whose last row deletes; those of them that are not unclear must not be there.
    """

    rows: DataFrame
    unclear: DataFrame
    gone: DataFrame


def check(mode: WriteMode) -> None:
    """
    Raises:
        Refused: the final state does not follow from the source.
    """
    if mode.replaces:
        raise Refused(
            "AUDIT_ORDER",
            f"Each batch replaces what the sink has of its values in {', '.join(mode.replaces)}. What is left of "
            "earlier batches is known to the batches that ran, not to the source, so the table cannot be held against "
            "it.",
            next_step="compare the newest partitions with a query of your own",
        )
    if mode.upserts and mode.version is None:
        raise Refused(
            "AUDIT_ORDER",
            f"The sink keeps the last row of each key ({mode.keys_text}) by order of arrival. Which one came last is "
            "known to the batches that ran, not to the source, so the table cannot be held against it.",
            next_step='write with .option("versionColumn", ...), or compare the keys with a query of your own',
        )


def id_sql(mode: WriteMode) -> str:
    """SQL that tells keys apart."""
    columns = ", ".join("`" + k.replace("`", "``") + "`" for k in mode.keys)
    return f"to_json(struct({columns}))"


def final_state(frame: DataFrame, mode: WriteMode, partitions: Sequence[int] | None) -> FinalState:
    """
    Args:
        frame: every row that the sink was given.
        partitions: of each partition of `frame` the number of the source's partition that it comes from, rows in its
            order; None: rows were moved.
    """
    version = F.col(_quoted(str(mode.version)))
    gone = F.lit(False) if mode.delete is None else F.coalesce(F.col(_quoted(mode.delete)), F.lit(False))
    partition = F.lit(-1)
    if partitions:
        partition = F.element_at(F.array(*map(F.lit, partitions)), F.spark_partition_id() + 1)
    kept = [c for c in frame.columns if c != mode.delete]
    placed = frame.select(
        *map(_quoted, kept),
        gone.alias(_GONE),
        partition.alias(_PARTITION),
        F.monotonically_increasing_id().alias(_AT),
    )
    by_key = placed.groupBy(*map(_quoted, mode.keys)).agg(
        # Of equal versions the first one stays.
        F.max_by(F.struct(*map(_quoted, kept), _GONE, _AT), F.struct(version, -F.col(_AT))).alias(_ROW),
        F.max(F.when(~F.col(_GONE), F.col(_AT))).alias("newest"),
        F.min(_PARTITION).alias("first_partition"),
        F.max(_PARTITION).alias("last_partition"),
    )
    # A deleted key forgets its version: a row that came after its deletion, in a later batch, is there again, though
    # it is older.
    order_known = (F.col("first_partition") == F.col("last_partition")) & F.lit(partitions is not None)
    perhaps_back = F.col("newest").isNotNull() & (~order_known | (F.col("newest") > F.col(f"{_ROW}.{_AT}")))
    unclear = F.col(f"{_ROW}.{_GONE}") & perhaps_back
    rows = by_key.filter(~F.col(f"{_ROW}.{_GONE}")).select(*[F.col(f"{_ROW}.{_quoted(c)}").alias(c) for c in kept])
    key = F.expr(id_sql(mode)).alias("id")
    return FinalState(rows, by_key.filter(unclear).select(key), by_key.filter(f"{_ROW}.{_GONE}").select(key))


def of_state(report: AuditReport, mode: WriteMode, unclear: int) -> AuditReport:
    """The report on a sink that keeps one row of each key."""
    notes = [
        *report.notes,
        f"the sink keeps one row of each key ({mode.keys_text}): compared is the row with the greatest {mode.version} "
        "of the source range, without keys whose last row deletes; rows in between are in the ledger's total alone",
    ]
    if unclear:
        notes.append(f"{unclear} keys are not judged: deleted and perhaps brought back by an older row, or in progress")
    prints = report.fingerprints
    return replace(report, notes=tuple(notes), fingerprints=replace(prints, ledger=None) if prints else None)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
