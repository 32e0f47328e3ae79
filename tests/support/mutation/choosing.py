"""Which tests are asked about a mutant, and in which order."""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from functools import cache
from itertools import zip_longest
from pathlib import Path

from .covering import UNTRACED
from .mutants import Mutant

MOST = 120  # tests for one mutant


class Choice:
    """The tests that ran the changed line; for one that runs at import those of the function it heads, or of its file."""

    def __init__(self, root: Path, covering: Path) -> None:
        kept = json.loads(covering.read_text())
        self.root, self.lines, self.names, self.folders = root, kept["lines"], kept["tests"], kept["folders"]
        self.seconds = dict(zip(self.names, kept["seconds"], strict=True))

    def tests(self, mutant: Mutant) -> list[str]:
        """Those of the package's own folder and others in turn.

        Of each the quickest first, and no file's for longer than the others' before, so that the first few are unlike one another.
        """
        spent: dict[str, float] = defaultdict(float)
        ranked: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
        for test in sorted(self._covering(mutant), key=self._time):
            file = test.partition("::")[0]
            spent[file] += self.seconds[test]
            ranked[file.startswith(f"tests/{mutant.package}/")].append((spent[file], test))
        own, others = (sorted(each) for each in ranked.values())
        chosen = [test for pair in zip_longest(own, others) for _, test in filter(None, pair)][:MOST]
        return chosen + [test for test in self.names if UNTRACED.get(test.partition("::")[0]) == mutant.package]

    def few(self) -> list[str]:
        """The two quickest tests of each file."""
        had: Counter[str] = Counter()
        found = []
        for test in sorted(self.seconds, key=self._time):
            file = test.partition("::")[0]
            had[file] += 1
            found += [test] if had[file] <= 2 else []
        return sorted(found)

    def _time(self, test: str) -> tuple[float, str]:
        return self.seconds[test], test

    def is_run(self, mutant: Mutant) -> bool:
        """Whether one of the measured tests runs the changed statement, or the function that it heads."""
        return bool(self._running(mutant))

    def _running(self, mutant: Mutant) -> set[str]:
        of_file = self.lines.get(mutant.file, {})
        for first, last in _around(self.root / mutant.file, mutant.line):
            if found := {self.names[test] for line in range(first, last + 1) for test in of_file.get(str(line), ())}:
                return found
        return set()

    def _covering(self, mutant: Mutant) -> set[str]:
        if found := self._running(mutant):
            return found
        if found := {self.names[test] for tests in self.lines.get(mutant.file, {}).values() for test in tests}:
            return found
        folders = (f"tests/{mutant.package}/", "tests/rules/")
        of = ([each for each in sorted(self.seconds, key=self._time) if each.startswith(folder)] for folder in folders)
        return {test for tests in of for test in tests[:15]}


def _around(file: Path, line: int) -> list[tuple[int, int]]:
    """The spans of lines that tell which tests run a line: its statement without what that holds, then the function that it heads."""
    held = [
        (node.decorator_list[0].lineno if getattr(node, "decorator_list", ()) else node.lineno, node)
        for node in ast.walk(_tree(file))
        if isinstance(node, (ast.stmt, ast.excepthandler))
    ]
    around = [(first, node) for first, node in held if first <= line <= (node.end_lineno or first)]
    if not around:
        return [(line, line)]
    first, node = max(around, key=lambda each: (each[0], -(each[1].end_lineno or 0)))
    body = getattr(node, "body", None)
    if not body:
        return [(line, line), (first, node.end_lineno or first)]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [(body[0].lineno, node.end_lineno or first)]
    return [(line, line), (first, body[0].lineno - 1)]


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
