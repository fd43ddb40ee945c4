"""Options that connectors of several kinds declare in the same words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

from delivered.model.capability import APPEND, WriteMode
from delivered.model.errors import UsageError
from delivered.model.limits import NAME_LENGTH_MAX
from delivered.model.options import FLAG, Option, Options, OptionType, Unfit, choice, option, several, whole

if TYPE_CHECKING:
    import ssl

UPSERT_OPTIONS = (
    Option("keyColumns", "With upsert: columns of the key, with commas; the table has a unique index over them."),
    Option("versionColumn", "With upsert: a row is written only if its version is greater than the stored one."),
    Option(
        "deleteColumn",
        "With upsert: a boolean column; a row where it is true deletes its key. The column itself is not stored.",
    ),
)


def if_not_exists(*, default: bool) -> Any:
    return option("ifNotExists", "Whether a missing table is created from the rows' schema.", FLAG, default=default)


def rows_max_option(what: str) -> Any:
    doc = f"At most about so many {what} in one batch."
    return option("maxOffsetsPerTrigger", doc, whole(1), default=None, shown="no bound")


def data_loss_option(what: str) -> Any:
    doc = f"Stop when {what} are gone before they were read; false: go on, with a warning."
    return option("failOnDataLoss", doc, FLAG, default=True)


def headers_option(doc: str) -> Any:
    return option("includeHeaders", doc, FLAG, default=False)


def external_ledger() -> Any:
    return option("ledger", "SQLite file of the driver in which batches are recorded.", example="/data/ledger.db")


def write_mode() -> Any:
    """The field `write` of a sink that appends and upserts."""
    mode = Option("mode", "append, or upsert: a row replaces the one with the same key.", "append")
    return several(
        lambda owner, values: parse_mode(owner, values, ("append", "upsert")), mode, *UPSERT_OPTIONS, default=APPEND
    )


def parse_mode(owner: str, values: Mapping[str, str], modes: Sequence[str]) -> WriteMode:
    """
    Raises:
        UsageError: an unknown mode, an upsert without key, options of an upsert without it, one column in two roles.
    """
    mode = choice(modes).parse(owner, "mode", values.get("mode", "append"))
    given = [o.name for o in UPSERT_OPTIONS if o.name in values]
    if mode == "append":
        if given:
            raise UsageError(
                "OPTION_VALUE",
                f"{owner}: option {given[0]!r} is for mode upsert; the mode is append.",
                next_step='add .option("mode", "upsert"), or take the option out',
            )
        return APPEND
    if mode == "overwrite":
        return _overwrite(owner, values.get("partitionBy", ""), given)
    keys = tuple(k.strip() for k in values.get("keyColumns", "").split(",") if k.strip())
    if not keys:
        raise UsageError(
            "OPTION_MISSING",
            f"{owner} needs the option 'keyColumns' for mode upsert: the columns that tell rows apart.",
            next_step='add .option("keyColumns", "id")',
        )
    version, delete = (values.get(n, "").strip() or None for n in ("versionColumn", "deleteColumn"))
    named = [*keys, *(n for n in (version, delete) if n is not None)]
    twice = next((n for n in named if named.count(n) > 1), None)
    if twice is not None:
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: column {twice!r} is named twice in keyColumns, versionColumn and deleteColumn.",
            next_step="a column has one of these roles",
        )
    return WriteMode(keys, version, delete)


def _overwrite(owner: str, partitions: str, given: Sequence[str]) -> WriteMode:
    replaces = split_columns(partitions)
    if not replaces or given:
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: mode overwrite replaces whole partitions: it needs 'partitionBy'"
            f"{f', and takes no {given[0]!r}' if given else ''}.",
            next_step='write .option("partitionBy", ...), or .option("mode", "upsert") to replace rows by key',
        )
    return WriteMode(replaces=replaces)


def split_columns(text: str) -> tuple[str, ...]:
    """Columns or transforms between commas, those within parentheses apart: "a, bucket(16, b)"."""
    return tuple(part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip())


def sink_name(target: str) -> str:
    """A table's name or a folder's, made fit for a sink's name; two of them never share one."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", target)[: NAME_LENGTH_MAX - 9]
    if plain == target:
        return plain
    return f"{plain}-{hashlib.blake2b(target.encode(), digest_size=4).hexdigest()}"


def queue_sink_name(target: str) -> str:
    """As `sink_name`, of a queue or a topic: cut, and without a digest."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", target)[:NAME_LENGTH_MAX]


def absolute(path: str) -> str:
    """Tasks may run in another working folder than the driver: make a local path absolute. A URL stays."""
    path = path.removeprefix("file://")
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _path(text: str) -> str:
    if not text.removeprefix("file://").strip():
        raise Unfit("is empty")
    return absolute(text)


PATH = OptionType(_path)
"""A local path, made absolute, or a URL."""


def names(what: str) -> OptionType[tuple[str, ...]]:
    """Names between commas, at least one; of equal ones, the first."""

    def read(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        if not found:
            raise Unfit(f"is {text!r}; it names no {what}")
        return found

    return OptionType(read)


def not_blank(text: str) -> str:
    """Read text that says something, as it is."""
    if not text.strip():
        raise Unfit("is empty")
    return text


def broker_url(schemes: Sequence[str], example: str, known_password: str | None = None) -> OptionType[str]:
    """URL of a message broker: one of these schemes, a host, no password.

    Args:
        known_password: one that is no secret.
    """

    def read(url: str) -> str:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            usable = False
        if not usable:
            raise Unfit(f"ends with {url.rpartition('@')[2]!r}; it must be like {example}")
        if parts.password not in (None, known_password):
            raise password_in_url("env:BROKER_PASSWORD")
        return url

    return OptionType(read)


def password_in_url(instead: str) -> Unfit:
    """Args: instead: a reference to write."""
    return Unfit(
        "holds a password; urls are shown in plans and logs",
        f'take it out and write .option("password", "{instead}")',
        "PASSWORD_IN_URL",
    )


class BrokerOptions(Options):
    """Base of what is told of a message broker that is reached by one URL.

    Attributes:
        PORTS: default by scheme.
        url: without a password; a connector declares it again, with its schemes.
        password: may be a reference; None: what the URL says.
    """

    PORTS: ClassVar[Mapping[str, int]] = {}

    url: str
    password: str | None = option(
        "password", "Of the user in the URL.", default=None, secret=True, example="env:BROKER_PASSWORD"
    )

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or self.PORTS[parts.scheme]

    @property
    def user(self) -> str | None:
        name = urlsplit(self.url).username
        return None if name is None else unquote(name)

    @property
    def place(self) -> str:
        """Host and port, for people."""
        return f"{self.host}:{self.port}"


def trust(name: str, path: str | None) -> ssl.SSLContext:
    """What checks certificates and host names.

    Args:
        name: of the option.
        path: its value, a PEM file with the certificates to trust; None: those that the system trusts.

    Raises:
        UsageError: the file is not here, or holds no certificate.
    """
    import ssl  # no executor of another system needs it

    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        why = "it holds no certificate in PEM"
    except OSError as error:
        why = (error.strerror or str(error)).lower()
    raise UsageError(
        "TLS_FILES",
        f"The option {name} is {path!r}, which cannot be used here: {why}.",
        next_step="name a PEM file with the certificates of who signed the servers'; it must be there on the driver, "
        "on every executor and where receivers run",
    )
