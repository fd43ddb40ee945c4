"""YAML of users: values as they are written, and bounded in size, depth and aliases."""

from __future__ import annotations

import re
from typing import Any

import yaml

from delivered.model.errors import UsageError

TEXT_BYTES_MAX = 1 << 20
NODES_MAX = 20_000
DEPTH_MAX = 50


class _Loader(yaml.SafeLoader):
    """Reads a number or a flag only where its text is what it would be written as again.

    YAML 1.1 reads 0123 as 83, 1_000 as 1000, 22:22 as 1342, 1.10 as 1.1, yes and on as true, and 2026-01-01 as a date:
    for the name of a topic or a password, another one. All these stay text.
    """


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"0|-?[1-9][0-9]{0,17}", "-0123456789"),
    ("float", r"-?(?:0|[1-9][0-9]{0,9})\.(?:0|[0-9]{0,3}[1-9])", "-0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def load_yaml(text: str) -> Any:
    """
    Raises:
        yaml.YAMLError: it is not YAML, or an explicit tag does not fit its value.
        UsageError: it is larger, deeper or more repeated than a pipeline can be.
    """
    _check(text)
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (ValueError, TypeError, AttributeError, OverflowError, KeyError) as error:  # !!int "x", !!timestamp "x"
        raise yaml.YAMLError(f"a value does not fit its tag: {str(error)[:200]}") from None


def compose_yaml(text: str) -> Any:
    """The nodes of a text that `load_yaml` accepted, with their lines."""
    return yaml.compose(text, Loader=_Loader)


def _check(text: str) -> None:
    """Count nodes with their aliases expanded, event by event, before anything is built."""
    if len(text) > TEXT_BYTES_MAX:
        raise _too_large(f"has {len(text):,} characters", f"{TEXT_BYTES_MAX:,}")
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_):
                raise _too_large(f"refers to {event.anchor!r} within itself", "no cycle")
            count += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            count += 1
            open_.append((event.anchor, count))
            if len(open_) > DEPTH_MAX:
                raise _too_large(f"is nested more than {DEPTH_MAX} deep", str(DEPTH_MAX))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = count - before + 1
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if count > NODES_MAX:
            raise _too_large(f"has more than {NODES_MAX:,} values, with its aliases expanded", f"{NODES_MAX:,}")


def _too_large(what: str, limit: str) -> UsageError:
    return UsageError(
        "FILE_TOO_LARGE",
        f"This YAML {what}; the limit is {limit}.",
        next_step="split it into several pipelines; `delivered init` writes an example",
    )
