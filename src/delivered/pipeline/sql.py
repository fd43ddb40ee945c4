"""What is known of a transform's SQL without Spark, in milliseconds: that it cannot run, or which columns it gives.

Spark's own parser needs a JVM, and its analysis a session: 5 s. Here sqlglot reads the text in Spark's dialect, and an
answer has three values (decision 102): wrong, for reasons that no version of Spark known here gets around; fine, as far
as names and functions go; or in doubt, where only Spark knows. What is wrong must be certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from delivered.model.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from sqlglot import exp
    from sqlglot.tokens import Token

KNOWN_SPARK = (4, 3)
"""Newest version whose keywords and functions stand here: a later one may know more."""
_COUNTS = Path(__file__).with_name("sql-arguments.json")

_KEYWORDS_TEXT = """
add after aggregate align all alter always analyze and anti any any_value apply approx archive array as asc
asensitive asof at atomic authorization auto begin bernoulli between bigint bin bin_distribute_ratio bin_end
bin_start binary binding boolean both bucket buckets by byte cache call called cascade case cast catalog catalogs
cdc change changes char character check clear close cluster clustered codegen collate collation collations
collection column columns comment commit compact compactions compensation compute concatenate condition constraint
contains continue cost create cross cube current current_database current_date current_path current_schema
current_time current_timestamp current_user cursor data database databases date date_add date_diff dateadd datediff
day dayofyear days dbproperties dec decimal declare default default_path defined definer delay delete delimited desc
describe deterministic dfs directories directory distance distinct distribute div do double drop else elseif end
enforced error escape escaped evolution exact except exchange exclude exclusive execute exists exit explain export
extend extended external extract false fetch fields fileformat filter first float flow following for foreign format
formatted found from full function functions generated geography geometry global grant group grouping handler having
history hour hours identified identifier identity if ignore ilike immediate import in include inclusive increment
index indexes inner inpath input inputformat insensitive insert int integer intersect interval into invoker is items
iterate join json json_table key keys language last lateral lazy leading leave left level like limit lines list load
local localtime location lock locks logical long loop macro map match_condition matched materialized max measure
merge metrics microsecond microseconds millisecond milliseconds minus minute minutes modifies month months msck name
namespace namespaces nanosecond nanoseconds natural nearest next no none norely not null nulls numeric of offset on
only open option options or order ordinality out outer outputformat over overlaps overlay overwrite partition
partitioned partitions path percent pivot placing position preceding primary principals procedure procedures
properties purge qualify quarter query range read reads real recordreader recordwriter recover recursion recursive
reduce references refresh rely rename repair repeat repeatable replace reset respect restrict return returns revoke
right role roles rollback rollup row rows scd schema schemas second seconds security select semi separated sequence
serde serdeproperties session_user set sets short show similarity single skewed smallint some sort sorted source
specific sql sqlexception sqlstate start statistics stored stratify stream streaming string struct substr substring
sync system system_path system_time system_version table tables tablesample target tblproperties terminated then
time timediff timestamp timestamp_ltz timestamp_ntz timestampadd timestampdiff tinyint to touch track trailing
transaction transactions transform trim true truncate try_cast type unarchive unbounded uncache uniform union unique
unknown unlock unnest unpivot unset until update use user using value values var varchar variable variant version
view views void watermark week weeks when where while width window with within without x year years zone
"""
_KEYWORDS = frozenset(_KEYWORDS_TEXT.split())
"""Of Spark's grammar (SQLKeywordUtils.keywords); most of them may be names, too."""
_SQL_ONLY_TEXT = """
approx_top_k approx_top_k_accumulate approx_top_k_combine approx_top_k_estimate chr from_avro from_protobuf len
luhn_check mod percentile_cont percentile_disc python_worker_logs random schema_of_avro space sql_keywords to_avro
to_protobuf uuid variant_explode variant_explode_outer
"""
_SQL_ONLY = frozenset(_SQL_ONLY_TEXT.split())
"""Functions of SQL that `pyspark.sql.functions` has not, in one of the versions from 3.5 on."""
_STARTS = ("SELECT", "WITH", "FROM", "VALUES", "TABLE")
_CHANGES = frozenset(("insert", "update", "delete", "merge", "create", "drop", "alter", "truncate"))
_CLAUSES = ("FROM", "WHERE", "GROUP", "ORDER", "HAVING", "LIMIT", "JOIN", "UNION")
_NAMES = frozenset(("source", "value", "key", "topic"))
"""Keywords that are names in a query over a source."""
_TYPE_NAMES = (
    *("BOOLEAN", "TINYINT", "SMALLINT", "INT", "INTEGER", "BIGINT", "LONG", "FLOAT", "DOUBLE", "DECIMAL", "STRING"),
    *("VARCHAR", "BINARY", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ", "INTERVAL", "ARRAY", "MAP", "STRUCT", "VARIANT"),
)
"""The usual ones, for suggestions."""
_BETWEEN_ARGUMENTS = frozenset(
    ("as", "from", "for", "in", "placing", "using", "order", "both", "leading", "trailing", "select", "distinct", "all")
)
"""Words between arguments, in the grammars of single functions."""
_UNITS_TEXT = """
year years yearofweek yr quarter qtr month mon week weeks day days d dayofweek dow doy hour hours h minute min m
second seconds sec s millisecond ms microsecond us nanosecond epoch
"""
_UNITS = frozenset(_UNITS_TEXT.split())
"""Words that functions of time take where a column could stand."""
_GENERATED = frozenset(["col", "pos", "key", "value", *(f"col{i}" for i in range(100)), *(f"c{i}" for i in range(100))])
"""Columns that table functions and VALUES name themselves."""

UNKNOWN = pa.null()
"""Type of a column that only Spark knows."""
_TYPES: Mapping[str, pa.DataType] = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "TEXT": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMPTZ": pa.timestamp("us", "UTC"),
    "TIMESTAMPNTZ": pa.timestamp("us"),
}
"""By sqlglot's names, which are those of several dialects."""


