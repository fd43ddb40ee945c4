"""Options as typed declarations: a field of a frozen dataclass says what an option is, once.

From it come parsing, suggestions for misspelt names, errors, docs/options.md and the JSON Schema. Plain dataclasses,
since executors unpickle them: importing pydantic takes 90 to 120 ms of CPU, this module 10 to 14.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, dataclass_transform
from urllib.parse import SplitResult, parse_qs, parse_qsl, urlsplit

from delivered.model.errors import Refused, UsageError, holds_password, is_secret, texts
from delivered.model.errors import shown as shown_value
from delivered.model.identity import SOURCE, by_source

T = TypeVar("T")

_KEY = "delivered.options"


class Unfit(Exception):
    """Raised by a type's `read`: the text is not a valid value.

    Attributes:
        reason: continues "option 'x' ", without a full stop: "is 0; it must be at least 1".
        next_step: None: built from `nearest`, or the option's example.
        nearest: the value that was probably meant.
    """

    def __init__(
        self, reason: str, next_step: str | None = None, code: str = "OPTION_VALUE", nearest: str | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.next_step, self.code, self.nearest = reason, next_step, code, nearest

    @classmethod
    def build(cls, code: str, *, nearest: str | None = None, **values: object) -> Unfit:
        """With the texts of the catalogue; `code` with its condition."""
        reason, next_step = texts(code, values)
        return cls(reason, next_step, code, nearest)

    def of(self, subject: str, next_step: str | None = None) -> UsageError:
        """The error that says of what: "delivered_kafka sink: option 'topic'". `next_step`: if the text has none."""
        return UsageError(self.code, f"{subject} {self.reason}.", self.next_step or next_step)


@dataclass(frozen=True)
class OptionType(Generic[T]):
    """How an option's text is parsed.

    Attributes:
        read: text to value; raises Unfit.
        write: value to text, for docs.
        schema: keywords of JSON Schema besides the type: every value may also be written as text, in any case.
        example: an allowed value, as text.
    """

    read: Callable[[str], T]
    write: Callable[[T], str] = str
    schema: Mapping[str, Any] = field(default_factory=dict)
    example: str | None = None

    def parse(
        self,
        owner: str,
        name: str,
        text: str,
        next_step: str | None = None,
        call: Callable[[str, str | None], str] | None = None,
    ) -> T:
        """Read a user's value.

        Args:
            next_step: of the error; None: write the example.
            call: how its user writes a value; None: as an option.

        Raises:
            UsageError: with the value, what is allowed and what to write.
        """
        try:
            return self.read(text)
        except Unfit as why:
            call = call or _call
            nearest = why.nearest and f"write {call(name, why.nearest)}"
            step = nearest or next_step or (self.example and f"write {call(name, self.example)}")
            raise why.of(f"{owner}: option {name!r}", step) from None


TEXT = OptionType[str](str)
TEXT_OR_NONE = OptionType[str | None](lambda text: text or None)
"""An empty text means that the option is not set."""


def choice(
    allowed: Iterable[T] | Mapping[str, T],
    former: Mapping[str, str] | None = None,
    meant: Mapping[str, str] | None = None,
) -> OptionType[T]:
    """One of these, in any case.

    Args:
        allowed: the values, or their texts with the values; the first one is the example in errors.
        former: text that is still accepted -> its current spelling.
        meant: text that is refused -> the value to suggest, where the nearest spelling would mislead.
    """
    texts = dict(allowed) if isinstance(allowed, Mapping) else {str(value): value for value in allowed}
    spelling = {text.lower(): text for text in texts}

    def read(text: str) -> T:
        given = text.strip().lower()
        now = spelling.get((former or {}).get(given, given))
        if now is None:
            near = difflib.get_close_matches(given, spelling, n=1)
            raise Unfit.build(
                "OPTION_VALUE.CHOICE",
                nearest=(meant or {}).get(given) or (spelling[near[0]] if near else None),
                text=text,
                known=", ".join(filter(None, texts)),
            )
        return texts[now]

    return OptionType(
        read,
        lambda value: next(t for t, v in texts.items() if v == value),
        {"examples": list(texts)},
        next(iter(texts)),
    )


FLAG: OptionType[bool] = choice({"true": True, "false": False})


def integer(low: int, high: int | None = None) -> OptionType[int]:
    """An integer, bounds included."""
    bound = f"at least {low}" if high is None else f"from {low} to {high}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise Unfit.build("OPTION_VALUE.NUMBER", text=text, bound=bound) from None
        if number < low or (high is not None and number > high):
            raise Unfit.build("OPTION_VALUE.RANGE", number=number, bound=bound)
        return number

    bounds = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return OptionType(read, str, bounds, str(low))


@dataclass(frozen=True)
class Option:
    """
    Attributes:
        name: as documented, with its capital letters.
        doc: one sentence, for the reference page and the JSON Schema.
        default: as text, for the reference page; None: none.
        secret: its value appears in no log, plan, page, error or repr.
        example: an allowed value.
        aliases: earlier spellings, still accepted.
    """

    name: str
    doc: str
    default: str | None = None
    required: bool = False
    secret: bool = False
    type: OptionType[Any] = TEXT
    example: str | None = None
    aliases: tuple[str, ...] = ()

    def parse(self, owner: str, text: str) -> Any:
        """Raise UsageError; see `OptionType.parse`."""
        return self.type.parse(owner, self.name, text, self.example and f"write {_call(self.name, self.example)}")


_SAME = (
    frozenset(("topic", "topics", "subscribe")),
    frozenset(("kafka.bootstrap.servers", "bootstrap.servers", "bootstrapservers", "brokers", "servers", "broker")),
    frozenset(("url", "uri", "dsn", "host", "server", "servers", "address", "addresses", "endpoint", "endpoints")),
    frozenset(("path", "file", "folder", "dir", "directory", "location", "basepath")),
    frozenset(("table", "dbtable", "relation")),
    frozenset(("queue", "stream", "destination")),
    frozenset(("keycolumns", "primarykey", "primarykeys", "mergekeys", "upsertkeys")),
    frozenset(("mode", "writemode", "savemode", "outputmode")),
)
"""Names, in lower case, that one thing has in different systems and tools; for suggestions."""


@dataclass(frozen=True)
class OptionTable:
    """The options of one source or sink.

    Attributes:
        owner: for errors: "delivered_kafka sink".
        passthrough: prefixes whose options go to the client library unchanged, for example "kafka.".
        ignored: options that Spark adds itself.
    """

    owner: str
    options: tuple[Option, ...]
    passthrough: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def restore(self, given: Mapping[str, str]) -> dict[str, str]:
        """Restore the documented case of keys (PySpark lower-cases them) and refuse unknown ones.

        Raises:
            UsageError: unknown option, with the nearest known one; or a required one is missing; or one has two
                spellings; or a URL contains a password.
        """
        known = {spelling.lower(): o.name for o in self.options for spelling in (o.name, *o.aliases)}
        secrets = {o.name for o in self.options if o.secret}
        restored: dict[str, str] = {}
        spelt: dict[str, str] = {}
        for key, value in given.items():
            name = known.get(key.lower())
            if name is None and key.lower().startswith(self.passthrough):
                name = key.lower()
            if name is None and key.lower() in self.ignored:
                continue
            if name is None:
                raise self._unknown(key)
            if spelt.setdefault(name, key) != key:
                raise UsageError("OPTION_CONFLICT.SAME", owner=self.owner, first=spelt[name], second=key, name=name)
            if holds_password(str(value)) and not (name in secrets or is_secret(name)):
                raise password_in_url(self.owner, name)
            if (name in secrets or is_secret(name)) and (meant := _meant_reference(str(value))):
                raise UsageError("OPTION_VALUE.SECRET_REFERENCE", owner=self.owner, name=name, call=_call(name, meant))
            if "." not in name and name not in secrets and (step := not_as_meant(str(value))):
                raise UsageError("OPTION_VALUE.LITERAL", owner=self.owner, name=name, value=value, action=step)
            restored[name] = str(value)
        for option in self.options:
            if option.required and option.name in restored and not restored[option.name].strip():
                raise UsageError(
                    "OPTION_VALUE.BLANK",
                    owner=self.owner,
                    name=option.name,
                    call=_call(option.name, option.example),
                )
            if option.required and option.name not in restored:
                raise UsageError(
                    "OPTION_MISSING.REQUIRED",
                    owner=self.owner,
                    option=option.name,
                    meaning=option.doc,
                    call=_call(option.name, option.example),
                )
        return restored

    def _unknown(self, key: str) -> UsageError:
        if key.lower() in ("options", "option", "properties", "config"):
            raise UsageError("OPTION_UNKNOWN.NESTED", owner=self.owner, key=key)
        names = [o.name for o in self.options]
        same = [n for n in names if any({key.lower(), n.lower()} <= words for words in _SAME)]
        near = difflib.get_close_matches(key.lower(), [n.lower() for n in names], n=1, cutoff=0.6)
        near = same or [n for n in names if n.lower() in near]
        within = [n for n in names if key.lower().endswith(n.lower())]  # another system's word: serviceUrl
        suggestion = next(iter(near), max(within, key=len, default=None))
        known = ", ".join(sorted(names)) + "".join(f", {p}*" for p in self.passthrough)
        return UsageError(
            "OPTION_UNKNOWN.NEAR" if suggestion else "OPTION_UNKNOWN.OTHER",
            owner=self.owner,
            key=key,
            known=known,
            suggestion=suggestion,
        )


def password_in_url(owner: str, name: str, next_step: str | None = None) -> UsageError:
    """The error for a value with a URL that contains a password. Values are shown in plans, logs and pages."""
    if next_step is None and name.lower() in ("url", "log"):
        next_step = 'remove it and write .option("password", "env:NAME")'
    elif next_step is None and "." in name:  # goes to a client's library, and may be a reference
        next_step = f"write the complete URL by reference: {_call(name, 'env:NAME')}"
    return UsageError(
        "PASSWORD_IN_URL.OPTION" if next_step else "PASSWORD_IN_URL.OTHER_OPTION",
        owner=owner,
        name=name,
        action=next_step,
    )


def find_option(options: Mapping[str, str], name: str) -> str | None:
    """The value of an option, whose key may be in any case: Spark does not keep it."""
    return next((v for k, v in options.items() if k.lower() == name.lower()), None)


def argument(name: str, value: str | None) -> str:
    """As a caller of a function writes a value."""
    return f'{name}="{value}"'


def check_argument(
    call: str, name: str, value: object, types: type | tuple[type, ...], wanted: str, example: str
) -> None:
    """Check what a caller passes.

    Args:
        call: as the caller writes it: "delivered.receive".
        wanted: what the types are, in words; example: the argument as it could be written.

    Raises:
        UsageError: it has another type; True is no number.
    """
    allowed = types if isinstance(types, tuple) else (types,)
    if isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool)):
        return
    raise UsageError(
        "ARGUMENT_TYPE",
        call=call,
        name=name,
        value=shown_value(value, name),
        kind=type(value).__name__,
        wanted=wanted,
        example=example,
    )


def _call(name: str, value: str | None) -> str:
    quote = "'" if '"' in (value or "") else '"'
    return f'.option("{name}", {"..." if value is None else quote + value + quote})'


@dataclass(frozen=True)
class _Declared:
    options: tuple[Option, ...]
    passthrough: tuple[str, ...]
    read: Callable[[str, Mapping[str, str]], Any]


def option(
    name: str,
    doc: str,
    type: OptionType[Any] = TEXT,  # noqa: A002
    *,
    default: Any = MISSING,
    shown: str | None = None,
    secret: bool = False,
    example: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a field of `Options` that holds one option.

    Args:
        default: the field's value if the option is not set; without it, the option is required.
        shown: the default for docs, if it is not a text of the type: "no limit".
    """
    required = default is MISSING
    if shown is None and not required and default is not None:
        shown = type.write(default)
        example = example or shown
    example = example or type.example
    made = Option(name, doc, shown, required, secret, type, example, aliases)

    def read(owner: str, values: Mapping[str, str]) -> Any:
        return made.parse(owner, values[name]) if name in values else default

    return field(default=default, repr=not secret, metadata={_KEY: _Declared((made,), (), read)})


