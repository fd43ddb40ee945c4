"""Which files of a table hold the rows that were added since a position, from the commits since. Pure.

A commit that removes files either keeps their rows, as compaction does, or changes them. What was compacted is read as
it was before, while those files exist: a file that compaction wrote may hold rows of both sides of the position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from delivered.contract.sink import Changes

F = TypeVar("F")


@dataclass(frozen=True)
class FileCommit(Generic[F]):
    """One commit of a table.

    Attributes:
        name: for messages: "version 12 (DELETE)".
        adds: by path.
        removes: paths.
        same_rows: the added files hold the rows of the removed ones: compaction.
    """

    name: str
    adds: Mapping[str, F]
    removes: Collection[str] = ()
    same_rows: bool = False


@dataclass(frozen=True)
class Compacted(Generic[F]):
    """What compaction made of added files.

    Attributes:
        inner: the added files; they are left until the table's unused files are deleted.
        files: hold their rows now.
        others: `files` hold rows from before the position, too.
    """

    inner: frozenset[str]
    files: Mapping[str, F]
    others: bool


@dataclass
class Added(Generic[F]):
    """What was added since a position, and what happened to the rest.

    Attributes:
        files: hold the added rows, compacted or not.
        altered: commits that changed rows from before the position.
        mixed: why the added rows cannot be distinguished from others; empty: they can.
    """

    files: dict[str, F] = field(default_factory=dict)
    compacted: list[Compacted[F]] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    mixed: str = ""

    def take(self, commit: FileCommit[F]) -> None:
        """The next commit."""
        removes = set(commit.removes)
        groups = [g for g in self.compacted if removes & g.files.keys()]
        old = removes - self.files.keys() - {path for g in groups for path in g.files}
        if commit.same_rows:
            self._compact(commit, removes, groups, bool(old))
            return
        both = any(g.others for g in groups)
        for group in groups:
            if not group.others:
                self._replace(group)
        new = removes & self.files.keys()
        for path in new:
            del self.files[path]
        if old or both:
            self.altered.append(f"{commit.name} removed or changed rows")
        if (both or (old and new)) and commit.adds:
            self.mixed = f"{commit.name} rewrote rows of both sides of the position"
        elif not old:
            self.files |= commit.adds

    def keep_existing(self, exists: Callable[[str], bool]) -> None:
        """Read the compacted files instead of added ones that were deleted since."""
        for group in list(self.compacted):
            if not all(map(exists, group.inner)):
                if group.others:
                    self.mixed = "what was added was compacted with older files, and the files as they were are deleted"
                else:
                    self._replace(group)

    def changes(self) -> Changes:
        return Changes(altered=tuple(self.altered), unknown=(self.mixed,) * bool(self.mixed), continues=not self.mixed)

    def _compact(self, commit: FileCommit[F], removes: set[str], groups: list[Compacted[F]], old: bool) -> None:
        inner = removes & self.files.keys() - {path for g in self.compacted for path in g.inner}
        files = {path: f for g in groups for path, f in g.files.items() if path not in removes}
        if inner or groups:
            self.compacted = [g for g in self.compacted if g not in groups]
            names = frozenset(inner).union(*(g.inner for g in groups))
            others = old or any(g.others for g in groups)
            self.compacted.append(Compacted(names, {**files, **commit.adds}, others))

    def _replace(self, group: Compacted[F]) -> None:
        self.compacted.remove(group)
        for path in group.inner:
            self.files.pop(path, None)
        self.files |= group.files


def added_since(commits: Iterable[FileCommit[F]]) -> Added[F]:
    """Args: commits: those since the position, oldest first."""
    found: Added[F] = Added()
    for commit in commits:
        found.take(commit)
    return found
