"""Options that several connectors share: write modes, paths, addresses of brokers, TLS and what is sent without it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import SplitResult, parse_qs, parse_qsl, unquote, urlsplit

from delivered.model.capability import APPEND, OnConflict, WriteMode
from delivered.model.errors import UsageError
from delivered.model.identity import fitted_name
from delivered.model.limits import NAME_LENGTH_MAX
from delivered.model.options import (
    FLAG,
    SSL_WORDS,
    Option,
    Options,
    OptionType,
    Unfit,
    choice,
    endpoints_in_clear,
    integer,
    is_loopback,
    is_netloc,
    option,
    several,
    storage_environment,
    unverified,
)

if TYPE_CHECKING:
    import ssl


TRUSTED = "tlsTrustCertsFile"
UPSERT_OPTIONS = (
    Option("keyColumns", "For upsert: comma-separated key columns."),
    Option("versionColumn", "For upsert: a row is written only if its version is greater than the stored one."),
    Option(
        "deleteColumn",
        "For upsert: a boolean column; a row where it is true deletes its key. The column is not stored.",
    ),
)

CONDITION_OPTIONS = (
    Option(
        "expectedVersion",
        "For upsert with versionColumn: a column with the version that the stored row must have, or the row is a "
        "conflict; null: the key must not exist. The column is not stored.",
    ),
    Option(
        "onConflict",
        "A row whose key exists (insert), or whose expected version does not match (expectedVersion): skip and count "
        "it (insert only), keep it as a dead_letter, or fail the query. Default: skip for insert, fail for "
        "expectedVersion.",
    ),
    Option(
        "onConstraint",
        "A row that breaks a unique, check, foreign key or not-null constraint of the table: fail the query, or keep "
        "the row as a dead_letter.",
        "fail",
    ),
)

COMPLETE_DOC = "complete: a batch replaces all rows of the table (set by output_mode complete)"


def if_not_exists(*, default: bool) -> Any:
    return option("ifNotExists", "Create a missing table from the rows' schema.", FLAG, default=default)


def merge_schema(when: str) -> Any:
    return option("mergeSchema", f"Add columns that the table lacks {when}.", FLAG, default=False)


def rows_max_option(what: str) -> Any:
    doc = f"Approximate maximum number of {what} per batch."
    return option("maxOffsetsPerTrigger", doc, integer(1), default=None, shown="no bound")


def data_loss_option(what: str) -> Any:
    doc = f"Fail the query if {what} were deleted before they were read; false: continue with a warning."
    return option("failOnDataLoss", doc, FLAG, default=True)


def headers_option(doc: str) -> Any:
    return option("includeHeaders", doc, FLAG, default=False)


def external_ledger() -> Any:
    doc = "SQLite file on the driver that holds the ledger."
    return option("ledger", doc, DATABASE_FILE, example="/data/ledger.db")


def message_id_columns() -> Any:
    doc = (
        "Comma-separated columns whose values, joined by -, are the id that each message carries, the same in every "
        "resend: message_id, or the source's topic,partition,offset. Except key and value they are not written."
    )
    return option("messageIdColumns", doc, names("column"), default=(), shown="")


def write_mode() -> Any:
    """The field `write` of a sink to a database table."""
    doc = (
        "append; upsert: a row replaces the stored row with the same key; insert: a row whose key is there is not "
        f"written; {COMPLETE_DOC}."
    )
    modes = ("append", "upsert", "insert", "complete")
    return several(
        lambda owner, values: parse_mode(owner, values, modes),
        Option("mode", doc, "append"),
        Option("keyColumns", "For upsert and insert: comma-separated key columns. They need a unique index."),
        *UPSERT_OPTIONS[1:],
        *CONDITION_OPTIONS,
        default=APPEND,
    )


def parse_mode(owner: str, values: Mapping[str, str], modes: Sequence[str]) -> WriteMode:
    """
    Raises:
        UsageError: unknown mode, upsert without a key, upsert options in another mode, or one column in two roles.
    """
    mode = choice(modes).parse(owner, "mode", values.get("mode", "append"))
    upsert_options = [o.name for o in UPSERT_OPTIONS if o.name in values]
    on_constraint = choice((OnConflict.FAIL, OnConflict.DEAD_LETTER)).parse(
        owner, "onConstraint", values.get("onConstraint", OnConflict.FAIL)
    )
    condition = _condition(owner, mode, values, on_constraint)
    if mode in ("append", "complete"):
        if upsert_options:
            raise UsageError("OPTION_VALUE.UPSERT_ONLY", owner=owner, option=upsert_options[0], mode=mode)
        return WriteMode(complete=mode == "complete", on_constraint=on_constraint)
    if mode == "overwrite":
        return _overwrite(owner, values.get("partitionBy", ""), upsert_options)
    keys = tuple(k.strip() for k in values.get("keyColumns", "").split(",") if k.strip())
    if not keys:
        raise UsageError("OPTION_MISSING.KEY_COLUMNS", owner=owner, mode=mode)
    for name in ("versionColumn", "deleteColumn", "expectedVersion"):  # blank, every row would count as newer
        if not values.get(name, name).strip():
            raise UsageError("OPTION_VALUE.BLANK", owner=owner, name=name, call=f'.option("{name}", "...")')
    version, delete = (values[n].strip() if n in values else None for n in ("versionColumn", "deleteColumn"))
    expected = values["expectedVersion"].strip() if "expectedVersion" in values else None
    columns = [*keys, *(n for n in (version, delete, expected) if n is not None)]
    twice = next((n for n in columns if columns.count(n) > 1), None)
    if twice is not None:
        raise UsageError("OPTION_VALUE.COLUMN_TWICE", owner=owner, column=twice)
    return WriteMode(
        keys, version, delete, insert=mode == "insert", expected=expected, on_conflict=condition,
        on_constraint=on_constraint,
    )  # fmt: skip


def _condition(owner: str, mode: str, values: Mapping[str, str], on_constraint: OnConflict) -> OnConflict:
    """The handling of conflicts, after checking that the options are compatible.

    Raises:
        UsageError: options of another mode, or mutually exclusive ones.
    """

    def unfit(why: str, next_step: str) -> UsageError:
        return UsageError("OPTION_VALUE.CONTENT", owner=owner, reason=why, action=next_step)

    expects = "expectedVersion" in values
    if mode == "insert" and (wrong := next((n for n in ("versionColumn", "deleteColumn") if n in values), None)):
        raise unfit(
            f"option {wrong!r} is for mode upsert; with mode insert the first row that arrives stays",
            'remove the option, or write .option("mode", "upsert")',
        )
    if expects and (mode != "upsert" or "versionColumn" not in values):
        raise unfit(
            "option 'expectedVersion' needs mode upsert and the option 'versionColumn', with which it is compared",
            'write .option("mode", "upsert").option("versionColumn", ...)',
        )
    wrong = "mode complete" if mode == "complete" else "deleteColumn" if "deleteColumn" in values else ""
    if wrong and (expects or on_constraint is not OnConflict.FAIL):
        name = "expectedVersion" if expects else "onConstraint"
        raise unfit(
            f"option {name!r} does not go with {wrong}: a delete leaves nothing to compare a later row with, and no "
            "row to keep as a dead letter",
            f"remove {name}, or {wrong}",
        )
    if not expects and mode != "insert":
        if "onConflict" in values:
            raise unfit(
                "option 'onConflict' is for mode insert, and for expectedVersion; a row of this mode has no conflict",
                'remove it, or write .option("mode", "insert")',
            )
        return OnConflict.FAIL
    if expects and values.get("onConflict", "").strip().lower() == OnConflict.SKIP:
        raise unfit(
            "option 'onConflict' is 'skip', which is for mode insert only; a row with expectedVersion was computed "
            "from a version that is no longer there, and skipping it would lose that update without a trace",
            'write .option("onConflict", "dead_letter"), which keeps the row, or "fail"',
        )
    able = (OnConflict.FAIL, OnConflict.DEAD_LETTER) if expects else tuple(OnConflict)
    default = OnConflict.FAIL if expects else OnConflict.SKIP
    return choice(able).parse(owner, "onConflict", values.get("onConflict", default))


def _overwrite(owner: str, partitions: str, option_names: Sequence[str]) -> WriteMode:
    replaces = split_columns(partitions)
    if not replaces or option_names:
        raise UsageError(
            "OPTION_VALUE.OVERWRITE",
            owner=owner,
            unsupported=f", and does not support {option_names[0]!r}" if option_names else "",
        )
    return WriteMode(replaces=replaces)


def split_columns(text: str) -> tuple[str, ...]:
    """Split a list of columns or transforms at top-level commas: "a, bucket(16, b)"."""
    return tuple(part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip())


def sink_name(target: str) -> str:
    """A valid, unique sink name for a table or a folder."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", target)[: NAME_LENGTH_MAX - 9]
    if plain == target:
        return plain
    return f"{plain}-{hashlib.blake2b(target.encode(), digest_size=4).hexdigest()}"


