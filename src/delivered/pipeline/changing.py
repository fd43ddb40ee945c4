"""Functions called by a transform whose value changes when a batch reruns: found in its SQL and bytecode, without
running it; also in strings that its Python holds, as for `selectExpr`. Calls inside installed packages, methods of
values, and tables that it reads are not examined.

It imports the standard library alone: a test runs it on every Python of this machine.
"""

from __future__ import annotations

import datetime
import dis
import functools
import random
import re
import secrets
import sys
import time
import uuid
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

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
_LOADS = (
    *("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST"),
    *("LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR"),  # in a class: of 3.11, of 3.12 on
)
_OF_VARIABLES = re.compile("LOAD_FAST|STORE_FAST")
"""What an instruction does: STORE_FAST_LOAD_FAST does two things."""


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
            for code in nested(item.__code__):
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


def nested(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of each function and class in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def _changing(code: CodeType, names: Names) -> Iterator[str]:
    """Follows names and their attributes; values made at run time are unknown."""
    local: Names = {}
    value: Any = None
    path = ""
    for operation, operand in _operations(code):
        name = operand if isinstance(operand, str) else ""
        if operation == "LOAD_CONST":
            yield from _in_strings(operand)
            value = None
            continue
        if operation == "IMPORT_NAME":
            value, path = sys.modules.get(name), name
        elif operation.startswith(_LOADS):
            value, path = local.get(name, names.get(name)), name
        elif operation.startswith(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")):
            path = f"{path}.{name}"
            if _is_known(value, name) and operation != "IMPORT_FROM":
                yield path
            value = getattr(value, name, None) if isinstance(value, ModuleType | type) else None
            continue
        elif operation.startswith("STORE_") and name:
            (names if operation == "STORE_DEREF" else local)[name] = value  # visible to nested functions
            continue
        else:
            continue
        yield from _in_strings(value)
        if _changes(value):
            yield path


def _operations(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Each operation, and what it is about. From 3.13 on, one instruction may load and store two variables."""
    for step in dis.get_instructions(code):
        several = _OF_VARIABLES.findall(step.opname)
        if len(several) > 1:
            yield from zip(several, step.argval, strict=True)
        else:
            yield step.opname, step.argval


def _in_strings(value: Any) -> Iterator[str]:
    """SQL that a string holds, or a list of them."""
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str):
            yield from (call.removesuffix("()") for call in changing_in_sql(text))


def _is_known(parent: Any, name: str) -> bool:
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
