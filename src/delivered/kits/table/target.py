"""The user's table as any connector to tables of files sees it: compare it with the rows, and say what is wrong."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.kits.table.options import FileTableOptions
from delivered.kits.table.store import Store
from delivered.model.capability import APPEND
from delivered.model.errors import DeliveredError, Refused, Unreachable, UsageError
from delivered.model.guarantee import Guarantee


def preflight(options: FileTableOptions, guarantee: Guarantee, look: Callable[[], None]) -> list[Finding]:
    """
    Args:
        look: raises what speaks against this table.
    """
    mode = options.write
    if mode != APPEND and guarantee is not Guarantee.EXACTLY_ONCE:
        return [
            Finding(
                "MODE_GUARANTEE",
                f"Mode {'upsert' if mode.upserts else 'overwrite'} takes files of the table away, and under "
                f"{guarantee.value} each task would do so for itself: they would meet at the same files.",
                True,
                "choose exactly_once, where one commit does it for all shards",
            )
        ]
    try:
        look()
    except DeliveredError as error:
        return [Finding.refusal(error)]
    return []


def probe(store: Store, folder: str) -> None:
    """Write one small file, and take it away again. Raises what the store raises."""
    name = f"{folder}/probe-{uuid.uuid4().hex}"
    store.put(name, b"may this user write here?")
    store.remove([name])


def compare(
    options: FileTableOptions, there: pa.Schema, schema: pa.Schema, partitions: Collection[str], *, adds: bool = False
) -> list[pa.Field]:
    """Columns that the table lacks and that are to be added.

    Args:
        there: the table's columns; one that may hold no null says so.
        schema: of the rows, canonical.
        partitions: names of the columns that the table is partitioned by.
        adds: whether columns can be added now, if the options ask for it.

    Raises:
        UsageError: names or types do not fit, or a column is missing on one of the sides.
    """
    lower = {name.lower(): name for name in there.names}
    missing = [field for field in schema if field.name not in there.names]
    for field in schema:
        known = lower.get(field.name.lower(), field.name)
        if known != field.name and field in missing:
            raise UsageError(
                "COLUMN_CASE",
                f"Column {field.name!r} is {known!r} in the table {options.where}.",
                next_step=f"rename it to {known!r}",
            )
        if field not in missing and not there.field(field.name).type.equals(field.type):
            raise UsageError(
                "COLUMN_TYPE",
                f"Column {field.name!r} is {there.field(field.name).type} in the table {options.where}, and "
                f"{field.type} in the rows.",
                next_step="cast it in the pipeline",
            )
    if missing and not (adds and options.merge_schema):
        way = 'have it added with .option("mergeSchema", "true"), or leave it out of the rows'
        raise UsageError(
            "COLUMN_MISSING",
            f"The table {options.where} has no column {', '.join(repr(f.name) for f in missing)}; it has "
            f"{there.names}.",
            next_step="start the pipeline again, which adds it" if options.merge_schema else way,
        )
    needed = dict.fromkeys([*(f.name for f in there if not f.nullable), *partitions])
    absent = [name for name in needed if name not in schema.names]
    if absent:
        nested = "" if set(absent) <= set(there.names) else "; a field inside a struct cannot partition what is written"
        raise UsageError(
            "COLUMN_REQUIRED",
            f"The table {options.where} needs a value in {absent}, and the rows have no such column.",
            next_step=f"add it to the rows{nested}",
        )
    return missing


def check_asked(options: FileTableOptions, asked: Sequence[str]) -> None:
    """
    Args:
        asked: what the table asks of a writer and this one does not do.

    Raises:
        Refused: there is such a thing.
    """
    if asked:
        raise Refused(
            "TABLE_FEATURES",
            f"The table {options.where} asks of its writers: {', '.join(asked)}. This sink does not do that.",
            next_step="write to a table without it, and take the rows over from there",
        )


def missing_table(options: FileTableOptions, system: str, check: str) -> UsageError:
    """Args: check: what the user should look at."""
    return UsageError(
        "TABLE_MISSING",
        f"There is no {system} table {options.where}.",
        next_step=f'check {check}; or let it be created with .option("ifNotExists", "true")',
    )


def unreachable(options: FileTableOptions, error: Exception, check: str) -> DeliveredError:
    """An error of the client or of the file system as ours."""
    if isinstance(error, OSError) and options.local:
        return DeliveredError(
            "TABLE_STORAGE",
            f"The files of the table {options.where} cannot be read or written: {str(error)[:500]}",
            next_step="make room on the disk, or give the user the right to write there; the batch runs again",
        )
    return Unreachable(
        "TABLE_UNREACHABLE",
        f"The table {options.where} cannot be read or written: {type(error).__name__}: {str(error)[:500]}",
        next_step=f"check {check}",
    )


@contextlib.contextmanager
def but_gone(explained: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """`explained`, but for a file that is gone: that is told apart from a store that does not work."""
    gone = None
    with explained:
        try:
            yield
        except FileNotFoundError as error:
            gone = error
    if gone is not None:
        raise gone