def queue_sink_name(target: str) -> str:
    """As `sink_name`, for a queue or a topic."""
    return fitted_name(target)


def absolute(path: str) -> str:
    """Make a local path absolute: tasks may have another working directory than the driver. URLs are unchanged."""
    path = path.removeprefix("file://")
    return path if "://" in path else str(Path(path).expanduser().absolute())


def not_a_folder(path: str) -> UsageError | None:
    """Why no folder can be at a local path; None: another reason than a file that is there."""
    return UsageError("PATH_KIND.FILE", path=path) if Path(path).is_file() else None


def not_a_file(path: str) -> UsageError | None:
    """As `not_a_folder`, the other way round."""
    return UsageError("PATH_KIND.FOLDER", path=path) if Path(path).is_dir() else None


def _path(text: str) -> str:
    if not text.removeprefix("file://").strip():
        raise Unfit.build("OPTION_VALUE.EMPTY")
    if "\0" in text:  # Arrow ends the process at one
        raise Unfit.build("OPTION_VALUE.ZERO_BYTE", text=text)
    return absolute(text)


PATH = OptionType(_path)
"""A local path, made absolute, or a URL."""


def _database_file(text: str) -> str:
    if not text.strip() or text == ":memory:" or text.startswith("file:"):
        raise Unfit.build("OPTION_VALUE.NOT_A_FILE", text=text)
    return str(Path(text).expanduser().absolute())


