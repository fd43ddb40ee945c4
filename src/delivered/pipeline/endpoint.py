"""A source or sink, declared but not connected."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any
from urllib.parse import unquote, urlsplit

from delivered.contract.sink import Sink
from delivered.contract.source import Source
from delivered.engine import Columns
from delivered.engine.transform import REJECTED
from delivered.model.errors import UsageError, holds_password, is_secret, redacted, shown
from delivered.model.options import check_argument, find_option, password_in_url
from delivered.model.rows import backquoted
from delivered.pipeline.registry import PREFIX, find_sink, find_source

# Which of a pipeline's rows and columns a sink gets: `select` and `where`, next to its options.

_OWN = "__delivered_sink_"
_COLUMN = re.compile(r"[A-Za-z_]\w*|`[^`]+`")
_NAMED = re.compile(r"(?P<sql>.+?)\s+AS\s+(?P<name>[A-Za-z_]\w*|`[^`]+`)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Item:
    """One column of a sink. `sql`: None: the column of that name as it is."""

    name: str
    sql: str | None = None


@dataclass(frozen=True)
class Projection:
    """
    Attributes:
        items: empty: all columns.
        where: SQL; rows for which it is not true are dropped. None: all rows.
    """

    items: tuple[Item, ...] = ()
    where: str | None = None

    @property
    def is_all(self) -> bool:
        return not self.items and self.where is None

    @property
    def is_plain(self) -> bool:
        """Whether it only picks columns, which needs no SQL."""
        return self.where is None and all(i.sql is None for i in self.items)

    def columns(self, names: Iterable[str]) -> tuple[Item, ...]:
        """The sink's columns, of rows with these."""
        return self.items or tuple(map(Item, names))

    @property
    def route(self) -> Columns | None:
        """The route of a sink that only picks columns."""
        return None if self.is_all else Columns(tuple((i.name, i.name) for i in self.items))

    @property
    def texts(self) -> tuple[str, ...]:
        """All the SQL in it."""
        return tuple(t for t in (self.where, *(i.sql for i in self.items)) if t is not None)


def parse_projection(select: Iterable[str], where: str | None) -> Projection:
    """Parse column names and named expressions ("amount * 2 AS double").

    Raises:
        UsageError: an expression without a name, a name twice, or an empty condition.
    """
    items = tuple(_item(text) for text in select)
    names = [i.name for i in items]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UsageError("SELECT_NAME_TWICE", name=twice[0])
    if where is not None and not where.strip():
        raise UsageError("WHERE_EMPTY")
    return Projection(items, where)


def _item(text: str) -> Item:
    text = text.strip()
    if _COLUMN.fullmatch(text):
        return Item(text.strip("`"))
    named = _NAMED.fullmatch(text)
    if named is None:
        raise UsageError("SELECT_UNNAMED", text=text)
    return Item(named["name"].strip("`"), named["sql"])


@dataclass(frozen=True)
class Routing:
    """How the rows of one frame reach several sinks. Rows are neither added nor moved.

    Attributes:
        guard: SQL; true for rows, false for what the transform rejected: expressions are for rows.
        where: column that it adds -> a sink's condition.
        computed: column that it adds -> SQL that already has the guard.
        columns: all that are needed.
        routes: what each sink gets of them; None: everything.
    """

    guard: str
    where: Mapping[str, str]
    computed: Mapping[str, str]
    columns: tuple[str, ...]
    routes: tuple[Columns | None, ...]


def plan_routes(projections: Sequence[Projection], columns: Sequence[str], keep: Collection[str] = ()) -> Routing:
    """
    Args:
        columns: of the frame.
        keep: columns to keep in addition, if the frame has them: where a row came from.

    Raises:
        UsageError: a sink's column is not among them.
    """
    names = [c for c in columns if c != REJECTED.name]
    guard = f"{REJECTED.name} IS NULL" if REJECTED.name in columns else "true"
    where, computed = dict[str, str](), dict[str, str]()
    routes: list[Columns | None] = []
    used = [c for c in (*keep, REJECTED.name) if c in columns]
    for number, projection in enumerate(projections):
        own = None
        if projection.where is not None:
            where[own := f"{_OWN}{number}"] = projection.where
        take = []
        for item in projection.columns(names):
            column = item.name
            if item.sql is not None:
                column = f"{_OWN}{number}_{item.name}"
                # CASE evaluates it only for the sink's own rows, and rules out generators and aggregates.
                computed[column] = f"CASE WHEN {guard} AND {backquoted(own) if own else 'true'} THEN ({item.sql}) END"
            elif column not in names:
                raise UsageError("SELECT_COLUMN.PLAN", column=column, names=", ".join(names))
            take.append((item.name, column))
        used += [c for _, c in take] + ([own] if own else [])
        routes.append(None if projection.is_all else Columns(tuple(take), own))
    if any(r is None for r in routes):
        used += names
        routes = [r or Columns(tuple((n, n) for n in names)) for r in routes]
    return Routing(guard, where, computed, tuple(dict.fromkeys(used)), tuple(routes))


