"""The pages, served: they load themselves again, and their forms do what `delivered transactions` and `delivered
dead-letters` do, with the same refusals.

Every request must carry a token, unless the pages are served without one on a loopback address. A browser brings it
once, as `?token=`, and has it in a cookie from then on: it is in no page, and in no address that is kept. On a loopback
address only requests for this machine's own names are answered, so that no other site can point its name here (DNS
rebinding). A form works only where it is allowed (`actions`), by POST, from a page of this server, which carries the
server's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlencode

from delivered import html
from delivered.checkpoint.history import looked_at
from delivered.model.errors import DeliveredError, UsageError, extra
from delivered.model.limits import DEAD_LETTERS_MAX
from delivered.operate.asking import ASK_S_MAX, look, status
from delivered.operate.dead_letters import dead_letters, drop, retry
from delivered.operate.page import (
    HOURS,
    Actions,
    Flow,
    Frame,
    Order,
    Row,
    dead_letters_page,
    flow_of,
    message_page,
    overview,
    pipeline_page,
)
from delivered.operate.status import Problem, SinkStatus, Status
from delivered.operate.transactions import end_transaction
from delivered.pipeline.definition import Definition

if TYPE_CHECKING:
    from asyncio import TimerHandle, Transport

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn.protocols.http.h11_impl import H11Protocol


log = logging.getLogger(__name__)

REFRESH_S = 5.0
SETTLES = ("read", "retry", "drop")
"""What can be done with dead letters."""
_LETTERS_SHOWN = 200
_COUNT_LENGTH_MAX = 18
FRESH_S = 2.0
WAIT_S = ASK_S_MAX + 1.0
AT_ONCE = 8
LOCAL = ("127.0.0.1", "::1", "localhost")
HEADERS_TIMEOUT_S = 10.0
"""A client that has not sent a complete request by then is disconnected."""
BODY_TIMEOUT_S = 10.0
BODY_BYTES_MAX = 1 << 20
TOKEN_LENGTH_MIN = 16
_COOKIE = "delivered_token"
_HOST = re.compile(r"(?P<name>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_HEADERS = {
    "Cache-Control": "no-store",
    # Nothing from another host, no script, and in nobody's frame: a click on a button is meant for it.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "same-origin",  # without any, a form's Origin would be null
    "X-Content-Type-Options": "nosniff",
}


def application(
    paths: Sequence[Path],
    *,
    token: str | None = None,
    address: str = LOCAL[0],
    hosts: Sequence[str] = (),
    actions: bool | None = None,
    verified: Callable[[], str] | None = None,
) -> Starlette:
    """An ASGI application.

    Args:
        paths: pipeline files.
        token: that requests must carry, as `?token=`, a cookie, or `Authorization: Bearer`.
        address: that the pages are served on.
        hosts: names besides it by which they are reached: of a proxy that keeps the request's host.
        actions: whether the pages have forms that end transactions and settle dead letters; None: if only this machine
            reaches them.
        verified: the page of the verifier's results, as HTML.

    Raises:
        UsageError: an address that others reach, without a token; or a short token.
        MissingExtra: starlette is not installed.
    """
    if token is not None and len(token) < TOKEN_LENGTH_MIN:
        raise UsageError("UI_TOKEN.SHORT", length=len(token), token_length_min=TOKEN_LENGTH_MIN)
    if token is None and address not in LOCAL:
        raise UsageError("UI_TOKEN.NONE", address=address)
    with extra("ui"):
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
        from starlette.routing import Route

    pages = Pages(paths, address in LOCAL and not hosts if actions is None else actions, verified is not None)
    known_hosts = {name.lower() for name in (*LOCAL, address, *hosts)} if address in LOCAL or hosts else None

    def is_right(presented: str | None) -> bool:
        return token is not None and presented is not None and hmac.compare_digest(presented.encode(), token.encode())

    def bearer(request: Request) -> str | None:
        scheme, _, presented = request.headers.get("authorization", "").partition(" ")
        return presented if scheme.lower() == "bearer" else None

    def refused(request: Request) -> Response | None:
        sent = request.headers.getlist("host")
        host = ", ".join(sent)
        if known_hosts is not None and (len(sent) != 1 or _host_name(host) not in known_hosts):
            known = "A proxy's host name is given by: delivered ui --host NAME"
            return PlainTextResponse(f"This page is not served for the host {host[:100]!r}. {known}\n", 421)
        if token is None or is_right(bearer(request)) or is_right(request.cookies.get(_COOKIE)):
            return None
        if request.method == "GET" and is_right(request.query_params.get("token")):
            page_again = RedirectResponse(request.url.path, 303)
            secure = request.url.scheme == "https"
            page_again.set_cookie(_COOKIE, token, httponly=True, samesite="strict", secure=secure)
            return page_again
        return PlainTextResponse("A token is needed: ?token=..., or Authorization: Bearer.\n", 401)

    async def form_of(request: Request) -> dict[str, list[str]]:
        """What a form sent, if it may do anything. Raises Refusal: it may not."""
        if not pages.has_actions:
            raise Refusal(403, "Nothing can be changed here: delivered ui --actions, or use the command line.")
        sites, origins = request.headers.getlist("sec-fetch-site"), request.headers.getlist("origin")
        host = request.headers.get("host")
        foreign = any(site != "same-origin" for site in sites)
        foreign = foreign or any(origin not in (f"http://{host}", f"https://{host}") for origin in origins)
        if foreign:
            raise Refusal(403, "The request came from another page.")
        form = _parsed(await _body(request))
        if is_right(bearer(request)):
            return form
        if not (sites or origins):
            raise Refusal(403, "The request came from no page, and without the token.")
        (csrf,) = form.get("csrf", [""])[:1]
        if not hmac.compare_digest(csrf.encode(), pages.csrf.encode()):
            raise Refusal(403, "The page is of another start of the server: load it again.")
        return form

    def answering(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                response = refused(request) or await handler(request)
            except Refusal as refusal:
                response = PlainTextResponse(f"{refusal}\n", refusal.status)
            response.headers.update(_HEADERS)
            return response

        return answer

    async def index(request: Request) -> Response:
        asked = request.query_params
        return HTMLResponse(await run_in_threadpool(pages.overview, asked.get("sort"), "paused" in asked))

    async def one(request: Request) -> Response:
        path, asked = pages.find(request.path_params["name"]), request.query_params
        return HTMLResponse(await run_in_threadpool(pages.pipeline, path, asked.get("hours"), "paused" in asked))

    async def letters(request: Request) -> Response:
        path = pages.find(request.path_params["name"])
        try:
            return HTMLResponse(await run_in_threadpool(pages.dead_letters, path, "settled" in request.query_params))
        except DeliveredError as error:
            return HTMLResponse(pages.failed(error, path), 409)

    async def settle(request: Request) -> Response:
        form = await form_of(request)
        path, how = pages.find(request.path_params["name"]), request.path_params["how"]
        if how not in SETTLES:
            raise Refusal(404, f"There is no such action: POST .../dead-letters/{'|'.join(SETTLES)}.")
        try:
            done = await run_in_threadpool(pages.settle, path, how, form)
        except DeliveredError as error:
            return HTMLResponse(pages.failed(error, path), 409)
        return RedirectResponse(pages.address_of(path), 303) if done is None else HTMLResponse(done)

    async def end(request: Request) -> Response:
        await form_of(request)
        path, how = pages.numbered(request.path_params["file"]), request.path_params["how"]
        if how not in ("apply", "abort") or not request.path_params["id"]:
            raise Refusal(404, "There is no such action: POST /end/FILE/apply|abort/TRANSACTION.")
        try:
            after = await run_in_threadpool(pages.end, path, request.path_params["id"], how == "apply")
        except DeliveredError as error:
            return HTMLResponse(pages.failed(error, path), 409)
        return RedirectResponse(after, 303)

    async def matrix(_request: Request) -> Response:
        if verified is None:
            raise Refusal(404, "No results: delivered ui --verified build/verify.json")
        return HTMLResponse(await run_in_threadpool(verified))

    async def status_json(_request: Request) -> Response:
        return JSONResponse([s.to_json() for s in await run_in_threadpool(look, paths)])

    app = Starlette(
        routes=[
            Route("/", answering(index)),
            Route("/pipelines/{name}", answering(one)),
            Route("/pipelines/{name}/dead-letters", answering(letters)),
            Route("/pipelines/{name}/dead-letters/{how}", answering(settle), methods=["POST"]),
            Route("/verified", answering(matrix)),
            Route("/status.json", answering(status_json)),
            Route("/end/{file}/{how}/{id:path}", answering(end), methods=["POST"]),
        ]
    )
    app.state.csrf = pages.csrf
    return app


async def _body(request: Request) -> bytes:
    """Raises Refusal: it is too long, or does not arrive."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES_MAX:
                    raise Refusal(413, f"A form has at most {BODY_BYTES_MAX:,} bytes.")
    except TimeoutError:
        raise Refusal(408, f"The form did not arrive within {BODY_TIMEOUT_S:g} s.") from None
    return bytes(body)


