"""The schema registry, by confluent-kafka's client. One client per process and registry; schemas by id are kept."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from delivered.kits.options import distrusted, trust
from delivered.kits.schemas import PREFIX, TRUSTED, URL, Format
from delivered.model.answers import AnswerTooLarge, JsonAnswer, UnexpectedAnswer, bounded, limited, starts
from delivered.model.errors import DeliveredError, Unreachable, UsageError, extra
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.options import resolve_secrets
from delivered.model.patience import patience_s, wait_out

if TYPE_CHECKING:
    import ssl

_KINDS = {"AVRO": Format.AVRO, "PROTOBUF": Format.PROTOBUF, "JSON": Format.JSON_SCHEMA}
_NAMES = {v: k for k, v in _KINDS.items()}
_REFERENCES_MAX = 100
_ANSWER_BYTES_MAX = 16 << 20
_NOT_FOUND, _CONFLICT, _INVALID = 404, 409, 422
_PATH = re.compile(
    "(?P<by_id>/schemas/ids/[0-9]+)$|(?P<compatibility>/compatibility/subjects/[^/]+/versions/[^/]+)$"
    "|/subjects/[^/]+(?:(?P<new>/versions)|/versions/[^/]+)?$"
)
_BUSY = (408, 429, 500, 502, 503, 504)

T = TypeVar("T")


@dataclass(frozen=True)
class Registered:
    """A schema of a subject.

    Attributes:
        id: names it in a record; 0: declared for reading, not registered.
        subject, version: 0: only its id is known.
        references: (name, text) of the schemas that it imports, each after those that it imports itself.
    """

    id: int
    kind: Format
    text: str
    subject: str = ""
    version: int = 0
    references: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if not self.id:
            return "the declared schema"
        return f"version {self.version} of {self.subject} (id {self.id})" if self.version else f"schema {self.id}"


class BadSchema(UsageError):
    """What the registry has under an id or a version is no schema that can be used."""


class Incompatible(Exception):
    """The registry refuses a schema; the text is its answer."""


class Registry:
    """See `connected`. Its methods raise Unreachable if the registry is away, UsageError if it refuses the login."""

    def __init__(self, settings: tuple[tuple[str, str], ...]) -> None:
        with extra("schemas"):
            from confluent_kafka import schema_registry
        self._module = schema_registry
        self.url = dict(settings)["url"]
        known = {"timeout": str(CONNECT_TIMEOUT_S), "max.retries": "0", **resolve_secrets(PREFIX, dict(settings))}
        numbers = {k: float(v) for k, v in known.items() if k in _NUMBERS}
        self._trusted = known.get(TRUSTED.removeprefix(PREFIX))
        if self._trusted is not None and not Path(self._trusted).is_dir():
            trust(TRUSTED, self._trusted)
        try:
            self._client: Any = schema_registry.SchemaRegistryClient({**known, **numbers})
        except (ValueError, TypeError, OSError) as error:
            raise UsageError("SCHEMA_REGISTRY_OPTIONS", url=self.url, error=str(error)[:200]) from None
        session = limited(self._client._rest_client.session)
        session.headers["Accept-Encoding"] = "identity"
        session.event_hooks = {"request": [lambda _: starts(CONNECT_TIMEOUT_S)], "response": [self._read]}
        self._by_id: dict[int, Registered | None] = {}

    def find(self, subject: str, version: int | None) -> Registered | None:
        """A version of a subject; None: the newest. Returns None if there is none."""
        self._client.clear_latest_caches()
        newest, named = self._client.get_latest_version, self._client.get_version
        version_: Any = self._found(partial(newest, subject) if version is None else partial(named, subject, version))
        return (
            None
            if version_ is None
            else self._registered(version_.schema, version_.schema_id, subject, version_.version)
        )

    def by_id(self, number: int) -> Registered | None:
        """A schema that a record names. Kept, as ids never change; an unknown one may become known."""
        if self._by_id.get(number) is None:
            schema = self._found(lambda: self._client.get_schema(number))
            self._by_id[number] = None if schema is None else self._registered(schema, number)
        return self._by_id[number]

    def accepts(self, subject: str, kind: Format, text: str) -> bool:
        """Whether the subject's compatibility rule allows the schema. A new subject takes any."""
        answer = self._found(lambda: self._client.test_compatibility(subject, self._schema(kind, text)))
        return answer is None or bool(answer)

    def register(self, subject: str, kind: Format, text: str) -> Registered:
        """The schema, which the subject has afterwards. Idempotent. Raises Incompatible."""
        schema = self._schema(kind, text)
        number: int = self._ask(lambda: self._client.register_schema(subject, schema))
        version: Any = self._ask(lambda: self._client.lookup_schema(subject, schema))
        return self._registered(schema, number, subject, version.version)

    def _schema(self, kind: Format, text: str) -> Any:
        return self._module.Schema(text, _NAMES[kind])

    def _registered(self, schema: Any, number: int, subject: str = "", version: int = 0) -> Registered:
        kind = _KINDS.get(schema.schema_type or "AVRO")
        if kind is None:
            raise BadSchema("SCHEMA_KIND.UNKNOWN", number=number, url=self.url, schema_type=schema.schema_type)
        return Registered(number, kind, schema.schema_str, subject, version, self._references(schema))

    def _references(self, schema: Any) -> tuple[tuple[str, str], ...]:
        """(name, text) of all that it imports, each after those that it imports itself; each asked for once."""
        texts: dict[str, str] = {}
        asked: set[tuple[str, str, int]] = set()
        within: list[tuple[str, str, int]] = []

        def add(one: Any) -> None:
            which = (one.name, one.subject, one.version)
            if which in within:
                raise _bad_references(f"imports itself, by way of {one.name!r}")
            if which in asked:
                return
            asked.add(which)
            if len(asked) > _REFERENCES_MAX:
                raise _bad_references(f"imports more than {_REFERENCES_MAX} others")
            imported = self._ask(partial(self._client.get_version, one.subject, one.version)).schema
            within.append(which)
            for inner in imported.references or ():
                add(inner)
            within.pop()
            texts[one.name] = imported.schema_str

        for one in schema.references or ():
            add(one)
        return tuple(texts.items())

    def _found(self, ask: Callable[[], T]) -> T | None:
        try:
            return self._ask(ask)
        except _Missing:
            return None

    def _ask(self, ask: Callable[[], T]) -> T:
        try:
            return wait_out(f"schema registry {self.url}", ask, self._is_away, patience_s(answered=False))
        except self._module.SchemaRegistryError as error:
            raise self._answer(error) from None
        except DeliveredError:
            raise
        except Exception as error:
            bad = _bad_certificate(error)
            if bad is not None:
                trusted = "those of certifi, or in SSL_CERT_FILE or SSL_CERT_DIR"
                trusted = f"those in {self._trusted}" if self._trusted else trusted
                raise distrusted(self.url.rpartition(",")[2].strip(), bad, TRUSTED, trusted, URL) from None
            unreadable = isinstance(
                error, ValueError | TypeError | KeyError | AttributeError
            )  # no JSON, or another shape
            if not unreadable and not self._is_away(error):
                raise
            raise Unreachable(
                "REGISTRY_UNREACHABLE.NO_ANSWER", url=self.url, error=str(error)[:200] or type(error).__name__
            ) from None

    def _read(self, response: Any) -> None:
        body = _body(response)
        if response.status_code >= 300:
            return
        path = response.request.url.raw_path.decode().partition("?")[0]
        try:
            _check(path, JsonAnswer.read(body))
        except UnexpectedAnswer as why:
            raise Unreachable("REGISTRY_UNREACHABLE.OTHER_ANSWER", url=self.url, path=path, reason=why) from None

    def _answer(self, error: Any) -> Exception:
        status, text = error.http_status_code, str(error.error_message)[:500]
        if status == _NOT_FOUND:
            return _Missing(text)
        if status in (_CONFLICT, _INVALID):
            return Incompatible(text)
        if status in (401, 403):
            _connected.cache_clear()  # the next client resolves its secrets again: they may have been corrected
            return Unreachable("SCHEMA_REGISTRY_LOGIN", url=self.url, status=status, text=text)
        return Unreachable("REGISTRY_UNREACHABLE.HTTP", url=self.url, status=status, text=text)

    def _is_away(self, error: BaseException) -> bool:
        if isinstance(error, self._module.SchemaRegistryError):
            return error.http_status_code in _BUSY
        if _bad_certificate(error) is not None:
            return False
        return any("TransportError" in c.__name__ for c in type(error).__mro__)  # of httpx or its successor


