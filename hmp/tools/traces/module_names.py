"""What the modules of a program are called in a capture, whatever is wrapped around them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from ...errors import HmpError
from ..formatting import some
from ..model_call import compiled_in
from .trace import INPUTS

# Wrapper's class → the attribute that it holds the wrapped module in, which has the wrapper's place in the model.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_COMPILED = "_orig_mod"  # of what torch.compile(module) gives


@dataclass
class Root:
    """A model: the prefix of its modules' names, and how many of its calls have returned."""

    prefix: str
    calls: int = 0


@dataclass(frozen=True)
class ModulePath:
    """A module's name in its model, and whether it is compiled."""

    name: str
    root: Root
    is_compiled: bool


class ModuleNames:
    """The places of the modules of `model`.

    Without one, of every module that runs and of those that it holds: the first model with parameters has no prefix, others have that of
    their class.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.places: weakref.WeakKeyDictionary[torch.nn.Module, ModulePath] = weakref.WeakKeyDictionary()
        self._is_open = model is None
        self._prefixes: set[str] = set()
        if model is not None:
            self._attach(model, Root(""))

    def place(self, module: torch.nn.Module) -> ModulePath | None:
        """Return the module's place; None for a module outside the model and for a wrapper, whose place the wrapped module has."""
        if self._is_open and (inside := _unwrapped(module)) not in self.places:
            self._attach(inside, Root(self._prefix_of(inside)))
        return self.places.get(module)

    def _prefix_of(self, module: torch.nn.Module) -> str:
        is_model = next(module.parameters(), None) is not None
        kind = type(module).__name__
        candidates = ["", *(f"{kind}{'' if number == 1 else number}" for number in range(1, len(self._prefixes) + 2))]
        prefix = next(each for each in candidates[not is_model :] if each not in self._prefixes)
        self._prefixes.add(prefix)
        return prefix

    def _attach(self, module: torch.nn.Module, root: Root) -> None:
        todo = [(module, root.prefix)]
        while todo:
            each, name = todo.pop()
            each = _unwrapped(each)
            if each in self.places:
                continue  # it is held under two names: the first one
            inside = vars(each)["_modules"].get(_COMPILED)
            self.places[each] = ModulePath(name, root, compiled_in(each) is not None)
            children = list((each if inside is None else inside).named_children())
            todo += [(child, f"{name}.{key}" if name else key) for key, child in reversed(children)]


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while (name := _WRAPPERS.get(type(module).__name__)) is not None and (inside := getattr(module, name, None)) is not None:
        module = inside
    return module


def renamer(rules: Mapping[str, str] | Iterable[str], names: Iterable[str]) -> Callable[[str], str]:
    """Return what gives a name in the second program for one in the first: each rule in turn rewrites what the ones before it gave.

    A rule is `OLD=NEW`, with as many `*` on both sides, each of which stands for any text; `model.*` also for `model` itself, and
    `model.*=*` takes the prefix away. Raise HmpError for an invalid rule, and for one that no name in `names` follows.
    """
    pairs = list(rules.items()) if isinstance(rules, Mapping) else [_split(rule) for rule in rules]
    steps = [_rule(old, new) for old, new in pairs]
    known = list(names)
    for (old, new), step in zip(pairs, steps, strict=True):
        changed = [step(name) for name in known]
        if changed == known:
            raise HmpError(f"map {old}={new}: no module is called {old}; the names are {_some(known)}")
        known = changed

    def renamed(name: str) -> str:
        if not name.endswith(INPUTS):
            for step in steps:
                name = step(name)
        return name

    return renamed


def _split(rule: str) -> tuple[str, str]:
    old, equals, new = rule.partition("=")
    if not equals:
        raise HmpError(f"map {rule}: expected OLD=NEW, such as model.layers.*=transformer.h.*")
    return old, new


def _rule(old: str, new: str) -> Callable[[str], str]:
    if old.count("*") != new.count("*"):
        raise HmpError(f"map {old}={new}: expected as many * on the right as on the left, got {old.count('*')} and {new.count('*')}")
    # a dot ends every name, so that `model.*` holds for `model` too
    pattern = re.compile("(.*)".join(map(re.escape, _ended(old).split("*"))))
    parts = _ended(new).split("*")

    def renamed(name: str) -> str:
        found = pattern.fullmatch(f"{name}.")
        if found is None:
            return name
        texts = [text for pair in zip(parts, (*found.groups(), ""), strict=True) for text in pair]
        return "".join(texts).strip(".")

    return renamed


def _ended(pattern: str) -> str:
    return pattern if pattern.endswith("*") else f"{pattern}."


def _some(names: list[str]) -> str:
    shown = [name for name in names if name and not name.endswith(INPUTS)]
    return some(shown, 4)
