"""What a saga is: named steps, each with what takes it back, as functions or as HTTP calls with an idempotency key; and
where a saga stands and what comes next, a pure function of its declaration and its log.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from importlib import import_module
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from delivered.model.answers import ends_within, limited
from delivered.model.errors import BadRecord, DeliveredError, Refused, Unreachable, UsageError, extra, without_passwords
from delivered.model.limits import NAME_LENGTH_MAX, SAGA_DATA_BYTES_MAX, SAGA_STEPS_MAX
from delivered.model.options import REFERENCES, check_argument, check_http_url, resolve_secret
from delivered.patterns.caller import json_text

if TYPE_CHECKING:
    import httpx


_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_LENGTH_MAX}}}")
LEASE_MARGIN_S = 5.0


class Verb(StrEnum):
    """What is called: a step's do, ask or undo."""

    DO = "do"
    ASK = "ask"
    UNDO = "undo"


@dataclass(frozen=True)
class Call:
    """What a step's functions are given.

    Attributes:
        saga, id, step: names of the saga and the step; the id that the saga was recorded with.
        verb: which of the step's functions this is.
        key: idempotency key of the step: the same in every try, also after a crash and in another process; the undo
            gets the key of its step.
        data: as given to `begin`.
        results: what the steps done so far returned, by name.
        attempt: from 1, counted across crashes.
    """

    saga: str
    id: str
    step: str
    verb: Verb
    key: str
    data: Any
    results: Mapping[str, Any]
    attempt: int


class Rejected(DeliveredError):
    """Raised by a `do`: it was not done, and never will be, so the saga turns back. Any other exception leaves open
    whether it was done."""

    def __init__(self, code: str, message: str | None = None, next_step: str | None = None) -> None:
        # Callers pass only the reason; unpickling passes three arguments.
        if message is None:
            super().__init__("SAGA_STEP_REJECTED", reason=code)
        else:
            super().__init__(code, message, next_step)


@dataclass(frozen=True)
class Done:
    """Answer of an `ask`: the step was done, with this result."""

    result: Any = None


class _NotNeeded(Enum):
    NO_UNDO = "no undo"


NO_UNDO: Final = _NotNeeded.NO_UNDO
"""`undo` of a step that needs none: it changes nothing that others see, or what it did may stay."""


@dataclass(frozen=True)
class Step:
    """
    Attributes:
        do: returns a JSON value, kept as the step's result. `Rejected` turns the saga back; after any other exception
            it is called again if the step takes the key or can be asked, else the saga turns back.
        undo: takes back what `do` did. Called at least once, also if it is open whether `do` was done: it must accept
            that there is nothing to take back, and that it was called before.
        takes_key: calling `do` again with the same key has no second effect.
        ask: whether `do` was done: `Done(result)`; None: it was not, and will not be any more.
        attempts_max: calls of `do`, and of `undo` until the saga is stuck.
        backoff_s: before the second attempt; doubles up to a minute.
        timeout_s: the longest that one call may take, or that of `Http` if it is longer. After that, another worker may
            take the saga over.
    """

    name: str
    do: Callable[[Call], Any]
    undo: Callable[[Call], Any] | _NotNeeded | None = None
    takes_key: bool = False
    ask: Callable[[Call], Done | None] | None = None
    attempts_max: int = 5
    backoff_s: float = 1.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        kinds: Any = {"do": Callable, "undo": (Callable, _NotNeeded, NoneType), "ask": (Callable, NoneType)}
        for name, kind in kinds.items():
            check_argument("Step", name, getattr(self, name), kind, "a function", f"..., {name}=function")
        check_argument("Step", "takes_key", self.takes_key, bool, "True or False", "..., takes_key=True")
        check_argument("Step", "attempts_max", self.attempts_max, int, "a number", "..., attempts_max=5")
        for name in ("backoff_s", "timeout_s"):
            check_argument("Step", name, getattr(self, name), (int, float), "in seconds", f"..., {name}=60")

    @property
    def longest_s(self) -> float:
        """Of a call."""
        return max(self.timeout_s, *(getattr(f, "timeout_s", 0.0) for f in (self.do, self.undo, self.ask)))

    @property
    def repeatable(self) -> bool:
        """`do` may be called again with its key."""
        return self.takes_key or getattr(self.do, "takes_key", False)


