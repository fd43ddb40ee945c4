"""JSON documents of records: what a number says is kept, or known to be lost."""

from __future__ import annotations

import json
from decimal import Decimal
from math import isfinite
from typing import Any

from delivered.kits.schemas.bounds import Unreadable, in_words

_EXACT_LENGTH = 16
"""A number of so many characters has at most 15 digits, which every double holds."""
_NUMBER_LENGTH_MAX = 1_000
"""Characters. The longest exact double has 767 digits."""
_SMALL, _LARGE = 1e-290, 1e300


def parsed(data: bytes) -> Any:
    """The document. A number with a fraction or an exponent is a float if that says the same, else a Decimal.

    Raises:
        Unreadable
    """
    try:
        return json.loads(data, parse_float=_number, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not JSON: {in_words(error)}") from None
    except Unreadable:
        raise
    except ValueError:  # Python's limit for integers
        raise Unreadable("it has an integer of more than 4,300 digits") from None
    except RecursionError:
        raise Unreadable("it is not JSON that can be read: it is nested too deeply") from None


def as_double(value: Any) -> float | None:
    """A number of a document as a double; None: no double says the same."""
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            found = float(value)
        except OverflowError:
            return None
        return found if int(found) == value else None
    return None


def _number(text: str) -> float | Decimal:
    value = float(text)
    if len(text) <= _EXACT_LENGTH and _SMALL < abs(value) < _LARGE:
        return value
    if len(text) > _NUMBER_LENGTH_MAX:
        raise Unreadable(f"it has a number of {len(text):,} characters, of at most {_NUMBER_LENGTH_MAX:,}")
    try:
        exact = Decimal(text)
    except ArithmeticError:
        raise Unreadable(f"it has the number {text[:40]}, whose exponent is too large") from None
    # The double's own digits, as many as are written: 0.1 stands for its nearest double, 2^53 + 1.0 for none.
    digits = max(0, len(exact.as_tuple().digits) - 1)
    return value if isfinite(value) and Decimal(f"{value:.{digits}e}") == exact else exact


def _no_number(text: str) -> Any:
    raise Unreadable(f"it is not JSON: {text} is no number there")