def several(
    read: Callable[[str, Mapping[str, str]], Any],
    *options: Option,
    passthrough: tuple[str, ...] = (),
    default: Any = MISSING,
    secret: bool = False,
) -> Any:
    """Declare a field of `Options` built from several options, or from those with a prefix.

    Args:
        read: from owner and options, by documented name; raises UsageError.
    """
    return field(default=default, repr=not secret, metadata={_KEY: _Declared(options, passthrough, read)})


def prefixed(prefix: str) -> Any:
    """Declare a field of `Options` that holds the options with `prefix`, stripped of it. Values may be secrets."""

    def read(_owner: str, values: Mapping[str, str]) -> dict[str, str]:
        return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}

    return field(default_factory=dict, repr=False, metadata={_KEY: _Declared((), (prefix,), read)})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, several, prefixed))
@dataclass(frozen=True)
class Options:
    """Base of the options of a source or sink, checked once and frozen. Subclasses are frozen dataclasses, too.

    Fields are declared by `option`, `several` and `prefixed`; `check` holds the rules between them.

    Attributes:
        TABLE: all options, in order of declaration.
    """

    TABLE: ClassVar[OptionTable]
    _DECLARED: ClassVar[tuple[tuple[str, _Declared], ...]]

    def __init_subclass__(
        cls, owner: str = "", ignored: tuple[str, ...] = (), more: tuple[type[Options], ...] = ()
    ) -> None:
        """
        Args:
            owner, ignored: see `OptionTable`.
            more: other classes that read some of the same options.
        """
        dataclass(frozen=True, kw_only=True)(cls)
        cls._DECLARED = tuple((f.name, f.metadata[_KEY]) for f in fields(cls) if _KEY in f.metadata)
        declared = [d for c in (cls, *more) for _, d in c._DECLARED]
        options = tuple(o for d in declared for o in d.options)
        cls.TABLE = OptionTable(owner, options, tuple({p: None for d in declared for p in d.passthrough}), ignored)

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Read a user's options, with keys in any case.

        Raises:
            UsageError: an option is unknown, missing, contradicts another, or is out of bounds.
            Refused: the request would break a guarantee.
        """
        return cls.read(cls.TABLE.owner, cls.TABLE.restore(given))

    @classmethod
    def read(cls, owner: str, values: Mapping[str, str]) -> Self:
        """As `parse`, from options restored by a table, which may have others as well."""
        try:
            found = {name: declared.read(owner, values) for name, declared in cls._DECLARED}
        except RecursionError:
            raise UsageError("OPTION_VALUE.NESTED", owner=owner) from None
        made = cls(**{name: value for name, value in found.items() if value is not MISSING})
        made.check(owner)
        return made

    def check(self, owner: str) -> None:
        """Raise UsageError if options are incompatible."""

    @property
    def in_clear(self) -> tuple[str, ...]:
        """What travels over a network unencrypted, or to a server that is not verified, as sentences for the plan."""
        return ()


REFERENCES = ("env:", "file:")
"""How a reference to a secret starts; see `resolve_secret`."""


def is_reference(value: str) -> bool:
    """Whether `resolve_secret` finds the secret elsewhere; else the value itself may be one."""
    return value.startswith(("env:", "file:"))


_LIKE_REFERENCE = re.compile(r"\s*(env|file)\s*:\s*(.*)", re.IGNORECASE | re.DOTALL)


def _meant_reference(value: str) -> str | None:
    """The reference that a misspelt one stands for; None: it is right, or none."""
    found = None if is_reference(value) else _LIKE_REFERENCE.fullmatch(value)
    return f"{found[1].lower()}:{'NAME' if found[1].lower() == 'env' else 'PATH'}" if found else None


_ONE_SLASH = re.compile(r"(s3[an]?|gs|abfss?|wasbs?):/?([^/].*)", re.DOTALL)


def not_as_meant(place: str) -> str | None:
    """For a path or URL, a next step: it means an object store, or a variable, and would be a local file."""
    if (variable := _VARIABLE.match(place)) is not None and variable[1] in os.environ:
        return f"write the path itself; nothing but a shell expands {variable[0]}, as in --set KEY={variable[0]}..."
    if place.startswith("env:"):
        return f"write the path itself (--set KEY=${place[4:]} takes a shell's variable); env: is for secrets"
    found = _ONE_SLASH.fullmatch(place)
    return found and f"write {found[1]}://{found[2]}"


_VARIABLE = re.compile(r"\$(\w+)(?=/|$)")
"""Of a shell, in front of a path."""


def resolve_secret(name: str, value: str) -> str:
    """Resolve a reference to a secret: `env:NAME` or `file:PATH`; any other text is returned as it is.

    Call it where the secret is used, as late as possible, so that only the reference is passed around.

    Raises:
        UsageError: the variable or file does not exist here. The message shows the reference, not the value.
    """
    if value.strip() in ("env:", "file:"):
        raise UsageError("SECRET_MISSING.NAME", name=name, value=value)
    if value.startswith("env:"):
        found = os.environ.get(value[4:])
        if found is None:
            raise UsageError("SECRET_MISSING.VARIABLE", name=name, value=value[4:])
        return found
    if value.startswith("file:"):
        try:
            return Path(value[5:]).read_text(encoding="utf-8-sig").rstrip("\r\n")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError("SECRET_MISSING.FILE", name=name, value=value[5:], error=why) from None
    return value


def resolve_secrets(prefix: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Settings of a client library with references resolved; use at once, do not keep.

    Args:
        prefix: of their options, for errors.
    """
    return {key: resolve_secret(f"{prefix}{key}", value) for key, value in settings.items()}