@dataclass(frozen=True)
class Saga:
    """A saga's declaration.

    Raises:
        Refused: a step has no undo and does not say that it needs none.
        UsageError: names, counts or times out of bounds.
    """

    name: str
    steps: Sequence[Step] = field(default=())

    def __post_init__(self) -> None:
        check_argument("Saga", "steps", self.steps, Sequence, "a list of steps", "name, [Step(...)]")
        for step in self.steps:
            check_argument("Saga", "steps", step, Step, "a list of steps", "name, [Step(...)]")
        names = [s.name for s in self.steps]
        if not 0 < len(names) <= SAGA_STEPS_MAX:
            raise _wrong(self.name, f"has {len(names)} steps; it must have 1 to {SAGA_STEPS_MAX}")
        for name in (self.name, *names):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise _wrong(self.name, f"uses the name {name!r}; names are {_NAME.pattern}")
        if len(set(names)) < len(names):
            raise _wrong(self.name, f"has two steps of one name: {', '.join(names)}")
        for step in self.steps:
            if step.undo is None:
                raise Refused("SAGA_UNDO_MISSING", step=step.name, name=self.name)
            if step.attempts_max < 1 or not 0 < step.timeout_s < math.inf or not 0 <= step.backoff_s < math.inf:
                raise _wrong(
                    self.name,
                    f"has a step {step.name!r} with attempts_max {step.attempts_max!r}, timeout_s {step.timeout_s!r}, "
                    f"backoff_s {step.backoff_s!r}; at least 1, more than 0, and at least 0 are needed, all finite",
                )

    @property
    def signature(self) -> str:
        """Names of the steps: a worker claims only sagas that were recorded with the same ones."""
        return json.dumps([s.name for s in self.steps])

    @property
    def lease_s(self) -> float:
        return max(s.longest_s for s in self.steps) + LEASE_MARGIN_S

    def key(self, id: str, step: Step) -> str:  # noqa: A002
        """The idempotency key of a step: printable ASCII."""
        return f"{self.name}/{quote(id, safe='')}/{step.name}"


def _wrong(name: object, what: str) -> UsageError:
    return UsageError("SAGA_DECLARATION", name=name, what=what)


def load(name: str) -> Saga:
    """A saga by the place of its declaration, `module:name`.

    Raises:
        UsageError: there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        saga = getattr(import_module(module), attribute) if module and attribute else None
    except (ImportError, AttributeError) as error:
        raise UsageError("SAGA_NOT_FOUND.IMPORT", name=name, error=error) from error
    if not isinstance(saga, Saga):
        raise UsageError("SAGA_NOT_FOUND.NO_SAGA", name=name, saga_type=type(saga).__name__)
    return saga


def stored_result(result: Any) -> Any:
    """A step's result as the log returns it.

    Raises:
        BadRecord: it cannot be stored.
    """
    try:
        text = json_text(json.dumps(result, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRecord("SAGA_RESULT.INVALID", result=result, error=error) from None
    if len(text.encode()) > SAGA_DATA_BYTES_MAX:
        raise BadRecord("SAGA_RESULT.TOO_LARGE", bytes=len(text.encode()), saga_data_bytes_max=SAGA_DATA_BYTES_MAX)
    return json.loads(text)


class Status(StrEnum):
    RUNNING = "running"
    COMPENSATING = "compensating"
    COMPLETE = "complete"
    COMPENSATED = "compensated"
    STUCK = "stuck"
    """A compensation failed too often; a person decides."""

    @property
    def at_rest(self) -> bool:
        """No worker will change it."""
        return self not in (Status.RUNNING, Status.COMPENSATING)


class Event(StrEnum):
    STARTED = "started"
    """Durable before the call."""
    DONE = "done"
    FAILED = "failed"
    """Whether it was done is open."""
    REJECTED = "rejected"
    """Not done, and never will be."""
    NOT_DONE = "not_done"
    """Answer of an ask."""
    SKIPPED = "skipped"
    RETRY = "retry"
    """A person lets a stuck compensation be tried again."""


@dataclass(frozen=True)
class Entry:
    """One line of a saga's log.

    Attributes:
        value: result of a do that is done.
    """

    step: str
    verb: Verb
    event: Event
    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class Next:
    """The call that comes next.

    Attributes:
        attempt: from 1.
    """

    step: Step
    verb: Verb
    attempt: int = 1


@dataclass
class _Calls:
    """What the log says of one step's do.

    Attributes:
        asked: since the last answer.
        open: whether the newest call was done is not known.
        earlier_open: whether an earlier one was done is not known.
    """

    started: int = 0
    asked: int = 0
    open: bool = False
    earlier_open: bool = False
    done: bool = False
    rejected: bool = False


def _forward(step: Step, entries: Sequence[Entry]) -> _Calls:
    """Fold the entries of one step's do and ask."""
    calls = _Calls()
    for entry in entries:
        if entry.step != step.name or entry.verb is Verb.UNDO:
            continue
        match entry.event:
            case Event.STARTED if entry.verb is Verb.ASK:
                calls.asked += 1
            case Event.STARTED:
                calls.started += 1
                calls.earlier_open, calls.open = calls.earlier_open or calls.open, True
            case Event.DONE:
                calls.done = True
            case Event.REJECTED:
                calls.rejected, calls.open = True, False
            case Event.NOT_DONE:
                calls.open = calls.earlier_open = False
                calls.asked = 0
    return calls


