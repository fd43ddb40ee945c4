"""The transform between source and sink, and dedup: what is declared, a fingerprint, and what changes in a rerun."""

from __future__ import annotations

import datetime
import dis
import functools
import hashlib
import importlib
import inspect
import random
import re
import secrets
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from delivered.model.dedup import KIND, TABLE, Dedup, read_ms
from delivered.model.errors import UsageError
from delivered.model.identity import SOURCE
from delivered.model.options import Unfit, choice
from delivered.model.rows import OnBadRow
from delivered.pipeline.endpoint import Projection
from delivered.planner import TransformFacts

# Functions called by a transform whose value changes when a batch reruns: found in its SQL and bytecode, without
# running it; also in strings that its Python holds, as for `selectExpr`. Calls inside installed packages, methods of
# values, and tables that it reads are not examined.

_SQL = (
    *("rand", "randn", "random", "uuid", "shuffle", "randstr", "monotonically_increasing_id", "spark_partition_id"),
    *("reflect", "java_method"),
    # of rows that a shuffle may reorder
    *("first", "first_value", "last", "last_value", "any_value", "collect_list", "collect_set", "array_agg"),
    *("listagg", "string_agg"),
)
"""Not now(): Spark logs a batch's time with its offsets."""
_CALLED = re.compile(rf"\b({'|'.join(_SQL)})\s*\(", re.IGNORECASE)
_KEEPS_STATE_SQL = re.compile(r"\b(group\s+by|distinct|join)\b", re.IGNORECASE)
_KEEPS_STATE = frozenset(
    {
        *("agg", "applyInPandasWithState", "cube", "distinct", "dropDuplicates", "dropDuplicatesWithinWatermark"),
        *("drop_duplicates", "groupBy", "groupby", "join", "rollup", "transformWithState"),
        "transformWithStateInPandas",
    }
)
_MODULES: tuple[ModuleType, ...] = (random, secrets)
_FUNCTIONS = {
    uuid: ("uuid1", "uuid4"),
    time: ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"),
    datetime.datetime: ("now", "utcnow", "today"),
    datetime.date: ("today",),
}
_CODES_MAX = 1_000


def changing_in_sql(sql: str) -> tuple[str, ...]:
    """The functions, each once: ("uuid()",)."""
    return tuple(dict.fromkeys(f"{name.lower()}()" for name in _CALLED.findall(sql)))


def sql_keeps_state(sql: str) -> bool:
    return bool(_KEEPS_STATE_SQL.search(sql))


def changing_in_python(function: Any) -> tuple[str, ...]:
    """The functions that it calls, or another of the user's own that it references: ("uuid.uuid4()",)."""
    calls = (name for code, names in _codes_called(function) for name in _changing(code, names))
    return tuple(dict.fromkeys(f"{name}()" for name in calls))


def python_keeps_state(function: Any) -> bool:
    return any(_KEEPS_STATE.intersection(code.co_names) for code, _ in _codes_called(function))


Names = dict[str, Any]


def _codes_called(user_code: Any) -> Iterator[tuple[CodeType, Names]]:
    """The code of a function, of nested functions, and of the user's own functions and classes that it names."""
    pending, seen = [user_code], set[int]()
    while pending and len(seen) < _CODES_MAX:
        item = pending.pop()
        if id(item) in seen or not str(getattr(item, "__module__", "") or "").strip():
            continue
        seen.add(id(item))
        if isinstance(item, functools.partial):
            pending += [item.func, *item.args, *item.keywords.values()]
        elif hasattr(item, "deterministic") and hasattr(item, "func"):  # a UDF
            pending.append(item.func)
        elif isinstance(item, type):
            pending += vars(item).values()
        elif isinstance(item, FunctionType):
            names = {**item.__globals__, **_closure(item)}
            for code in _nested(item.__code__):
                yield code, names
                # The user's own only: calls inside installed packages are not examined.
                own = [v for n in (*code.co_names, *code.co_freevars) if _is_own(v := names.get(n), item)]
                pending += own
            pending += [v for v in (getattr(item, "__wrapped__", None),) if v is not None]
        elif not isinstance(item, ModuleType) and callable(item) and _is_own(type(item), user_code):
            pending += [type(item), *getattr(item, "__dict__", {}).values()]


