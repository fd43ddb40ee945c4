"""A checkpoint: where it is, how this process opens it, its files. Spark's own, and the sidecar files.

Spark reads and writes a checkpoint in the JVM, with `fs.s3a.*` and `dfs.*` of its configuration. Each Python process of
the driver reads it too, and tasks may write to it. So what the settings say of one location is worked out once, where a
query starts, and travels with it as the arguments of Python's own file system (`Store`). A process that starts no query
(`delivered status`) takes the pipeline's own configuration and the files of HADOOP_CONF_DIR.

What Python cannot do as Spark does is refused before a query starts, never replaced by something else. Files are read
by pyarrow's file systems, so wherever the driver's Python can: a local folder, HDFS, an object store.

Layout (Spark 3 and 4): `metadata` holds the query's id; `offsets/N` a version line, a metadata line, then a line per
source, `name:offsets` if it has a name; `commits/N` exists once batch N is done; `state/` once a stateful query has run
a batch.

sidecar.py  of its sources: where batch 0 started, metadata that Spark cannot log, what precedes a position; of its
            query: deciding sink, dedup, shards, removed sources, registered schemas; records that a batch's source
            could not turn into rows
history.py  what batches took and audits found; starts, ends and errors of drivers
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from pyarrow import fs

from delivered.kits.table.store import find_outage, put, put_first, sync
from delivered.model.errors import DeliveredError, InvariantBroken, Refused, Unreachable
from delivered.model.identity import SOURCE
from delivered.model.limits import CONNECT_TIMEOUT_S, OFFSETS_BYTES_MAX
from delivered.model.patience import left_s, patience_s
from delivered.model.work import CheckpointView, with_format, without_format

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
    if uri.startswith(("gs:", "gcs:")) and _GCS_RETRIES not in uri:  # by default, for a quarter of an hour
        longest_s = left_s(patience_s(answered=False) or CONNECT_TIMEOUT_S)
        uri += f"{'&' if '?' in uri else '?'}{_GCS_RETRIES}={max(1, round(longest_s))}"
    found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(re.sub(r"^s3[an]:", "s3:", uri))
    return found


# Hadoop's settings as arguments of Python's own file systems.

SECRETS = ("fs.s3a.access.key", "fs.s3a.secret.key", "fs.s3a.session.token")
"""Settings that may be in a key store instead."""
S3A = "fs.s3a."
_GCS_RETRIES = "retry_limit_seconds"
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
    """Of the settings that say how a location is opened. Args: settings: hold Hadoop's default file system."""
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


# The files, Spark's and ours.

T = TypeVar("T")
_HADOOP = "spark.hadoop."
_settings: dict[str, Mapping[str, str]] = {}
"""By location, in this process."""
_STATE_PARTITIONS = "spark.sql.shuffle.partitions"
"""Spark's key in a batch's metadata for the number of state partitions."""
_OWN_LINES = 2
"""Spark's header lines in an offsets file: version, and metadata with a timestamp that replays keep."""


def configure(location: str, conf: Mapping[str, str]) -> None:
    """Spark's configuration, for a process that opens the location before a session says how."""
    _settings[location] = {k.removeprefix(_HADOOP): v for k, v in conf.items() if k.startswith(_HADOOP)}


def open_folder(location: str) -> tuple[fs.FileSystem, str]:
    """File system and path of a checkpoint location in Spark's notation.

    Raises:
        Unreachable: Python has no file system for it, or not with these settings.
    """
    store, settings = recall(location), _settings.get(location)
    try:
        if not (store or settings or location.startswith("hdfs:") or "HADOOP_CONF_DIR" in os.environ):
            return from_uri(location)
        return open_location(location, store or store_of(location, {**hadoop_files(), **(settings or {})}))
    except DeliveredError:
        raise
    except Exception as error:
        raise _find_outage(location, error) or Unreachable(
            "CHECKPOINT_UNREADABLE.LOCATION", location=location, error=error
        ) from error


@contextmanager
def _reading(location: str) -> Iterator[tuple[fs.FileSystem, str]]:
    """As `open_folder`. Raises Unreachable: the checkpoint cannot be read."""
    filesystem, path = open_folder(location)
    try:
        yield filesystem, path
    except OSError as error:
        raise _unreadable(location, error) from error


def read_view(location: str) -> CheckpointView:
    """Read the checkpoint, after Spark logged the offsets of the batch about to run.

    Raises:
        InvariantBroken: the files are not in Spark's format.
        Unreachable: they cannot be read.
    """
    with _reading(location) as (filesystem, path):
        incarnation = str(json.loads(_read(filesystem, f"{path}/metadata"))["id"])
        batch = _newest(filesystem, f"{path}/offsets")
        if batch is None:
            raise InvariantBroken("CHECKPOINT_EMPTY", location=location)
        offsets = _offsets(filesystem, f"{path}/offsets/{batch}")
        logged = _newest(filesystem, f"{path}/commits")
    if len(offsets) > OFFSETS_BYTES_MAX:
        raise InvariantBroken("OFFSETS_TOO_LARGE", batch=batch, bytes=len(offsets), offsets_bytes_max=OFFSETS_BYTES_MAX)
    return CheckpointView(incarnation, batch, offsets, logged)


