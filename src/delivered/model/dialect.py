"""Spells the options in hints for their reader.

A hint holds an option as Spark's users write it, `.option("name", "value")`; that is its stored form, because Spark
carries errors as text. Users of a pipeline file get `name: value`; `in_file_words` rewrites all of them at the edge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from delivered.model.offsets import SOURCE, by_source

_OPTION = re.compile(
    r"""\.option\((?P<q>["'])(?P<name>[\w.]+)(?P=q), (?:(?P<v>["'])(?P<value>.*?)(?P=v)|(?P<any>\.\.\.))\)"""
)
_SNAKE = {
    "missingLedger": "missing_ledger",
    "newCheckpoint": "new_checkpoint",
    "newTarget": "new_target",
    "lostRecords": "lost_records",
}
"""Options of Spark's writer that a pipeline file spells differently."""
_FRAMES = (
    (re.compile(r'df\.withColumn\("([^"]+)", col\("([^"]+)"\)\.cast\("([^"]+)"\)\)'), r"write CAST(\2 AS \3) AS \1"),
    (re.compile(r'df\.filter\(col\("([^"]+)"\)\.isNotNull\(\)\)'), r"add WHERE \1 IS NOT NULL"),
    (re.compile(r'df\.drop\("([^"]+)"\)'), r"leave \1 out"),
)
"""A DataFrame call -> its counterpart in the transform's SQL."""
_SHOWN_LENGTH = 500
_PLAIN = re.compile(r"[A-Za-z0-9_./+-][A-Za-z0-9_./+ -]*")


def starting_at(offsets: str) -> str:
    """A hint's options that start the sources at `offsets`, lines of Spark's offset log.

    Made for pasting: never shortened, and without spaces, where a terminal would wrap.
    """
    options = {n: f""".option("startingOffsets", '{_compact(line)}')""" for n, line in by_source(offsets).items()}
    return " and ".join(f"{o} for source {n}" if n != SOURCE else o for n, o in options.items())


def without_newest(offsets: str, others: Iterable[str] = ()) -> str:
    """How to go on with a ledger that lacks the newest batches of its checkpoint.

    Args:
        offsets: where its last batch ended; empty: it has none.
        others: further sinks of the pipeline, which may hold the missing batches.
    """
    accept = 'to lose them, once, .option("missingLedger", "accept")'
    if not offsets:
        return f"restore the sink; or, {accept}"
    named = sorted(others)
    repeats = f"loses nothing, and repeats them at the sinks {named}," if named else "loses and repeats nothing"
    return (
        f"restore the sink; or write the missing batches again, which {repeats} if the source still has their records "
        "(a query that keeps state starts with none): stop this query, and start one with a new checkpointLocation, "
        f'{starting_at(offsets)} and, once, .option("newCheckpoint", "accept"); or, {accept}'
    )


def _compact(text: str) -> str:
    try:
        return json.dumps(json.loads(text), separators=(",", ":"))
    except ValueError:  # one of Spark's own sources, in its own format
        return text


def shown(offsets: str) -> str:
    """Offsets within a sentence, with a mark if shortened."""
    return offsets if len(offsets) <= _SHOWN_LENGTH else f"{offsets[:_SHOWN_LENGTH]}... ({len(offsets):,} characters)"


def in_file_words(text: str) -> str:
    """A message with every option as in a pipeline file, and every change of columns as SQL."""
    for frame, sql in _FRAMES:
        text = frame.sub(f"{sql} in the transform", text)
    return _OPTION.sub(_file_line, text)


def _file_line(found: re.Match[str]) -> str:
    name = _SNAKE.get(found["name"], found["name"])
    value = found["any"] or found["value"]
    if not found["any"] and not _PLAIN.fullmatch(value):
        value = "'" + value.replace("'", "''") + "'" if '"' in value else f'"{value}"'
    return f"{name}: {value}"
