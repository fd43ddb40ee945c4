"""A fingerprint of the transform between source and sinks, so that the ledger can record each batch's version of it.

It covers the text of SQL; the source of a function, and of the functions and constants that it references, unless they
come from installed packages. A different fingerprint means that the transform was edited.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sysconfig
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from delivered.model.bad_row import OnBadRow
from delivered.pipeline.projection import Projection
from delivered.pipeline.transform import Transform

_CONSTANT_LENGTH_MAX = 10_000
_FUNCTIONS_MAX = 1_000
_INSTALLED = tuple(sysconfig.get_path(p) for p in ("purelib", "platlib", "stdlib"))


def version_of(transform: Transform, projections: Iterable[tuple[str, Projection]], on_bad_row: OnBadRow) -> str:
    """16 hex digits for a pipeline's transform with what its sinks select of it.

    Args:
        projections: of every sink, by its name. One that passes all rows unchanged does not count.
    """
    parts = [transform.kind, transform.sql.strip(), *transform.select, *_parts_of(transform.function, set())]
    parts += [f"{name}: {p!r}" for name, p in projections if not p.is_all]
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
