"""at_most_once: which attempt of a shard may send. The first one that asks; every other one never (decision 097).

Spark's own numbers cannot answer this: it numbers attempts from 0 again when it reruns a stage (P31), and Python tasks
do not learn the number of the stage's attempt.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid

from delivered.model.errors import Unreachable
from delivered.model.limits import CONNECT_TIMEOUT_S, GRANT_WAIT_S, REQUEST_TIMEOUT_S
from delivered.model.work import NO, YES, Arbiter, BatchPlan

_RETRY_S = 0.2


def may_send(plan: BatchPlan, shard: int) -> bool:
    """Ask the driver whether this attempt of the shard may send records. Runs in a task, before its first record.

    While another attempt holds the grant and lives, waits for its end, at most `GRANT_WAIT_S`: a speculative copy that
    answered Spark at once would end the attempt that is sending.

    Raises:
        Unreachable: the driver does not answer. Nothing was sent.
    """
    arbiter = plan.arbiter
    if arbiter is None:
        return False
    _release()
    request = json.dumps({"token": arbiter.token, "shard": shard, "attempt": uuid.uuid4().hex}).encode() + b"\n"
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            connection, answer = _asked(arbiter, request)
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(plan, arbiter, shard, error) from None
            time.sleep(_RETRY_S)
            continue
        if answer == YES:
            _hold(connection)
            return True
        connection.close()
        return False


def check_reachable(arbiter: Arbiter) -> None:
    """Ask for a shard under a token that grants none. Raises OSError: the driver does not answer."""
    request = json.dumps({"token": arbiter.token, "shard": 0, "attempt": ""}).encode() + b"\n"
    connection, _ = _asked(arbiter, request)
    connection.close()


def _asked(arbiter: Arbiter, request: bytes) -> tuple[socket.socket, bytes]:
    connection = socket.create_connection((arbiter.host, arbiter.port), CONNECT_TIMEOUT_S)
    try:
        connection.settimeout(GRANT_WAIT_S + REQUEST_TIMEOUT_S)
        connection.sendall(request)
        answer = b""
        while answer not in (YES, NO):
            received = connection.recv(len(YES))
            if not received:
                raise ConnectionError("the driver closed the connection")
            answer += received
    except BaseException:
        connection.close()
        raise
    return connection, answer


_held: socket.socket | None = None
"""Open as long as this process lives or until its next shard: so the arbiter knows that the attempt lives, or that
Spark has its result."""


def _hold(connection: socket.socket) -> None:
    global _held
    _held = connection


def _release() -> None:
    global _held
    if _held is not None:
        with contextlib.suppress(OSError):
            _held.close()
        _held = None


def _unreachable(plan: BatchPlan, arbiter: Arbiter, shard: int, error: OSError) -> Unreachable:
    return Unreachable(
        "GRANT_UNREACHABLE.SHARD", shard=shard, batch=plan.batch, host=arbiter.host, port=arbiter.port, error=error
    )
