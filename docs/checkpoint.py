"""What may change between two starts on one checkpoint: the page docs/checkpoint.md, from the marks of tests.

A test with `pytest.mark.checkpoint(change, outcome, remark)` made the change and saw the outcome. Nothing of the table
is written by hand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

_ABOVE = """\
# Changes on an existing checkpoint

This page lists what you may change in a pipeline that has a checkpoint, and what is refused. Look here before you
rename, move or rewrite anything; each row is a test. `delivered plan`, and every start, check for changes before they
read a record. "Refused" means that the pipeline does not start, or stops before its first write, and says what to do.
For what Spark requires of a changed stateful query, see its guide under
[recovery semantics after changes](https://spark.apache.org/docs/latest/streaming/).

| change | outcome | details | test |
|---|---|---|---|
"""
_BELOW = """
If two drivers use one checkpoint, the second is refused while the first is alive
(`delivered run --takeover` fences the first). A driver that lost its claim stops before its next decision.

`repartition` is Spark's `spark._streamingCheckpointManager.repartition(checkpoint, partitions)`, in classic sessions
since 4.2. It logs a batch with the offsets and the timestamp of the previous batch; these distinguish it from a lost
batch.
"""


def marks(mark: str) -> Iterator[tuple[str, str, str, str]]:
    """The three arguments of each such mark of a test, and the file of the test."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if f"mark.{mark}" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for made in getattr(node, "decorator_list", ()):
                name = ast.unparse(made.func) if isinstance(made, ast.Call) else ""
                if name in (mark, f"pytest.mark.{mark}"):
                    change, outcome, remark = (ast.literal_eval(argument) for argument in made.args)
                    yield change, outcome, remark, path.relative_to(ROOT).as_posix()


def page() -> str:
    lines = [
        f"| {change} | {outcome} | {remark} | [{Path(file).stem.removeprefix('test_')}](../{file}) |"
        for change, outcome, remark, file in marks("checkpoint")
    ]
    return _ABOVE + "\n".join(lines) + "\n" + _BELOW
