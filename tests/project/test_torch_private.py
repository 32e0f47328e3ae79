"""torch's private names are read in hmp.torch_private, which says what is missing of them, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hmp
from hmp import torch_private
from process_kit import run_in_another_process

HMP = Path(hmp.__file__).parent
# Torch's private names, and the places of the dispatcher's and of Dynamo's; bridges to libraries and the demo, which users copy from, may
# read their own.
MAY_READ = (
    "torch_private.py",
    "torch_dispatcher.py",
    "torch_compile/dynamo_internals.py",
    "torch_compile/dynamo_names.py",
    "compat/",
    "cli/demo/",
)
# What else reads private names, and which. This table may only shrink.
EXCEPTIONS = {"torch_compile/bridge.py": {"torch._dynamo", "torch.export._trace"}}  # whose import the bridge waits for

_WRITTEN = re.compile(r"\btorch(?:\.\w+)*\._(?!_)\w*(?:\.\w+)*")
_ASKING = ("getattr", "hasattr", "getattr_static", "rebind", "setattr", "delattr")


# --- who reads private names ----------------------------------------------------------------------------------------------


class _Reader:
    """Finds what a module reads of torch: attributes, imports, names given to getattr() and the like, and names written as strings."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.known = dict(self._imported())
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._note(target, node.value)

    def _imported(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((each.asname or "torch", each.name if each.asname else "torch") for each in node.names if _is_torchs(each.name))
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                for each in node.names:
                    path = f"{module}.{each.name}".lstrip(".")
                    if (not node.level and _is_torchs(module)) or (node.level and path.partition(".")[0] == "torch_private"):
                        yield each.asname or each.name, path

    def _note(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, its in zip(target.elts, value.elts, strict=True):
                self._note(each, its)
        elif isinstance(target, ast.Name) and (path := self.path(value)):
            self.known.setdefault(target.id, path)

    def path(self, node: ast.expr) -> str:
        """`torch._C._nn` for what is read from there, by whatever name the module has it; "" for anything else."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, "")
        inner = self.path(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""

    def read(self) -> Iterator[str]:
        documented = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names if _is_torchs(each.name))
            elif isinstance(node, ast.Attribute):
                yield self.path(node)
            elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in _ASKING and (owner := self.path(node.args[0])):
                    yield f"{owner}.{node.args[1].value}"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                yield from _WRITTEN.findall(node.value)
        yield from self.known.values()


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def private_names(source: str) -> set[str]:
    """The private names of torch that a module's source reads, each as long as it is read there."""
    found = {path for path in _Reader(source).read() if any(re.match(r"_(?!_)", part) for part in path.split("."))}
    return {path for path in found if not any(other.startswith(f"{path}.") for other in found)}


def test_private_names_of_torch_are_read_in_one_module() -> None:
    files = {path.relative_to(HMP).as_posix(): path for path in HMP.rglob("*.py")}
    assert "torch_private.py" in files and "wrapping/wrappers.py" in files
    found = {name: private_names(path.read_text(encoding="utf-8")) for name, path in files.items() if not name.startswith(MAY_READ)}
    assert {name: names for name, names in found.items() if names} == EXCEPTIONS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nf = torch._C._nn.gelu", {"torch._C._nn.gelu"}),
        ("import torch\ndef f(): return torch._C", {"torch._C"}),
        ("import torch.jit._builtins as b\nb._find_builtin", {"torch.jit._builtins._find_builtin"}),
        ("from torch.utils import _device", {"torch.utils._device"}),
        ("def f():\n    from torch.utils._pytree import tree_map as leaves", {"torch.utils._pytree.tree_map"}),
        ("from torch.amp import autocast_mode\nautocast_mode._cast", {"torch.amp.autocast_mode._cast"}),
        ("import torch\nprofiling: object = torch.autograd.profiler\nprofiling._is_on", {"torch.autograd.profiler._is_on"}),
        ("import torch\na, b = torch.nn, torch.optim\nb._hidden", {"torch.optim._hidden"}),
        ("import torch\nf = getattr(torch.Tensor, '_base', None)", {"torch.Tensor._base"}),
        ("import sys\nsys.modules.get('torch._dynamo.variables')", {"torch._dynamo.variables"}),
        ("NAMES = 'torch.functional torch._tensor'.split()", {"torch._tensor"}),
        ("name = f'torch._C.{part}'", {"torch._C"}),
        ("from .torch_private import vf\nvf._hidden", {"torch_private.vf._hidden"}),
        ("from .. import torch_private\ntorch_private._found", {"torch_private._found"}),
        ("from ..torch_private import vf as _vf\n_vf.mm, _vf.__name__", set()),
        ("import torch\ntorch.Tensor.__torch_function__, tensor._version, torch.nn.Module()._buffers", set()),
        ("'''About torch._C.'''", set()),
    ],
)
def test_every_way_to_read_a_private_name_is_found(source: str, found: set[str]) -> None:
    assert private_names(source) == found


