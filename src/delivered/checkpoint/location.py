"""Where a checkpoint is, and how this process opens it: in an object store or HDFS by Hadoop's settings.

Spark reads and writes a checkpoint in the JVM, with `fs.s3a.*` and `dfs.*` of its configuration. Each Python process of
the driver reads it too, and tasks may write to it. So what the settings say of one location is worked out once, where a
query starts, and travels with it as the arguments of Python's own file system (`Store`). A process that starts no query
(`delivered status`) takes the pipeline's own configuration and the files of HADOOP_CONF_DIR.

What Python cannot do as Spark does is refused before a query starts, never replaced by something else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from pyarrow import fs

from delivered.model.errors import Refused, Unreachable

Store = Mapping[str, str]
"""How Python opens a location, if Hadoop's settings say so. May hold secrets."""
SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:")
_stores: dict[str, Store] = {}
"""By location, in this process."""


def remember(location: str | None, store: Store) -> None:
    """From now on, this process opens the location so. An empty store: as its configuration says."""
    if location is not None and store:
        _stores[location] = store
    elif location is not None:
        _stores.pop(location, None)


def recall(location: str) -> Store:
    """Empty: nothing is."""
    return _stores.get(location, {})


def is_relative(location: str) -> bool:
    return not location.startswith("/") and not SCHEME.match(location)


def from_uri(location: str) -> tuple[fs.FileSystem, str]:
    if not SCHEME.match(location):
        return fs.LocalFileSystem(), location
    uri = re.sub(r"^file:/+", "file:///", location)
    found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(re.sub(r"^s3[an]:", "s3:", uri))
    return found


# Hadoop's settings as arguments of Python's own file systems.

SECRETS = ("fs.s3a.access.key", "fs.s3a.secret.key", "fs.s3a.session.token")
"""Settings that may be in a key store instead."""
S3A = "fs.s3a."
_DEFAULT = "fs.defaultFS"
_HDFS = ("dfs.nameservices", "dfs.ha.namenodes.", "dfs.namenode.rpc-address", "dfs.client.failover.")
_HADOOP_FILES = ("core-site.xml", "hdfs-site.xml")
_KEYS, _SESSION, _NOBODY = "access.key", "session.token", "AnonymousAWSCredentialsProvider"
_BY_KEYS = ("SimpleAWSCredentialsProvider", "TemporaryAWSCredentialsProvider")
_BY_ITSELF = (
    "EnvironmentVariableCredentialsProvider",
    "IAMInstanceCredentialsProvider",
    "InstanceProfileCredentialsProvider",
    "ContainerCredentialsProvider",
    "EC2ContainerCredentialsProviderWrapper",
    "WebIdentityTokenFileCredentialsProvider",
    "WebIdentityTokenCredentialsProvider",
    "ProfileCredentialsProvider",
    "ProfileAWSCredentialsProvider",
    "DefaultCredentialsProvider",
    "DefaultAWSCredentialsProviderChain",
)
"""Providers whose sources the AWS client in pyarrow looks at by itself."""
_hdfs_clients: dict[tuple[Any, ...], Any] = {}
"""By process and address, for ever. A client has threads: dropped in a forked process, which has none of them, it waits
for them; this hung the start of a JVM."""
_FLAGS = ("anonymous", "force_virtual_addressing")
_CLIENT_SIDE = ("SSE-C", "CSE")
"""Encryption without which nobody can read a file."""


def prefixes(location: str, settings: Mapping[str, str]) -> tuple[str, ...]:
    """Of the settings that say how a location is opened.

    Args:
        settings: hold Hadoop's default file system.
    """
    match _qualify(location, settings).partition(":")[0]:
        case "s3" | "s3a" | "s3n":
            return S3A, "hadoop.security.credential.provider.path"
        case "hdfs":
            return _HDFS
    return ()