SPARK_OWN = "spark:"
"""Prefix of a format that is one of Spark's own sources, or of a JAR in the session: "spark:kafka"."""

_ASYNC = "asyncprogress"
_SHOWN = (
    "subscribe",
    "subscribepattern",
    "assign",
    "topic",
    "topics",
    "queue",
    "exchange",
    "routingkey",
    "saga",
    "path",
)


@dataclass(frozen=True, repr=False)
class Endpoint:
    """
    Attributes:
        format: "kafka", or "spark:kafka" for a source of Spark itself or of a JAR.
        options: as text, with keys as documented; secrets may be references (`env:NAME`, `file:PATH`).
        name: of a sink, in its pipeline; None: the connector's default.
        projection: of a sink: the rows and columns it gets.
        audit: of a sink: how the audit identifies its records, {"id": SQL, "key": SQL}; empty: as the pipeline does.
        written: options with a path that depends on the process's folder, as the pipeline file has them.
    """

    format: str
    options: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    projection: Projection = Projection()
    audit: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.options.items():
            if holds_password(value) and not is_secret(key):
                raise password_in_url(self.format, key)

    @property
    def is_spark_own(self) -> bool:
        return self.format.startswith(SPARK_OWN)

    @property
    def system(self) -> str:
        """Without a prefix: "kafka"."""
        return self.format.removeprefix(SPARK_OWN).removeprefix(PREFIX)

    @property
    def label(self) -> str:
        """For display, on one line: "kafka orders"."""
        by_name = {k.lower(): v for k, v in self.options.items()}
        shown = [by_name[k].rstrip("/").rsplit("/", 1)[-1] for k in _SHOWN if k in by_name]
        return " ".join([self.system, *shown, *([by_name["table"]] if "table" in by_name else [])])

    @property
    def description(self) -> str:
        """In Spark's reports, as Spark describes its own: "delivered_kafka[orders]"."""
        system, _, rest = self.label.partition(" ")
        return f"{PREFIX}{system}[{rest}]"

    @property
    def sink_name(self) -> str:
        """Of a sink, in its pipeline: as given, or the connector's default. Raises as `sink`."""
        return self.name or self.sink().name

    @property
    def connector_options(self) -> dict[str, str]:
        """Without those of Spark's asynchronous progress, which are set on a sink but are not the connector's."""
        return {k: v for k, v in self.options.items() if not k.lower().startswith(_ASYNC)}

    @property
    def spark_options(self) -> dict[str, str]:
        """Those of Spark's asynchronous progress."""
        return {k: v for k, v in self.options.items() if k.lower().startswith(_ASYNC)}

    def source(self) -> Source:
        """The connector's source. Raises UsageError for a bad option, or a format that cannot be read."""
        return find_source(self.system, self.options)

    def sink(self) -> Sink:
        """The connector's sink. Raises UsageError for a bad option, or a format that cannot be written."""
        if self.is_spark_own:
            raise UsageError("NOT_A_SINK.SPARK", format=self.format, system=self.system)
        return find_sink(self.system, self.connector_options)

    def with_options(self, **options: str) -> Endpoint:
        """A copy with these options, replacing those of the same name in any case."""
        replaced = {k.lower() for k in options}
        kept = {k: v for k, v in self.options.items() if k.lower() not in replaced}
        return self.keeping({**kept, **options})

    def keeping(self, options: Mapping[str, str]) -> Endpoint:
        """A copy with only these options."""
        return replace(self, options=options)

    def __repr__(self) -> str:
        return f"Endpoint({self.format!r}, {redacted(self.options)!r})"


