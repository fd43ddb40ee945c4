"""An OpenID Connect server: client credentials against tokens that Kafka's own validator accepts."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

CLIENT, SECRET = "delivered-client", "delivered-client-secret"


def _coded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class TokenServer:
    """
    Attributes:
        lifetime_s: of tokens.
        issued: how many tokens were given.
        fail: status codes to answer with, one after the other, before tokens are given again.
        forms: what clients posted.
    """

    def __init__(self) -> None:
        self.lifetime_s = 300.0
        self.issued = 0
        self.fail: list[int] = []
        self.forms: list[dict[str, list[str]]] = []
        self._key = rsa.generate_private_key(65537, 2048)
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, served.keys())

            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self._answer(*served.answer(form, self.headers.get("Authorization", "")))

            def _answer(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                if status in (301, 302, 307):
                    self.send_header("Location", f"{served.url}/elsewhere")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, form: dict[str, list[str]], login: str) -> tuple[int, object]:
        self.forms.append(form)
        if self.fail:
            return self.fail.pop(0), {"error": "asked_for", "error_description": "by the test"}
        wanted = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        if login != f"Basic {wanted}":
            return 401, {"error": "invalid_client", "error_description": "unknown client"}
        return 200, {"access_token": self.token(), "expires_in": self.lifetime_s, "token_type": "Bearer"}

    def token(self, **claims: Any) -> str:
        self.issued += 1
        now = time.time()
        body = {
            "iss": self.url, "aud": "kafka", "sub": "alice", "scope": "kafka", "iat": int(now) - 1,
            "exp": int(now + self.lifetime_s), "jti": str(self.issued), **claims,
        }  # fmt: skip
        head = {"alg": "RS256", "kid": "one", "typ": "JWT"}
        signed = ".".join(_coded(json.dumps(part).encode()) for part in (head, body))
        return f"{signed}.{_coded(self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def keys(self) -> object:
        numbers = self._key.public_key().public_numbers()
        n, e = (_coded(x.to_bytes((x.bit_length() + 7) // 8, "big")) for x in (numbers.n, numbers.e))
        return {"keys": [{"kty": "RSA", "kid": "one", "use": "sig", "alg": "RS256", "n": n, "e": e}]}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def fetched(config: str) -> tuple[str, float]:
    """A user's function: a token, and when it expires. `config`: the server's address."""
    login = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
    request = urllib.request.Request(
        f"{config}/token", b"grant_type=client_credentials", {"Authorization": f"Basic {login}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        found = json.load(answer)
    return found["access_token"], time.time() + found["expires_in"]


def foreign(config: str) -> str:
    """A token of a server that the broker does not trust."""
    server = TokenServer()
    try:
        return server.token(iss=config)
    finally:
        server.close()