DATABASE_FILE = OptionType(_database_file)
"""A SQLite file, made absolute."""


def names(what: str) -> OptionType[tuple[str, ...]]:
    """Comma-separated names, at least one; duplicates are dropped."""

    def read(text: str) -> tuple[str, ...]:
        parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        if not parts:
            raise Unfit.build("OPTION_VALUE.NAMES_NOTHING", text=text, what=what)
        return parts

    return OptionType(read)


def not_blank(text: str) -> str:
    if not text.strip():
        raise Unfit.build("OPTION_VALUE.EMPTY")
    return text


def refuse_rest(parts: SplitResult, parameters: Collection[str] = (), names_max: int = 0) -> None:
    """Refuse what nobody would read of a server's URL, such as a parameter that is to turn TLS on. Raises Unfit.

    Args:
        parameters: those that have an effect.
        names_max: names in the path, between slashes.
    """
    unknown = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if name not in parameters]
    rest = [f"?{unknown[0]}"] if unknown else [f"#{parts.fragment}"] if parts.fragment else []
    if not rest and parts.path.strip("/").count("/") + bool(parts.path.strip("/")) > names_max:
        rest = [parts.path]
    if rest:
        raise Unfit.build("OPTION_VALUE.URL_REST", rest=rest[0])


_FILE = OptionType(not_blank)
"""Blank, it would stand for the system's certificates."""


def broker_url(
    schemes: Sequence[str],
    example: str,
    known_password: str | None = None,
    parameters: Collection[str] = (),
    names_max: int = 0,
) -> OptionType[str]:
    """URL of a message broker: one of these schemes, a host, no password.

    Args:
        known_password: a well-known one that is not secret.
        parameters, names_max: see `refuse_rest`.
    """

    def read(url: str) -> str:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in schemes and is_netloc(parts.netloc)
        except ValueError:
            usable = False
        if not usable:
            raise Unfit.build("OPTION_VALUE.URL_FORM", url=url.rpartition("@")[2], example=example)
        if parts.password not in (None, known_password):
            raise password_in_url("env:BROKER_PASSWORD")
        refuse_rest(parts, parameters, names_max)
        return f"{parts.scheme}://{url.partition('://')[2]}"  # in lower case: some decide about TLS by its start

    return OptionType(read)


