"""Which line holds in which module: hmp's resolution beside one that is written out naively, and the rules one by one."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hmp

X = torch.ones(2, 2)
CASTS = ("bf16", "fp32", "promote")
# each with the names that mean the same
SAME = {"softmax": {"softmax"}, "linear": {"linear"}, "mul": {"mul", "multiply"}, "multiply": {"mul", "multiply"}}


OPS = {
    "softmax": lambda x: F.softmax(x, -1),
    "linear": lambda x: F.linear(x, x),
    "mul": lambda x: torch.mul(x, x),
    "multiply": lambda x: torch.multiply(x, x),
}


class Node(torch.nn.Module):
    """A module that calls each op, and then the modules that it holds by these names."""

    def __init__(self, **inside: torch.nn.Module) -> None:
        super().__init__()
        for name, module in inside.items():
            self.add_module(name, module)

    def forward(self) -> None:
        for op in OPS.values():
            op(X)
        for module in self._modules.values():
            module()


def listed(model: torch.nn.Module, policy: hmp.Policy) -> dict[str, dict[str, str | None]]:
    """For each path the list that each op was on there when it was called."""
    with hmp.casts(policy, model=model), hmp.record() as report:
        model()
    found: dict[str, dict[str, str | None]] = {}
    for row in report.rows:
        if row.op in SAME:
            found.setdefault(row.module.removeprefix(type(model).__name__), {})[row.op] = row.rule if row.rule in CASTS else None
    of_modules = {module: found[path] for path, module in model.named_modules() if path in found}
    return {path: of_modules[module] for path, module in model.named_modules(remove_duplicate=False)}


class Tie(Exception):
    pass


def naive(model: torch.nn.Module, lines: list[tuple[str, str | None, str]]) -> dict[str, dict[str, str | None]]:
    """The same, from the text of the rule alone. `lines` are (name, scope, list)."""
    paths: dict[torch.nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)

    def rank(module: torch.nn.Module, scope: str | None) -> tuple[int, int] | None:
        if scope is None:
            return (10**6, 0)
        steps = []
        for path in paths[module]:
            parts = path.split(".") if path else []
            for up in range(len(parts) + 1):
                if fnmatch.fnmatchcase(".".join(parts[: len(parts) - up]), scope):
                    steps.append(up)
        return (min(steps), -sum(letter not in "*?" for letter in scope)) if steps else None

    found: dict[str, dict[str, str | None]] = {}
    for module, its_paths in paths.items():
        told: dict[str, str | None] = {}
        for op, names in SAME.items():
            ranked = [(rank(module, scope), name, cast) for name, scope, cast in lines if name in names]
            best = min((r for r, *_ in ranked if r is not None), default=None)
            those = [(name, cast) for r, name, cast in ranked if r == best and best is not None]
            for name in names:
                if {(name, "bf16"), (name, "fp32")} <= set(those):
                    raise Tie
            # its own name before a synonym's; of one name BF16 and FP32 before promote
            those.sort(key=lambda each: (each[0] != op, each[1] == "promote"))
            told[op] = those[0][1] if those else None
        for path in its_paths:
            found[path] = told
    return found


names = st.sampled_from(["a", "b", "c"])
leaves = st.builds(Node)
trees = st.recursive(leaves, lambda inside: st.dictionaries(names, inside, max_size=3).map(lambda held: Node(**held)), max_leaves=8)
globs = st.lists(st.sampled_from(["a", "b", "c", ".", "*", "?"]), min_size=1, max_size=4).map("".join)
lines = st.lists(st.tuples(st.sampled_from(sorted(SAME)), globs, st.sampled_from(CASTS)), min_size=1, max_size=5)
unscoped = st.dictionaries(st.sampled_from(sorted(SAME)), st.sampled_from(CASTS), max_size=4)


@given(data=st.data(), tree=trees, scoped=lines, everywhere=unscoped)
def test_scope_resolution_is_the_naive_one(data: st.DataObject, tree: Node, scoped, everywhere) -> None:
    modules = [module for module in tree.modules() if isinstance(module, Node)]
    if data.draw(st.booleans()):  # one module at two paths
        tree.add_module("shared", data.draw(st.sampled_from([m for m in modules if m is not tree] or [Node()])))
    paths = [path for path, _ in tree.named_modules(remove_duplicate=False)]
    scoped = [line for line in scoped if any(fnmatch.fnmatchcase(path, line[1]) for path in paths)]
    entries: dict[str, set[str]] = {cast: {name for name, on in everywhere.items() if on == cast} for cast in CASTS}
    for name, glob, cast in scoped:
        entries[cast].add(f"{name} @ {glob}")
    every = [*scoped, *((name, None, cast) for name, cast in everywhere.items())]
    try:
        wanted = naive(tree, every)
    except Tie:
        with pytest.raises(hmp.OpListError):
            listed(tree, hmp.Policy(**entries))  # type: ignore[arg-type]
        return
    try:
        policy = hmp.Policy(**entries)  # type: ignore[arg-type]
    except hmp.OpListError:
        return  # one scope on both lists is refused, also where another line settles it
    for told in wanted.values():  # torch itself promotes in these: whether a list says so makes no difference
        told |= {op: None for op in ("mul", "multiply") if told[op] == "promote"}
    assert listed(tree, policy) == wanted


TREE = Node(encoder=Node(block=Node(), last=Node()), decoder=Node(block=Node(inner=Node())))


def on(policy: hmp.Policy, op: str = "softmax", model: torch.nn.Module = TREE) -> dict[str, str | None]:
    return {path: lists[op] for path, lists in listed(model, policy).items()}


def test_scope_a_tie_between_lists_names_both_lines(tmp_path: Path):
    bf16, fp32 = tmp_path / "bf16.txt", tmp_path / "fp32.txt"
    bf16.write_text("softmax @ *r.block\n")
    fp32.write_text("gelu\nsoftmax @ *.blockr\nsoftmax @ e*.block\n")
    with pytest.raises(hmp.OpListError, match="matches no module"):
        listed(TREE, hmp.Policy.load(tmp_path))
    fp32.write_text("gelu\nsoftmax @ e*.block\n")
    with pytest.raises(hmp.OpListError) as caught:
        listed(TREE, hmp.Policy.load(tmp_path))
    one, other = ("softmax @ *r.block", "BF16", f"{bf16}:1"), ("softmax @ e*.block", "FP32", f"{fp32}:2")
    said = str(caught.value)
    both = f"is on the {one[1]} list and on the {other[1]} list ({other[2]})"
    assert said.startswith(f"{one[2]}: {one[0]!r} and {other[0]!r} are the same op, which {both}")
    assert said.endswith("remove one, or make one pattern longer")
    fp32.write_text("gelu\nsoftmax @ e*.block\nsoftmax @ encoder.block\n")  # settled
    assert on(hmp.Policy.load(tmp_path))["encoder.block"] == "fp32"
