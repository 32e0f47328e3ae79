"""What was found, as a page and as the JSON that it is made from."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmic_ray.work_db import use_db

from .covering import MOST, Choice
from .mutants import package_of

PAGE = "docs/dev/mutants.md"
WIDTH = 90  # of a changed line
Found = Mapping[str, Any]

OPENING = """# Mutants

Do the tests notice errors in the core? One place of the core is changed at a time (a `not` added, a number raised by one, a loop \
left out), and tests that cover the changed line are run. A mutant is killed if one of them fails. A survivor is a gap in the tests, \
or a change without a visible effect.

`python -m tests.support.mutation cover`, `run` and `page` made this page, with the extra `mutation`, of hmp and its tests \
as of {commit}: {ran} mutants, drawn with the seed {seed} of those that cosmic-ray's operators make in the core, from each package \
in proportion. {asked}At most {most} tests were run for each mutant, the fastest of each \
file first, for at most {budget:g} seconds. They were chosen from {tests} tests of the default suite that passed while `cover` \
measured them: {folders}. Slow tests, and tests in their own processes, do not count.

**{killed} of {counted} were killed, {rate}**: {how}. Apart from these, {apart} are in lines that no measured test runs, such as branches \
for other devices and releases of torch. The survivors are listed below; some of them are equivalent to the original.

| package | mutants | killed | |
|---|---|---|---|
"""


def place(mutation: Any) -> str:
    """Where a mutation is, and which."""
    return f"{mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name}"


def killer(result: Any) -> str:
    """What noticed the mutant: the test that failed, or what else came of it; "" for nobody."""
    if not result.is_killed:
        return ""
    output = result.output or ""
    if output == "timeout":
        return output
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return (failed[1] if "::" in failed[1] else f"import of {failed[1]}") if failed else "crash"


def _found(choice: Choice, folder: Path) -> Iterator[Found]:
    for session in sorted(folder.glob("session*.sqlite")):
        with use_db(str(session)) as db:
            yield from (_row(choice, item.mutations[0], result) for item, result in db.completed_work_items)


def _row(choice: Choice, mutation: Any, result: Any) -> Found:
    lines = [line for line in (result.diff or "").splitlines() if not line.startswith(("---", "+++"))]
    before, after = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return {
        "file": str(mutation.module_path), "line": mutation.start_pos[0], "operator": mutation.operator_name.removeprefix("core/"),
        "occurrence": mutation.occurrence, "before": before, "after": after, "outcome": "killed" if result.is_killed else "survived",
        "killer": killer(result), "is_run": choice.is_run(mutation),
    }  # fmt: skip


def write(root: Path, about: Path, choice: Choice | None, kept: Path) -> None:
    """Write the JSON and the page from the sessions of a run; without those, the page from the JSON that is kept."""
    if choice is not None:
        mutants = sorted(_found(choice, about.parent), key=lambda each: (each["file"], each["line"], each["operator"], each["occurrence"]))
        lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in mutants)
        kept.write_text(f'{{"about":{about.read_text()},"mutants":[\n{lines}\n]}}\n')
    whole = json.loads(kept.read_text())
    (root / PAGE).write_text(_text(whole["about"], whole["mutants"]), encoding="utf-8")


def _text(about: Found, mutants: Sequence[Found]) -> str:
    packages: dict[str, list[Found]] = defaultdict(list)
    survivors: dict[str, list[Found]] = defaultdict(list)
    counted = [each for each in mutants if each["is_run"] or each["outcome"] == "killed"]
    for each in mutants:
        if each["is_run"] or each["outcome"] == "killed":
            packages[package_of(each["file"])].append(each)
        if each["outcome"] == "survived":
            survivors[each["file"]].append(each)
    killed = [each for each in mutants if each["outcome"] == "killed"]
    ways = [("timeout", "ran without end"), ("crash", "crashed"), ("import", "could not be imported")]
    how = [f"{count} {what}" for key, what in ways if (count := sum(each["killer"].startswith(key) for each in killed))]
    test = sum(each["killer"].startswith("tests/") for each in killed)
    text = OPENING.format(
        commit=about["commit"],
        ran=len(mutants),
        seed=about["seed"],
        asked="" if len(mutants) >= about["asked"] else f"They are the first of {about['asked']} in a random order. ",
        most=MOST,
        budget=about["budget"],
        tests=f"{about['tests']:,}",
        folders=_folders(about["folders"]),
        killed=len(killed),
        counted=len(counted),
        apart=len(mutants) - len(counted),
        rate=_rate(killed, counted),
        how=", ".join([f"a test failed with {test}", *how]),
    )
    for package in sorted(packages, key=lambda name: (name == "hmp", name)):
        of = packages[package]
        dead = [each for each in of if each["outcome"] == "killed"]
        name = f"`{package}`" if package != "hmp" else "modules in no package"
        text += f"| {name} | {len(of)} | {len(dead)} | {_rate(dead, of)} |\n"
    text += "\n## Survivors\n"
    for file in sorted(survivors):
        text += f"\n`{file}`\n\n"
        for each in survivors[file]:
            before, after = _short(each["before"], each["after"])
            asked = "" if each["is_run"] else ", which no measured test runs"
            text += f"- {each['line']}{asked}: `{before}` → `{after}`\n"
    return text


def _folders(folders: Mapping[str, int]) -> str:
    """Which tests were measured, as in "all of `caches` and `rules`, one in 7 of `lists`"."""
    said = []
    for every in sorted({*folders.values()}):
        *most, last = sorted(f"`{folder}`" for folder, each in folders.items() if each == every)
        of = f"{', '.join(most)} and {last}" if most else last
        said.append(f"all in {of}" if every == 1 else f"one in {every} of those in {of}")
    return "; ".join(said)


def _rate(some: Sequence[Found], of: Sequence[Found]) -> str:
    return f"{100 * len(some) / len(of):.0f} %"


def _short(before: str, after: str) -> tuple[str, str]:
    """The two lines around where they differ."""
    same = next((place for place, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), 0)
    start = 0 if max(len(before), len(after)) <= WIDTH else max(0, same - WIDTH // 2)

    def cut(line: str) -> str:
        part = line[start : start + WIDTH]
        return (("…" if start else "") + part + ("…" if start + WIDTH < len(line) else "") or "nothing").replace("`", "'")

    return cut(before), cut(after)
