"""What may be shown: no secrets, and no control characters of text from outside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