def store_of(location: str, settings: Mapping[str, str]) -> Store:
    """What Hadoop's settings say of a location.

    Args:
        settings: Hadoop's, without Spark's prefix.

    Raises:
        Unreachable: they name something that Python cannot do.
    """
    at = _qualify(location, settings)
    default = {_DEFAULT: settings[_DEFAULT]} if at != location else {}
    match at.partition(":")[0]:
        case "s3" | "s3a" | "s3n":
            return {**default, **_s3(location, _of_bucket(settings, urlsplit(at).netloc.rpartition("@")[2]))}
        case "hdfs":
            return {**default, **{k: v for k, v in settings.items() if k.startswith((*_HDFS, _DEFAULT))}}
    return default


def open_location(location: str, store: Store) -> tuple[fs.FileSystem, str]:
    """The file system of a location, and the path in it. Raises what the client raises."""
    at, options = _qualify(location, store), {k: v for k, v in store.items() if k != _DEFAULT}
    if at.startswith("hdfs:"):
        return _hdfs(at, store)
    if options and at.startswith("s3"):
        split = urlsplit(at)
        if not options.keys() & {"region", "endpoint_override"}:
            options["region"] = fs.resolve_s3_region(split.netloc)
        flags = {k: v == "true" for k, v in options.items() if k in _FLAGS}
        return fs.S3FileSystem(**{**options, **flags}), f"{split.netloc}{split.path}"
    return from_uri(at)


def _qualify(location: str, settings: Mapping[str, str]) -> str:
    """A path without a scheme is on Hadoop's default file system, for Spark too."""
    default = settings.get(_DEFAULT, "")
    if SCHEME.match(location) or not default or default.startswith("file:"):
        return location
    if is_relative(location):
        raise Refused("CHECKPOINT_RELATIVE.DEFAULT", location=location, default=default)
    return default.rstrip("/") + "/" + location.lstrip("/")


def _of_bucket(settings: Mapping[str, str], bucket: str) -> dict[str, str]:
    """The `fs.s3a.` settings of a bucket, without that prefix: its own above the common ones."""
    common = {k.removeprefix(S3A): v for k, v in settings.items() if k.startswith(S3A) and v.strip()}
    prefix = f"bucket.{bucket}."
    own = {k.removeprefix(prefix): v for k, v in common.items() if k.startswith(prefix)}
    keystore = settings.get("hadoop.security.credential.provider.path", "")
    return {"security.credential.provider.path": keystore, **common, **own}


def _s3(location: str, s3a: Mapping[str, str]) -> dict[str, str]:
    """Arguments of pyarrow's S3FileSystem, as text."""
    encryption = s3a.get("encryption.algorithm", s3a.get("server-side-encryption-algorithm", ""))
    if encryption.upper().startswith(_CLIENT_SIDE):
        raise Unreachable("CHECKPOINT_UNREADABLE.ENCRYPTION", location=location, algorithm=encryption)
    found = _credentials(location, s3a)
    if region := s3a.get("endpoint.region"):
        found["region"] = region
    if endpoint := s3a.get("endpoint"):
        found |= _endpoint(endpoint, s3a)
    if host := s3a.get("proxy.host"):
        user, password = (quote(s3a.get(f"proxy.{name}", ""), safe="") for name in ("username", "password"))
        login = f"{user}:{password}@" if user else ""
        secure = _is(s3a, "proxy.ssl.enabled", default=False)
        port = s3a.get("proxy.port", "443" if secure else "80")
        found["proxy_options"] = f"{'https' if secure else 'http'}://{login}{host}:{port}"
    return found


def _endpoint(endpoint: str, s3a: Mapping[str, str]) -> dict[str, str]:
    scheme, separator, address = endpoint.rpartition("://")
    if not separator:
        scheme = "https" if _is(s3a, "connection.ssl.enabled", default=True) else "http"
    address = address.rstrip("/")
    amazon = re.fullmatch(r"s3(?:[.-](?P<region>[a-z0-9-]+))?\.amazonaws\.com", address)
    if amazon is not None:  # Amazon's own: a region says the same, and keeps its usual addresses
        return {"region": s3a.get("endpoint.region") or amazon["region"] or "us-east-1", "scheme": scheme}
    virtual = not _is(s3a, "path.style.access", default=False) and not _is_address(address)
    return {"scheme": scheme, "endpoint_override": address, "force_virtual_addressing": str(virtual).lower()}