def repartitions_before(location: str, batch: int) -> int:
    """Number of batches right before `batch` that only repartitioned the query's state: no sink saw them.

    Spark's `repartition` logs a batch without input. Different from a batch that ran, it has the offsets and the
    timestamp of the previous one; and it has another number of partitions.

        Raises:
            Unreachable: the checkpoint cannot be read.
    """
    count = 0
    while _is_repartition(_read_logged(location, batch - count - 2), _read_logged(location, batch - count - 1)):
        count += 1
    return count


def batch_metadata(location: str, batch: int) -> dict[str, Any] | None:
    """What Spark logged with a batch's offsets: `batchWatermarkMs`, `batchTimestampMs`, `conf`; None: it is not logged.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    found = _read_logged(location, batch)
    return None if found is None else found[0]


def _read_logged(location: str, batch: int) -> tuple[dict[str, Any], str] | None:
    """Spark's metadata of a batch, and its offsets; None: it is not logged."""
    lines = (read(location, f"offsets/{batch}") or b"").decode("utf-8").split("\n") if batch >= 0 else []
    return (json.loads(lines[1]), "\n".join(lines[_OWN_LINES:]).strip()) if len(lines) > _OWN_LINES else None


def _is_repartition(before: tuple[dict[str, Any], str] | None, after: tuple[dict[str, Any], str] | None) -> bool:
    if before is None or after is None or before[1] != after[1]:
        return False
    confs = [logged[0].get("conf", {}).get(_STATE_PARTITIONS) for logged in (before, after)]
    return before[0].get("batchTimestampMs") == after[0].get("batchTimestampMs") and confs[0] != confs[1]


def newest_offsets(location: str) -> str:
    """The sources' offsets of the newest batch that Spark logged, a line per source; empty: none.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    with _reading(location) as (filesystem, path):
        batch = _newest(filesystem, f"{path}/offsets")
        return "" if batch is None else _offsets(filesystem, f"{path}/offsets/{batch}")


def holds_state(location: str) -> bool:
    """Whether the query has state here, of any state store and format.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    with _reading(location) as (filesystem, path):
        return bool(filesystem.get_file_info(fs.FileSelector(f"{path}/state", allow_not_found=True)))


def holds(location: str, below: str, suffix: str) -> bool:
    """Whether the folder `below` has a file with this suffix. Raises Unreachable: the checkpoint cannot be read."""
    with _reading(location) as (filesystem, path):
        found = filesystem.get_file_info(fs.FileSelector(f"{path}/{below}", allow_not_found=True))
    return any(info.base_name.endswith(suffix) for info in found)


def folders(location: str, below: str) -> list[str]:
    """Names of the folders in the folder `below`. Raises Unreachable: the checkpoint cannot be read."""
    with _reading(location) as (filesystem, path):
        found = filesystem.get_file_info(fs.FileSelector(f"{path}/{below}", allow_not_found=True))
    return sorted(info.base_name for info in found if info.type is fs.FileType.Directory)


def read_logged(location: str) -> tuple[str | None, int | None]:
    """Incarnation and newest batch of a checkpoint whose query is stopped; None, None for a new one.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, folder = open_folder(location)
    try:
        if filesystem.get_file_info(f"{folder}/metadata").type is not fs.FileType.File:
            return None, None
        incarnation = str(json.loads(_read(filesystem, f"{folder}/metadata"))["id"])
        return incarnation, _newest(filesystem, f"{folder}/offsets")
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(location, error) from error


def started_ms(location: str) -> int | None:
    """When the checkpoint was made, in milliseconds since 1970; None: it is not there, or its store does not say."""
    filesystem, folder = open_folder(location)
    made = filesystem.get_file_info(f"{folder}/metadata").mtime_ns
    return None if made is None else made // 1_000_000


def is_done(location: str, batch: int) -> bool:
    """Whether Spark logged the batch as committed."""
    filesystem, folder = open_folder(location)
    return filesystem.get_file_info(f"{folder}/commits/{batch}").type is fs.FileType.File


def find_damaged(location: str, newest: int) -> tuple[str, int] | None:
    """The log and batch of a file that Spark will read at its next start, and that a power failure has cut off.

    Spark renames its log files into place without fsync: the name may outlast the bytes.

    Args:
        newest: batch in the log of offsets.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    with _reading(location) as (filesystem, folder):
        committed = _newest(filesystem, f"{folder}/commits")
        for log, batch, lines in (("offsets", newest, _OWN_LINES + 1), ("commits", committed, _OWN_LINES)):
            if batch is not None and not _is_complete(filesystem, f"{folder}/{log}/{batch}", lines):
                return log, batch
    return None


