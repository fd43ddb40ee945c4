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
import hmac
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from delivered.model.errors import DeliveredError, UsageError, extra
from delivered.model.limits import DEAD_LETTERS_MAX
from delivered.operate.asking import look
from delivered.operate.pages import SETTLES, Pages, Refusal

if TYPE_CHECKING:
    from asyncio import TimerHandle, Transport

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn.protocols.http.h11_impl import H11Protocol

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