# Spells the options in hints for their reader.
#
# A hint holds an option as Spark's users write it, `.option("name", "value")`; that is its stored form, because Spark
# carries errors as text. Users of a pipeline file get `name: value`; `in_file_words` rewrites all of them at the edge.

_OPTION = re.compile(
    r"""\.option\((?P<q>["'])(?P<name>[\w.]+)(?P=q), (?:(?P<v>["'])(?P<value>.*?)(?P=v)|(?P<any>\.\.\.))\)"""
)
_SNAKE = {
    "missingLedger": "missing_ledger",
    "newCheckpoint": "new_checkpoint",
    "repeatedBatch": "repeated_batch",
    "newTarget": "new_target",
    "lostRecords": "lost_records",
}
"""Options of Spark's writer that a pipeline file spells differently."""
_FRAMES = (
    (re.compile(r'df\.withColumn\("([^"]+)", col\("([^"]+)"\)\.cast\("([^"]+)"\)\)'), r"write CAST(\2 AS \3) AS \1"),
    (re.compile(r'df\.filter\(col\("([^"]+)"\)\.isNotNull\(\)\)'), r"add WHERE \1 IS NOT NULL"),
    (re.compile(r'df\.drop\("([^"]+)"\)'), r"leave \1 out"),
)
"""A DataFrame call -> its counterpart in the transform's SQL."""
_SHOWN_LENGTH = 500
_PLAIN = re.compile(r"[A-Za-z0-9_./+-][A-Za-z0-9_./+ -]*")


