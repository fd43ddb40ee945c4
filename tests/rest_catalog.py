"""The part of Iceberg's REST protocol that a writer needs, in front of the client's own SQL catalog.

PyPI has no server for this protocol; this one follows its rules: it checks a request's requirements, then swaps the
pointer. It can lose replies on request, like a proxy that is cut off.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest
from pyiceberg.table.update import AssertRefSnapshotId


class RestCatalogServer:
    """`server.url` is its address; the next `server.lose_answers` commits succeed, but their replies are lost."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.catalog = SqlCatalog("served", uri=f"sqlite:///{folder}/rest.db", warehouse=f"file://{folder}")
        self.lose_answers = 0
        self._one = threading.Lock()
        self.commits = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, identifier: tuple[str, ...], request: dict[str, Any]) -> Any:
        with self._one:  # check and swap are atomic
            return self._commit(identifier, request)

    def _commit(self, identifier: tuple[str, ...], request: dict[str, Any]) -> Any:
        wanted = CommitTableRequest.model_validate(request)
        table = self.catalog.load_table(identifier)
        refs = [r for r in wanted.requirements if isinstance(r, AssertRefSnapshotId)]
        # As in the Java servers: the client's own check rejects branches of a table without a snapshot.
        for ref in refs:
            found = table.metadata.refs.get(ref.ref)
            if (found.snapshot_id if found else None) != ref.snapshot_id:
                raise CommitFailedException(f"Requirement failed: {ref.ref} has changed")
        self.commits += 1
        return self.catalog.commit_table(table, tuple(r for r in wanted.requirements if r not in refs), wanted.updates)


def _handler(server: RestCatalogServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(None)

        def do_HEAD(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(None if self.path.endswith("/oauth/tokens") else json.loads(body))

        def _answer(self, body: dict[str, Any] | None) -> None:
            path = [unquote(p) for p in urlsplit(self.path).path.strip("/").split("/")][1:]
            try:
                code, said = self._do(path, body)
            except CommitFailedException as error:
                code, said = 409, _error(409, "CommitFailedException", error)
            except TableAlreadyExistsError as error:
                code, said = 409, _error(409, "AlreadyExistsException", error)
            except NoSuchTableError as error:
                code, said = 404, _error(404, "NoSuchTableException", error)
            except ValueError as error:
                code, said = 400, _error(400, "BadRequestException", error)
            if code == 0:
                self.close_connection = True
                self.connection.close()
                return
            data = b"" if said is None or self.command == "HEAD" else json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _do(self, path: list[str], body: dict[str, Any] | None) -> tuple[int, Any]:
            if path == ["config"]:
                return 200, {"defaults": {}, "overrides": {}}
            if path == ["oauth", "tokens"]:
                return 200, {"access_token": "t", "token_type": "bearer"}
            namespace = tuple(path[1].split("\x1f")) if len(path) > 1 else ()
            match path[2:]:
                case []:
                    if body is not None:
                        server.catalog.create_namespace(tuple(body["namespace"]))
                        return 200, {"namespace": body["namespace"], "properties": {}}
                    return (200 if server.catalog.namespace_exists(namespace) else 404), {"namespace": list(namespace)}
                case ["tables"]:
                    made = server.catalog.create_table(
                        (*namespace, body["name"]), Schema.model_validate(body["schema"]),
                        partition_spec=PartitionSpec.model_validate(body["partition-spec"]),
                        properties=body.get("properties") or {},
                    )  # fmt: skip
                    return 200, _table(made)
                case ["tables", name]:
                    identifier = (*namespace, name)
                    if body is None:
                        return 200, _table(server.catalog.load_table(identifier))
                    done = server.commit(identifier, body)
                    if server.lose_answers:
                        server.lose_answers -= 1
                        return 0, None
                    return 200, {"metadata-location": done.metadata_location, "metadata": _json(done.metadata)}
            return 404, _error(404, "NotFound", ValueError(str(path)))

    return Handler


def _table(table: Any) -> dict[str, Any]:
    return {"metadata-location": table.metadata_location, "metadata": _json(table.metadata), "config": {}}


def _json(metadata: Any) -> Any:
    return json.loads(metadata.model_dump_json(by_alias=True, exclude_none=True))


def _error(code: int, kind: str, error: Exception) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": kind, "code": code}}