def password_in_url(instead: str) -> Unfit:
    """For what `OptionTable.restore` lets through: an empty password, a reference. Args: instead: what to write."""
    return Unfit.build("PASSWORD_IN_URL.TYPE", instead=instead)


class BrokerOptions(Options):
    """Base of the options for a message broker that is reached by one URL.

    Attributes:
        PORTS: default by scheme.
        url: without a password; each connector redeclares it with its schemes.
        password: may be a reference; None: as in the URL.
    """

    PORTS: ClassVar[Mapping[str, int]] = {}

    url: str
    password: str | None = option(
        "password", "Password of the user in the URL.", default=None, secret=True, example="env:BROKER_PASSWORD"
    )

    @property
    def in_clear(self) -> tuple[str, ...]:
        parts = urlsplit(self.url)
        if self.password is None or parts.scheme.endswith(("s", "+ssl")) or is_loopback(parts.hostname):
            return ()
        return (f"{parts.scheme}:// sends the password in clear to {parts.hostname}",)

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
        """Host and port, for messages."""
        return f"{self.host}:{self.port}"


def trust(name: str, path: str | None) -> ssl.SSLContext:
    """TLS context that verifies certificates and host names.

    Args:
        name: of the option.
        path: its value, a PEM file with trusted certificates; None: the system's trust store.

    Raises:
        UsageError: the file is missing here, or contains no certificate.
    """
    import ssl  # executors of other systems need not load it

    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        why = "it contains no PEM certificate"
    except OSError as error:
        why = (error.strerror or str(error)).lower()
    raise UsageError("TLS_FILES.CA", name=name, path=path, reason=why)


_OTHER_NAME = (62, 64)
"""OpenSSL's codes for a certificate of another host name or address."""


def distrusted(
    url: str, error: ssl.SSLCertVerificationError, option: str, trusted: str, names_in: str = "url"
) -> UsageError:
    """The error for a server certificate that is not trusted.

    Args:
        url: the server's.
        option: names the file of trusted certificates.
        trusted: which ones are trusted, in words.
        names_in: options with the servers' host names.
    """
    if error.verify_code in _OTHER_NAME:
        step = f"in {names_in}, use the host names of the servers' certificates"
    else:
        step = (
            f"set {option} to the issuer's certificate, after verifying it: "
            f"openssl s_client -showcerts -connect {urlsplit(url).netloc}"
        )
    return UsageError(
        "CERTIFICATE_REFUSED.URL", url=url, error=error.verify_message.rstrip("."), trusted=trusted, action=step
    )


class TlsOptions(Options):
    """Base of the options for certificates, of servers and our own.

    Attributes:
        trusted: PEM file of certificates; None: the system's.
        certificate, key: PEM files of ours, for servers that require one.
    """

    trusted: str | None = option(
        TRUSTED, "PEM file with trusted certificates, for TLS.", _FILE, default=None, shown="the system's trust store"
    )
    certificate: str | None = option(
        "tlsCertificateFile",
        "PEM file with the client's certificate, for mutual TLS.",
        _FILE,
        default=None,
        shown="none",
    )
    key: str | None = option(
        "tlsKeyFile",
        "PEM file with the key of tlsCertificateFile, without a password.",
        _FILE,
        default=None,
        shown="none",
    )

    def check_tls(self, owner: str, used: bool, url: str) -> None:
        """Refuse certificates that nothing would use. Raises UsageError.

        Args:
            used: whether a connection uses TLS.
            url: one that does, for the error.
        """
        if (self.certificate is None) != (self.key is None):
            raise UsageError("OPTION_CONFLICT.TLS_PAIR", owner=owner)
        option_name = (
            TRUSTED if self.trusted is not None else "tlsCertificateFile" if self.certificate is not None else None
        )
        if option_name is not None and not used:
            raise UsageError("OPTION_CONFLICT.TLS_UNUSED", owner=owner, option=option_name, url=url)

    def untrusted(self, url: str, error: ssl.SSLCertVerificationError, names_in: str = "url") -> UsageError:
        """The error for the certificate of a server that is not trusted. Arguments: see `distrusted`."""
        trusted = f"those in {self.trusted}" if self.trusted is not None else "the system's trust store"
        return distrusted(url, error, TRUSTED, trusted, names_in)

    def tls_context(self) -> ssl.SSLContext:
        """Verifies certificates and host names. Raises UsageError: a file cannot be used here."""
        context = trust(TRUSTED, self.trusted)
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, lambda: "")
            except OSError as error:  # ssl.SSLError is one
                raise UsageError("TLS_FILES.CLIENT", certificate=self.certificate, key=self.key, error=error) from None
        return context