def _is_address(address: str) -> bool:
    """Whether a host cannot have a bucket's name before it. The AWS client in the JVM asks the same."""
    try:
        ip_address(address.rpartition(":")[0].strip("[]") or address)
    except ValueError:
        return False
    return True


def _credentials(location: str, s3a: Mapping[str, str]) -> dict[str, str]:
    """Those of the first provider that has some, as in Hadoop."""
    own = {"access_key": s3a.get(_KEYS, ""), "secret_key": s3a.get("secret.key", "")}
    if not all(own.values()) and s3a.get("security.credential.provider.path"):
        raise Unreachable(
            "CHECKPOINT_UNREADABLE.KEYSTORE", location=location, path=s3a["security.credential.provider.path"]
        )
    providers = [p.strip() for p in s3a.get("aws.credentials.provider", "").split(",") if p.strip()]
    for provider in providers or ["TemporaryAWSCredentialsProvider", "SimpleAWSCredentialsProvider", *_BY_ITSELF[:1]]:
        match provider.rpartition(".")[2]:
            case "TemporaryAWSCredentialsProvider":
                if all(own.values()) and s3a.get(_SESSION):
                    return {**own, "session_token": s3a[_SESSION]}
            case "SimpleAWSCredentialsProvider":
                if all(own.values()):
                    return own
            case name if name == _NOBODY:
                return {"anonymous": "true"}
            case name if name in _BY_ITSELF:
                return {}
            case _:
                raise Unreachable("CHECKPOINT_UNREADABLE.PROVIDER", location=location, provider=provider)
    raise Unreachable("CHECKPOINT_UNREADABLE.KEYS", location=location, providers=", ".join(providers))


def _is(s3a: Mapping[str, str], name: str, *, default: bool) -> bool:
    return s3a.get(name, str(default)).strip().lower() == "true"


def _hdfs(location: str, settings: Store) -> tuple[fs.FileSystem, str]:
    """By hdfs-native, which needs no JVM; or by libhdfs, where a Hadoop is installed."""
    split = urlsplit(location)
    host = split.hostname or urlsplit(settings.get(_DEFAULT, "")).hostname
    port = split.port if split.hostname else urlsplit(settings.get(_DEFAULT, "")).port
    try:
        from hdfs_native.fsspec import HdfsFileSystem
    except ImportError:
        try:
            return fs.HadoopFileSystem(host or "default", port or 0), split.path
        except Exception as error:
            raise Unreachable("CHECKPOINT_UNREADABLE.HDFS", location=location, error=error) from error
    client = (os.getpid(), host, port, *sorted(settings.items()))
    if client not in _hdfs_clients:
        _hdfs_clients[client] = HdfsFileSystem(host, port, skip_instance_cache=True, **settings)
    return fs.PyFileSystem(fs.FSSpecHandler(_hdfs_clients[client])), split.path


def hadoop_files() -> Mapping[str, str]:
    """Settings of HADOOP_CONF_DIR that say how a location is opened."""
    folder = os.environ.get("HADOOP_CONF_DIR")
    return _parse(Path(folder)) if folder else {}


@cache
def _parse(folder: Path) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in _HADOOP_FILES:
        file = folder / name
        if file.is_file():
            import xml.etree.ElementTree as ElementTree  # tasks load this module, too

            for entry in ElementTree.parse(file).getroot().iter("property"):  # noqa: S314 - the cluster's own
                key = (entry.findtext("name") or "").strip()
                found[key] = (entry.findtext("value") or "").strip()
    return found