def starting_at(offsets: str) -> str:
    """A hint's options that start the sources at `offsets`, lines of Spark's offset log.

    For pasting: never shortened, and without spaces, where a terminal would wrap.
    """
    options = {n: f""".option("startingOffsets", '{_compact(line)}')""" for n, line in by_source(offsets).items()}
    return " and ".join(f"{o} for source {n}" if n != SOURCE else o for n, o in options.items())


def without_newest(offsets: str, others: Iterable[str] = ()) -> str:
    """How to go on with a ledger that lacks the newest batches of its checkpoint.

    Args:
        offsets: where its last batch ended; empty: it has none.
        others: further sinks of the pipeline, which may hold the missing batches.
    """
    accept = 'to lose them, once, .option("missingLedger", "accept")'
    if not offsets:
        return f"restore the sink; or, {accept}"
    named = sorted(others)
    repeats = f"loses nothing, and repeats them at the sinks {named}," if named else "loses and repeats nothing"
    return (
        f"restore the sink; or write the missing batches again, which {repeats} if the source still has their records "
        "(a query that keeps state starts with none): stop this query, and start one with a new checkpointLocation, "
        f'{starting_at(offsets)} and, once, .option("newCheckpoint", "accept"); or, {accept}'
    )


def _compact(text: str) -> str:
    try:
        return json.dumps(json.loads(text), separators=(",", ":"))
    except ValueError:  # one of Spark's own sources, in its own format
        return text