@dataclass(frozen=True)
class SqlFacts:
    """
    Attributes:
        error: why it cannot run; None: no reason is known.
        doubt: what only Spark knows; empty: nothing. The rest is then a guess.
        columns: of its rows; a type may be `UNKNOWN`. None: unknown.
        aggregates: it aggregates a source over all of its records.
        sorts: its rows are sorted.
        outer: why it cannot run without a watermark: an outer join of sources.
    """

    error: UsageError | None = None
    doubt: str = ""
    columns: pa.Schema | None = None
    aggregates: bool = False
    sorts: bool = False
    outer: UsageError | None = None


def is_readable() -> bool:
    """Whether the library is there that reads SQL without Spark."""
    return find_spec("sqlglot") is not None


@dataclass(frozen=True)
class Place:
    """Where a text of SQL stands.

    Attributes:
        subject: how an error's sentence about it begins.
        before, after: what makes a query of it; empty: it is one.
        rows: what has the columns, in a next step; empty: each source's view has its own.
    """

    subject: str
    before: str = ""
    after: str = ""
    rows: str = ""


TRANSFORM = Place("The transform's SQL")


def check_sql(sql: str, sources: Mapping[str, pa.Schema], *, builtin: bool, place: Place = TRANSFORM) -> SqlFacts:
    """
    Args:
        sources: columns by the name of the view.
        builtin: the session has Spark's own functions, tables and grammar, and no others.
    """
    if not builtin:
        return SqlFacts(doubt="the session is configured to know more, or other, functions and tables")
    facts = _Query(sql, sources, place).facts()
    if facts.error is not None and _spark_version() > KNOWN_SPARK:
        return SqlFacts(doubt=facts.error.message)
    return facts


def invalid_sql(
    sql: str, sources: Mapping[str, pa.Schema], reason: str, *, place: tuple[int, int] | None, suggested: str
) -> UsageError:
    """What Spark refuses.

    Args:
        place: line and position, from 1; None: unknown.
        suggested: columns, with commas; empty: none.
    """
    where = f" (line {place[0]}, position {place[1]} of {sql.strip()!r})" if place else f" ({sql.strip()!r})"
    views = "; ".join(f"the view `{n}` has the columns {', '.join(s.names)}" for n, s in sources.items())
    return UsageError(
        "SQL_INVALID.NEAR" if suggested else "SQL_INVALID.OTHER",
        sources="sources" if len(sources) > 1 else "source",
        text=reason,
        where=where,
        suggested=suggested,
        views=views,
    )