def endpoint(
    format: str,  # noqa: A002
    *,
    name: str | None = None,
    select: Sequence[str] = (),
    where: str | None = None,
    audit: Mapping[str, str] | None = None,
    **options: Any,
) -> Endpoint:
    """Any source or sink, by the name of its format.

    Args:
        format: "kafka", "log", "sqlite"; or "spark:kafka" for a source of Spark itself or of a JAR.
        name: of a sink, in its pipeline.
        select: of a sink: the columns it gets, by name or as named SQL: ["key", "amount * 2 AS double"].
        where: of a sink: SQL; it gets the rows that match.
        audit: of a sink, for a pipeline with several: {"id": SQL, "key": SQL} over its own columns.
        options: as documented, for example maxOffsetsPerTrigger=1000. Names with dots:
            **{"kafka.security.protocol": "SSL"}.

    Raises:
        UsageError: a value that cannot be an option.
    """
    texts = {k: as_text(k, v) for k, v in options.items()}
    if isinstance(select, str | bytes):
        raise UsageError("SELECT_VALUE", select=select)
    call = "delivered.endpoint"
    check_argument(call, "format", format, str, "text", 'format="kafka"')
    check_argument(call, "name", name, (str, NoneType), "text", 'name="orders"')
    check_argument(call, "select", select, Sequence, "a list of texts", 'select=["id", "amount * 2 AS double"]')
    for text in select:
        check_argument(call, "select", text, str, "a list of texts", 'select=["id", "amount * 2 AS double"]')
    check_argument(call, "where", where, (str, NoneType), "SQL", 'where="amount > 0"')
    check_argument(call, "audit", audit, (Mapping, NoneType), "a mapping", 'audit={"id": "id"}')
    return Endpoint(format, texts, name, parse_projection(select, where), dict(audit or {}))


def _path(system: str, path: object) -> str:
    check_argument(f"delivered.{system}", "path", path, (str, PathLike), "a path", "path=...")
    return str(path)


def _check_texts(system: str, **given: object) -> None:
    for name, value in given.items():
        check_argument(f"delivered.{system}", name, value, str, "text", f'{name}="..."')


def delta(path: str, *, name: str | None = None, **options: Any) -> Endpoint:
    """A Delta table, as a sink: a folder, or the URL of one in an object store.

    Args:
        options: as documented, for example partitionBy="day"; those of the object store as
            **{"storage.aws_region": "eu-central-1"}.
    """
    return endpoint("delta", name=name, path=_path("delta", path), **options)


def files(path: str, *, name: str | None = None, **options: Any) -> Endpoint:
    """A local folder of Parquet files, as a sink; of JSON or CSV by `fileFormat=`. Needs no server."""
    return endpoint("files", name=name, path=_path("files", path), **options)


def iceberg(table: str, *, name: str | None = None, **options: Any) -> Endpoint:
    """An Iceberg table, as a sink.

    Args:
        table: "shop.orders".
        options: as documented: warehouse="/data/lake" for an embedded catalog; for another one
            **{"catalog.type": "rest", "catalog.uri": "https://..."}.
    """
    _check_texts("iceberg", table=table)
    return endpoint("iceberg", name=name, table=table, **options)


def kafka(bootstrap: str, *, name: str | None = None, **options: Any) -> Endpoint:
    """Kafka as a source (`subscribe=`, `subscribePattern=`, `assign=`) or a sink (`topic=`).

    Args:
        bootstrap: "host:port,host:port".
    """
    _check_texts("kafka", bootstrap=bootstrap)
    servers = "kafka.bootstrap.servers"
    if (other := find_option(options, servers)) not in (None, bootstrap):
        raise UsageError("OPTION_CONFLICT.SAME", owner="delivered.kafka", first=bootstrap, second=other, name=servers)
    return endpoint("kafka", name=name, **{servers: bootstrap, **options})


def log(path: str, **options: Any) -> Endpoint:
    """A durable log, kept as a Delta table: a source that needs no server."""
    return endpoint("log", path=_path("log", path), **options)


def mysql(url: str, dbtable: str, *, name: str | None = None, **options: Any) -> Endpoint:
    """A table of a MySQL or MariaDB server, as a sink.

    Args:
        url: "mysql://host:3306/database", without a password; that is the option `password`.
        dbtable: "orders" or "sales.orders".
    """
    _check_texts("mysql", url=url, dbtable=dbtable)
    return endpoint("mysql", name=name, url=url, dbtable=dbtable, **options)