def _parsed(body: bytes) -> dict[str, list[str]]:
    """Raises Refusal: it is no form."""
    try:
        return parse_qs(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=DEAD_LETTERS_MAX)
    except ValueError:
        raise Refusal(400, "That is no form.") from None


def serve(
    paths: Sequence[Path],
    port: int,
    *,
    address: str = LOCAL[0],
    token: str | None = None,
    hosts: Sequence[str] = (),
    actions: bool | None = None,
    verified: Callable[[], str] | None = None,
) -> None:
    """Until a signal ends the process. Raises UsageError, MissingExtra: as `application`."""
    app = application(paths, token=token, address=address, hosts=hosts, actions=actions, verified=verified)
    with extra("ui"):
        import uvicorn
    uvicorn.run(app, host=address, port=port, log_level="warning", access_log=False, http=timed_protocol())


def check_port(address: str, port: int) -> None:
    """Raises UsageError: another process has it, or this machine has no such address."""
    try:
        socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError as error:
        raise UsageError("METRICS_PORT", port=port, address=address, error=error.strerror or error) from None


def timed_protocol() -> type[H11Protocol]:
    """uvicorn's protocol, which bounds the time between requests, and also the time that one takes to arrive."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedConnection(H11Protocol):
        _late: TimerHandle | None = None

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """The time runs from the connection, or a later request's first byte, until the headers are complete."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._late is None:
                self._late = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.close)

        def _stop(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return TimedConnection


def _host_name(host: str) -> str | None:
    """The name in a Host header, without its port; None: it is none. Strict: no user, path or query, as in a URL."""
    match = _HOST.fullmatch(host)
    return match and match["name"].strip("[]").lower()


class Refusal(Exception):
    """An answer that is no page of a pipeline.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Pages:
    """What the served pages show and do, without HTTP.

    Args:
        paths: pipeline files.
        actions: whether the forms are there, and work.
        verified: there is a page of the verifier's results.
    """

    def __init__(self, paths: Sequence[Path], actions: bool, verified: bool) -> None:
        self.paths = tuple(paths)
        self.csrf = secrets.token_urlsafe(32)
        self.has_actions = actions
        self._asked = Asked(paths)
        self._names = _names(paths)
        self._names_by_path = {path: name for name, path in self._names.items()}
        self._verified = (("verified", "/verified"),) if verified else ()
        self._acting = {path: threading.Lock() for path in paths}

    def find(self, name: str) -> Path:
        if name not in self._names:
            raise Refusal(404, f"There is no pipeline file {name[:100]!r}.")
        return self._names[name]

    def numbered(self, number: str) -> Path:
        found = {str(n): path for n, path in enumerate(self.paths)}.get(number)
        if found is None:
            raise Refusal(404, "There is no such action: POST /end/FILE/apply|abort/TRANSACTION.")
        return found

    def address_of(self, path: Path) -> str:
        return f"/pipelines/{quote(self._names_by_path[path], safe='')}"

    def overview(self, order: str | None, paused: bool) -> str:
        answers = self._asked.all()
        rows = [
            Row.of(s, self.address_of(path) if s.checkpoint or s.problems else "")
            for path, found in zip(self.paths, answers, strict=True)
            for s in found or ()
        ]

        def link(order: str, paused: bool = paused) -> str:
            return "/?" + urlencode({"sort": order, **({"paused": ""} if paused else {})})

        frame = self._frame(link(order or "", not paused), paused)
        waiting = sum(found is None for found in answers)
        return overview(rows, order=Order.parse(order), frame=frame, link=link, waiting=waiting)

    def pipeline(self, path: Path, hours: str | None, paused: bool) -> str:
        found = (self._asked.one(path) or [Status(path.stem, "", "")])[0]
        chosen = next((h for h in HOURS if str(h) == hours), HOURS[0])
        here, flow, letters = self.address_of(path), Flow(), None
        with contextlib.suppress(DeliveredError):  # it is a problem of the status
            pipeline = Definition.from_file(path)
            flow, letters = flow_of(pipeline), f"{here}/dead-letters" if _keeps_dead_letters(pipeline) else None

        def link(hours: int, paused: bool = paused) -> str:
            return f"{here}?" + urlencode({"hours": hours, **({"paused": ""} if paused else {})})

        return pipeline_page(
            found,
            flow,
            frame=self._frame(link(chosen, not paused), paused, ("all pipelines", "/")),
            actions=self._actions(path),
            dead_letters=letters,
            hours=chosen,
            link=link,
        )

    def dead_letters(self, path: Path, settled: bool) -> str:
        here = self.address_of(path)
        pipeline = Definition.from_file(path)
        sinks = status(pipeline).sinks  # first: what comes meanwhile has not been seen
        listed = dead_letters(pipeline, settled=settled, limit=_LETTERS_SHOWN + 1)
        other = (
            ("only open ones", f"{here}/dead-letters") if settled else ("also settled", f"{here}/dead-letters?settled")
        )
        return dead_letters_page(
            pipeline.name,
            listed[:_LETTERS_SHOWN],
            file=str(path),
            frame=Frame(links=(("all pipelines", "/"), (pipeline.name, here), other)),
            actions=self._actions(path),
            seen={s.name: s.records for s in sinks if s.dead_letters and s.records is not None},
            more=len(listed) > _LETTERS_SHOWN,
            settled=settled,
        )

    def end(self, path: Path, transaction: str, apply: bool) -> str:
        """The address of the page that shows what became of it."""
        try:
            with self._acting[path]:
                end_transaction(Definition.from_file(path), transaction, commit=apply)
        finally:  # its outcome may be unknown
            self._asked.forget(path)
        return self.address_of(path)

    def settle(self, path: Path, how: str, form: dict[str, list[str]]) -> str | None:
        """A page of what a retry or a drop did; None: there is nothing to say."""
        pipeline, here = Definition.from_file(path), self.address_of(path)
        ids, every = form.get("id", []), form.get("which") == ["all"]
        if how != "read" and (bool(ids) == every or (every and how == "drop")):
            raise Refusal(400, "Choose the dead letters: nothing was done.")
        try:
            with self._acting[path]:
                _look_at(pipeline, form.get("seen", []))
                done = None if how == "read" else (retry if how == "retry" else drop)(pipeline, ids or None)
        finally:
            self._asked.forget(path)
        if done is None:
            return None
        lines = done.lines("retried" if how == "retry" else "dropped", f"{here}/dead-letters")
        body = html.joined(html.element("p", line) for line in lines)
        links = (("all pipelines", "/"), (pipeline.name, here), ("dead letters", f"{here}/dead-letters"))
        return message_page(f"Dead letters of {pipeline.name}", body, Frame(links=links))

    def failed(self, error: DeliveredError, path: Path) -> str:
        links = (("all pipelines", "/"), (path.stem, self.address_of(path)))
        step = error.next_step and error.next_step.replace("PIPELINE.yaml", str(path))
        return message_page("Refused", html.problem(error.code, error.message, step), Frame(links=links))

    def _frame(self, toggled: str, paused: bool, *links: tuple[str, str]) -> Frame:
        pause = ("go on" if paused else "pause", toggled)
        return Frame(None if paused else REFRESH_S, (*links, pause, *self._verified))

    def _actions(self, path: Path) -> Actions | None:
        if not self.has_actions:
            return None
        number, here = self.paths.index(path), self.address_of(path)

        def end(transaction: str, apply: bool) -> str:
            return f"/end/{number}/{'apply' if apply else 'abort'}/{quote(transaction, safe='')}"

        return Actions(self.csrf, end, {how: f"{here}/dead-letters/{how}" for how in SETTLES})


def _names(paths: Sequence[Path]) -> dict[str, Path]:
    """By file name; those of several folders with their number."""
    names: dict[str, Path] = {}
    for path in paths:
        name = path.stem
        for number in range(2, len(paths) + 2):
            if name not in names:
                break
            name = f"{path.stem}-{number}"
        names[name] = path
    return names


def _keeps_dead_letters(pipeline: Definition) -> bool:
    return pipeline.dead_letter is not None or any(e.sink().capability().write.conditional for e in pipeline.sinks)


def _look_at(pipeline: Definition, seen: Sequence[str]) -> None:
    """Remember what a page showed: "12 sink", each; no more than there are."""
    parts = (s.partition(" ") for s in seen)
    counts = {name: int(count) for count, _, name in parts if count.isdecimal() and len(count) <= _COUNT_LENGTH_MAX}
    if counts:
        sinks = status(pipeline).sinks
        looked_at(pipeline.checkpoint, [_seen(s, counts[s.name]) for s in sinks if s.name in counts])


def _seen(sink: SinkStatus, count: int) -> SinkStatus:
    return sink if sink.records is None else replace(sink, records=min(count, sink.records))


class Asked:
    """The newest answer of each pipeline, asked again only while somebody looks, and never for longer than a page may
    take. All viewers share the answers. With very many pipelines a page shows those that have answered; the others
    follow.

    Args:
        paths: pipeline files, and those of ledgers.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._answers: dict[Path, list[Status]] = {}
        self._at_s: dict[Path, float] = {}
        self._took_s: dict[Path, float] = {}
        self._due: deque[tuple[Path, object]] = deque()
        self._open: dict[Path, object] = {}
        self._workers = 0
        self._changed = threading.Condition()

    def all(self) -> list[list[Status] | None]:
        """Of each path the statuses in it, the newest ones that are known after `WAIT_S`; None: not answered yet."""
        with self._changed:
            for path in self._paths:
                if path not in self._open and self._is_old(path):
                    self._ask(path)
            self._wait(self._paths)
            return [self._answers.get(p) for p in self._paths]

    def one(self, path: Path) -> list[Status] | None:
        """As `all`, before the others."""
        with self._changed:
            if self._is_old(path, FRESH_S):
                self._ask(path, first=True)
            self._wait([path])
            return self._answers.get(path)

    def forget(self, path: Path) -> None:
        """What is known, and what is being asked, are older than an action."""
        with self._changed:
            self._at_s.pop(path, None)
            self._open.pop(path, None)

    def _is_old(self, path: Path, fresh_s: float | None = None) -> bool:
        """At most half of the time is spent on asking."""
        if fresh_s is None:
            fresh_s = max(FRESH_S, sum(self._took_s.values()) / AT_ONCE)
        return path not in self._at_s or time.monotonic() - self._at_s[path] > fresh_s

    def _wait(self, paths: Iterable[Path]) -> None:
        deadline = time.monotonic() + WAIT_S
        asked = [(p, self._open[p]) for p in paths if p in self._open]
        while any(self._open.get(p) is request for p, request in asked):
            if (left := deadline - time.monotonic()) <= 0:
                return
            self._changed.wait(left)

    def _ask(self, path: Path, first: bool = False) -> None:
        self._open[path] = request = object()
        (self._due.appendleft if first else self._due.append)((path, request))
        if self._workers < AT_ONCE:
            self._workers += 1
            threading.Thread(target=self._work, daemon=True, name="delivered-page").start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._due and self._open.get(self._due[0][0]) is not self._due[0][1]:
                    self._due.popleft()
                if not self._due:
                    self._workers -= 1
                    return
                path, request = self._due.popleft()
            start = time.monotonic()
            found = _look(path)
            with self._changed:
                self._took_s[path] = time.monotonic() - start
                if self._open.get(path) is request:
                    self._answers[path], self._at_s[path] = found, time.monotonic()
                    del self._open[path]
                self._changed.notify_all()


def _look(path: Path) -> list[Status]:
    try:
        return look([path])
    except Exception as error:  # one file must not hide the others
        log.debug("not answered", exc_info=True)
        problem = Problem.build("UNEXPECTED.STATUS", error_type=type(error).__name__, error=error)
        return [Status(path.stem, "", "", problems=(problem,))]
