"""The public names wait for nothing, and the docstring of each has Args, Returns, Raises and an Example that runs."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
import hmp.types
from command_kit import ROOT, python
from process_kit import alone

BRIDGES = "hmp.compat.gaudi_config hmp.compat.habana hmp.compat.lightning hmp.compat.transformers".split()
# Habana's own names: of these the classes are asked, the functions are those that torch.cuda has, or are in Habana's guides
HABANA = [f"hmp.compat.habana.{name}" for name in "dataloader graphs hpu kernels optimizers".split()]
MADE_BY_HMP = "Applied Capture Handle Report Rule Shim Unreachable".split()
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples?):$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Public:
    """A public name, and the class that it is a method of."""

    name: str
    value: Any
    owner: type | None = None

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.value) or ""

    @functools.cached_property
    def sections(self) -> dict[str, str]:
        """Each section of the docstring, with its text."""
        _, *rest = SECTION.split(self.doc)
        return dict(zip((title.removesuffix("s") for title in rest[::2]), rest[1::2], strict=True))

    def documents(self, parameter: str) -> bool:
        listed = self.sections.get("Arg", "") + self.sections.get("Attribute", "")
        return re.search(rf"^    (?:[*\w]+, )*\*{{0,2}}{parameter}\b[^:\n]*:", listed, re.MULTILINE) is not None


RESULTS = ("Capture", "Handle", "Report", "Rule", "Unreachable")  # whose methods users call


@functools.cache
def public_names() -> tuple[Public, ...]:
    found: dict[str, Public] = {}
    for home in [hmp, *_modules(["hmp.memory", "hmp.low_kernels", "hmp.errors", *BRIDGES, *HABANA])]:
        for name in home.__all__:
            value = getattr(home, name)
            if not inspect.ismodule(value) and (inspect.isclass(value) or home.__name__ not in HABANA):
                found |= {each.name: each for each in _with_methods(f"{home.__name__}.{name}", value)}
    for name in RESULTS:
        found |= {each.name: each for each in _with_methods(f"hmp.types.{name}", getattr(hmp.types, name))}
    return tuple({id(each.value): each for each in reversed(found.values())}.values())[::-1]  # without second names


def _modules(names: list[str]) -> Iterator[Any]:
    for name in names:
        try:
            yield importlib.import_module(name)
        except ImportError:  # Lightning or transformers is not installed
            continue


def _with_methods(name: str, value: Any) -> Iterator[Public]:
    yield Public(name, value)
    if not inspect.isclass(value):
        return
    elsewhere = {each for base in value.__mro__ if not _is_ours(base) for each in vars(base)}
    for attribute in {each: None for base in value.__mro__ if _is_ours(base) for each in vars(base)}:
        member = inspect.getattr_static(value, attribute)
        # what the class of a framework declares is described there
        if not attribute.startswith("_") and attribute not in elsewhere and _function(member) is not None:
            yield Public(f"{name}.{attribute}", member, owner=value)


def _is_ours(value: Any) -> bool:
    return value.__module__.partition(".")[0] == "hmp"


def _function(value: Any) -> Any:
    """The function in a method, property or class method; None for another attribute."""
    if isinstance(value, (property, functools.cached_property)):
        return value.fget if isinstance(value, property) else value.func
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value if inspect.isfunction(value) else None


def problems(public: Public) -> list[str]:
    """What the docstring lacks."""
    if not public.doc or (dataclasses.is_dataclass(public.value) and public.doc.startswith(f"{public.value.__name__}(")):
        return ["a docstring"]
    if isinstance(public.value, (property, functools.cached_property)):
        return []
    lacking = [] if _has_example(public) else ["Example"]
    function = _function(public.value)
    if inspect.isclass(public.value):
        function = None if public.value.__name__ in MADE_BY_HMP else vars(public.value).get("__init__")
    elif function is not None and _returns(function) and not {"Return", "Yield"} & public.sections.keys():
        lacking.append("Returns")
    if function is not None:
        lacking += [f"argument {name}" for name in _parameters(function) if not public.documents(name)]
        lacking += [f"Raises {name}" for name in sorted(_raised(function)) if name not in public.sections.get("Raise", "")]
    return lacking


def _parameters(function: Any) -> list[str]:
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def _raised(function: Any) -> set[str]:
    """The exceptions that its own `raise` statements make."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except OSError:  # of a dataclass
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(ast.unparse(node.exc.func).rpartition(".")[2])
    return {name for name in found if name.endswith(("Error", "Exception"))}


