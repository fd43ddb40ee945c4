"""The transform between source and sink, and what is declared about it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delivered.model.errors import UsageError
from delivered.planner import TransformFacts

_CHANGES_BETWEEN_RUNS = re.compile(
    r"\b(rand|randn|random|uuid|shuffle|randstr|monotonically_increasing_id|spark_partition_id|reflect|java_method)\s*\(",
    re.IGNORECASE,
)
"""SQL functions whose values change when a batch reruns. Not now(): Spark logs a batch's time with its offsets."""

_KEEPS_STATE = re.compile(r"\b(group\s+by|distinct|join)\b", re.IGNORECASE)


def changes_between_runs(sql: str) -> bool:
    """Whether SQL calls a function whose values change when a batch reruns."""
    return bool(_CHANGES_BETWEEN_RUNS.search(sql))


@dataclass(frozen=True)
class Transform:
    """
    Attributes:
        kind: "none", "sql", "python" (DataFrame -> DataFrame) or "arrow" (record batch -> record batch, row-wise).
        sql: over the view `source`.
        function: for "python" and, optionally, "arrow".
        select: for "arrow": columns to keep before `function`; empty: all.
        stateful: it keeps state between batches.
        deterministic: the same input rows give the same output rows; None: not declared.
    """

    kind: str
    sql: str = ""
    function: Callable[[Any], Any] | None = None
    select: tuple[str, ...] = ()
    stateful: bool = False
    deterministic: bool | None = None

    def facts(self) -> TransformFacts:
        """What the planner needs to know. Runs nothing."""
        deterministic, stateful = self.deterministic, self.stateful
        if self.kind == "sql":
            if deterministic is None and changes_between_runs(self.sql):
                deterministic = False
            stateful = stateful or bool(_KEEPS_STATE.search(self.sql))
        kind = "none" if self.kind == "arrow" and self.function is None else self.kind
        text = self.sql or getattr(self.function, "__qualname__", "")
        return TransformFacts(kind, text, stateful, deterministic)


NO_TRANSFORM = Transform("none")


def transform(
    what: str | Callable[[Any], Any], *, stateful: bool = False, deterministic: bool | None = None
) -> Transform:
    """SQL over the view `source`, or a function DataFrame -> DataFrame, with what is declared about it.

    Args:
        stateful: it keeps state between batches (aggregation, stream-stream join, deduplication).
        deterministic: the same input rows give the same output rows in every run.
    """
    if isinstance(what, str):
        return Transform("sql", sql=what, stateful=stateful, deterministic=deterministic)
    if callable(what):
        return Transform("python", function=what, stateful=stateful, deterministic=deterministic)
    raise UsageError(
        "TRANSFORM_VALUE",
        f"transform is {what!r} ({type(what).__name__}); it must be SQL over the view `source`, or a function from "
        "DataFrame to DataFrame.",
    )


def arrow(function: Callable[[Any], Any] | None = None, *, select: Sequence[str] = ()) -> Transform:
    """A transform from Arrow record batch to Arrow record batch: fastest, since records never become JVM rows.

    Args:
        function: row-wise and deterministic: rows of one batch depend on no other. None: only `select`.
        select: columns to keep before `function`; empty: all.
    """
    return Transform("arrow", function=function, select=tuple(select), deterministic=True)


def as_transform(what: Any) -> Transform:
    """A `Transform` from None, SQL, a function, or a `Transform`."""
    if what is None:
        return NO_TRANSFORM
    return what if isinstance(what, Transform) else transform(what)


def load_function(reference: str, folder: Path) -> Callable[[Any], Any]:
    """The function that "module:function" names; the module may lie in `folder`.

    Raises:
        UsageError: malformed reference, no such module, no such function.
    """
    module_name, _, function_name = reference.partition(":")
    if not (module_name and function_name):
        raise UsageError(
            "TRANSFORM_VALUE",
            f"The transform is {reference!r}; it must be written module:function, as in orders:clean.",
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            "TRANSFORM_MISSING",
            f"The module of the transform {reference!r} cannot be imported: {error}.",
            next_step=f"put {module_name}.py into {folder}, or install the package it needs",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(
            "TRANSFORM_MISSING", f"The module {module_name!r} ({module.__file__}) has no function {function_name!r}."
        )
    found: Callable[[Any], Any] = function
    return found
