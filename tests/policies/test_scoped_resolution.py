"""Which line holds in which module: hmp's resolution beside one that is written out naively, the rules one by one, and through wrappers.

Trainers and libraries put a name of their own into the path.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import hmp
from test_scoped_models import Block, Net

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
        with pytest.raises(hmp.errors.OpListError):
            listed(tree, hmp.Policy(**entries))  # type: ignore[arg-type]
        return
    try:
        policy = hmp.Policy(**entries)  # type: ignore[arg-type]
    except hmp.errors.OpListError:
        return  # one scope on both lists is refused, also where another line settles it
    assert listed(tree, policy) == wanted


TREE = Node(encoder=Node(block=Node(), last=Node()), decoder=Node(block=Node(inner=Node())))


def on(policy: hmp.Policy, op: str = "softmax", model: torch.nn.Module = TREE) -> dict[str, str | None]:
    return {path: lists[op] for path, lists in listed(model, policy).items()}


def test_scope_a_tie_between_lists_names_both_lines(tmp_path: Path):
    bf16, fp32 = tmp_path / "bf16.txt", tmp_path / "fp32.txt"
    bf16.write_text("softmax @ *r.block\n")
    fp32.write_text("gelu\nsoftmax @ *.blockr\nsoftmax @ e*.block\n")
    with pytest.raises(hmp.errors.OpListError, match="matches no module"):
        listed(TREE, hmp.Policy.load(tmp_path))
    fp32.write_text("gelu\nsoftmax @ e*.block\n")
    with pytest.raises(hmp.errors.OpListError) as caught:
        listed(TREE, hmp.Policy.load(tmp_path))
    one, other = ("softmax @ *r.block", "BF16", f"{bf16}:1"), ("softmax @ e*.block", "FP32", f"{fp32}:2")
    said = str(caught.value)
    both = f"is on the {one[1]} list and on the {other[1]} list ({other[2]})"
    assert said.startswith(f"{one[2]}: {one[0]!r} and {other[0]!r} are the same op, which {both}")
    assert said.endswith("remove one, or make one pattern longer")
    fp32.write_text("gelu\nsoftmax @ e*.block\nsoftmax @ encoder.block\n")  # settled
    assert on(hmp.Policy.load(tmp_path))["encoder.block"] == "fp32"


LOW, WIDE = torch.bfloat16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's wrappers


def compiled(module: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(module, backend="eager")


def inside(path: str, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[Net], torch.nn.Module]:
    """Wraps the module at that path of the model."""

    def wrapped(model: Net) -> torch.nn.Module:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, wrap(model.get_submodule(path)))
        return model

    return wrapped


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp(module: torch.nn.Module) -> torch.nn.Module:
    return torch.distributed.fsdp.FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def peft(model: torch.nn.Module) -> torch.nn.Module:
    library = pytest.importorskip("peft")
    return library.get_peft_model(model, library.LoraConfig(target_modules=["linear"], r=2))


WRAPPERS: dict[str, Callable[[Net], torch.nn.Module]] = {
    "checkpoint_wrapper of a layer": inside("encoder.0.linear", checkpoint_wrapper),
    "two wrappers": inside("encoder.0", lambda block: checkpoint_wrapper(checkpoint_wrapper(block))),
    "torch.compile of a model with a checkpoint_wrapper": lambda model: compiled(inside("encoder.0", checkpoint_wrapper)(model)),
    "DataParallel": torch.nn.DataParallel,
    "AveragedModel": AveragedModel,
    "FSDP": lambda model: fsdp(inside("encoder.0", fsdp)(model)),
    "DDP of a model with wrappers": lambda model: ddp(inside("encoder.0", lambda block: compiled(checkpoint_wrapper(block)))(model)),
    "PEFT": peft,
}


@pytest.mark.parametrize(
    ("name", "scope", "order"),
    [
        ("checkpoint_wrapper of a layer", "encoder.0.linear", "applied first"),
        ("two wrappers", "*.0", "wrapped first"),
        ("torch.compile of a model with a checkpoint_wrapper", "encoder.0", "wrapped first"),
        ("DataParallel", "encoder.0.linear", "wrapped first"),
        ("AveragedModel", "*.0", "wrapped first"),  # it holds a copy of the model
        ("FSDP", "encoder.0", "wrapped first"),
        ("FSDP", "encoder.0.linear", "applied first"),
        ("DDP of a model with wrappers", "*.0", "applied first"),
        ("PEFT", "encoder.0", "wrapped first"),
    ],
)
@pytest.mark.usefixtures("process_group", "fresh_compiler")
def test_a_scope_names_modules_as_the_model_itself_does(name: str, scope: str, order: str) -> None:
    model: torch.nn.Module = Net()
    blocks = [*model.encoder, *model.decoder]
    policy = hmp.Policy("scoped", bf16={f"linear @ {scope}"})
    if order == "applied first":
        hmp.apply(model, policy)
        model = WRAPPERS[name](model)
    else:
        model = hmp.apply(WRAPPERS[name](model), policy)
    model(torch.ones(2, 4))
    blocks = [*model.module.encoder, *model.module.decoder] if name == "AveragedModel" else blocks
    assert [block.seen[0] for block in blocks] == [LOW, WIDE, LOW if scope == "*.0" else WIDE, WIDE]


def test_a_module_of_the_users_with_a_child_of_such_a_name_is_no_wrapper() -> None:
    """Its child has a path of its own: `linear @ module` is not `linear` of the whole model."""

    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.fc = torch.nn.Sequential(Block()), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.module(x))

    model = Mine()
    with pytest.raises(hmp.errors.OpListError, match="matches no module"):
        hmp.apply(model, hmp.Policy("scoped", bf16={"linear @ 0"}))
    hmp.apply(model, hmp.Policy("scoped", bf16={"linear @ module"}))(torch.ones(2, 4))
    assert (model.module[0].seen[0], model.fc.seen[0]) == (LOW, WIDE)
