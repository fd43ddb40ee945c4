"""What a connector implements: all that engine and planner know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from delivered.model.errors import UsageError

P = TypeVar("P")


def build(base: type[Any], make: Callable[..., P], *args: Any) -> P:
    """What `make(*args)` returns, if it derives from a class of the contract.

    Raises:
        UsageError: the connector was written for another version of the contract.
    """
    try:
        part = make(*args)
    except ImportError as error:
        if not (error.name or "").startswith("delivered."):
            raise  # a client library
        raise outdated(str(error)) from error
    except TypeError as error:
        if "instantiate abstract class" not in str(error):
            raise
        raise outdated(str(error)) from error
    if not isinstance(part, base):
        found = f"{type(part).__module__}.{type(part).__qualname__}"
        raise outdated(f"{found} does not derive from {base.__module__}.{base.__qualname__}")
    return part


def outdated(why: str) -> UsageError:
    return UsageError("CONNECTOR_OUTDATED", reason=why)
