"""Dedup and transform between source and sink: what is declared, a fingerprint, what changes in a rerun, and the SQL of
a dedup's keys."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any

from delivered.contract.sink import KEY_BYTES
from delivered.contract.source import COORDINATES
from delivered.engine.keys import AT, KEY, TIE
from delivered.engine.keys import TIME as SEEN_AT
from delivered.model.capability import BY_WATERMARK, IN_TABLE, Dedup
from delivered.model.errors import BadRecord, UsageError
from delivered.model.identity import SOURCE
from delivered.model.options import Unfit, check_argument, choice, read_ms
from delivered.model.rows import OnBadRow, backquoted
from delivered.pipeline.changing import changing_in_python, changing_in_sql, nested, python_keeps_state, sql_keeps_state
from delivered.pipeline.endpoint import Projection
from delivered.planner import TransformFacts

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
        """Whether it is known which row it fails for."""
        return self.kind == "arrow" and self.function is not None

    @property
    def own_module(self) -> ModuleType | None:
        """The user's module that its function is from; None: the main one, or one that is installed."""
        name = getattr(self.function, "__module__", None) or "__main__"
        file = getattr(sys.modules.get(name), "__file__", None)
        return None if name == "__main__" or file is None or file.startswith(_INSTALLED) else sys.modules[name]

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
    call = "delivered.transform"
    check_argument(call, "stateful", stateful, bool, "True or False", "..., stateful=True")
    check_argument(call, "deterministic", deterministic, (bool, NoneType), "True or False", "..., deterministic=True")
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
    wanted = "a function from record batch to record batch"
    check_argument("delivered.arrow", "function", function, (Callable, NoneType), wanted, "function")  # type: ignore[arg-type]
    check_argument("delivered.arrow", "select", select, (list, tuple), "a list of columns", 'select=["id", "amount"]')
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
        if transform.kind == "python" and transform.function is not None:
            with suppress(ValueError):  # a callable with unknown parameters
                try:
                    inspect.signature(transform.function).bind(None)
                except TypeError as error:
                    raise UsageError("TRANSFORM_VALUE.PARAMETERS", error=error) from None
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
    except Exception as error:
        if not (isinstance(error, ImportError) and error.name and f"{module_name}.".startswith(f"{error.name}.")):
            kind = type(error).__name__
            raise UsageError("TRANSFORM_MISSING.IMPORT", reference=reference, kind=kind, error=error) from error
        if module_name.endswith(".py"):
            meant = f"{module_name[:-3]}:{function_name}"
            raise UsageError("TRANSFORM_MISSING.SUFFIX", reference=reference, meant=meant) from error
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