def _is_own(what: Any, user: Any) -> bool:
    """Whether it comes from the transform's top-level package, or from the main program."""
    module = str(getattr(what, "__module__", "") or getattr(type(what), "__module__", ""))
    own_module = str(getattr(user, "__module__", ""))
    return callable(what) and module.partition(".")[0] in ("__main__", own_module.partition(".")[0])


def _closure(function: FunctionType) -> Names:
    variables: Names = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return variables


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _changing(code: CodeType, names: Names) -> Iterator[str]:
    """Follows names and their attributes; values made at run time are unknown."""
    local: Names = {}
    value: Any = None
    path = ""
    for step in dis.get_instructions(code):
        name = step.argval if isinstance(step.argval, str) else ""
        if step.opname == "LOAD_CONST":
            yield from _in_strings(step.argval)
        if step.opname == "IMPORT_NAME":
            value, path = sys.modules.get(name), name
        elif step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST")):
            value, path = local.get(name, names.get(name)), name
        elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")):
            path = f"{path}.{name}"
            if _known(value, name) and step.opname != "IMPORT_FROM":
                yield path
            value = getattr(value, name, None) if isinstance(value, ModuleType | type) else None
            continue
        elif step.opname.startswith("STORE_") and name:
            (names if step.opname == "STORE_DEREF" else local)[name] = value  # visible to nested functions
            continue
        else:
            continue
        yield from _in_strings(value)
        if _changes(value):
            yield path


def _in_strings(value: Any) -> Iterator[str]:
    """SQL that a string holds, or a list of them."""
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str):
            yield from (call.removesuffix("()") for call in changing_in_sql(text))


def _known(parent: Any, name: str) -> bool:
    """Whether the attribute of this module or class gives another value each time."""
    if isinstance(parent, ModuleType):
        return _changes(getattr(parent, name, None))
    return isinstance(parent, type) and any(
        isinstance(owner, type) and issubclass(parent, owner) and name in named for owner, named in _FUNCTIONS.items()
    )


def _changes(value: Any) -> bool:
    if isinstance(value, ModuleType | type) or not callable(value):
        return False
    module, name = str(getattr(value, "__module__", "") or ""), str(getattr(value, "__name__", ""))
    if module.startswith("pyspark.sql") and module.endswith("functions.builtin"):
        return name in _SQL
    if getattr(value, "deterministic", True) is False:  # a UDF declared so
        return True
    listed = [getattr(m, n) for m, names in _FUNCTIONS.items() if isinstance(m, ModuleType) for n in names]
    listed += [v for m in _MODULES for v in vars(m).values()]
    return any(value is v for v in listed) or (module, name) == ("posix", "urandom")


# The transform between source and sink, what is declared about it, and a fingerprint of it.
#
# The ledger records with each batch which version of the transform it ran with. The fingerprint covers the text of SQL;
# the source of a function, and of the functions and constants that it references, unless they come from installed
# packages. A different fingerprint means that the transform was edited.

_CONSTANT_LENGTH_MAX = 10_000
_FUNCTIONS_MAX = 1_000
_INSTALLED = tuple(sysconfig.get_path(p) for p in ("purelib", "platlib", "stdlib"))


