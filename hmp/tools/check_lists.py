"""A check of list files: what each name does, and all problems at once, each with its file and line."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ..core import lists
from ..core.ops import sites, table
from ..core.policy import folders as list_folders
from ..core.policy import precedence, presets, scopes
from ..core.policy.entries import EVERY_OP, ListEntry, ListName, parse_list, read_text
from ..core.policy.names import ops_of
from ..core.policy.policy import Policy
from ..core.policy.precedence import Listed
from ..core.rules import registry
from ..errors import HmpError, OpListError
from .explain import explain

Level = Literal["ok", "note", "error"]  # of an entry: it has an effect, it has none, or convert() would refuse it


class EntryFinding(NamedTuple):
    """The result for one name of a list, with a message.

    `level` is "ok" where it has an effect, "note" where it has none, "error" where convert() would refuse it.
    """

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
    """Return (file, list) of each list file at `path`, a file or a policy's folder. A file's list is `cast`, or that of its name.

    OpListError if the name isn't a list's, or the folder contains no list file, or `cast` is given for a folder.
    """
    file = Path(path)
    if file.is_dir():
        if cast is not None:
            raise OpListError("is a folder, in which each file's name shows which list it is; leave --list out", file)
        files = list_folders.files_in(file) if list_folders.misnamed(file) else list_folders.contents(file)
        return [(path, each) for each, path in list_folders.list_files(files).items()]
    if cast is None:
        said = list_folders.lists_named(file.name)
        if len(said) != 1 and not file.exists():
            raise (
                OpListError("no such file; give a list file or a policy's folder", file)
                if file.suffix == ".txt"
                else list_folders.is_no_folder(str(path))
            )
        if len(said) != 1:
            *others, last = lists.names()
            raise OpListError(f"its name does not show which list it is; add --list {', '.join(others)} or {last}", file)
        (cast,) = said
    return [(file, cast)]


def check(files: Iterable[tuple[Path, ListName]], folders: Iterable[Path] = (), model: torch.nn.Module | None = None) -> list[EntryFinding]:
    """Return a finding for every name in the files, in their order; a single one, an error, for a file that cannot be read.

    `folders` are policies' folders whose list files are among the files: a finding more for what else is wrong in one, and for its lists
    without a file. Scopes are those of modules of `model`; without one they are not checked.
    """
    files, folders = list(files), list(folders)
    entries, found = _read(files)
    usable, said = _judged(entries)
    found += said
    policy = _policy(usable)
    if len(folders) == 1 and len(files) == len(files_of(folders[0])):
        with contextlib.suppress(HmpError):  # convert() would refuse the folder, and what for is said below
            policy = Policy.load(folders[0])  # with what its base.txt adds
    found += _meanings(usable, policy, model)
    order = {str(path): index for index, (path, _) in enumerate(files)}
    found.sort(key=lambda each: (order.get(each.path, 0), each.line or 0, each.level == "note"))
    for folder in folders:
        found += _of_folder(folder, any(each.level == "error" for each in found))
    return found


def _read(files: Iterable[tuple[Path, ListName]]) -> tuple[list[ListEntry], list[EntryFinding]]:
    """Return the entries of the files, and an error for each other line, or for a file that cannot be read."""
    entries: list[ListEntry] = []
    found: list[EntryFinding] = []
    for path, cast in files:
        try:
            lines = read_text(path).removeprefix("\ufeff").splitlines()
        except OpListError as error:
            found.append(EntryFinding(str(path), error.line, "", cast, "error", _bare(error)))
            continue
        for number, text in enumerate(lines, start=1):
            try:
                # after a blank, a byte order mark within the file stays as it is there, and isn't an op's name
                entries += [entry._replace(path=str(path), line=number) for entry in parse_list(f" {text}", cast)]
            except OpListError as error:
                found.append(EntryFinding(str(path), number, "", cast, "error", _bare(error)))
    return entries, found


def _judged(entries: list[ListEntry]) -> tuple[list[ListEntry], list[EntryFinding]]:
    """Return the entries that a policy can have, and a finding for each that it cannot have, or that says nothing new."""
    taken: defaultdict[tuple[ListName | None, str | None], dict[str, ListEntry]] = defaultdict(dict)  # by list and scope: op → entry
    usable: list[ListEntry] = []
    found: list[EntryFinding] = []

    def say(entry: ListEntry, level: Level, message: str) -> None:
        found.append(EntryFinding(entry.path or "", entry.line, entry.text, entry.list_name, level, message))

    for entry in entries:
        try:
            ops = ops_of(entry)
        except OpListError as error:
            say(entry, "error", _bare(error))
            continue
        if not ops:
            say(entry, "note", "not an op of this torch release; skipped, because other releases or compilers have it")
            continue
        rivals = (precedence.same_op(ops, taken[rival, entry.scope]) for rival in _rivals(entry.list_name))
        other = next(filter(None, rivals), None)
        if other is not None:
            say(entry, "error", f"is also on the {other.list_name} list, as {other.text!r} ({other.path}:{other.line}); remove one of them")
            continue
        for op in ops:
            taken[entry.list_name, entry.scope].setdefault(op, entry)
        usable.append(entry)
    return usable, found


def _policy(usable: Iterable[ListEntry]) -> Policy:
    named: dict[str, Any] = {cast: frozenset(e.name for e in usable if e.list_name == cast and e.scope is None) for cast in lists.names()}
    return Policy("checked", **named)


def _meanings(usable: list[ListEntry], policy: Policy, model: torch.nn.Module | None) -> Iterator[EntryFinding]:
    """Yield what each entry of the policy does."""
    listed = Listed(policy)
    scoped = tuple(entry for entry in usable if entry.scope is not None)
    reached = set(scoped) if model is None else scopes.matched(Policy("checked", scoped=scoped), model)
    for entry in usable:
        if entry.scope is None:
            level, message = _meaning(entry, policy, listed)
        elif entry in reached:
            inside = scopes.effective(policy, ((entry,),))
            level, message = _meaning(entry, inside, Listed(inside))
            unchecked = " (scope not checked)" if model is None else ""
            message = f"inside modules whose path {entry.scope!r} matches{unchecked}: {message}"
        else:
            assert model is not None
            level = "note" if presets.is_in_one(entry.path) else "error"  # a preset's names modules that some models have
            near = scopes.hint(entry.scope, [name for name, _ in model.named_modules() if name])
            message = f"matches no module of {type(model).__name__}; {near}"
        yield EntryFinding(entry.path or "", entry.line, entry.text, entry.list_name, level, message)


def _meaning(entry: ListEntry, policy: Policy, listed: Listed) -> tuple[Level, str]:
    """Return what the entry of the policy does; `listed` is the policy's."""
    kind = lists.kind_of(entry.list_name)
    if kind.adds:
        return _added(entry, policy, listed, kind)
    if entry.name == EVERY_OP:
        if listed.star is not None and listed.star.list_name != entry.list_name:
            return "note", f"also on the {listed.star.list_name} list, which wins (R4)"
        return "ok", f"every op that is on no list ({sum(listed.source(op) is None for op in sites.starred())})"
    ops = ops_of(entry)
    if "." in entry.name and not sites.sites_of(ops[0]):
        return "ok", "a function of yours: it is cast as one op; ops that it calls are not looked up on the lists again"
    why = explain(entry.name, policy).why
    if ops[0] in table.DTYPE_OPS or sites.is_view(ops[0]):
        return "note", why
    sources = [each for each in map(listed.source, ops) if each is not None]
    if entry.list_name not in {each.list_name for each in sources}:
        return "note", f"also on the {sources[0].list_name} list, as {sources[0].text!r}, which wins (R4)"
    if all(map(sites.writes_first, ops)):
        return "note", registry.IN_PLACE.sentence
    return "ok", why


