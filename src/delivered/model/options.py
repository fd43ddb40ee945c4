"""Options as typed declarations: a field of a frozen dataclass says what an option is, once.

From it come parsing, suggestions for misspelt names, errors, docs/options.md and the JSON Schema. Plain dataclasses,
since executors unpickle them: importing pydantic takes 90 to 120 ms of CPU, this module 10 to 14.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, dataclass_transform

from delivered.model.errors import UsageError
from delivered.model.offsets import SOURCE, by_source
from delivered.model.secrets import holds_password, is_secret

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

    def parse(self, owner: str, name: str, text: str, next_step: str | None = None) -> T:
        """Read a user's value.

        Args:
            next_step: of the error; None: write the example.

        Raises:
            UsageError: with the value, what is allowed and what to write.
        """
        try:
            return self.read(text)
        except Unfit as why:
            nearest = why.nearest and f"write {_call(name, why.nearest)}"
            step = why.next_step or nearest or next_step or (self.example and f"write {_call(name, self.example)}")
            raise UsageError(why.code, f"{owner}: option {name!r} {why.reason}.", step) from None


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
            raise Unfit(
                f"is {text!r}; it must be one of: {', '.join(filter(None, texts))}",
                nearest=(meant or {}).get(given) or (spelling[near[0]] if near else None),
            )
        return texts[now]

    return OptionType(
        read,
        lambda value: next(t for t, v in texts.items() if v == value),
        {"examples": list(texts)},
        next(iter(texts)),
    )


FLAG: OptionType[bool] = choice({"true": True, "false": False})


def whole(low: int, high: int | None = None) -> OptionType[int]:
    """A whole number, bounds included."""
    bound = f"at least {low}" if high is None else f"from {low} to {high}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise Unfit(f"is {text!r}; it must be a whole number {bound}") from None
        if number < low or (high is not None and number > high):
            raise Unfit(f"is {number}; it must be {bound}")
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
            if spelt.setdefault(name, key).lower() != key.lower():
                raise UsageError(
                    "OPTION_CONFLICT",
                    f"{self.owner}: {spelt[name]!r} and {key!r} are the same option.",
                    next_step=f"keep {name!r}",
                )
            if holds_password(str(value)) and not (name in secrets or is_secret(name)):
                raise password_in_url(self.owner, name)
            if (name in secrets or is_secret(name)) and (meant := _meant_reference(str(value))):
                raise UsageError(
                    "OPTION_VALUE",
                    f"{self.owner}: option {name!r} starts like a reference to a secret, which is written env:NAME or "
                    "file:PATH, in small letters and without a space; its text would be sent as the secret.",
                    next_step=f"write {_call(name, meant)}",
                )
            restored[name] = str(value)
        for option in self.options:
            if option.required and option.name not in restored:
                raise UsageError(
                    "OPTION_MISSING",
                    f"{self.owner} needs the option {option.name!r}: {option.doc}",
                    next_step=f"add {_call(option.name, option.example)}",
                )
        return restored

    def _unknown(self, key: str) -> UsageError:
        names = [o.name for o in self.options]
        near = difflib.get_close_matches(key.lower(), [n.lower() for n in names], n=1, cutoff=0.6)
        suggestion = next((n for n in names if near and n.lower() == near[0]), None)
        known = ", ".join(sorted(names)) + "".join(f", {p}*" for p in self.passthrough)
        return UsageError(
            "OPTION_UNKNOWN",
            f"{self.owner} has no option {key!r}. Known: {known}.",
            next_step=f"write {suggestion!r}" if suggestion else "remove the option",
        )


def password_in_url(owner: str, name: str, next_step: str | None = None) -> UsageError:
    """The error for a value with a URL that contains a password. Values are shown in plans, logs and pages."""
    if next_step is None and name.lower() in ("url", "log"):
        next_step = 'remove it and write .option("password", "env:NAME")'
    elif next_step is None and "." in name:  # goes to a client's library, and may be a reference
        next_step = f"write the complete URL by reference: {_call(name, 'env:NAME')}"
    return UsageError(
        "PASSWORD_IN_URL",
        f"{owner}: {name!r} is a URL that contains a password; URLs are shown in plans and logs.",
        next_step or "remove it; credentials have options of their own, which take a reference: env:NAME",
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
            raise UsageError(
                "OPTION_VALUE",
                f"{owner}: an option's value is JSON that is nested too deep.",
                next_step="write the offsets of each topic and partition as this format's page shows",
            ) from None
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


def resolve_secret(name: str, value: str) -> str:
    """Resolve a reference to a secret: `env:NAME` or `file:PATH`; any other text is returned as it is.

    Call it where the secret is used, as late as possible, so that only the reference is passed around.

    Raises:
        UsageError: the variable or file does not exist here. The message shows the reference, not the value.
    """
    if value.startswith("env:"):
        found = os.environ.get(value[4:])
        if found is None:
            raise UsageError(
                "SECRET_MISSING",
                f"Option {name!r} refers to the environment variable {value[4:]!r}, which is not set here.",
                next_step=f"export {value[4:]}=... on the driver and on every executor",
            )
        return found
    if value.startswith("file:"):
        try:
            return Path(value[5:]).read_text(encoding="utf-8").rstrip("\n")
        except OSError as error:
            raise UsageError(
                "SECRET_MISSING",
                f"Option {name!r} refers to the file {value[5:]!r}, which cannot be read here: {error.strerror}.",
                next_step="put the file on the driver and on every executor",
            ) from None
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

    Made for pasting: never shortened, and without spaces, where a terminal would wrap.
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