def shown(offsets: str) -> str:
    """Offsets within a sentence, with a mark if shortened."""
    return offsets if len(offsets) <= _SHOWN_LENGTH else f"{offsets[:_SHOWN_LENGTH]}... ({len(offsets):,} characters)"


def in_file_words(text: str) -> str:
    """A message with every option as in a pipeline file, and every change of columns as SQL."""
    for frame, sql in _FRAMES:
        text = frame.sub(f"{sql} in the transform", text)
    return _OPTION.sub(_file_line, text)


def _file_line(found: re.Match[str]) -> str:
    name = _SNAKE.get(found["name"], found["name"])
    value = found["any"] or found["value"]
    if not found["any"] and not _PLAIN.fullmatch(value):
        value = "'" + value.replace("'", "''") + "'" if '"' in value else f'"{value}"'
    return f"{name}: {value}"


# Addresses of servers, checked when options are parsed: one that can never be reached must not be waited for.

_ADDRESS = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::(.*))?", re.DOTALL)
_LABEL = re.compile(r"[\w-]{1,63}")
_NAME_LENGTH_MAX = 253
PORT_MAX = 65_535
_ENDPOINT = re.compile(r"(?i)(^|[._-])(endpoint(_url)?|server-uri|service\.host|base_url)$")
"""aws_endpoint, s3.endpoint, azure_storage_endpoint, google_base_url, gcs.service.host, oauth2-server-uri ..."""