def store_in_clear(path: str, storage: Mapping[str, str]) -> tuple[str, ...]:
    """What an object store's client sends in clear, or to a server that it does not verify; see `Options.in_clear`."""
    wrong = [n for n in storage if n.lower() == "allow_invalid_certificates" and storage[n].lower() in ("true", "1")]
    anybody = tuple(unverified(f"storage.{n}={storage[n]}", path, f"storage.{n}=false") for n in wrong)
    return anybody + endpoints_in_clear("storage.", storage, storage_environment(path))


_UNENCRYPTED = ("disable", "allow", "prefer")


def postgres_in_clear(url: str) -> tuple[str, ...]:
    """What a connection sends unencrypted, or to a server that it does not verify; see `Options.in_clear`."""
    parts = urlsplit(url)
    parameters = parse_qs(parts.query)
    named = [urlsplit(f"//{h}").hostname or "" for h in parts.netloc.rpartition("@")[2].split(",")]
    host = parameters.get("host", [",".join(named) or os.environ.get("PGHOST", "")])[-1]
    host = parameters.get("hostaddr", [os.environ.get("PGHOSTADDR") or host])[-1]
    words: Mapping[str, Callable[[str], str]] = {"sslmode": str, **SSL_WORDS}
    modes = [words[name](value) for name, value in parse_qsl(parts.query) if name in words]
    mode = [os.environ.get("PGSSLMODE", "prefer"), *modes][-1]
    if all(is_loopback(h) for h in host.split(",")):
        return ()
    if mode == "require" and not _trusted_by_libpq(parameters):
        return (unverified("sslmode=require", f"PostgreSQL at {host}", "?sslmode=verify-full&sslrootcert=PATH"),)
    if mode == "verify-ca":
        return (unverified("sslmode=verify-ca", f"PostgreSQL at {host}", "?sslmode=verify-full", "its name"),)
    if mode not in _UNENCRYPTED:
        return ()
    why = "the default" if not modes and "PGSSLMODE" not in os.environ else "as configured"
    return (
        f"the connection to PostgreSQL at {host} is not required to be encrypted (sslmode={mode}, {why}); write "
        "?sslmode=verify-full&sslrootcert=PATH",
    )


def _trusted_by_libpq(parameters: Mapping[str, list[str]]) -> bool:
    """Whether libpq has trusted certificates, with which sslmode=require means verify-ca."""
    default = os.environ.get("PGSSLROOTCERT") or "~/.postgresql/root.crt"
    path = parameters.get("sslrootcert", [default])[-1]
    return path == "system" or Path(path).expanduser().exists()


def mysql_in_clear(url: str) -> tuple[str, ...]:
    """What a connection sends unencrypted, or to a server that it does not verify; see `Options.in_clear`."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname):
        return ()
    if given := dict(parse_qsl(parts.query, keep_blank_values=True)):
        no = [
            name for name in ("ssl_verify_cert", "ssl_verify_identity") if name in given and not FLAG.read(given[name])
        ]
        what = "the server" if no[:1] == ["ssl_verify_cert"] else "its name"
        return tuple(unverified(f"{n}={given[n]}", f"MySQL at {parts.hostname}", "?ssl_ca=PATH", what) for n in no[:1])
    return (
        f"the connection to MySQL at {parts.hostname} is not required to be encrypted, and the server is not verified; "
        "write ?ssl_ca=PATH",
    )
