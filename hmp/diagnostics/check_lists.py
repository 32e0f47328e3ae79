"""Everything that can be said of list files at once: what each name stands for, and every problem with its line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import OpListError
from ..lists import CASTS, EVERY_OP, ListEntry, ListName, Policy, conflicts, list_files, parse_list, read_list, scopes, spelling
from ..ops import op_facts, sites
from .explanation import explain

Level = Literal["ok", "note", "error"]
# How files are named that hold a list of that kind.
_MARKS: Mapping[str, ListName] = {
    "bf16": "bf16",
    "fp16": "bf16",
    "lower": "bf16",
    "fp32": "fp32",
    "promote": "promote",
    "widest": "promote",
}


class Finding(NamedTuple):
    """What there is to say of one name: "ok" with what it does, "note" where it does nothing, "error" where it cannot be used."""

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
    """The list files at `path`, a file or a policy's folder, each with its kind: `cast`, or what its name says.

    OpListError where nothing says it, or nothing is there.
    """
    file = Path(path)
    if file.is_dir():
        return [(path, each) for each, path in list_files(file).items()]
    if cast is None:
        said = {kind for mark, kind in _MARKS.items() if mark in file.name.lower()}
        if len(said) != 1 and not file.exists():
            raise OpListError("no such file; give a list file or a policy's folder", file)
        if len(said) != 1:
            raise OpListError("its name does not say which list it is; name it with --list bf16, fp32 or promote", file)
        (cast,) = said
    return [(file, cast)]


def missing_of(path: str | Path) -> list[ListName]:
    """The lists that have no file in a policy's folder, and are empty; none for what is no folder."""
    return [cast for cast in CASTS if cast not in list_files(Path(path))] if Path(path).is_dir() else []


def check(files: Iterable[tuple[Path, ListName]]) -> list[Finding]:
    """What there is to say of every name in the files, in their order; what cannot be read at all is one error of its file."""
    found: list[Finding] = []
    rules: list[ListEntry] = []
    for path, cast in files:
        try:
            rules += read_list(path, cast)
        except OpListError as error:
            if error.line is None:
                found.append(Finding(str(path), None, "", cast, "error", _bare(error)))
                continue
            lines = path.read_bytes().decode("utf-8", errors="replace").removeprefix("\ufeff").splitlines()
            for number, text in enumerate(lines, start=1):
                try:
                    rules += [rule._replace(path=str(path), line=number) for rule in parse_list(text, cast)]
                except OpListError as bad:
                    found.append(Finding(str(path), number, "", cast, "error", _bare(bad)))
    found += _of_rules(rules)
    order = {str(path): index for index, (path, _) in enumerate(files)} if isinstance(files, list) else {}
    return sorted(found, key=lambda each: (order.get(each.path, 0), each.line or 0))


def _of_rules(rules: list[ListEntry]) -> list[Finding]:
    taken: defaultdict[tuple[ListName | None, str | None], dict[str, ListEntry]] = defaultdict(dict)  # by list and scope: op → entry
    usable: list[ListEntry] = []
    found: list[Finding] = []

    def say(rule: ListEntry, level: Level, message: str) -> None:
        found.append(Finding(rule.path or "", rule.line, rule.text, rule.cast, level, message))

    for rule in rules:
        try:
            ops = spelling.resolve(rule)
        except OpListError as error:
            say(rule, "error", _bare(error).removeprefix(f"{rule.name!r} is "))
            continue
        if not ops:
            say(rule, "note", "no op of this torch release; skipped, other releases or compilers know it")
            continue
        other = conflicts.same_op(ops, taken[conflicts.RIVALS.get(rule.cast), rule.scope])
        if other is not None:
            say(rule, "error", f"is on the {other.cast} list too, as {other.text!r} ({other.path}:{other.line}); take it off one of them")
            continue
        before = conflicts.same_op(ops, taken[rule.cast, rule.scope])
        if before is not None:
            say(rule, "note", f"the same op as {before.text!r} in line {before.line}")
        for op in ops:
            taken[rule.cast, rule.scope].setdefault(op, rule)
        usable.append(rule)
    bf16, fp32, promote = (frozenset(rule.name for rule in usable if rule.cast == cast and rule.scope is None) for cast in CASTS)
    policy = Policy("checked", bf16=bf16, fp32=fp32, promote=promote)
    noted = {(each.path, each.line, each.name) for each in found}
    for rule in usable:
        if (rule.path, rule.line, rule.text) in noted:
            continue
        if rule.scope is None:
            level, message = _meaning(rule, policy)
        else:
            level, message = _meaning(rule, scopes.effective(policy, ((rule,),)))
            message = f"inside modules whose path {rule.scope!r} matches: {message}"
        say(rule, level, message)
    return found


def _meaning(rule: ListEntry, policy: Policy) -> tuple[Level, str]:
    if rule.name == EVERY_OP:
        return "ok", f"every op that is on no list ({sum(1 for _ in sites.starred())})"
    if "." in rule.name and not sites.sites_of(spelling.resolve(rule)[0]):
        return "ok", "a function of yours; it is one op, and what it calls inside is not decided again"
    told = explain(rule.name, policy)
    if spelling.resolve(rule)[0] in op_facts.DTYPE_OPS:
        return "note", told.why
    places = [site.partition(":")[0] for site in told.sites if not site.endswith("left to torch")]
    return "ok", f"{told.why}; at {', '.join(places)}" if places else told.why


def _bare(error: OpListError) -> str:
    """The message without the place, which a finding has."""
    text = str(error)
    place = f"{error.path}:{error.line}: " if error.line else f"{error.path}: "
    return text.removeprefix(place)
