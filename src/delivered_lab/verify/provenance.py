"""What a verdict rests on: when it was found, of which commit and code, with which versions, and the verdicts before.

The code of a case: model, contract, kits, engine, ledger, and the connectors of its sink and source; through Spark also
what runs there. It is compared without comments and docstrings: a change of those alone keeps its verdicts.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import delivered
from delivered_lab.brokers.servers import SERVERS
from delivered_lab.verify.services import ENDS, ENGINE, SPARK

PACKAGE = Path(delivered.__file__).parent
_ALWAYS = ("model", "contract", "kits", "clients")
_BATCHES = (*_ALWAYS, "engine", "ledger", "ledger.py", "checkpoint", "source.py", "prefork", "receiver")
_ROOMS = {
    SPARK: (*_BATCHES, "spark", "pipeline"),
    ENGINE: _BATCHES,
    **dict.fromkeys(ENDS, (*_ALWAYS, "patterns")),
}
"""What a case runs apart from connectors, by its service."""
_ALWAYS_READ = "log"
"""The connector that feeds every sink whose case names no source."""
_CLIENTS = (
    "delivered", "pyspark", "pyarrow", "confluent-kafka", "kafka-python", "psycopg", "PyMySQL", "deltalake",
    "pyiceberg", "pulsar-client", "pika", "stomp.py", "rocketmq-python-client",
)  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """One run of a case.

    Attributes:
        at: UTC, ISO 8601, to the second.
        commit: of the checkout; "+" behind it: files were changed. Empty: not run from a checkout.
        code: `code_of` the case.
    """

    at: str
    commit: str
    code: str
    verdict: str

    def to_json(self) -> list[str]:
        return [self.at, self.commit, self.code, self.verdict]


def ran(service: str, sink: str, source: str, verdict: str) -> Ran:
    """A run that ended now."""
    return Ran(datetime.now(UTC).isoformat(timespec="seconds"), commit(), code_of(service, sink, source), verdict)


def merged(*histories: Sequence[Sequence[str]]) -> list[list[str]]:
    """Runs of several records of one case, each once, in their order in time."""
    return [list(run) for run in sorted({tuple(run) for history in histories for run in history})]


@cache
def commit() -> str:
    """Of the checkout that this package lies in; empty: it is installed, or there is no git."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=PACKAGE, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    if shutil.which("git") is None or not git("ls-files", "__init__.py"):
        return ""
    changed = git("status", "--porcelain", "--", str(PACKAGE))
    return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)


@cache
def code_of(service: str, sink: str, source: str) -> str:
    """A digest of the code that a case runs, without comments and docstrings."""
    found = hashlib.sha256()
    for path in sorted({p for room in _rooms(service, sink, source) for p in _files(PACKAGE / room)}):
        digest = _digest(path.read_bytes(), path.suffix == ".py")
        found.update(f"{path.relative_to(PACKAGE)} {digest}\n".encode())
    return found.hexdigest()[:12]


def _rooms(service: str, sink: str, source: str) -> Iterator[str]:
    yield from _ROOMS[service]
    for name in {*sink.split("-"), *source.split("_"), _ALWAYS_READ}:
        if name and (PACKAGE / "connectors" / name).is_dir():
            yield f"connectors/{name}"


def _files(room: Path) -> Iterator[Path]:
    if room.is_file():
        yield room
    yield from (p for p in room.rglob("*") if p.suffix in (".py", ".c", ".h"))


@cache
def _digest(data: bytes, is_python: bool) -> str:
    if is_python:
        data = _dump(_Bare().visit(ast.parse(data))).encode()
    return hashlib.sha256(data).hexdigest()


def _dump(value: object) -> str:
    """As `ast.dump` of Python 3.11: that of later versions writes other texts for the same code."""
    if isinstance(value, list):
        return f"[{', '.join(map(_dump, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = {name: getattr(value, name) for name in value._fields if hasattr(value, name)}
    given = {k: v for k, v in fields.items() if v is not None or not hasattr(type(value), k)}
    if not given.get("type_params"):
        given.pop("type_params", None)
    return f"{type(value).__name__}({', '.join(f'{k}={_dump(v)}' for k, v in given.items())})"


class _Bare(ast.NodeTransformer):
    """Removes docstrings, and texts that stand under names."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else node


@cache
def versions(servers: frozenset[str] = frozenset()) -> dict[str, str]:
    """Versions of what verdicts depend on: of the packages here, and of these kinds of servers."""
    found = {"python": platform.python_version()}
    for name in _CLIENTS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found | {f"{kind} server": SERVERS[kind].version() for kind in sorted(servers)}


def environment_id(found: Mapping[str, Any]) -> str:
    """A short name of versions, by their content."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]
