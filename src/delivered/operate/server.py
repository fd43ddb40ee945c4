"""The page, served: it loads itself again, and its buttons end transactions as `delivered transactions` does.

Every request must carry a token, unless the page is served without one on a loopback address. A browser brings it once,
as `?token=`, and has it in a cookie from then on: it is in no page, and in no address that is kept. On a loopback
address only requests for this machine's own names are answered, so that no other site can point its name here (DNS
rebinding), and a button works only from the page itself.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from delivered.model.errors import DeliveredError, MissingExtra, UsageError
from delivered.operate.asking import look
from delivered.operate.page import look_with_flow, page
from delivered.operate.transactions import end_transaction
from delivered.pipeline.definition import Definition

if TYPE_CHECKING:
    from asyncio import TimerHandle, Transport

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn.protocols.http.h11_impl import H11Protocol

LOCAL = ("127.0.0.1", "::1", "localhost")
REFRESH_S = 5.0
HEADERS_TIMEOUT_S = 10.0
"""A client that has not sent a complete request by then is disconnected."""
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
    verified: Callable[[], str] | None = None,
) -> Starlette:
    """An ASGI application.

    Args:
        paths: pipeline files.
        token: that requests must carry, as `?token=`, a cookie, or `Authorization: Bearer`.
        address: that the page is served on.
        hosts: names besides it by which the page is reached: of a proxy that keeps the request's host.
        verified: the page of the verifier's results, as HTML.

    Raises:
        UsageError: an address that others reach, without a token; or a short token.
        MissingExtra: starlette is not installed.
    """
    if token is not None and len(token) < TOKEN_LENGTH_MIN:
        raise UsageError("UI_TOKEN.SHORT", length=len(token), token_length_min=TOKEN_LENGTH_MIN)
    if token is None and address not in LOCAL:
        raise UsageError("UI_TOKEN.NONE", address=address)
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
        from starlette.routing import Route
    except ImportError:
        raise MissingExtra("ui") from None

    def address_of(number: int, transaction: str, apply: bool) -> str:
        return f"/end/{number}/{'apply' if apply else 'abort'}/{quote(transaction, safe='')}"

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

    def is_own(request: Request) -> bool:
        """Whether our page, or a client that has the token, made a request that changes something."""
        sites, origins = request.headers.getlist("sec-fetch-site"), request.headers.getlist("origin")
        host = request.headers.get("host")
        if any(site != "same-origin" for site in sites):
            return False
        if any(origin not in (f"http://{host}", f"https://{host}") for origin in origins):
            return False
        return bool(sites or origins) or is_right(bearer(request))

    def answering(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            response = refused(request) or await handler(request)
            response.headers.update(_HEADERS)
            return response

        return answer

    def render(paused: bool) -> str:
        return page(
            look_with_flow(paths),
            refresh_s=None if paused else REFRESH_S,
            action=address_of,
            links=(
                ("go on", "/") if paused else ("pause", "/?paused"),
                *((("verified", "/verified"),) if verified else ()),
            ),
        )

    async def index(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(render, "paused" in request.query_params))

    async def matrix(_request: Request) -> Response:
        if verified is None:
            return PlainTextResponse("No results: delivered ui --verified build/verify.json", 404)
        return HTMLResponse(await run_in_threadpool(verified))

    async def status(_request: Request) -> Response:
        return JSONResponse([s.to_json() for s in await run_in_threadpool(look, paths)])

    async def end(request: Request) -> Response:
        if not is_own(request):
            return PlainTextResponse("The request came from another page, and without the token.\n", 403)
        files, how = {str(n): path for n, path in enumerate(paths)}, request.path_params["how"]
        path = files.get(request.path_params["file"])
        if how not in ("apply", "abort") or path is None or not request.path_params["id"]:
            return PlainTextResponse("There is no such action: POST /end/FILE/apply|abort/TRANSACTION.\n", 404)
        apply = how == "apply"
        try:
            pipeline = Definition.from_file(path)
            await run_in_threadpool(end_transaction, pipeline, request.path_params["id"], commit=apply)
        except DeliveredError as error:
            return PlainTextResponse(f"{error}\n", 409)
        return RedirectResponse("/", 303)

    return Starlette(
        routes=[
            Route("/", answering(index)),
            Route("/verified", answering(matrix)),
            Route("/status.json", answering(status)),
            Route("/end/{file}/{how}/{id:path}", answering(end), methods=["POST"]),
        ]
    )


def serve(
    paths: Sequence[Path],
    port: int,
    *,
    address: str = LOCAL[0],
    token: str | None = None,
    hosts: Sequence[str] = (),
    verified: Callable[[], str] | None = None,
) -> None:
    """Until a signal ends the process.

    Raises:
        UsageError, MissingExtra: as `application`.
    """
    app = application(paths, token=token, address=address, hosts=hosts, verified=verified)
    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("ui") from None
    uvicorn.run(app, host=address, port=port, log_level="warning", access_log=False, http=timed_protocol())


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
