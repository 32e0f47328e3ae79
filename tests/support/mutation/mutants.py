"""The changes to the core that are tried, one at a time: made by cosmic-ray's operators, drawn with a seed."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code

DOOR = "hmp/session/__init__.py"  # convert(), apply(), casts(): what these import is the core
LEAST = 4  # of each package

# What Python refuses at once, such as `<<` of two strings, says nothing about tests: only what is likely to give another answer.
OPERATORS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue ReplaceContinueWithBreak "
    "ExceptionReplacer NumberReplacer RemoveDecorator ZeroIterationForLoop "
    "ReplaceUnaryOperator_Delete_Not ReplaceUnaryOperator_Delete_USub ReplaceUnaryOperator_Delete_Invert"
).split()
OPERATORS += [f"ReplaceBinaryOperator_{pair}" for pair in "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul".split()]
OPERATORS += [f"ReplaceBinaryOperator_{pair}" for pair in "LShift_RShift RShift_LShift BitAnd_BitOr".split()]
OPERATORS += [f"ReplaceComparisonOperator_{pair}" for pair in "Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is Lt_LtE Lt_GtE LtE_Lt LtE_Gt".split()]
OPERATORS += [f"ReplaceComparisonOperator_{pair}" for pair in "Gt_GtE Gt_LtE GtE_Gt GtE_Lt".split()]


@dataclass(frozen=True)
class Mutant:
    """One change: cosmic-ray's operator at its nth place in a file."""

    file: str
    line: int
    operator: str
    occurrence: int

    @property
    def package(self) -> str:
        """The package of hmp that its file belongs to."""
        return package_of(self.file)

    @lru_cache(maxsize=2)  # noqa: B019
    def source(self, root: Path) -> str | None:
        """The whole changed file; None where the change is none that could be seen, or where Python cannot read it."""
        before = (root / self.file).read_text(encoding="utf-8")
        after = mutate_code(before, plugins.get_operator("core/" + self.operator)(), self.occurrence)
        try:
            return None if after is None or _seen(before) == _seen(after) else after
        except SyntaxError:
            return None

    def change(self, root: Path) -> tuple[str, str]:
        """The lines that differ, before and after."""
        before = (root / self.file).read_text(encoding="utf-8").splitlines()
        after = (self.source(root) or "").splitlines()
        (old, new), *_ = [
            (before[i:j], after[k:m]) for tag, i, j, k, m in SequenceMatcher(None, before, after, False).get_opcodes() if tag != "equal"
        ]
        return " ".join(map(str.strip, old)), " ".join(map(str.strip, new))


class _WithoutHints(ast.NodeTransformer):
    """Takes out what is never evaluated, or only read by people and type checkers."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        """To cosmic-ray the star of `def f(a, *, b)` is a product."""
        node.args, node.posonlyargs, node.kwonlyargs = [*node.posonlyargs, *node.args, *node.kwonlyargs], [], []
        node.defaults, node.kw_defaults = [*node.defaults, *(each for each in node.kw_defaults if each)], []
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        node.returns = None
        overload = any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)
        return None if overload else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)


def package_of(file: str) -> str:
    """The package of hmp that the file belongs to; "hmp" for a module in none."""
    return Path(file).parent.name


def _seen(source: str) -> str:
    compile(source, "mutant", "exec")
    return ast.dump(_WithoutHints().visit(ast.parse(source)))


def core(root: Path) -> list[Path]:
    """The modules of hmp that `DOOR` imports, directly or not, inside of functions too."""
    found, todo = set(), [root / DOOR]
    while todo:
        file = todo.pop()
        if file not in found and file.is_file():
            found.add(file)
            todo += [each for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) for each in _imported(root, file, node)]
    return sorted(found)


def _imported(root: Path, file: Path, node: ast.AST) -> list[Path]:
    """The files that an import statement of a module of hmp's may mean: modules, packages and names in them."""
    if isinstance(node, ast.Import):
        modules = [root.joinpath(*alias.name.split(".")) for alias in node.names if alias.name.split(".")[0] == "hmp"]
    elif isinstance(node, ast.ImportFrom) and (node.level or str(node.module).split(".")[0] == "hmp"):
        of = file.parents[node.level - 1] if node.level else root
        module = of.joinpath(*node.module.split(".")) if node.module else of
        names = [module / alias.name for alias in node.names]
        modules = names if module == root / "hmp" else [module, *names]  # hmp/__init__ imports everything
    else:
        return []
    return [each for module in modules for each in (module.with_suffix(".py"), module / "__init__.py")]


def all_mutants(root: Path) -> dict[str, list[Mutant]]:
    """By package, every change that the operators know, those included that nobody could see."""
    operators = {name: plugins.get_operator("core/" + name)() for name in OPERATORS}
    found: dict[str, list[Mutant]] = defaultdict(list)
    for file in core(root):
        nodes = list(ast_nodes(get_ast_from_path(file)))
        for name, operator in operators.items():
            places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
            for occurrence, (line, _) in enumerate(places):
                mutant = Mutant(str(file.relative_to(root)), line, name, occurrence)
                found[mutant.package].append(mutant)
    return dict(found)


def sample(root: Path, number: int, seed: int) -> list[Mutant]:
    """About as many as asked for, of each package in proportion to what there is, in a random order that is always the same.

    Some of them have no source that is worth a try: to know which takes longer than to draw them.
    """
    everything, drawn = all_mutants(root), []
    total = sum(map(len, everything.values()))
    dice = random.Random(seed)
    for package in sorted(everything):
        wanted = max(LEAST, round(number * len(everything[package]) / total))
        drawn += dice.sample(everything[package], min(wanted, len(everything[package])))
    dice.shuffle(drawn)
    return drawn
