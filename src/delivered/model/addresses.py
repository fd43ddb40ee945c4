"""Addresses of servers, checked when options are parsed: one that can never be reached must not be waited for."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qs, urlsplit

from delivered.model.errors import UsageError
from delivered.model.options import REFERENCES, Unfit

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
        raise Unfit(f"has {text!r}; it must be host:port{hint}")
    host, digits = found[1], found[2]
    check_host(host, text)
    if digits is None and port is not None:
        return host.strip("[]"), port
    if digits is None or not re.fullmatch(r"[0-9]{1,9}", digits) or not 0 < int(digits) <= PORT_MAX:
        why = "no port" if not digits else f"the port {digits!r}; it must be a number from 1 to {PORT_MAX}"
        raise Unfit(f"has {text!r}, with {why}")
    return host.strip("[]"), int(digits)


def parse_addresses(text: str, port: int | None = None) -> list[tuple[str, int]]:
    """As `parse_address`, for one or several, separated by commas; empty ones are skipped, as Kafka's clients do."""
    if not text.strip():
        raise Unfit("is empty")
    parts = [part.strip() for part in text.split(",")]
    found = [parse_address(part, port) for part in parts if part]
    if not found:
        raise Unfit(f"is {text!r}, which names no server")
    return found


def check_host(host: str, text: str) -> None:
    """Raise Unfit if nothing can have this name or address. `text`: where it was written, for the message."""
    if not host:
        raise Unfit(f"has {text!r}, which names no host")
    numeric = host.startswith("[") or re.fullmatch(r"[0-9.]*[0-9]\.?", host) is not None
    if numeric:
        try:
            if host.startswith("["):
                ipaddress.IPv6Address(host.strip("[]"))
            else:
                ipaddress.IPv4Address(host)
        except ValueError as error:
            raise Unfit(f"has {text!r}, whose host is no IP address: {error}") from None
        return
    # A longer label, or an empty one, cannot be looked up.
    labels = host.removesuffix(".").split(".")
    if len(host) > _NAME_LENGTH_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        raise Unfit(f"has {text!r}, whose host {host!r} is no valid name")


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
        raise Unfit(f"is {url.rpartition('@')[2]!r}, which is no URL: {error}") from None
    if not parts.netloc:
        raise Unfit(f"is {url!r}, which names no host; a URL is like http://host:8081")
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
            raise Unfit(f"is {url!r}; its scheme must be http or https")
    except Unfit as error:
        raise UsageError("OPTION_VALUE", f"{name} {error}.", next_step=f"write {example}") from None


def check_endpoints(owner: str, prefix: str, given: Mapping[str, str], environment: str = "") -> None:
    """Check the endpoints among the settings of a library, by their names. References to secrets are not resolved.

    Args:
        environment: of an object store, the prefix of variables that its clients read themselves: AWS.

    Raises:
        UsageError: nothing can listen at one.
    """
    names = {f"{owner}: option '{prefix}{key}'": value for key, value in given.items() if _ENDPOINT.search(key)}
    if environment:
        names |= {k: v for k in (f"{environment}_ENDPOINT", f"{environment}_ENDPOINT_URL") if (v := os.environ.get(k))}
    for name, value in names.items():
        if not value.startswith(REFERENCES):
            check_http_url(name, value, "a URL like http://minio:9000")


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


def check_postgres_words(query: str) -> None:
    """Whether libpq knows the words of a URL's parameters, which it reads only once it connects.

    Raises:
        Unfit: a word is unknown, or a parameter is given twice.
    """
    given = parse_qs(query, keep_blank_values=True)
    for name, words in _LIBPQ.items():
        values = given.get(name, [words[0]])
        wrong = len(values) > 1 or values[0] not in words
        near = difflib.get_close_matches(values[0].strip().lower().replace("_", "-"), words, n=1)
        if wrong:
            raise Unfit(
                f"has {name}={'&'.join(values)!r:.100}; it must be one of: {', '.join(words)}, once",
                f"write {name}={near[0] if near else words[-1]}",
            )
    known = [*_LIBPQ, "ssl"]
    odd = next((name for name in given if name not in known and name.lower() in known), None)
    if odd is not None:
        raise Unfit(f"has the parameter {odd}; libpq knows {odd.lower()}", f"write {odd.lower()}=...")


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