def results(entries: Sequence[Entry]) -> dict[str, Any]:
    return {e.step: e.value for e in entries if e.verb is not Verb.UNDO and e.event is Event.DONE}


def next_of(saga: Saga, entries: Sequence[Entry]) -> tuple[Status, Next | None]:
    """The saga's status, and the call that comes next; None: it is at rest."""
    backward = any(e.verb is Verb.UNDO for e in entries)  # never forward again, even if the declaration changed
    for at, step in enumerate(saga.steps):
        calls = _forward(step, entries)
        if calls.done:
            continue
        if not backward and not calls.rejected:
            if calls.started == 0:
                return Status.RUNNING, Next(step, Verb.DO)
            if calls.open and step.ask is not None and not step.repeatable and calls.asked < step.attempts_max:
                return Status.RUNNING, Next(step, Verb.ASK, calls.asked + 1)
            known = step.repeatable or (step.ask is not None and not calls.open)
            if known and calls.started < step.attempts_max:
                return Status.RUNNING, Next(step, Verb.DO, calls.started + 1)
        perhaps = calls.open or calls.earlier_open
        return _undo(saga.steps[: at + perhaps], entries)
    return _undo(saga.steps, entries) if backward else (Status.COMPLETE, None)


def _undo(steps: Sequence[Step], entries: Sequence[Entry]) -> tuple[Status, Next | None]:
    """The next compensation of steps that were done, or perhaps done; the last one first."""
    for step in reversed(steps):
        if step.undo is NO_UNDO:
            continue
        started, over = 0, False
        for entry in entries:
            if entry.step == step.name and entry.verb is Verb.UNDO:
                started = 0 if entry.event is Event.RETRY else started + (entry.event is Event.STARTED)
                over = over or entry.event in (Event.DONE, Event.SKIPPED)
        if over:
            continue
        if started >= step.attempts_max:
            return Status.STUCK, None
        return Status.COMPENSATING, Next(step, Verb.UNDO, started + 1)
    return Status.COMPENSATED, None


_REASON_BYTES_MAX = 1_000
_RESULT_BYTES_MAX = SAGA_DATA_BYTES_MAX // 2
_TEXT_LENGTH_MAX = 1_000
_AGAIN = (408, 409, 425, 429)
"""Refused for now: a request with the same key is under way (409), too many requests."""


def _everything(call: Call) -> Any:
    return {"id": call.id, "key": call.key, "data": call.data, "results": dict(call.results)}


