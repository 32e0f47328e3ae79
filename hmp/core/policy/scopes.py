"""The policy of each module of a model: a policy's scoped entries that match the module's path, over its unscoped lists."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .. import lists
from . import presets
from .entries import AUTOCAST, ListEntry, error_at
from .names import ops_of, with_relatives
from .policy import Policy, as_policy
from .precedence import refuse_both

# The scoped entries that hold in a module, by precedence: those of one tuple win over those of all later tuples.
Ranks = tuple[tuple[ListEntry, ...], ...]

_WILDCARD = re.compile(r"\[!?\]?[^\]]*\]|[*?]")


class ModuleNode(NamedTuple):
    """A module at one of its paths in a model, with the scoped entries that match the path.

    `above` are the nodes of the modules that contain it, the nearest first.

    `paths` are its names: first the one that named_modules() gives, last the one in the model itself, without the parts that wrappers have
    put in (`module`, `_checkpoint_wrapped_module`), and between them those without some of these parts. An entry may match any.
    """

    paths: tuple[str, ...]
    module: torch.nn.Module
    matched: tuple[ListEntry, ...]
    above: tuple[ModuleNode, ...]

    @property
    def path(self) -> str:
        """Return the module's path in the model itself."""
        return self.paths[-1]


def refuse_without_model(policy: Policy) -> None:
    """Raise OpListError where the policy has scoped entries. For uses without a model, whose modules they could match."""
    if policy.scoped:
        first, model = policy.scoped[0], "use hmp.apply(model, policy), or pass model="
        without = "or use policy.unscoped, which leaves out such entries"
        raise error_at(first, f"{first.text!r} needs a model, and policy {policy.name!r} has none; {model}, {without}")


def resolve(policy: Policy, model: torch.nn.Module, *, may_match_nothing: bool = False) -> dict[torch.nn.Module, Policy]:
    """Return each module of `model` → the policy active in it, an unscoped one; the model itself comes first.

    A scoped entry holds in the modules whose path its glob matches and in all modules inside them. It wins over the unscoped lists for its
    ops and for those that follow them. Of several entries for one op, the one whose glob matches the nearest module wins; at equal distance
    the one whose glob has more characters besides wildcards; BF16 and FP32 win over promote. A module at several paths has the entries
    of all of them. Modules with the same entries get the same object. Raise OpListError for an entry that matches no module, and for two
    equally near and exact entries that put an op on the BF16 and on the FP32 list. With `may_match_nothing` an entry may.
    """
    nodes = list(_nodes(model, policy.scoped))
    if not may_match_nothing:
        _refuse_unmatched(policy, nodes)
    nearness: dict[torch.nn.Module, dict[ListEntry, int]] = {}
    for node in nodes:
        steps = nearness.setdefault(node.module, {})
        for distance, around in enumerate((node, *node.above)):
            for entry in around.matched:
                steps[entry] = min(distance, steps.get(entry, distance))
    of_ranks = functools.cache(functools.partial(effective, policy.unscoped))
    return {module: of_ranks(_by_rank(steps)) for module, steps in nearness.items()}


def matched(policy: Policy, model: torch.nn.Module) -> set[ListEntry]:
    """Return the scoped entries of the policy that match a module of `model`."""
    return {entry for node in _nodes(model, policy.scoped) for entry in node.matched}


def of_user(policy: Policy) -> list[ListEntry]:
    """Return the scoped entries that the user meant some module by.

    A preset's entries name what some models have. In a policy that has all of a preset's, as one that was saved, they are that preset's.
    """
    texts = {(entry.list_name, entry.text) for entry in policy.scoped}
    of_presets = [{(entry.list_name, entry.text) for entry in as_policy(preset).scoped} for preset in presets.policies()]
    theirs = set().union(*(each for each in of_presets if each <= texts))
    return [entry for entry in policy.scoped if (entry.list_name, entry.text) not in theirs and not presets.is_in_one(entry.path)]


