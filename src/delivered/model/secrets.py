"""What must not be shown: one list of names, for options, files, errors, logs and pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from delivered.model.text import plain

REDACTED = "*****"

_WORDS = (
    *("password", "passwd", "passphrase", "secret", "jaas", "token", "credential", "private", "user.info"),
    *("key.pem", "keystore.key", "account_key", "access_key", "api.key", "api_key", "apikey", "pwd"),
)
_REFERENCES = ("env:", "file:", "${env:", "${file:")
_SHOWN_MAX = 300

# name=value, name: value, "name": "value"; the name may go on after the word, as in sasl.password.old.
_NAMED = re.compile(
    rf"(?i)((?:{'|'.join(map(re.escape, _WORDS))})[\w.]*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&)}}\]]+)"
)
_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s/?#:@'\"]*):([^\s/?#'\"]+)@")
"""The password of a URL."""


def is_secret(name: str) -> bool:
    """Whether the name of an option says that its value may be secret."""
    return any(word in name.lower() for word in _WORDS)


def redacted(options: Mapping[str, str]) -> dict[str, str]:
    """A copy for logs and pages: possible secrets are replaced, references stay."""
    return {k: str(_without_secrets(v, k)) for k, v in options.items()}


def without_passwords(text: str) -> str:
    """The text, with passwords of URLs and values of secret names replaced."""
    return _IN_URL.sub(rf"\1:{REDACTED}@", _NAMED.sub(_hidden, text))


def _hidden(found: re.Match[str]) -> str:
    kept = found.group(2).lstrip("\"'").startswith(_REFERENCES) or REDACTED in found.group(2)
    return found.group(0) if kept else f"{found.group(1)}{REDACTED}"


def shown(value: Any, name: str = "") -> str:
    """A value from a user's file or call, for an error: secrets replaced at any depth, at most 300 characters.

    Args:
        name: its key.
    """
    text = plain(repr(_without_secrets(value, name)))
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def _without_secrets(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {k: _without_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, str):
        hide = is_secret(name) and not value.startswith(_REFERENCES)
        return REDACTED if hide else without_passwords(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_without_secrets(v, name) for v in value]
    return REDACTED if is_secret(name) and value is not None and not isinstance(value, bool) else value