@cache
def _spark_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version("pyspark").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return (99,)


@cache
def _functions() -> frozenset[str]:
    """Names that may be functions; empty: pyspark is not installed. Imports nothing of it."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return frozenset()
    names = ("functions/builtin.py", "functions.py")  # the latter in 3.5
    files = (Path(spec.origin).parent / "sql" / name for name in names)
    text = next(f for f in files if f.exists()).read_text(encoding="utf-8")
    return _SQL_ONLY | {name.lower() for name in re.findall(r"^(?:def )?(\w+)(?:\(| = )", text, re.MULTILINE)}


_COUNTS_MAX = 9
"""Arguments that `tools.sql_arguments` tried."""


@cache
def _argument_counts() -> Mapping[str, Collection[int]]:
    """How many arguments Spark's functions take, in any version known here."""
    counts: dict[str, list[int]] = json.loads(_COUNTS.read_text(encoding="utf-8"))
    return counts


def _either(counts: Collection[int]) -> str:
    *some, last = sorted(counts)
    if last == _COUNTS_MAX:
        return f"{min(counts)} or more arguments"
    return f"{', '.join(map(str, some))} or {last} arguments" if some else f"{last} argument{'s' * (last != 1)}"


class _Query:
    """One text over the views of the sources."""

    def __init__(self, sql: str, sources: Mapping[str, pa.Schema], place: Place) -> None:
        self._own, self._place = sql, place
        self._sql = f"{place.before}{sql}{place.after}"
        self._shown = sources
        self._sources = {name.lower(): schema for name, schema in sources.items()}
        self._columns = {column.lower(): column for schema in sources.values() for column in schema.names}

    def facts(self) -> SqlFacts:
        from sqlglot import exp
        from sqlglot.dialects.spark import Spark
        from sqlglot.errors import SqlglotError

        try:
            words = [_Word.of(token) for token in Spark().tokenize(self._sql)]
        except SqlglotError as why:
            unclosed = self._unclosed()
            return SqlFacts(error=unclosed, doubt="" if unclosed else str(why))
        if (wrong := self._wrong_words(words)) is not None:
            return SqlFacts(error=wrong)
        try:
            trees = Spark().parse(self._sql)
        except SqlglotError as why:
            return SqlFacts(doubt=_ESCAPES.sub("", str(why)).partition("\n")[0])
        if len(trees) != 1 or not isinstance(trees[0], exp.Query):
            return SqlFacts(doubt="it is no query")
        tree = trees[0]
        names = _Names.of(tree)
        problems = (
            self._unknown_function(words, names),
            *(self._unknown_view(table, names) for table in tree.find_all(exp.Table)),
            *(self._unknown_column(column, names) for column in tree.find_all(exp.Column)),
            self._wrong_where(tree, names),
            self._unstreamed(tree, names),
            self._wrong_arithmetic(tree, names),
        )
        error = next((p for p in problems if isinstance(p, UsageError)), None)
        doubts = [p for p in problems if isinstance(p, str)] + [odd for odd in (_odd(words),) if odd]
        if doubts:  # what made them may explain the error, too
            return SqlFacts(doubt=doubts[0])
        if error is None and not names.opaque and tree.find(exp.Table) is None:
            error = self._wrong("SQL_INVALID.NO_SOURCE", "", 0)
        sorts = tree.args.get("order") is not None
        aggregates = self._aggregates(tree) or (isinstance(tree, exp.Union) and self._merges(tree, names))
        return SqlFacts(error, "", self._result(tree, names), aggregates, sorts, self._outer(tree, names))

    def _wrong(self, condition: str, name: str, start: int, near: Collection[str] = (), hint: str = "") -> UsageError:
        start = min(max(start - len(self._place.before), 0), len(self._own))
        line, at = self._own.count("\n", 0, start) + 1, start - self._own.rfind("\n", 0, start)
        views = (
            f"{self._place.rows or f'the view `{n}` has'} the columns {', '.join(s.names)}"
            for n, s in self._shown.items()
        )
        return UsageError(
            condition,
            subject=self._place.subject,
            name=name,
            line=line,
            position=at,
            sql=self._own.split("\n")[line - 1].rstrip(),
            hint=hint or did_you_mean(name, near),
            views="; ".join(views),
        )

    def _unclosed(self) -> UsageError | None:
        """A quote, or a comment, that the text opens and does not close."""
        rest = _QUOTED.sub(lambda match: " " * len(match[0]), self._sql)
        opened = re.search(r"['\"`]|/\*", rest)
        if opened is None or _RAW.search(self._sql):
            return None
        return self._wrong("SQL_INVALID.UNCLOSED", opened[0], opened.start())

    def _wrong_words(self, words: list[_Word]) -> UsageError | None:
        """What no grammar of Spark's allows, whatever the names mean."""
        first = next((w for w in words if w.text != "("), None)
        if first is None:
            return self._wrong("SQL_INVALID.EMPTY", "", 0)
        if first.is_plain:
            return self._wrong("SQL_INVALID.START", first.text, first.start, _STARTS)
        if first.lower in _CHANGES:
            return self._wrong("SQL_INVALID.NO_QUERY", first.text, first.start)
        after = next((two for one, two in pairwise(words) if one.text == ";"), None)
        if after is not None and first.text.upper() in _STARTS:
            return self._wrong("SQL_INVALID.SEVERAL", ";", after.start)
        depth = 0
        for word in words:
            depth += (word.text == "(") - (word.text == ")")
            if depth < 0:
                return self._wrong("SQL_INVALID.PARENTHESIS", ")", word.start)
        if depth:
            last = [w for w in words if w.text == "("][-1]
            return self._wrong("SQL_INVALID.PARENTHESIS", "(", last.start)
        if "/*+" in self._sql:  # words of hints
            return None
        for one, two, three in zip(words, words[1:], words[2:], strict=False):
            outer = all(w.is_plain or w.lower in _NAMES for w in (one, three))
            named = one.lower == "as" and (two.is_plain or two.quoted)
            if (two.is_plain and outer) or (named and (three.is_plain or not three.text)):
                hint = did_you_mean(two.text, _CLAUSES)
                words_ = f"{one.text} {two.text} {three.text or self._sql[three.start :].split()[0]}"
                return self._wrong("SQL_INVALID.WORDS", words_, one.start, hint=hint)
        checks = (self._comma, self._wrong_alias, self._unclosed_case, self._unknown_type, self._wrong_count)
        return next((wrong for check in checks if (wrong := check(words)) is not None), None)

    def _wrong_alias(self, words: list[_Word]) -> UsageError | None:
        """What is no name after AS, and a CAST without AS."""
        end = _Word("", len(self._sql), is_name=False, quoted=False)
        for at, (one, two) in enumerate(pairwise(words)):
            three, four = [*words[at + 2 : at + 4], end, end][:2]
            if one.lower == "as" and not one.quoted and not two.text:
                given = self._sql[two.start :].split(",")[0].split()[0]
                return self._wrong("SQL_INVALID.ALIAS_TEXT", given, two.start)
            if one.lower == "as" and not one.quoted and two.is_name and not two.quoted and three.text == "-":
                return self._wrong("SQL_INVALID.ALIAS_DASH", f"{two.text}-{four.text}", two.start)
            before = words[at - 1].lower if at else ""
            if one.lower not in ("cast", "try_cast") or one.quoted or two.text != "(" or before in ("as", "with", "."):
                continue
            close = _closing(words, at + 1)
            if all(w.lower != "as" for w in words[at + 2 : close]):
                return self._wrong("SQL_INVALID.CAST", one.text, one.start)
        return None

    def _unclosed_case(self, words: list[_Word]) -> UsageError | None:
        opened = next((a for a, b in pairwise(words) if (a.lower, b.lower) == ("case", "when")), None)
        if opened is None or any(w.lower == "end" for w in words):
            return None
        return self._wrong("SQL_INVALID.CASE", opened.text, opened.start)

    def _comma(self, words: list[_Word]) -> UsageError | None:
        """A comma that nothing follows. Older Sparks take FROM for a column then, of a query that reads nothing."""
        named = any(one.lower == "as" and two.lower == "from" for one, two in pairwise(words))
        for one, two, three in zip(words, words[1:], words[2:], strict=False):
            ends = two.lower == "from" and not two.quoted and not named and three.lower in self._sources
            if one.text == "," and (ends or two.text == ")"):
                return self._wrong("SQL_INVALID.COMMA", two.text, one.start)
        return None

    def _unknown_type(self, words: list[_Word]) -> UsageError | None:
        """Of a cast: all types are keywords."""
        inside: list[str] = []
        for before, word, after in zip([None, *words], words, words[1:], strict=False):
            if word.text == "(":
                inside.append("" if before is None else before.lower)
            elif word.text == ")":
                inside.pop()
            elif word.lower == "as" and after.is_plain and inside and inside[-1] in ("cast", "try_cast"):
                return self._wrong("SQL_INVALID.TYPE", after.text, after.start, _TYPE_NAMES)
        return None

    def _unknown_function(self, words: list[_Word], names: _Names) -> UsageError | None:
        known = _functions()
        for before, word, after in zip([None, *words], words, words[1:], strict=False):
            called = word.is_name and not word.quoted and after.text == "(" and (before is None or before.text != ".")
            if called and known and word.lower not in known | _KEYWORDS | names.given:
                return self._wrong("SQL_INVALID.FUNCTION", word.text, word.start, known)
        return None

    def _wrong_count(self, words: list[_Word]) -> UsageError | None:
        """Of arguments that commas alone separate; `trim(BOTH FROM a)` has a grammar of its own."""
        end = _Word("", len(self._sql), is_name=False, quoted=False)
        calls: list[_Call] = []
        for at, word in enumerate(words):
            before, second = (words[at - n] if at >= n else end for n in (1, 2))
            if word.text == "(":
                calls.append(_Call(before if self._is_called(before, second) else None))
            elif word.text == ")":
                call = calls.pop()
                after, next_ = [*words[at + 1 : at + 3], end, end][:2]
                is_query = after.lower == "as" and next_.text == "("  # WITH rank(a, b) AS (...)
                count = call.commas + (before.text != "(")
                if call.name is None or not call.is_plain or is_query or count > _COUNTS_MAX:
                    continue
                allowed = _argument_counts().get(call.name.lower)
                if allowed and count not in allowed:
                    hint = f"{call.name.text} takes {_either(allowed)}, not {count}; "
                    return self._wrong("SQL_INVALID.ARGUMENTS", call.name.text, call.name.start, hint=hint)
            elif calls:
                calls[-1].add(word)
        return None

    def _is_called(self, name: _Word, before: _Word) -> bool:
        """Whether a name in front of a parenthesis is a function's, and not an alias of a table with its columns.

        Functions whose names are keywords have grammars of their own: dateadd(DAY, 1, a).
        """
        is_alias = before.lower in ("as", ".", ")", "with") or before.quoted or before.is_plain
        return name.is_plain and not is_alias and before.lower not in self._sources

    def _unknown_view(self, table: exp.Table, names: _Names) -> UsageError | str | None:
        name = table.name
        if not name or name.lower() in _KEYWORDS - _NAMES or table.args.get("db") is not None:
            return f"it reads {table.sql('spark')}"
        if name.lower() in self._sources or name.lower() in names.queries:
            return None
        return self._wrong("SQL_INVALID.VIEW", name, _start(table.this), list(self._shown))

    def _unknown_column(self, column: exp.Column, names: _Names) -> UsageError | str | None:
        from sqlglot import exp

        name, of = column.name, column.table.lower()
        if of in self._columns and not self._has_fields(of, names) and column.args.get("db") is None:
            path = f"get_json_object(CAST({column.table} AS STRING), '$.{name}') reads it of JSON; "
            return self._wrong("SQL_INVALID.FIELD", f"{column.table}.{name}", _start(column.this), hint=path)
        if not name or name == "*" or (of and of not in self._sources) or of in self._columns:
            return None
        if isinstance(column.parent, exp.Kwarg) and column.arg_key == "this":
            return None
        if name.lower() in self._columns or name.lower() in names.given:
            return None
        if names.opaque or name.lower() in _GENERATED | _UNITS | _KEYWORDS | _functions() | {"_metadata"}:
            return f"it reads a column {name}"
        return self._wrong("SQL_INVALID.COLUMN", name, _start(column.this), list(self._columns.values()))

    def _has_fields(self, name: str, names: _Names) -> bool:
        """Whether `name.field` may be a field of this column, or a column of a table of that name."""
        types = [f.type for schema in self._sources.values() for f in schema if f.name.lower() == name]
        certain = all(pa.types.is_primitive(t) or pa.types.is_string(t) or pa.types.is_binary(t) for t in types)
        return not certain or UNKNOWN in types or name in self._sources | dict.fromkeys(names.given)

    def _wrong_where(self, tree: exp.Query, names: _Names) -> UsageError | None:
        """An aggregate, or a name that SELECT gives, in the only WHERE."""
        from sqlglot import exp

        where = tree.args.get("where")
        if where is None or names.opaque or tree.find(exp.Subquery, exp.CTE, exp.Join, exp.Lambda, exp.Window):
            return None
        if len(list(tree.find_all(exp.Select))) > 1:
            return None
        at = re.search(r"\bwhere\b", self._sql, re.IGNORECASE)
        if (found := where.find(*_aggregates())) is not None:
            return self._wrong("SQL_INVALID.WHERE_AGGREGATE", found.sql_name().lower(), at.start() if at else 0)
        given = {item.alias.lower() for item in tree.expressions if isinstance(item, exp.Alias)} - set(self._columns)
        for column in where.find_all(exp.Column):
            if not column.table and column.name.lower() in given:
                return self._wrong("SQL_INVALID.WHERE_ALIAS", column.name, _start(column.this))
        return None

    def _reads_streams(self, tree: exp.Query, names: _Names) -> bool:
        """Whether it is certain that each of its tables is a source, and that no part of it is a constant."""
        from sqlglot import exp

        tables = {table.name.lower() for table in tree.find_all(exp.Table)}
        constant = any(select.find(exp.Table) is None for select in tree.find_all(exp.Select))
        return not (constant or names.opaque or names.queries) and tables <= self._sources.keys()

    def _unstreamed(self, tree: exp.Query, names: _Names) -> UsageError | str | None:
        """What Spark has for tables, and not for streams, under any output mode."""
        from sqlglot import exp

        if not self._reads_streams(tree, names):
            return None
        if any(
            isinstance(select.parent, exp.Subquery) and _is_value(select.parent) for select in tree.find_all(exp.Select)
        ):
            return "it has a subquery in an expression"
        for kind, words in _UNSTREAMED.items():
            if tree.find(getattr(exp, kind)) is not None:
                at = re.search(rf"\b{kind if kind != 'Window' else 'over'}\b", self._sql, re.IGNORECASE)
                return self._wrong("SQL_INVALID.UNSTREAMED", words, at.start() if at else 0)
        return None

    def _merges(self, tree: exp.Query, names: _Names) -> bool:
        """Whether a UNION without ALL drops repeats."""
        return bool(tree.args.get("distinct")) and self._reads_streams(tree, names)

    def _outer(self, tree: exp.Query, names: _Names) -> UsageError | None:
        from sqlglot import exp

        if not self._reads_streams(tree, names):
            return None
        for join in tree.find_all(exp.Join):
            if join.side and join.kind not in ("SEMI", "ANTI"):
                at = re.search(rf"\b{join.side}\b", self._sql, re.IGNORECASE)
                return self._wrong("SQL_INVALID.OUTER_JOIN", f"{join.side} JOIN", at.start() if at else 0)
        return None

    def _wrong_arithmetic(self, tree: exp.Query, names: _Names) -> UsageError | None:
        """Of a binary column: Kafka's value is one."""
        from sqlglot import exp

        binary = {f.name.lower() for s in self._sources.values() for f in s if pa.types.is_binary(f.type)}
        binary -= {f.name.lower() for s in self._sources.values() for f in s if not pa.types.is_binary(f.type)}
        if not self._reads_streams(tree, names):
            return None
        for sum_ in tree.find_all(exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Sum, exp.Avg):
            for side in (sum_.this, sum_.args.get("expression")):
                name = side.name.lower() if isinstance(side, exp.Column) else ""
                if name in binary and name not in names.given:
                    hint = f"CAST(CAST({side.name} AS STRING) AS BIGINT) is the number that it spells; "
                    return self._wrong("SQL_INVALID.BINARY", side.name, _start(side.this), hint=hint)
        return None

    def _result(self, tree: exp.Query, names: _Names) -> pa.Schema | None:
        """Columns of its rows, where each is named, or is one of the only source."""
        from sqlglot import exp

        tables = list(tree.find_all(exp.Table))
        if not isinstance(tree, exp.Select) or len(tables) != 1 or names.queries or names.opaque:
            return None
        source = self._sources.get(tables[0].name.lower())
        if source is None or tree.find(exp.Subquery, exp.Lateral, exp.Join):
            return None
        types = {f.name.lower(): f.type for f in source}
        fields: list[pa.Field] = []
        for item in tree.expressions:
            star = item.this if isinstance(item, exp.Column) else item
            if isinstance(star, exp.Star):
                if any(star.args.values()):
                    return None
                fields += source
            elif isinstance(item, exp.Column) and item.name.lower() in types and not item.table:
                fields.append(pa.field(item.name, types[item.name.lower()]))
            elif isinstance(item, exp.Alias) and item.alias:
                fields.append(pa.field(item.alias, _type(item.this, types)))
            elif isinstance(item, exp.Cast) and isinstance(item.this, exp.Column):
                fields.append(pa.field(item.this.name, _type(item, types)))
            elif isinstance(item, _unnamed()) and not item.find(exp.Star):
                fields.append(pa.field(item.sql("spark").lower(), UNKNOWN))
            else:
                return None
        return pa.schema(fields)

    def _aggregates(self, tree: exp.Query) -> bool:
        """Whether it is certain that rows of a source are aggregated, by groups of all records or over all of them."""
        from sqlglot import exp

        if not isinstance(tree, exp.Select) or tree.find(exp.Subquery, exp.Join, exp.CTE, exp.Window):
            return False
        tables = list(tree.find_all(exp.Table))
        if len(tables) != 1 or tables[0].name.lower() not in self._sources:
            return False
        grouped = tree.args.get("distinct") or tree.args.get("group") or tree.args.get("having")
        return bool(grouped) or any(item.find(*_aggregates()) for item in tree.expressions)


