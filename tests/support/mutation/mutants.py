"""The changes to the core that are tried, one at a time: made by cosmic-ray's operators, drawn with a seed."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_item import MutationSpec, WorkItem

DOOR = "hmp/core/apply.py"  # apply(), beside convert() and casts(): what it imports is the core
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
    """The package of hmp's core that the file belongs to; "hmp" for a module in none."""
    name = Path(file).parent.name
    return "hmp" if name == "core" else name


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


def sample(root: Path, number: int, seed: int) -> list[WorkItem]:
    """About as many as asked for that can be seen, of each package in proportion to what there is, in an order that is always the same."""
    operators = {name: plugins.get_operator("core/" + name)() for name in OPERATORS}
    everything: dict[str, list[MutationSpec]] = defaultdict(list)
    for file in core(root):
        nodes, name_of = list(ast_nodes(get_ast_from_path(file))), str(file.relative_to(root))
        for name, operator in operators.items():
            places = [place for node in nodes for place in operator.mutation_positions(node)]
            for occurrence, place in enumerate(places):
                everything[package_of(name_of)].append(MutationSpec(name_of, "core/" + name, occurrence, *place))
    total, dice, drawn = sum(map(len, everything.values())), random.Random(seed), []
    for package in sorted(everything):
        wanted = max(LEAST, round(number * len(everything[package]) / total))
        drawn += dice.sample(everything[package], min(wanted, len(everything[package])))
    dice.shuffle(drawn)
    return [WorkItem.single(f"{place:04}", spec) for place, spec in enumerate(drawn) if _is_seen(root, spec)]


def _is_seen(root: Path, spec: MutationSpec) -> bool:
    before = (root / spec.module_path).read_text(encoding="utf-8")
    after = mutate_code(before, plugins.get_operator(spec.operator_name)(), spec.occurrence)
    try:
        return after is not None and _seen(before) != _seen(after)
    except SyntaxError:
        return False
