"""Options as Spark spells them: known names, their case restored, secrets by reference."""

from __future__ import annotations

import difflib
import os
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from delivered.model.errors import UsageError

REDACTED = "*****"

_SECRET_WORDS = (
    *("password", "passphrase", "secret", "jaas", "token", "credential", "private"),
    *("key.pem", "keystore.key", "account_key", "access_key", "api.key", "api_key", "apikey"),
)


@dataclass(frozen=True)
class Option:
    """
    Attributes:
        name: as documented, with its capital letters.
        doc: one sentence, for the reference page and the JSON Schema.
        default: as text, for the reference page; None: none.
        secret: its value appears in no log, plan, page or error.
    """

    name: str
    doc: str
    default: str | None = None
    required: bool = False
    secret: bool = False


@dataclass(frozen=True)
class OptionTable:
    """The options that one source or sink knows.

    Attributes:
        owner: for errors: "delivered_kafka sink".
        passthrough: prefixes whose options go to the client library as they are, for instance "kafka.".
    """

    owner: str
    options: tuple[Option, ...]
    passthrough: tuple[str, ...] = ()

    def restore(self, given: Mapping[str, str]) -> dict[str, str]:
        """Give keys their documented case back (PySpark lower-cases them) and refuse unknown ones.

        Raises:
            UsageError: unknown option, with the nearest known one; or a required one is missing.
        """
        known = {o.name.lower(): o.name for o in self.options}
        restored: dict[str, str] = {}
        for key, value in given.items():
            name = known.get(key.lower())
            if name is None and key.lower().startswith(self.passthrough):
                name = key.lower()
            if name is None:
                raise self._unknown(key)
            restored[name] = str(value)
        for option in self.options:
            if option.required and option.name not in restored:
                raise UsageError(
                    "OPTION_MISSING",
                    f"{self.owner} needs the option {option.name!r}: {option.doc}",
                    next_step=f'add .option("{option.name}", ...)',
                )
        return restored

    def _unknown(self, key: str) -> UsageError:
        names = [o.name for o in self.options]
        near = difflib.get_close_matches(key.lower(), [n.lower() for n in names], n=1, cutoff=0.6)
        suggestion = next((n for n in names if near and n.lower() == near[0]), None)
        known = ", ".join(sorted(names)) + "".join(f", {p}*" for p in self.passthrough)
        return UsageError(
            "OPTION_UNKNOWN",
            f"{self.owner} knows no option {key!r}. Known: {known}.",
            next_step=f"write {suggestion!r}" if suggestion else "take the option out",
        )


def choice(owner: str, name: str, value: str, allowed: Iterable[str]) -> str:
    """Check that an option's value is one of `allowed`, case-insensitively; return it in lower case."""
    allowed = list(allowed)
    if value.lower() not in allowed:
        raise UsageError(
            "OPTION_VALUE", f"{owner}: option {name!r} is {value!r}; it must be one of: {', '.join(allowed)}."
        )
    return value.lower()


def whole_number(owner: str, name: str, value: str, low: int, high: int | None = None) -> int:
    """Read an integer option and check its bounds."""
    bound = f"at least {low}" if high is None else f"from {low} to {high}"
    try:
        number = int(value)
    except ValueError:
        raise UsageError(
            "OPTION_VALUE", f"{owner}: option {name!r} is {value!r}; it must be a whole number {bound}."
        ) from None
    if number < low or (high is not None and number > high):
        raise UsageError("OPTION_VALUE", f"{owner}: option {name!r} is {number}; it must be {bound}.")
    return number


def flag(owner: str, name: str, value: str) -> bool:
    """Read a true/false option."""
    return choice(owner, name, value, ["true", "false"]) == "true"


def server_url(owner: str, url: str, schemes: Sequence[str], example: str, known_password: str | None = None) -> str:
    """Check the option url of a message broker: one of these schemes, a host, no password in it.

    Args:
        known_password: one that is no secret.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        shown = url.rpartition("@")[2]
        raise UsageError("OPTION_VALUE", f"{owner}: option 'url' ends with {shown!r}; it must be like {example}.")
    if parts.password not in (None, known_password):
        raise UsageError(
            "PASSWORD_IN_URL",
            f"{owner}: the url holds a password; it would appear in plans and logs.",
            next_step="take it out, and set the option password to env:NAME or file:PATH",
        )
    return url


def resolve_secret(name: str, value: str) -> str:
    """Follow a reference to a secret: `env:NAME` or `file:PATH`; any other text stands for itself.

    Called where the secret is used, as late as possible, so that only the reference travels.

    Raises:
        UsageError: the variable or the file does not exist here. The message names the reference, not the value.
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


def trust(name: str, path: str | None) -> ssl.SSLContext:
    """What checks certificates and host names.

    Args:
        name: of the option.
        path: its value, a PEM file with the certificates to trust; None: those that the system trusts.

    Raises:
        UsageError: the file is not here, or holds no certificate.
    """
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


def redacted(options: Mapping[str, str]) -> dict[str, str]:
    """A copy fit for logs and pages: values of what may be secret are replaced, references stay."""
    return {
        k: (REDACTED if _may_be_secret(k) and not v.startswith(("env:", "file:")) else v) for k, v in options.items()
    }


def _may_be_secret(key: str) -> bool:
    return any(w in key.lower() for w in _SECRET_WORDS)