def differing(policies: Mapping[torch.nn.Module, Policy], model: torch.nn.Module, outside: Policy) -> dict[torch.nn.Module, Policy]:
    """Return those of `policies` whose module may be called while another policy is active.

    That is the policy of a module that contains it, or `outside`, the one active around the model.

    Every module that contains it counts, not its parent alone: a ModuleList is never called, and code may call a module of a module.
    """
    found: dict[torch.nn.Module, Policy] = {}
    for node in _nodes(model, ()):
        own = policies[node.module]
        if own is not outside or any(policies[around.module] is not own for around in node.above):
            found[node.module] = own
    return found


def plain_path(path: str) -> str:
    """Return a module's path without the parts that torch.compile, FSDP and checkpoint_wrapper add: "layer.0" for "layer._orig_mod.0"."""
    return ".".join(part for part in path.split(".") if part not in _UNMISTAKABLE)


def effective(base: Policy, ranks: Ranks) -> Policy:
    """Return the unscoped policy of a module: `base` with the entries of `ranks` over its lists, without their scopes.

    An entry takes its ops, with their synonyms and their in-place and reflected forms, from all later ranks and from `base`.
    """
    taken: dict[tuple[str, str], ListEntry] = {}
    kept: list[ListEntry] = []
    for rank in ranks:
        claims = [(entry, [op for op in ops_of(entry) if (entry.about, op) not in taken]) for entry in rank]
        by_list = {each: {op: entry for entry, ops in claims if entry.list_name == each for op in ops} for each in lists.names()}
        refuse_both(by_list, "both match a module equally well: remove one, or make one pattern longer")
        for entry, ops in claims:
            kept += _without_taken(entry, ops) if ops else ()
            for op in with_relatives(ops):
                taken.setdefault((entry.about, op), entry)
    if not taken:
        return base
    for entry in (entry for each in lists.names() for entry in base._listed(each)):
        kept += _without_taken(entry, [op for op in ops_of(entry) if (entry.about, op) not in taken])
    origin = {(entry.list_name, entry.name): entry for entry in reversed(kept)}
    named: dict[str, Any] = {each: frozenset(name for on, name in origin if on == each) for each in lists.names()}
    return base.replace(name=base.name, scoped=(), origin=origin, **named)


def _without_taken(entry: ListEntry, ops: list[str]) -> Iterator[ListEntry]:
    """Yield `entry` where `ops`, those that no entry before has taken, are all that it names.

    Else entries for those of `ops` that can be named without naming an op that is taken.
    """
    every = ops_of(entry)
    if len(ops) == len(every):
        yield entry
        return
    for op in ops:
        named = entry._replace(name=op + (AUTOCAST if entry.is_autocasts else ""))
        if set(ops_of(named)) <= set(ops):
            yield named


def _by_rank(steps: Mapping[ListEntry, int]) -> Ranks:
    ranked: dict[tuple[int, int], list[ListEntry]] = {}
    for entry, distance in steps.items():
        exactness = len(_WILDCARD.sub("", str(entry.scope)))  # how many characters of the glob aren't wildcards
        ranked.setdefault((distance, -exactness), []).append(entry)
    return tuple(tuple(sorted(ranked[rank], key=str)) for rank in sorted(ranked))


def _nodes(model: torch.nn.Module, entries: Iterable[ListEntry]) -> Iterator[ModuleNode]:
    """Return a node for every path of every module of `model`, parents first, with the scoped `entries` that match it.

    ScriptModules are left out: they are compiled, and no policy reaches their ops.
    """
    matching = [(re.compile(fnmatch.translate(str(entry.scope))), entry) for entry in entries]

    def inside(paths: tuple[str, ...], module: torch.nn.Module, above: tuple[ModuleNode, ...]) -> Iterator[ModuleNode]:
        node = ModuleNode(paths, module, tuple(entry for glob, entry in matching if any(map(glob.match, paths))), above)
        yield node
        above = (node, *above)
        for name, child in module._modules.items():
            if child is None or isinstance(child, torch.jit.ScriptModule) or any(around.module is child for around in above):
                continue  # modules may contain each other
            yield from inside(_paths_inside(node, name), child, above)

    return inside(("",), model, ())