_UNSTREAMED = {"Window": "OVER", "Except": "EXCEPT", "Intersect": "INTERSECT", "Offset": "OFFSET"}
"""By sqlglot's names."""


def _is_value(subquery: exp.Expression) -> bool:
    """Whether it stands in an expression, and not where a table could."""
    from sqlglot import exp

    return not isinstance(subquery.parent, exp.From | exp.Join | exp.SetOperation | exp.Subquery | type(None))


def _closing(words: list[_Word], at: int) -> int:
    """Where the parenthesis that opens here closes; there is one."""
    depth = 0
    for n, word in enumerate(words[at:], at):
        depth += (word.text == "(") - (word.text == ")")
        if not depth:
            return n
    return len(words)


_QUOTED = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[\d*m")
_RAW = re.compile(r"\br['\"]", re.IGNORECASE)
_NAME = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True)
class _Word:
    """
    Attributes:
        text: empty for a literal.
        start: its place in the SQL, from 0.
        is_name: a name, a keyword or a function.
    """

    text: str
    start: int
    is_name: bool
    quoted: bool

    @classmethod
    def of(cls, token: Token) -> _Word:
        from sqlglot.tokens import TokenType

        quoted = token.token_type is TokenType.IDENTIFIER
        literal = token.token_type in (TokenType.STRING, TokenType.NUMBER, TokenType.RAW_STRING)
        text = "" if literal else token.text
        return cls(text, token.start, _NAME.fullmatch(text) is not None, quoted)

    @property
    def lower(self) -> str:
        return self.text.lower()

    @property
    def is_plain(self) -> bool:
        """It can only be a name."""
        return self.is_name and not self.quoted and self.lower not in _KEYWORDS


