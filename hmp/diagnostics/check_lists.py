"""A check of list files: what each name does, and all problems at once, each with its file and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import OpListError
from ..lists import CASTS, EVERY_OP, LISTS, ListEntry, ListName, Policy, conflicts, list_files, parse_list, read_list, scopes, spelling
from ..ops import op_facts, sites
from .explanation import explain

Level = Literal["ok", "note", "error"]
# A part of a file's name → the list that such a file contains.
_MARKS: Mapping[str, ListName] = {
    "bf16": "bf16",
    "fp16": "bf16",
    "lower": "bf16",
    "fp8": "fp8",
    "fp32": "fp32",
    "promote": "promote",
    "widest": "promote",
}


class Finding(NamedTuple):
    """The result for one name of a list, with a message. `level` is "ok" where it has an effect, "note" where it has none, "error" where
    convert() would refuse it."""

    path: str
    line: int | None
    name: str
    cast: ListName
    level: Level
    message: str

    def __str__(self) -> str:
        at = f"{self.path}:{self.line}" if self.line else self.path
        return f"{at}: {self.name}: {self.message}" if self.name else f"{at}: {self.message}"


def files_of(path: str | Path, cast: ListName | None = None) -> list[tuple[Path, ListName]]:
    """(file, list) of each list file at `path`, a file or a policy's folder. Which list a file contains is `cast`, or told by its name.

    OpListError where the name does not tell, or the folder contains no list file.
    """
    file = Path(path)
    if file.is_dir():
        return [(path, each) for each, path in list_files(file).items()]
    if cast is None:
        said = {kind for mark, kind in _MARKS.items() if mark in file.name.lower()}
        if len(said) != 1 and not file.exists():
            raise OpListError("no such file; give a list file or a policy's folder", file)
        if len(said) != 1:
            raise OpListError("its name does not say which list it is; name it with --list fp8, bf16, fp32 or promote", file)
        (cast,) = said
    return [(file, cast)]


def missing_of(path: str | Path) -> list[ListName]:
    """The lists that have no file in a policy's folder, and are empty; none for what is no folder. Most policies have no FP8 list."""
    return [cast for cast in CASTS if cast not in list_files(Path(path))] if Path(path).is_dir() else []


def check(files: Iterable[tuple[Path, ListName]]) -> list[Finding]:
    """A finding for every name in the files, in their order; a single one, an error, for a file that cannot be read."""
    found: list[Finding] = []
    entries: list[ListEntry] = []
    for path, cast in files:
        try:
            entries += read_list(path, cast)
        except OpListError as error:
            if error.line is None:
                found.append(Finding(str(path), None, "", cast, "error", _bare(error)))
                continue
            lines = path.read_bytes().decode("utf-8", errors="replace").removeprefix("\ufeff").splitlines()
            for number, text in enumerate(lines, start=1):
                try:
                    entries += [entry._replace(path=str(path), line=number) for entry in parse_list(text, cast)]
                except OpListError as bad:
                    found.append(Finding(str(path), number, "", cast, "error", _bare(bad)))
    found += _of_entries(entries)
    order = {str(path): index for index, (path, _) in enumerate(files)} if isinstance(files, list) else {}
    return sorted(found, key=lambda each: (order.get(each.path, 0), each.line or 0))


def _of_entries(entries: list[ListEntry]) -> list[Finding]:
    taken: defaultdict[tuple[ListName | None, str | None], dict[str, ListEntry]] = defaultdict(dict)  # by list and scope: op → entry
    usable: list[ListEntry] = []
    found: list[Finding] = []

    def say(entry: ListEntry, level: Level, message: str) -> None:
        found.append(Finding(entry.path or "", entry.line, entry.text, entry.cast, level, message))

    for entry in entries:
        try:
            ops = spelling.resolve(entry)
        except OpListError as error:
            say(entry, "error", _bare(error).removeprefix(f"{entry.name!r} is "))
            continue
        if not ops:
            say(entry, "note", "no op of this torch release; skipped, other releases or compilers know it")
            continue
        rivals = (conflicts.same_op(ops, taken[rival, entry.scope]) for rival in conflicts.RIVALS.get(entry.cast, ()))
        other = next(filter(None, rivals), None)
        if other is not None:
            say(entry, "error", f"is on the {other.cast} list too, as {other.text!r} ({other.path}:{other.line}); take it off one of them")
            continue
        before = conflicts.same_op(ops, taken[entry.cast, entry.scope])
        if before is not None:
            say(entry, "note", f"the same op as {before.text!r} in line {before.line}")
        for op in ops:
            taken[entry.cast, entry.scope].setdefault(op, entry)
        usable.append(entry)
    lists: dict[str, Any] = {cast: frozenset(e.name for e in usable if e.cast == cast and e.scope is None) for cast in LISTS}
    policy = Policy("checked", **lists)
    noted = {(each.path, each.line, each.name) for each in found}
    for entry in usable:
        if (entry.path, entry.line, entry.text) in noted:
            continue
        if entry.scope is None:
            level, message = _meaning(entry, policy)
        else:
            level, message = _meaning(entry, scopes.effective(policy, ((entry,),)))
            message = f"inside modules whose path {entry.scope!r} matches: {message}"
        say(entry, level, message)
    return found


def _meaning(entry: ListEntry, policy: Policy) -> tuple[Level, str]:
    if entry.name == EVERY_OP:
        return "ok", f"every op that is on no list ({sum(1 for _ in sites.starred())})"
    if "." in entry.name and not sites.sites_of(spelling.resolve(entry)[0]):
        return "ok", "a function of yours; it is one op, and what it calls inside is not decided again"
    told = explain(entry.name, policy)
    if spelling.resolve(entry)[0] in op_facts.DTYPE_OPS:
        return "note", told.why
    places = [site.partition(":")[0] for site in told.sites if not site.endswith("left to torch")]
    return "ok", f"{told.why}; at {', '.join(places)}" if places else told.why


def _bare(error: OpListError) -> str:
    """The error's message without file and line, which the finding has."""
    text = str(error)
    place = f"{error.path}:{error.line}: " if error.line else f"{error.path}: "
    return text.removeprefix(place)