def _is_complete(filesystem: fs.FileSystem, path: str, lines: int) -> bool:
    """Whether a log file begins as Spark's do and has this many lines, and each object in it ends."""
    with filesystem.open_input_stream(path) as stream:
        found = bytes(stream.read()).split(b"\n")
    if re.fullmatch(rb"v\d+", found[0]) is None or len(found) < lines or not all(found[:lines]):
        return False
    try:
        for line in found:
            if line.startswith(b"{"):
                json.loads(line)
    except ValueError:
        return False
    return True


def find_unwritable(location: str) -> str | None:
    """Why a local folder is not writable; None: it is, or it is remote, and Spark will find out."""
    filesystem, path = open_folder(location)
    if not isinstance(filesystem, fs.LocalFileSystem):
        return None
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file"
    try:
        with tempfile.TemporaryFile(dir=folder):  # not os.access: it knows no read-only or pseudo file system
            return None
    except OSError as error:
        return f"{folder} takes no file ({error.strerror})"


def file_of(file: str, source: str) -> str:
    """A source's sidecar file; for a source without a name, the plain file name."""
    folder, name = file.rsplit("/", 1)
    return file if source == SOURCE else f"{folder}/{source}.{name}"


def read(location: str, file: str) -> bytes | None:
    """A small file of an earlier start, or None.

    Args:
        location: of the checkpoint, in Spark's notation.
        file: path below it.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, folder = open_folder(location)
    path = f"{folder.rstrip('/')}/{file}"
    try:
        if filesystem.get_file_info(path).type is not fs.FileType.File:
            return None
        with filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())
    except OSError as error:
        raise unusable(location, error) from error


def write(location: str, file: str, data: bytes, *, first: bool) -> None:
    """Write a small file; durable on a local disk.

    Args:
        first: on a local disk, keep an existing file. Otherwise it is replaced.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    filesystem, folder = open_folder(location)
    path = f"{folder.rstrip('/')}/{file}"
    try:
        if isinstance(filesystem, fs.LocalFileSystem):
            (put_first if first else put)(Path(path), data)
            # The process that created the folder may have died before its name was durable.
            sync([Path(path).parent.parent])
            return
        filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with filesystem.open_output_stream(path) as stream:
            stream.write(data)
    except OSError as error:
        raise unusable(location, error) from error


def read_record(location: str, file: str, what: str, of: Callable[[dict[str, Any]], T], damaged: str) -> T | None:
    """The record in a sidecar file, or None if there is no such file.

    Args:
        what: the record, for errors: "a source's first offsets".
        of: makes the record of its fields.
        damaged: code of the error if the file is damaged.

    Raises:
        InvariantBroken: the file is damaged.
        Refused: a later version of this package wrote it.
        Unreachable: the checkpoint cannot be read.
    """
    text = read(location, file)
    if text is None:
        return None
    try:
        return of(without_format(json.loads(text), what))
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantBroken(damaged, file=file, location=location, text=text[:80]) from error


def write_record(location: str, file: str, record: Mapping[str, Any], *, first: bool = False) -> None:
    """Write a record to a sidecar file, with its format. As `write`."""
    write(location, file, json.dumps(with_format(record), separators=(",", ":")).encode(), first=first)


def _unreadable(location: str, error: Exception) -> Unreachable:
    if isinstance(error, FileNotFoundError):
        return Unreachable("CHECKPOINT_UNREADABLE.ABSENT", location=location, error=error)
    return _find_outage(location, error) or Unreachable("CHECKPOINT_UNREADABLE.READ", location=location, error=error)


def unusable(location: str, error: OSError) -> Unreachable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unreachable("CHECKPOINT_UNREADABLE.FULL", location=location, error=error)
    return _find_outage(location, error) or Unreachable("CHECKPOINT_UNREADABLE.USE", location=location, error=error)


def _find_outage(location: str, error: Exception) -> Unreachable | None:
    is_remote = SCHEME.match(location) and not location.startswith("file:")
    return find_outage(f"the checkpoint {location!r}", error) if is_remote else None


def _offsets(filesystem: fs.FileSystem, path: str) -> str:
    return "\n".join(_read(filesystem, path).split("\n")[_OWN_LINES:]).strip()


def _read(filesystem: fs.FileSystem, path: str) -> str:
    with filesystem.open_input_stream(path) as stream:
        return bytes(stream.read()).decode("utf-8")


def _newest(filesystem: fs.FileSystem, folder: str) -> int | None:
    infos = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    return max((int(i.base_name) for i in infos if i.base_name.isdigit()), default=None)
