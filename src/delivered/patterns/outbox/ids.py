"""UUIDs of version 7 (RFC 9562) that increase within a process."""

from __future__ import annotations

import os
import threading
import time
import uuid

_COUNTER_BITS = 42
_MS_BITS = 48


class _State:
    """Time and counter of the last id of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ms = 0
        self.counter = 0


_states: dict[int, _State] = {}
"""Process id -> its state: a forked child must not inherit its parent's lock, which another thread may hold forever."""


def new_id() -> uuid.UUID:
    """A new id: milliseconds, a counter with a random start per ms, 32 random bits (RFC 9562, section 6.2, method 1).

    Ids of one process increase, even if its clock is set back. Thread-safe, and safe after a fork. Call it once per
    message, before the first attempt: with a new id per attempt, no consumer can recognise a duplicate.
    """
    state = _states.get(os.getpid()) or _states.setdefault(os.getpid(), _State())
    with state.lock:
        now = time.time_ns() // 1_000_000
        if now > state.ms:
            state.ms, state.counter = now, int.from_bytes(os.urandom(6), "big") >> (48 - _COUNTER_BITS + 1)
        else:
            state.counter += 1
            if state.counter >> _COUNTER_BITS:
                state.ms, state.counter = state.ms + 1, 0
        ms, counter = state.ms, state.counter
    high, low = counter >> 30, counter & ((1 << 30) - 1)
    random = int.from_bytes(os.urandom(4), "big")
    return uuid.UUID(int=(ms & ((1 << _MS_BITS) - 1)) << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low << 32 | random)
