"""Waits for a server that is away when something starts, by the one mechanism of `model/patience.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from delivered.model.errors import DeliveredError, Unreachable
from delivered.model.limits import OUTAGE_PATIENCE_S
from delivered.model.patience import log, wait_out

T = TypeVar("T")


class StoppedWaiting(Exception):
    """Told to stop before the server answered."""


def patiently(
    server: str,
    ask: Callable[[], T],
    *,
    away: Callable[[T], DeliveredError | None] = lambda _: None,
    patience_s: float = OUTAGE_PATIENCE_S,
    stop: Callable[[], bool] = lambda: False,
) -> T:
    """What `ask` answers once the server does. People are told by the logger `delivered.outage`.

    Args:
        server: for people: "RabbitMQ at broker:5672".
        away: the error inside an answer that tells of a server that is away; None: it is an answer.
        patience_s: 0: ask once.

    Raises:
        Unreachable: it stayed away; and every other error of `ask` at once.
        StoppedWaiting: `stop` said so.
    """
    told = False

    def once() -> T:
        nonlocal told
        if told and stop():
            raise StoppedWaiting
        try:
            answer = ask()
            error = away(answer)
            if error is not None:
                raise error
        except Unreachable as error:
            if patience_s and not told and error.may_come_back:
                log.warning("%s; waiting up to %.0f s", error.message.rstrip("."), patience_s)
                told = True
            raise
        return answer

    return wait_out(server, once, _is_away, patience_s)


def _is_away(error: BaseException) -> bool:
    return isinstance(error, Unreachable) and error.may_come_back