def _body(response: Any) -> bytes:
    """Read an answer, before the client does without a bound. What is compressed unasked is no answer."""
    from confluent_kafka.schema_registry.common._httpx_compat import httpx

    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    try:
        if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise AnswerTooLarge("its answer is compressed, although it was asked not to")
        body = response._content = bounded(response.iter_raw(), _ANSWER_BYTES_MAX, deadline)
    except OSError as error:
        response.close()
        raise httpx.ReadError(str(error), request=response.request) from None
    return body


def _check(path: str, answer: JsonAnswer) -> None:
    """The fields that the client takes without a look. Raises UnexpectedAnswer."""
    kind = _PATH.search(path)
    if kind is None:
        return
    if kind["compatibility"]:
        answer.take("is_compatible", bool)
        return
    if not kind["by_id"]:
        answer.number("id", 0)
        if kind["new"]:
            return
        answer.number("version", 0)
    answer.take("schema", str)
    answer.take("schemaType", str, "")
    if not answer.take("references", list, []):
        return
    for reference in answer.at("references").each():
        reference.take("name", str)
        reference.take("subject", str)
        reference.number("version", -1)


def _bad_references(what: str) -> BadSchema:
    return BadSchema("SCHEMA_REFERENCES", what=what)


def _bad_certificate(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The cause of a connection that failed, if it is the server's certificate."""
    import ssl  # executors that know all schemas need not load it

    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


class _Missing(Exception):
    """HTTP 404."""


_NUMBERS = (
    "timeout",
    "max.retries",
    "retries.wait.ms",
    "retries.max.wait.ms",
    "cache.capacity",
    "cache.latest.ttl.sec",
)


def connected(settings: Mapping[str, str]) -> Registry:
    """The registry of these settings.

    Args:
        settings: of the client; secrets are resolved here.

    Raises:
        MissingExtra, UsageError: the client refuses the settings.
    """
    return _connected(tuple(sorted(settings.items())))


@lru_cache(maxsize=16)
def _connected(settings: tuple[tuple[str, str], ...]) -> Registry:
    return Registry(settings)