@dataclass
class _Call:
    """Parentheses, and what stands in them, other parentheses left out.

    Attributes:
        name: of the function; None: it is none.
        is_plain: commas alone separate its arguments.
    """

    name: _Word | None
    commas: int = 0
    is_plain: bool = True

    def add(self, word: _Word) -> None:
        self.commas += word.text == ","
        self.is_plain &= word.text != "*" and word.lower not in _BETWEEN_ARGUMENTS


@dataclass(frozen=True)
class _Names:
    """Names that a query gives, in lower case.

    Attributes:
        given: to columns, tables, parameters and windows.
        queries: to its common table expressions.
        opaque: columns may come from elsewhere: a table function, a pivot.
    """

    given: frozenset[str]
    queries: frozenset[str]
    opaque: bool

    @classmethod
    def of(cls, tree: exp.Query) -> _Names:
        from sqlglot import exp

        given = {n.alias.lower() for n in tree.find_all(exp.Alias, exp.Table, exp.Subquery, exp.CTE, exp.Lateral)}
        several = [
            *tree.find_all(exp.TableAlias, exp.Aliases),
            *(p for n in tree.find_all(exp.Lambda) for p in n.expressions),
        ]
        given |= {i.name.lower() for n in several for i in n.find_all(exp.Identifier)}
        windows = [i for n in tree.find_all(exp.Window) for i in n.find_all(exp.Identifier) if i.parent is n]
        given |= {i.name.lower() for i in windows}
        sources = (exp.Lateral, exp.Values, exp.Pivot, exp.Unnest, exp.UDTF, exp.Explode, exp.Inline, exp.Posexplode)
        opaque = tree.find(*sources) is not None or any(isinstance(t.this, exp.Func) for t in tree.find_all(exp.Table))
        return cls(frozenset(given), frozenset(c.alias.lower() for c in tree.find_all(exp.CTE)), opaque)