def _rivals(list_name: ListName) -> tuple[ListName, ...]:
    """Return the lists that may not have an op of this list."""
    own = lists.kind_of(list_name).excludes
    return (*own, *(kind.name for kind in lists.kinds() if list_name in kind.excludes and kind.name not in own))


def _added(entry: ListEntry, policy: Policy, listed: Listed, kind: lists.ListKind) -> tuple[Level, str]:
    """Return what an entry of a list does that adds to what others decide."""
    every_op = frozenset(sites.starred() if kind.every_op is None else kind.every_op())
    if entry.name == EVERY_OP:
        return "ok", f"every op for which it is possible ({sum(listed.added(kind.name, op) is not None for op in every_op)})"
    ops = ops_of(entry)
    if all(every_op.isdisjoint(sites.ancestry(op)) for op in ops):
        return "note", kind.without_effect
    told = (kind.explained(op, own, policy) for op in ops if (own := listed.added(kind.name, op)) is not None)
    return "ok", next(told, "")


def _wrong_words(files: Mapping[str, Path]) -> list[OpListError]:
    """Return what is wrong with the files of one word, base.txt too."""
    found = []
    for name, file in files.items():
        try:
            list_folders.read_base({name: file})
            list_folders.read_words({name: file}, list_folders.default_words())
        except OpListError as error:
            found.append(error)
    return sorted(found, key=str)


def _of_folder(folder: Path, has_errors: bool) -> list[EntryFinding]:
    """Return what is wrong in a policy's folder apart from its entries, and the lists that it leaves empty.

    An error of the policy as a whole is returned only where it has no other: an entry's error would be in it again.
    """
    files = list_folders.files_in(folder)
    found = [_error(OpListError(list_folders.what_is_meant(right), file)) for file, right in list_folders.misnamed(folder).items()]
    found += map(_error, _wrong_words(files))
    if not found and not has_errors:
        try:
            Policy.load(folder)
        except OpListError as error:
            found.append(_error(error))
    missing = [kind for kind in lists.kinds() if not kind.is_optional and kind.file not in files]
    with contextlib.suppress(OpListError):  # of a wrong base.txt, which is among the errors
        base = list_folders.read_base(files)
        whose = f"those of {base!r}, which base.txt names" if base else "empty; a base.txt with a preset's name would fill them"
        if missing:
            lacks = f"no {', '.join(kind.file for kind in missing)}: these lists are {whose}"
            found.append(EntryFinding(str(folder), None, "", "", "note", lacks))
    return found


def _error(error: OpListError) -> EntryFinding:
    return EntryFinding(error.path or "", error.line, "", "", "error", _bare(error))


def _bare(error: OpListError) -> str:
    """Return the error's message without file and line, which the finding has."""
    text = str(error)
    place = f"{error.path}:{error.line}: " if error.line else f"{error.path}: "
    return text.removeprefix(place)