def parse_address(text: str, port: int | None = None) -> tuple[str, int]:
    """Host, without brackets, and port of host:port or [IPv6]:port.

    Args:
        port: the default; None: the text must have one.

    Raises:
        Unfit: the text is no address.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or (text.count(":") > 1 and not text.startswith("[")):
        hint = "; an IPv6 address is written in brackets, as [::1]:9092" if text.count(":") > 1 else ""
        raise Unfit.build("OPTION_VALUE.ADDRESS", text=text, action=hint)
    host, digits = found[1], found[2]
    check_host(host, text)
    if digits is None and port is not None:
        return host.strip("[]"), port
    if digits is None or not re.fullmatch(r"[0-9]{1,9}", digits) or not 0 < int(digits) <= PORT_MAX:
        why = "no port" if not digits else f"the port {digits!r}; it must be a number from 1 to {PORT_MAX}"
        raise Unfit.build("OPTION_VALUE.ADDRESS_CHARACTERS", text=text, reason=why)
    return host.strip("[]"), int(digits)


def parse_addresses(text: str, port: int | None = None) -> list[tuple[str, int]]:
    """As `parse_address`, for one or several, separated by commas; empty ones are skipped, as Kafka's clients do."""
    if not text.strip():
        raise Unfit.build("OPTION_VALUE.EMPTY")
    parts = [part.strip() for part in text.split(",")]
    found = [parse_address(part, port) for part in parts if part]
    if not found:
        raise Unfit.build("OPTION_VALUE.NO_SERVER", text=text)
    return found


def check_host(host: str, text: str) -> None:
    """Raise Unfit if nothing can have this name or address. `text`: where it was written, for the message."""
    if not host:
        raise Unfit.build("OPTION_VALUE.NO_HOST", text=text)
    numeric = host.startswith("[") or re.fullmatch(r"[0-9.]*[0-9]\.?", host) is not None
    if numeric:
        try:
            if host.startswith("["):
                ipaddress.IPv6Address(host.strip("[]"))
            else:
                ipaddress.IPv4Address(host)
        except ValueError as error:
            raise Unfit.build("OPTION_VALUE.NO_IP", text=text, error=error) from None
        return
    # A longer label, or an empty one, cannot be looked up.
    labels = host.removesuffix(".").split(".")
    if len(host) > _NAME_LENGTH_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        raise Unfit.build("OPTION_VALUE.HOST_NAME", text=text, host=host)


def check_netloc(netloc: str, several: bool = False) -> None:
    """Check the addresses in a URL's network location, after user and password. Raises Unfit.

    Args:
        several: it may have several, separated by commas.
    """
    place = netloc.rpartition("@")[2]
    for address in place.split(",") if several else [place]:
        parse_address(address, PORT_MAX)