def postgres(url: str, dbtable: str, *, name: str | None = None, **options: Any) -> Endpoint:
    """A table of a PostgreSQL database, as a sink.

    Args:
        url: "postgresql://host:5432/database", without a password; that is the option `password`.
        dbtable: "orders" or "sales.orders".
    """
    _check_texts("postgres", url=url, dbtable=dbtable)
    return endpoint("postgres", name=name, url=url, dbtable=dbtable, **options)


def sqlite(path: str, table: str, *, name: str | None = None, **options: Any) -> Endpoint:
    """A table of a SQLite file: a sink that needs no server."""
    _check_texts("sqlite", table=table)
    return endpoint("sqlite", name=name, path=_path("sqlite", path), table=table, **options)


def as_text(key: str, value: Any) -> str:
    """An option's value as Spark passes it."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case list() if all(isinstance(v, str) for v in value):
            return ",".join(value)  # as subscribe, keyColumns and others take several
        case dict() | list():
            return json.dumps(value, separators=(",", ":"))
        case _:
            raise UsageError("OPTION_VALUE.TYPE", key=key, value=shown(value, key), value_type=type(value).__name__)


def refuse_passwords(pipeline: str, places: Mapping[str, str]) -> None:
    """
    Raises:
        UsageError: one of these, by key, is a URL with a password.
    """
    step = "remove it, and put the credentials into Spark's configuration, or the environment"
    for key, place in places.items():
        if holds_password(place):
            raise password_in_url(f"pipeline {pipeline!r}", key, step)


# The same place under one name, whatever reads or writes it.

_NAMES = ("subscribe", "topic", "topics", "queue", "streams", "exchange", "table")
_POSTGRES, _MYSQL = ("postgres", 5432), ("mysql", 3306)
_DATABASES = {"postgres": _POSTGRES, "postgresql": _POSTGRES, "mysql": _MYSQL, "mariadb": _MYSQL}


def datasets(endpoint: Endpoint) -> Iterator[tuple[str, str]]:
    """Namespace and name of each dataset of a source or sink, without credentials."""
    options = {k.lower(): v for k, v in endpoint.options.items()}
    url = options.get("url", "").removeprefix("jdbc:")
    scheme = urlsplit(url).scheme
    table = options.get("dbtable") or options.get("table")
    if "path" in options or scheme in ("file", "sqlite"):
        namespace, name = _file(options.get("path") or unquote(urlsplit(url).path))
        yield namespace, f"{name}/{table}" if table and endpoint.system in ("sqlite", "outbox") else name
    elif scheme in _DATABASES:
        yield _table(url, scheme, table or "outbox_event")
    elif "catalog.uri" in options or "catalog.warehouse" in options:  # Iceberg
        catalog = urlsplit(options.get("catalog.uri") or options["catalog.warehouse"])
        yield catalog._replace(netloc=catalog.netloc.rpartition("@")[2], query="").geturl(), str(table)
    else:
        server = options.get("kafka.bootstrap.servers") or options.get("endpoints") or url
        namespace = f"{endpoint.system}://{_host(server)}"
        for name in _topics(options):
            yield namespace, name


def is_folder_of(location: str, endpoint: Endpoint) -> bool:
    """Whether a location is the folder of a source or sink, or its file."""
    path = find_option(endpoint.options, "path") or ""
    return bool(path) and _file(path.removeprefix("file://")) == _file(location.removeprefix("file://"))


def _file(path: str) -> tuple[str, str]:
    if "://" in path:
        parts = urlsplit(path)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", parts.path.strip("/")
    return "file", str(Path(path).absolute())


def _table(url: str, scheme: str, table: str) -> tuple[str, str]:
    name, port = _DATABASES[scheme]
    parts = urlsplit(url)
    plain = table.replace('"', "").replace("`", "")
    if name == "postgres" and "." not in plain:
        plain = f"public.{plain}"
    return f"{name}://{parts.hostname or 'localhost'}:{parts.port or port}", f"{unquote(parts.path.strip('/'))}.{plain}"


def _host(servers: str) -> str:
    """The first server's host and port, as the user wrote them."""
    first = re.split(r"[,;]", servers.partition("://")[2] or servers)[0]
    return first.partition("/")[0].rpartition("@")[2]


def _topics(options: Mapping[str, str]) -> list[str]:
    if "assign" in options:
        return sorted(json.loads(options["assign"]))
    names = next((options[name] for name in _NAMES if name in options), None) or options.get("subscribepattern", "")
    return [name.strip() for name in names.split(",")]
