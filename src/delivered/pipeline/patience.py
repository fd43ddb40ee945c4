"""Waits for a server that is unreachable at start, using `model/patience.py`."""

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
    """The answer of `ask`, once the server is reachable. The logger `delivered.outage` reports the wait.

    Args:
        server: for people: "RabbitMQ at broker:5672".
        away: the error in an answer that means the server is unreachable; None: the answer is good.
        patience_s: 0: ask once.

    Raises:
        Unreachable: it stayed unreachable. Any other error of `ask` is raised at once.
        StoppedWaiting: `stop()` became true.
    """
    warned = False

    def once() -> T:
        nonlocal warned
        if warned and stop():
            raise StoppedWaiting
        try:
            answer = ask()
            error = away(answer)
            if error is not None:
                raise error
        except Unreachable as error:
            if patience_s and not warned and error.may_come_back:
                log.warning("%s; waiting up to %.0f s", error.message.rstrip("."), patience_s)
                warned = True
            raise
        return answer

    return wait_out(server, once, _is_away, patience_s)


def _is_away(error: BaseException) -> bool:
    return isinstance(error, Unreachable) and error.may_come_back
