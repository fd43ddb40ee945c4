"""A reverse proxy with TLS and a login, in front of a real server that has neither."""

from __future__ import annotations

import base64
import ipaddress
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def certificate(folder: Path) -> dict[str, Path]:
    """Key and self-signed certificate for 127.0.0.1."""
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "proxy")])
    now, address = datetime.now(UTC), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = {"key": folder / "key.pem", "certificate": folder / "ca.pem"}
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    files["key"].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    files["certificate"].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return files


def _application(target: str, login: str) -> Starlette:
    """Passes requests on if they have the login, and answers as Confluent's registry does if they have not."""
    expected = "Basic " + base64.b64encode(login.encode()).decode()
    upstream = httpx.AsyncClient(base_url=target, timeout=60)

    async def forward(request: Request) -> Response:
        if not secrets.compare_digest(request.headers.get("authorization", ""), expected):
            return JSONResponse({"error_code": 401, "message": "Unauthorized"}, 401)
        kept = {k: v for k, v in request.headers.items() if k in ("accept", "content-type")}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answer = await upstream.request(request.method, path, content=await request.body(), headers=kept)
        return Response(answer.content, answer.status_code, {"content-type": answer.headers.get("content-type", "")})

    methods = ["GET", "POST", "PUT", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=methods)])


@contextmanager
def https_front(target: str, files: dict[str, Path], login: str) -> Iterator[str]:
    """
    Args:
        target: URL of the server; its path is passed on.
        files: see `certificate`.
        login: user:password.

    Yields:
        The proxy's URL, with the target's path.
    """
    parts = httpx.URL(target)
    application = _application(str(parts.copy_with(path="/")), login)
    server = uvicorn.Server(
        uvicorn.Config(
            application, log_level="error", ssl_certfile=str(files["certificate"]), ssl_keyfile=str(files["key"])
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}{parts.path}"
        finally:
            # Otherwise it waits half a minute for a client that keeps its connection.
            server.should_exit = server.force_exit = True
            thread.join(30)