# --- what must be there ---------------------------------------------------------------------------------------------------

_WITHOUT = """
    del sys.modules["hmp"]

    def without(name):
        owner, _, attribute = name.rpartition(".")
        found = torch
        for part in owner.split(".")[1:]:
            found = getattr(found, part)
        if hasattr(found, attribute):  # a torch that never had it is what is wanted
            delattr(found, attribute)
"""


@pytest.mark.slow
def test_a_torch_without_a_required_name_is_refused_when_the_first_name_is_asked_for() -> None:
    code = """
    without("torch._C._len_torch_dispatch_stack")
    torch.__version__ = "9.1.0"
    try:
        import hmp
        hmp.convert
    except Exception as error:
        print(type(error).__module__, type(error).__name__)
        print(error)
    """
    said = run_in_another_process(_WITHOUT + code, with_hmp=False, path=str(HMP.parent))
    assert said.splitlines() == [
        "hmp.errors HmpError",
        "hmp cannot work with torch 9.1.0: torch._C._len_torch_dispatch_stack, which torch does not promise and hmp needs, is missing. "
        f"hmp was run with torch {', '.join(torch_private.RELEASES_RUN[:-1])} and {torch_private.RELEASES_RUN[-1]}: install one of these, "
        "or a newer hmp",
    ]


@pytest.mark.slow
def test_each_required_name_is_missed() -> None:
    code = """
    import importlib.util
    spec = importlib.util.find_spec("hmp.torch_private")
    refused, fixed = 0, []
    for name, required in hmp.torch_private.NAMES.items():
        owner, _, attribute = name.rpartition(".")
        owner = hmp.torch_private._found(owner)
        if not required:
            continue
        found, module = getattr(owner, attribute), sys.modules.get(name)
        try:
            delattr(owner, attribute)
        except (AttributeError, TypeError):
            fixed.append(name)  # a type written in C
            continue
        if module is not None:
            sys.modules[name] = None  # an import of it raises
        try:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            print(name, "is not missed")
        except hmp.HmpError as error:
            refused += 1
            if f": {name}, " not in str(error):
                print(name, error)
        setattr(owner, attribute, found)
        if module is not None:
            sys.modules[name] = module
    print(refused, sum(hmp.torch_private.NAMES.values()), *fixed)
    """
    *not_missed, last = run_in_another_process(code).splitlines()
    refused, required, *fixed = last.split()
    assert not not_missed
    assert all(name.startswith(("torch._C.", "torch.Tensor._", "torch.UntypedStorage._")) for name in fixed), fixed
    assert int(refused) == int(required) - len(fixed) > 40


# --- what may be missing --------------------------------------------------------------------------------------------------

_USED = """
    import hmp
    layer, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    wanted = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    with hmp.casts("gaudi"):
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(layer(x), wanted) and layer(x).dtype is torch.bfloat16
        information = hmp.cache_info()
        layer(x).sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    assert torch.equal(layer.weight.grad, torch.ones(8, 64, dtype=torch.bfloat16).T.mm(x.bfloat16()).float())
    print(information.entries, information.bytes, information.hits, sorted(information.refused))
"""
# But for _lazy_clone, which a type written in C has.
OPTIONAL = [name for name, required in torch_private.NAMES.items() if not required and not name.endswith("._lazy_clone")]


MARKS = [["torch._C._is_cow_tensor"], ["torch._C._jit_interpret_graph"]]


@pytest.mark.slow
@pytest.mark.parametrize("names", [OPTIONAL, MARKS[0], pytest.param(MARKS[1], marks=pytest.mark.nightly)], ids=["all", *map(str, MARKS)])
def test_without_optional_names_hmp_works_and_without_marks_no_copy_of_a_weight_is_kept(names: list[str]) -> None:
    assert {*names} <= {*OPTIONAL} and MARKS[0][0] in OPTIONAL
    removed = _WITHOUT + "".join(f"    without({name!r})\n" for name in names)
    said = run_in_another_process(removed + _USED, with_hmp=False, path=str(HMP.parent))
    assert said.strip() == "0 0 0 ['device']"


@pytest.mark.nightly
@pytest.mark.slow
def test_with_all_optional_names_copies_are_kept() -> None:
    if not all(hasattr(torch._C, name) for name in ("_is_cow_tensor", "_jit_interpret_graph")):
        pytest.skip("this torch has no marks")
    said = run_in_another_process("    del sys.modules['hmp']\n" + _USED, with_hmp=False, path=str(HMP.parent))
    entries, nbytes, hits = map(int, said.split()[:3])
    assert entries == 2 and nbytes == 2 * (64 * 64 + 64) and hits > 0