def _returns(function: Any) -> bool:
    annotation = inspect.signature(function).return_annotation
    return annotation not in (None, "None", "NoReturn", inspect.Signature.empty)


def _has_example(public: Public) -> bool:
    if ">>> " in public.doc:
        return True
    if public.owner is not None:  # the example of its class may show it
        return f".{public.name.rpartition('.')[2]}(" in (inspect.getdoc(public.owner) or "").partition(">>> ")[2]
    return False


def _run_example(public: Public) -> str:
    """Return what doctest prints of an example that fails."""
    printed: list[str] = []
    home = public.name.removesuffix("." + getattr(public.owner or public.value, "__qualname__", ""))
    names = {"hmp": hmp, "torch": torch} | (dict(vars(sys.modules[home])) if home in HABANA else {})
    example = doctest.DocTestParser().get_doctest(public.doc, names, public.name, None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    runner.run(example, out=printed.append)
    return "".join(printed)


def test_every_public_name_says_what_it_takes_returns_and_raises_and_shows_a_call() -> None:
    assert len(public_names()) > 120
    lacking = {each.name: found for each in public_names() if (found := problems(each))}
    assert lacking == {}


@pytest.mark.parametrize("home", ["hmp", *BRIDGES, *HABANA])
def test_the_examples_run(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [each for each in public_names() if ">>> " in each.doc and _home(each.name) == home]
    assert {public.name: _run_example(public) for public in shown} == {public.name: "" for public in shown}


def _home(name: str) -> str:
    return max((each for each in ("hmp", *BRIDGES, *HABANA) if name.startswith(f"{each}.")), key=len)


@pytest.mark.slow
def test_importing_hmp_waits_for_nothing_and_brings_torch_and_the_standard_library_alone() -> None:
    script = """if True:
        import sys, types
        import hmp
        assert "torch" not in sys.modules
        assert type(hmp) is types.ModuleType and hmp.HmpError and "torch" not in sys.modules  # what pickles modules knows it by its type
        import torch
        before = set(sys.modules)
        hmp.convert
        print(*(name for name in set(sys.modules) - before if name.startswith("torch")))
        hmp.convert(); torch.ones(2, 2) @ torch.ones(2, 2); hmp.explain("mul"); hmp.revert()
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        torchs = {"torch", "sympy", "mpmath"}  # torch 2.7 imports sympy with torch.utils.checkpoint
        print(sorted(new - set(sys.stdlib_module_names) - torchs - {"hmp"}))
        lazy = tuple(f"hmp.tools.{name}." for name in ("benchmark", "tune", "compare", "nonfinite"))
        print([name for name in sys.modules if name.startswith(lazy)])
        assert all(getattr(hmp, name) is not None for name in hmp.__all__) and set(hmp.__all__) == set(dir(hmp)) and len(dir(hmp)) <= 30
        assert type(hmp) is types.ModuleType
        print(sorted(name for name in hmp.__all__ if isinstance(getattr(hmp, name), types.ModuleType)))
    """
    run = python("-c", script, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    late, others, not_asked_for, modules = run.stdout.splitlines()
    attention = {"torch.nn.attention._utils", "torch.nn.attention.flex_attention"}  # 5 ms
    assert set(late.split()) <= {"torch.nn.utils.prune", "torch.utils._device", *attention}
    assert (others, not_asked_for, modules) == ("[]", "[]", "[]")


@pytest.mark.slow
def test_a_compiled_function_may_be_the_first_to_ask(tmp_path: Path) -> None:
    code = "@torch.compile(backend='eager')\ndef f(x):\n    with hmp.disable_casts():\n        return x @ x\n"
    alone(tmp_path, f"import torch, hmp\n{code}assert f(torch.ones(2, 2)).dtype is torch.float32")