def build_version(
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
        if _is_installed(what):
            yield f"{what.__module__}.{what.__qualname__}"
            return
        yield _source(what)
        yield from _parts_of(what.__defaults__, seen)
        named = {n for code in nested(what.__code__) for n in code.co_names}
        for name in sorted(named & what.__globals__.keys()):
            yield name
            yield from _parts_of(what.__globals__[name], seen)
        for cell in what.__closure__ or ():
            yield from _parts_of(_content(cell), seen)
    elif isinstance(what, type):
        yield what.__qualname__ if _is_installed(what) else _source(what)
    elif isinstance(what, ModuleType):
        own = getattr(what, "__file__", None) is not None and not _is_installed(what)
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


def _is_installed(what: Any) -> bool:
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
        return "".join(_compile(code)) if isinstance(code, CodeType) else str(what.__name__)


def _compile(code: CodeType) -> Iterator[str]:
    for part in nested(code):
        constants = [repr(c) for c in part.co_consts if not isinstance(c, CodeType)]
        yield f"{part.co_code.hex()}{part.co_names}{constants}"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _attributes(what: Any) -> list[Any]:
    own = getattr(what, "__dict__", None)
    return [v for _, v in sorted(own.items())] if isinstance(own, dict) else []


# Dedup, which drops duplicates in the source before the transform. Helper columns hold a record's key and time. They
# are equal for duplicates, and only for them; records without a key are not duplicates of each other: each is keyed
# by its position in the source.

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
    texts = (
        ("within", within, "1 hour"),
        ("time", time, "timestamp"),
        ("late", late, "drop"),
        ("memory", memory, "table"),
    )
    for key, value, example in texts:
        check_argument("delivered.dedup", key, value, str, "text", f'..., {key}="{example}"')
    for text in (*by, time):
        if changing_in_sql(text) or _CLOCK.search(text):
            raise UsageError("DEDUP_CHANGES", text=text)
    drops = choice(("refuse", "drop")).parse("delivered.dedup", "late", late, 'write late="refuse"') == "drop"
    kind = (
        IN_TABLE
        if choice(("state", "table")).parse("delivered.dedup", "memory", memory, 'write memory="state"') == "table"
        else BY_WATERMARK
    )
    if drops and kind == IN_TABLE:
        raise UsageError("DEDUP_LATE_TABLE")
    try:
        within_ms = read_ms(within)
    except Unfit as why:
        raise UsageError("DEDUP_WITHIN", reason=why) from None
    return Dedup(tuple(b.strip() for b in by), within_ms, time.strip(), drops, kind)


# The SQL that computes the helper columns.

_BY = "__delivered_dedup_by_"
ALONE = "__delivered_dedup_alone"
TIME = "__delivered_dedup_time"
_AS_TEXT = ("boolean", "tinyint", "smallint", "int", "bigint", "date")


def key_columns(dedup: Dedup) -> list[str]:
    """The helper columns that are equal for duplicates, and only for them."""
    return [*(f"{_BY}{i}" for i in range(len(dedup.by))), ALONE]


def helper_columns(dedup: Dedup) -> list[str]:
    return [*key_columns(dedup), TIME]


def key_sql(dedup: Dedup) -> dict[str, str]:
    """By helper column, but the last: `alone_sql`. CASE rules out generators and aggregates."""
    own = {**dict(zip(key_columns(dedup), dedup.by, strict=False)), TIME: dedup.time}
    return {name: f"CASE WHEN true THEN ({sql}) END" for name, sql in own.items()}


def alone_sql(dedup: Dedup, columns: Collection[str]) -> dict[str, str]:
    """The last one, by helper column: keys a record whose key is null. It fails the query if the source has no
    positions."""
    no_key = f"CAST(raise_error('{BadRecord('DEDUP_KEY_NULL')}') AS STRING)"
    own = "concat_ws('-', `topic`, `partition`, `offset`)" if _is_placed(columns) else no_key
    return {ALONE: f"CASE WHEN {_missing(dedup)} THEN {own} END"}


def seen_sql(dedup: Dedup, types: Mapping[str, str], keyed: Mapping[str, str]) -> dict[str, str]:
    """By column of `engine.keys`, for a key table.

    Args:
        types: of the source's columns, as Spark names them; keyed: of the helper columns too.

    Raises:
        UsageError: a key of a type that has no text.
    """
    names = key_columns(dedup)[:-1]
    parts = [f"coalesce({_text(by, keyed[name], name)}, '')" for by, name in zip(dedup.by, names, strict=True)]
    digest = f"unhex(substr(sha2(CAST(concat_ws(',', {', '.join(parts)}) AS BINARY), 256), 1, {2 * KEY_BYTES}))"
    if _is_placed(types):
        at, tie = "`offset`", "xxhash64(`topic`, `partition`, `offset`)"
    else:
        plain = [backquoted(name) for name, kind in types.items() if "map<" not in kind]
        at, tie = "0", f"xxhash64({', '.join(plain)})"
    return {
        KEY: f"CASE WHEN {_missing(dedup)} THEN NULL ELSE {digest} END",
        SEEN_AT: f"unix_micros({TIME})",
        AT: f"CAST({at} AS BIGINT)",
        TIE: tie,
    }


def _missing(dedup: Dedup) -> str:
    return " OR ".join(f"`{name}` IS NULL" for name in key_columns(dedup)[:-1])


def _is_placed(columns: Collection[str]) -> bool:
    """Whether they hold a record's position in the source."""
    return all(c in columns for c in COORDINATES)


def _text(value: str, kind: str, column: str) -> str:
    """A text unique per value, whatever the session's time zone; null stays null."""
    if kind in ("string", "binary"):
        return f"hex(`{column}`)"
    if kind in _AS_TEXT or kind.startswith("decimal"):
        return f"CAST(`{column}` AS STRING)"
    if kind == "timestamp":
        return f"CAST(unix_micros(`{column}`) AS STRING)"
    raise UsageError("DEDUP_KEY_TYPE", value=value, kind=kind)