@dataclass(frozen=True)
class Transform:
    """
    Attributes:
        kind: "none", "sql", "python" (DataFrame -> DataFrame) or "arrow" (record batch -> record batch, row-wise).
        sql: over the view `source`, or over the names of the sources.
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

    @property
    def isolates(self) -> bool:
        """Whether a row that it fails for can be told from the others."""
        return self.kind == "arrow" and self.function is not None

    def facts(self) -> TransformFacts:
        """What the planner needs to know. Runs nothing."""
        kind = "none" if self.kind == "arrow" and self.function is None else self.kind
        text = self.sql or getattr(self.function, "__qualname__", "")
        found = TransformFacts(kind, text, self.stateful, self.deterministic)
        match self.kind:
            case "sql":
                return found.seen(changing_in_sql(self.sql), sql_keeps_state(self.sql))
            case "python":
                return found.seen(changing_in_python(self.function), python_keeps_state(self.function))
            case _:
                return found


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
    raise UsageError("TRANSFORM_VALUE.TYPE", transform=what, transform_type=type(what).__name__)


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


def reads_all(transform: Transform, sources: Sequence[str]) -> None:
    """Check that a transform can make one stream of these sources.

    Raises:
        UsageError: it reads one source and there are several, its SQL does not name one of them, or its function lacks
            a parameter for one.
    """
    if transform.kind in ("none", "arrow") and len(sources) > 1:
        raise UsageError("TRANSFORM_SOURCES.UNCOMBINED", sources=", ".join(sources))
    if tuple(sources) == (SOURCE,):
        return
    if transform.kind == "sql":
        missing = [n for n in sources if not re.search(rf"(?<!\w){n}(?!\w)", transform.sql, re.IGNORECASE)]
        if missing:
            raise UsageError("TRANSFORM_SOURCES.SQL", source=missing[0], sql=transform.sql.strip())
    if transform.kind == "python" and transform.function is not None and len(sources) > 1:
        try:
            inspect.signature(transform.function).bind(**dict.fromkeys(sources))
        except TypeError as error:
            raise UsageError("TRANSFORM_SOURCES.PARAMETERS", error=error, sources=", ".join(sources)) from None
        except ValueError:
            return  # a callable with unknown parameters


def load_function(reference: str, folder: Path) -> Callable[[Any], Any]:
    """The function that "module:function" names; the module may lie in `folder`.

    Raises:
        UsageError: malformed reference, no such module, no such function.
    """
    module_name, _, function_name = reference.partition(":")
    if not (module_name and function_name):
        raise UsageError("TRANSFORM_VALUE.REFERENCE", reference=reference)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            "TRANSFORM_MISSING.MODULE", reference=reference, error=error, module_name=module_name, folder=folder
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(
            "TRANSFORM_MISSING.FUNCTION", module_name=module_name, file=module.__file__, function_name=function_name
        )
    found: Callable[[Any], Any] = function
    return found


def version_of(
    transform: Transform,
    projections: Iterable[tuple[str, Projection]],
    on_bad_row: OnBadRow,
    sources: Sequence[str] = (SOURCE,),
) -> str:
    """16 hex digits for a pipeline's transform, including its sinks' projections.

    Args:
        projections: of every sink, by its name. One that passes all rows unchanged is ignored.
        sources: their names; ignored for a single unnamed source.
    """
    parts = [transform.kind, transform.sql.strip(), *transform.select, *_parts_of(transform.function, set())]
    parts += [f"{name}: {p!r}" for name, p in projections if not p.is_all]
    if tuple(sources) != (SOURCE,):
        parts += [f"source {n}" for n in sorted(sources)]
    if on_bad_row is not OnBadRow.FAIL:
        parts.append(on_bad_row.value)
    return hashlib.blake2b("\0".join(parts).encode(errors="replace"), digest_size=8).hexdigest()


def _parts_of(what: Any, seen: set[int]) -> Iterator[str]:
    """What a value contributes, each once, even with cyclic references."""
    if what is None or isinstance(what, str | bytes | int | float | complex):
        yield repr(what)[:_CONSTANT_LENGTH_MAX]
        return
    if id(what) in seen or len(seen) > _FUNCTIONS_MAX:
        return
    seen.add(id(what))
    # In its own dictionary: some objects have an attribute of any name.
    own = getattr(what, "__dict__", None)
    if isinstance(own, dict) and "__wrapped__" in own:
        yield from _parts_of(own["__wrapped__"], seen)
    if isinstance(what, FunctionType):
        if _installed(what):
            yield f"{what.__module__}.{what.__qualname__}"
            return
        yield _source(what)
        yield from _parts_of(what.__defaults__, seen)
        named = {n for code in _codes(what.__code__) for n in code.co_names}
        for name in sorted(named & what.__globals__.keys()):
            yield name
            yield from _parts_of(what.__globals__[name], seen)
        for cell in what.__closure__ or ():
            yield from _parts_of(_content(cell), seen)
    elif isinstance(what, type):
        yield what.__qualname__ if _installed(what) else _source(what)
    elif isinstance(what, ModuleType):
        own = getattr(what, "__file__", None) is not None and not _installed(what)
        yield _source(what) if own else what.__name__
    elif isinstance(what, BuiltinFunctionType):
        yield what.__name__
    elif isinstance(what, functools.partial):
        for value in (what.func, what.args, what.keywords):
            yield from _parts_of(value, seen)
    elif callable(what) and not inspect.ismethod(what):
        # A callable object: its type, and its attributes.
        yield from _parts_of(type(what), seen)
        for value in _attributes(what):
            yield from _parts_of(value, seen)
    elif inspect.ismethod(what):
        yield from _parts_of(what.__func__, seen)
        yield from _parts_of(what.__self__, seen)
    elif isinstance(what, list | tuple):
        for value in what:
            yield from _parts_of(value, set(seen))
    elif isinstance(what, dict):
        for key in sorted(what, key=repr):
            yield repr(key)[:_CONSTANT_LENGTH_MAX]
            yield from _parts_of(what[key], set(seen))
    elif isinstance(what, set | frozenset):
        yield from sorted(repr(v)[:_CONSTANT_LENGTH_MAX] for v in what)
    else:
        yield type(what).__qualname__


def _installed(what: Any) -> bool:
    """Whether it belongs to an installed package, whose version is not tracked."""
    try:
        file = inspect.getfile(what)
    except (TypeError, OSError):
        return False
    return file.startswith(_INSTALLED)


def _source(what: Any) -> str:
    try:
        return inspect.getsource(what)
    except (OSError, TypeError):
        code = getattr(what, "__code__", None)
        return "".join(_compiled(code)) if isinstance(code, CodeType) else str(what.__name__)


def _compiled(code: CodeType) -> Iterator[str]:
    for part in _codes(code):
        constants = [repr(c) for c in part.co_consts if not isinstance(c, CodeType)]
        yield f"{part.co_code.hex()}{part.co_names}{constants}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _attributes(what: Any) -> list[Any]:
    own = getattr(what, "__dict__", None)
    return [v for _, v in sorted(own.items())] if isinstance(own, dict) else []


# `dedup`: duplicates in the source that are dropped before the transform.

_CLOCK = re.compile(r"\b(now|current_timestamp|current_date|curdate|localtimestamp)\b", re.IGNORECASE)


def dedup(*by: str, within: str, time: str = "timestamp", late: str = "refuse", memory: str = "state") -> Dedup:
    """Drop duplicates in the source, under every guarantee, before the transform.

    Args:
        by: SQL over the source's columns that names a record: "key", "get_json_object(CAST(value AS STRING), '$.id')".
            A record for which one of them is null duplicates nothing.
        within: "1 hour", "90 seconds": a record whose time is at most this long after its key's first one is dropped.
        time: SQL over the source's columns, a timestamp.
        late: "drop": accept that a record older than the newest one by more than `within` is dropped, even if it is the
            first of its key. "refuse": such a pipeline is refused, with the reason. Not with a table, which only
            drops duplicates.
        memory: where keys are kept. "state": in Spark's state, in the checkpoint. "table": in a table of the sink's
            database (PostgreSQL, MySQL or SQLite), updated in the transaction that decides the batch.

    Raises:
        UsageError: no expression, one whose value changes between runs, or an invalid duration.
    """
    if not by or not all(isinstance(b, str) and b.strip() for b in by):
        raise UsageError("DEDUP_BY", by=by)
    for text in (*by, time):
        if changing_in_sql(text) or _CLOCK.search(text):
            raise UsageError("DEDUP_CHANGES", text=text)
    drops = choice(("refuse", "drop")).parse("delivered.dedup", "late", late, 'write late="refuse"') == "drop"
    kind = (
        TABLE
        if choice(("state", "table")).parse("delivered.dedup", "memory", memory, 'write memory="state"') == "table"
        else KIND
    )
    if drops and kind == TABLE:
        raise UsageError("DEDUP_LATE_TABLE")
    try:
        within_ms = read_ms(within)
    except Unfit as why:
        raise UsageError("DEDUP_WITHIN", reason=why) from None
    return Dedup(tuple(b.strip() for b in by), within_ms, time.strip(), drops, kind)