def split_url(url: str) -> SplitResult:
    """A URL's parts, with one valid address. Raises Unfit, without user and password in its message."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise Unfit.build("OPTION_VALUE.URL_INVALID", url=url.rpartition("@")[2], error=error) from None
    if not parts.netloc:
        raise Unfit.build("OPTION_VALUE.URL_HOST", url=url)
    check_netloc(parts.netloc)
    return parts


def check_http_url(name: str, url: str, example: str) -> None:
    """
    Args:
        name: of the setting, for the error.

    Raises:
        UsageError: nothing can be reached by HTTP under this URL.
    """
    try:
        parts = split_url(url)
        if parts.scheme not in ("http", "https"):
            raise Unfit.build("OPTION_VALUE.URL_SCHEME", url=url)
    except Unfit as error:
        raise UsageError("OPTION_VALUE.URL", name=name, error=error, example=example) from None


def check_endpoints(owner: str, prefix: str, given: Mapping[str, str], environment: str = "") -> None:
    """Check the endpoints among the settings of a library, by their names. References to secrets are not resolved.

    Args:
        environment: of an object store, the prefix of variables that its clients read themselves: AWS.

    Raises:
        UsageError: nothing can listen at one.
    """
    for name, value in _find_endpoints(f"{owner}: option '{prefix}", given, environment).items():
        if not value.startswith(REFERENCES):
            check_http_url(name, value, "a URL like http://minio:9000")


def _find_endpoints(start: str, given: Mapping[str, str], environment: str) -> dict[str, str]:
    names = {f"{start}{key}'": value for key, value in given.items() if _ENDPOINT.search(key)}
    if environment:
        names |= {k: v for k in (f"{environment}_ENDPOINT", f"{environment}_ENDPOINT_URL") if (v := os.environ.get(k))}
    return names


def endpoints_in_clear(prefix: str, given: Mapping[str, str], environment: str = "") -> tuple[str, ...]:
    """What goes to endpoints by plain HTTP; see `Options.in_clear`. Arguments as of `check_endpoints`."""
    return tuple(
        f"rows, and a token of the login, are sent in clear to {parts.hostname} ({name}); write https://"
        for name, value in _find_endpoints(f"option '{prefix}", given, environment).items()
        if (parts := urlsplit(value)).scheme.lower() == "http" and not is_loopback(parts.hostname)
    )


_NO = ("false", "0", "no", "off", "n")
_SAFE = {
    "aws_s3_allow_unsafe_rename": _NO,
    "allow_unsafe_rename": _NO,
    "aws_conditional_put": ("etag",),
    "conditional_put": ("etag",),
}
"""With any other value two writers could both appear to write the same version of a table's log. The client takes 1, on
and yes for true, and what is not among its options from the environment."""


def check_storage(owner: str, path: str, storage: Mapping[str, str]) -> None:
    """Check the options of the object store of a Delta table, or of a log, which is one.

    Raises:
        UsageError: nothing can listen at an endpoint.
        Refused: an option removes the protection against concurrent writers.
    """
    store = storage_environment(path)
    check_endpoints(owner, "storage.", storage, store)
    options = {f"option 'storage.{key}'": (key.lower(), value) for key, value in storage.items()}
    if store:
        options |= {f"the environment variable {name!r}": (name.lower(), text) for name, text in os.environ.items()}
    for what, (key, value) in options.items():
        if key in _SAFE and value.strip().lower() not in _SAFE[key]:
            raise Refused("COMMIT_UNSAFE", owner=owner, what=what, value=value)


def storage_environment(path: str) -> str:
    """Prefix of the variables that the client of an object store reads itself."""
    return "AWS" if path.lower().startswith(("s3://", "s3a://")) else ""


def is_netloc(netloc: str, several: bool = False) -> bool:
    """As `check_netloc`, where the text must not be shown: it may hold a password."""
    try:
        check_netloc(netloc, several)
    except Unfit:
        return False
    return True


_LIBPQ = {
    "sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    "sslnegotiation": ("postgres", "direct"),
    "sslcertmode": ("disable", "allow", "require"),
    "gssencmode": ("disable", "prefer", "require"),
    "channel_binding": ("disable", "prefer", "require"),
    "target_session_attrs": ("any", "read-write", "read-only", "primary", "standby", "prefer-standby"),
}


_LIBPQ_TEXT = """
application_name client_encoding connect_timeout dbname fallback_application_name gssdelegation gsslib host hostaddr
keepalives keepalives_count keepalives_idle keepalives_interval krbsrvname load_balance_hosts max_protocol_version
min_protocol_version options passfile password port replication require_auth requirepeer requiressl scram_client_key
scram_server_key service servicefile ssl ssl_max_protocol_version ssl_min_protocol_version sslcert sslcompression sslcrl
sslcrldir sslkey sslkeylogfile sslpassword sslrootcert sslsni tcp_user_timeout user
"""
_LIBPQ_NAMES = frozenset((*_LIBPQ, *_LIBPQ_TEXT.split()))
"""Parameters of libpq 18; a later one may know more."""


SSL_WORDS: Mapping[str, Callable[[str], str]] = {
    "ssl": lambda _: "require",
    "requiressl": lambda value: "require" if value.startswith("1") else "prefer",
}
"""Parameters that libpq reads as an sslmode, which replaces an earlier one."""


def check_database_url(url: str) -> None:
    """Whether libpq knows a URL's parameters and their words, which it reads only once it connects; and whether a URL
    of any database has a `#`, which libpq reads as a part of the name or value, and other clients as the URL's end.

    Raises:
        Unfit: it has a `#`; or a word is unknown, a parameter is misspelt, given twice, or replaces sslmode.
    """
    if "#" in url:
        raise Unfit.build("OPTION_VALUE.URL_FRAGMENT")
    if not url.startswith("postgres"):
        return
    query = urlsplit(url).query
    given = parse_qs(query, keep_blank_values=True)
    for name, words in _LIBPQ.items():
        values = given.get(name, [words[0]])
        wrong = len(values) > 1 or values[0] not in words
        near = difflib.get_close_matches(values[0].strip().lower().replace("_", "-"), words, n=1)
        if wrong:
            raise Unfit.build(
                "OPTION_VALUE.PARAMETER_CHOICE",
                name=name,
                value="&".join(values),
                known=", ".join(words),
                suggestion=near[0] if near else words[-1],
            )
    named = [name for name, _ in parse_qsl(query) if name == "sslmode" or name in SSL_WORDS]
    if "sslmode" in named[:-1]:
        raise Unfit.build("OPTION_VALUE.PARAMETER_SSLMODE", parameter=named[-1], mode=given["sslmode"][0])
    known = [*_LIBPQ, "ssl"]
    odd = next((name for name in given if name not in known and name.lower() in known), None)
    if odd is not None:
        raise Unfit.build("OPTION_VALUE.PARAMETER_CASE", parameter=odd, known=odd.lower())
    for name in given.keys() - _LIBPQ_NAMES:
        if near := difflib.get_close_matches(name.lower(), _LIBPQ_NAMES, n=1, cutoff=0.75):
            raise Unfit.build("OPTION_VALUE.PARAMETER_NEAR", parameter=name, known=near[0])


def names_database(parts: SplitResult) -> bool:
    """Whether a database's URL has valid addresses: several for libpq, which takes them from parameters, too; an empty
    host is the local one.
    """
    given = parse_qs(parts.query)
    several = parts.scheme.startswith("postgres")
    hosts = parts.netloc.rpartition("@")[2]
    listed = hosts.split(",") if several else [hosts]
    listed += [h for h in ",".join(given.get("host", ())).split(",") if several and h and not h.startswith("/")]
    listed += [f":{p}" for p in ",".join(given.get("port", ())).split(",") if several and p]
    return all(is_netloc(f"localhost{x}" if x.startswith(":") or not x else x) for x in listed)


# Names and addresses of hosts.


def is_loopback(host: str | None) -> bool:
    """Whether a host is this machine. None, or a path: a socket file."""
    if not host or host.startswith("/") or host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def unverified(setting: str, host: str, instead: str, what: str = "the server") -> str:
    """A sentence of `Options.in_clear`."""
    return f"with {setting} the connection to {host} is encrypted, but {what} is not verified; write {instead}"


# Durations as Spark writes them: "1 hour 30 minutes". Months and years have no fixed length.

_UNITS = {"day": 86_400_000, "hour": 3_600_000, "minute": 60_000, "second": 1_000, "millisecond": 1}
_READ = {**_UNITS, "week": 604_800_000}
_SHORT = {"d": "day", "h": "hour", "min": "minute", "s": "second", "ms": "millisecond"}
_PART = re.compile(rf"\s*(\d+)\s*((?:{'|'.join(_READ)})s?|{'|'.join(_SHORT)})\b", re.IGNORECASE)


def read_ms(text: str) -> int:
    """Milliseconds of a duration: "1 hour 30 minutes", "15 min". Raises Unfit."""
    total, at = 0, 0
    while part := _PART.match(text, at):
        unit = part[2].lower()
        total, at = total + int(part[1]) * _READ[_SHORT.get(unit) or unit.removesuffix("s")], part.end()
    if total <= 0 or text[at:].strip():
        raise Unfit.build("OPTION_VALUE.DURATION", text=text, units=", ".join(f"{u}s" for u in _READ))
    return total


def duration(ms: int) -> str:
    """As displayed, and as Spark accepts it."""
    parts = []
    for unit, size in _UNITS.items():
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count} {unit}{'s' if count > 1 else ''}")
    return " ".join(parts)


DURATION_MS: OptionType[int] = OptionType(read_ms, duration, {"examples": ["10 minutes"]}, "10 minutes")
