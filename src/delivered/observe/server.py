"""The page, served: it loads itself again, and its buttons end transactions as `delivered transactions` does.

Listens on 127.0.0.1 without a token; elsewhere every request must carry one. A browser brings it once, as `?token=`,
and has it in a cookie from then on: it is in no page, and in no address that is kept.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from delivered.model.errors import DeliveredError, MissingExtra, UsageError
from delivered.observe.look import look, seen
from delivered.observe.page import page
from delivered.pipeline.definition import Definition
from delivered.pipeline.transactions import end_transaction

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOCAL = ("127.0.0.1", "::1", "localhost")
REFRESH_S = 5.0
_COOKIE = "delivered_token"
_HEADERS = {
    "Cache-Control": "no-store",
    # Nothing from another host, no script, and in nobody's frame: a click on a button is meant for it.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "same-origin",  # without any, a form's Origin would be null
}


def application(
    paths: Sequence[Path],
    *,
    token: str | None = None,
    address: str = LOCAL[0],
    verified: Callable[[], str] | None = None,
) -> Starlette:
    """An ASGI application.

    Args:
        paths: pipeline files.
        token: that requests must carry, as `?token=`, a cookie, or `Authorization: Bearer`.
        verified: the page of the verifier's results, as HTML.

    Raises:
        UsageError: an address that others reach, without a token.
        MissingExtra: starlette is not installed.
    """
    if token is None and address not in LOCAL:
        raise UsageError(
            "UI_TOKEN",
            f"The page would be readable by everyone who reaches {address}, and its buttons end transactions.",
            next_step="pass --token env:NAME, or listen on 127.0.0.1 and reach it through a tunnel",
        )
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
        from starlette.routing import Route
    except ImportError:
        raise MissingExtra("ui") from None

    def address_of(number: int, transaction: str, apply: bool) -> str:
        return f"/end/{number}/{'apply' if apply else 'abort'}/{quote(transaction, safe='')}"

    def is_right(given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), (token or "").encode())

    def refused(request: Request) -> Response | None:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token is None or any(map(is_right, (bearer, request.cookies.get(_COOKIE)))):
            return None
        if request.method == "GET" and is_right(request.query_params.get("token")):
            known = RedirectResponse(request.url.path, 303)
            known.set_cookie(_COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https")
            return known
        return PlainTextResponse("A token is needed: ?token=...", 401)

    def render(paused: bool) -> str:
        return page(
            seen(paths),
            refresh_s=None if paused else REFRESH_S,
            action=address_of,
            links=(
                ("go on", "/") if paused else ("pause", "/?paused"),
                *((("verified", "/verified"),) if verified else ()),
            ),
        )

    async def index(request: Request) -> Response:
        if (no := refused(request)) is not None:
            return no
        return HTMLResponse(await run_in_threadpool(render, "paused" in request.query_params), headers=_HEADERS)

    async def matrix(request: Request) -> Response:
        if (no := refused(request)) is not None:
            return no
        if verified is None:
            return PlainTextResponse("No results: delivered ui --verified build/verify.json", 404)
        return HTMLResponse(await run_in_threadpool(verified), headers=_HEADERS)

    async def status(request: Request) -> Response:
        if (no := refused(request)) is not None:
            return no
        return JSONResponse([s.to_json() for s in await run_in_threadpool(look, paths)])

    async def end(request: Request) -> Response:
        if (no := refused(request)) is not None:
            return no
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return PlainTextResponse("The request came from another page.", 403)
        path = paths[int(request.path_params["file"])]
        apply = request.path_params["how"] == "apply"
        try:
            pipeline = Definition.from_file(path)
            await run_in_threadpool(end_transaction, pipeline, request.path_params["id"], commit=apply)
        except DeliveredError as error:
            return PlainTextResponse(f"{error}\n", 409)
        return RedirectResponse("/", 303)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/verified", matrix),
            Route("/status.json", status),
            Route("/end/{file:int}/{how}/{id}", end, methods=["POST"]),
        ]
    )


def serve(
    paths: Sequence[Path],
    port: int,
    *,
    address: str = LOCAL[0],
    token: str | None = None,
    verified: Callable[[], str] | None = None,
) -> None:
    """Until a signal ends the process.

    Raises:
        UsageError, MissingExtra: as `application`.
    """
    made = application(paths, token=token, address=address, verified=verified)
    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("ui") from None
    uvicorn.run(made, host=address, port=port, log_level="warning", access_log=False)