def _paths_inside(node: ModuleNode, name: str) -> tuple[str, ...]:
    """Return the paths of the child `name`: with its name, and without it where the node is a wrapper around that child."""
    named = tuple(f"{path}.{name}" if path else name for path in node.paths)
    return tuple(dict.fromkeys((*named, *node.paths))) if _wraps(node.module, name) else named


def _refuse_unmatched(policy: Policy, nodes: list[ModuleNode]) -> None:
    """Raise OpListError for an entry that matches no module: the user meant one."""
    found = {entry for node in nodes for entry in node.matched}
    if found.issuperset(policy.scoped):
        return
    entry = next((entry for entry in of_user(policy) if entry not in found), None)
    if entry is not None:
        near = hint(str(entry.scope), [node.path for node in nodes if node.path])
        model = type(nodes[0].module).__name__
        raise error_at(entry, f"{entry.text!r} matches no module of {model}, by the names of model.named_modules(); {near}")


def hint(scope: str, paths: list[str]) -> str:
    """Return the end of an error message: a scope that is close to `scope` and matches one of the paths, else the first paths."""
    if not paths:
        return "this one holds no others"
    globs = dict.fromkeys((*paths, *(f"*.{path.rpartition('.')[2]}" for path in paths)))
    same = [path for path in paths if path.endswith(f".{scope}")]
    near = same if len(same) == 1 else difflib.get_close_matches(scope, globs, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    top = list(dict.fromkeys(path.partition(".")[0] for path in paths))
    return f"it holds {', '.join(map(repr, top[:6]))}{' and others' if len(top) > 6 else ''}"


# --- modules that trainers and libraries wrap around a model: DDP, FSDP, Fabric, DeepSpeed, torch.compile, checkpoints, PEFT ---

# What wrappers call the module that they wrap: DDP, DataParallel and DeepSpeed; torch.compile; Fabric; FSDP; checkpoint_wrapper.
_WRAPPED_NAMES = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Of these, the ones that no module of the user's has.
_UNMISTAKABLE = frozenset(name for name in _WRAPPED_NAMES if name.startswith("_"))
# Whose they are: a module of the user's that has one child of such a name isn't a wrapper.
_LIBRARIES = frozenset(("torch", "lightning", "lightning_fabric", "pytorch_lightning", "deepspeed", "accelerate"))
# torch's classes whose children have the user's names.
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
# PeftModel, its tuner, and a layer with an adapter.
_WRAPPED_NAMES_OF_PEFT = ("base_model", "model", "base_layer")


def _wraps(module: torch.nn.Module, name: str) -> bool:
    """Return True if the child `name` is what the wrapper `module` wraps: its path in the model is then that of the wrapper."""
    if name == "_orig_mod":  # OptimizedModule sets `forward` on the object
        return True
    if name in _WRAPPED_NAMES_OF_PEFT and _library(module) == "peft":
        return True
    return name in _WRAPPED_NAMES and _is_wrapper(module) and not module._parameters


def _library(module: torch.nn.Module) -> str:
    return str(type(module).forward.__module__).partition(".")[0]


def _is_wrapper(module: torch.nn.Module) -> bool:
    return _library(module) in _LIBRARIES and not isinstance(module, _CONTAINERS)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside the wrappers around `model`, which is `model` without a wrapper.

    A wrapper's `forward` is a library's, and it has neither parameters of its own nor children besides what it wraps.
    """
    chain = [model]
    while (found := _inner(chain[-1])) is not None and all(found is not module for module in chain):
        chain.append(found)
    inside = set(map(id, chain))
    stops = (each for each in chain[:-1] if each._parameters or any(id(c) not in inside for c in each.children()))
    return next(stops, chain[-1])


def _inner(module: torch.nn.Module) -> torch.nn.Module | None:
    if not _is_wrapper(module):
        return None
    return next((inner for name in _WRAPPED_NAMES if (inner := module._modules.get(name)) is not None), None)