def _start(identifier: exp.Expression) -> int:
    return int(identifier.meta.get("start") or 0)


def _type(value: exp.Expression, columns: Mapping[str, pa.DataType]) -> pa.DataType:
    """Of a column, or of a value with an explicit cast."""
    from sqlglot import exp

    if isinstance(value, exp.Column):
        return columns.get(value.name.lower(), UNKNOWN) if not value.table else UNKNOWN
    if isinstance(value, exp.Cast) and not value.to.expressions and not value.to.args.get("nested"):
        return _TYPES.get(value.to.this.value if hasattr(value.to.this, "value") else "", UNKNOWN)
    if isinstance(value, exp.Count):
        return pa.int64()
    if isinstance(value, exp.Literal) and value.is_string:
        return pa.string()
    return UNKNOWN


def _aggregates() -> tuple[type[exp.Expression], ...]:
    from sqlglot import exp

    return (exp.Count, exp.Sum, exp.Avg, exp.Min, exp.Max)


def _unnamed() -> tuple[type[exp.Expression], ...]:
    """Common functions whose columns Spark names by their text."""
    from sqlglot import exp

    return (*_aggregates(), exp.Length, exp.Upper, exp.Lower, exp.Coalesce, exp.Concat, exp.Round, exp.JSONExtract)


def _odd(words: list[_Word]) -> str:
    """What sqlglot accepts and Spark perhaps not."""
    for one, two in pairwise(words):
        if (one.text == "," or one.lower == "select") and (two.text.upper() in _CLAUSES or two.text == ")"):
            return f"{two.text} follows {one.text}"
    return ""