@dataclass(frozen=True)
class Http:
    """A step's `do` or `undo` as an HTTP call. The service must honour the key: `do` then takes the key by itself.

    The header Idempotency-Key is the key of the step, or, for an undo, that key and `/undo`: the body says what to take
    back. 2xx is done, with the reply as result: its JSON, or its text if it is none. 4xx is rejected, except 408, 409,
    425 and 429; these, any other status and every error of the connection leave it open whether the call was done.

    Attributes:
        url: `{id}`, `{key}` and `{step}` are replaced, percent-encoded.
        body: makes the JSON body of a call; by default id, key, data, and results of earlier steps.
        headers: values may be env:NAME or file:PATH.
        timeout_s: of the call, from connecting to the end of the reply, however slowly its bytes come; less than the
            step's timeout_s.
    """

    url: str
    method: str = "POST"
    body: Callable[[Call], Any] = _everything
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 20.0
    takes_key: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.url.startswith(REFERENCES) or "{" in self.url.partition("://")[2].partition("/")[0]:
            raise UsageError("OPTION_VALUE.STEP_URL", url=self.url)
        check_http_url("The URL of a step", self.url, "Http('https://host/path')")

    def __call__(self, call: Call) -> Any:
        own = {name: resolve_secret(name, value) for name, value in self.headers.items()}
        key = f"{call.key}/undo" if call.verb is Verb.UNDO else call.key
        url = self.url
        for name, value in (("id", call.id), ("key", call.key), ("step", call.step)):
            url = url.replace("{" + name + "}", quote(value, safe=""))
        # Compressed replies are no use here, and a client that unpacks them has no bound.
        headers = {"Accept-Encoding": "identity", **own, "Idempotency-Key": key}
        with (
            ends_within(self.timeout_s) as deadline,
            _http_client(os.getpid()).stream(
                self.method, url, json=self.body(call), headers=headers, timeout=self.timeout_s
            ) as reply,
        ):
            status, encoding = reply.status_code, reply.encoding or "utf-8"
            done = 200 <= status < 300
            body = _body(reply, deadline, _RESULT_BYTES_MAX if done else _REASON_BYTES_MAX)
        if done:
            return _result(body, encoding)
        what = f"{self.method} {without_passwords(url)} answered {status}: {_text(body, encoding)[:200]}"
        if 400 <= status < 500 and status not in _AGAIN:
            raise Rejected(what)
        raise Unreachable("SAGA_HTTP", answer=what)


def _body(reply: httpx.Response, deadline: float, bytes_max: int) -> bytes:
    """What arrives until the deadline or the connection's end, at most this many bytes: the status alone says whether
    the call was done."""
    import httpx

    body = bytearray()
    with suppress(httpx.HTTPError):
        for part in reply.iter_raw():
            body += part
            if len(body) >= bytes_max or time.monotonic() > deadline:
                break
    return _unpacked(bytes(body[:bytes_max]), reply.headers.get("Content-Encoding", ""), bytes_max)


def _unpacked(body: bytes, how: str, bytes_max: int) -> bytes:
    """Of a service that compresses although it was asked not to; empty if the encoding is unknown, or wrong."""
    match how.strip().lower():
        case "" | "identity":
            return body
        case "gzip" | "x-gzip" | "deflate":
            with suppress(zlib.error):
                return zlib.decompressobj(wbits=47).decompress(body, bytes_max)
    return b""


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _result(body: bytes, encoding: str) -> Any:
    """JSON, or the text. Neither changes that the call was done."""
    if not body:
        return None
    try:
        return stored_result(json.loads(body, parse_constant=_no_number))
    except (ValueError, RecursionError, BadRecord):
        return _text(body, encoding)[:_TEXT_LENGTH_MAX]


def _text(body: bytes, encoding: str) -> str:
    """Text that every saga log stores. The service names the encoding: some are not of text, some reject bytes."""
    try:
        text = body.decode(encoding, "replace")
    except Exception:
        text = body.decode("utf-8", "replace")
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


@functools.cache
def _http_client(process: int) -> httpx.Client:
    """One for all threads of a process: it keeps connections, and loading certificates takes long."""
    del process  # a forked child must not use its parent's connections
    with extra("saga"):
        import httpx
    client: httpx.Client = limited(httpx.Client())
    return client
