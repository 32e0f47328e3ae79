"""Every variable of a module of the core that changes while hmp runs: who empties it, and whether that is so."""

from __future__ import annotations

import ast
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hmp
from hmp.context import state

PACKAGE = Path(hmp.__file__).parent
CORE = """errors fork_safe low_kernels torch_private weak_tensors formatting observing uncompiled patching context casting caches ops
    lists wrapping torch_hooks dispatch torch_compile diagnostics session""".split()

# Empty (or nothing, or 0) whenever nothing is patched: revert() sees to it.
EMPTIED = """
caches.activation_cache: _last _unshared misses
caches.shared_cast: _hits
caches.writes_by_address: _library
caches.weight_cache: _nbytes misses refused used_once
context.state: _calling_backward regions_open
context.suspensions: _alive
dispatch.function_protocol: _asked _counterparts _in_types _places _tables
dispatch.placement: _dispatchers
dispatch.dispatchers: _made
patching.patches: _unpatched _rebound _swapped _undo
session.compiled_policies: _alive _casts _latest _log_observers observers
session.conversion: _converted _regions_entered
torch_compile.bridge: functions
torch_compile.dynamo_internals: _added _bridge
torch_hooks.autocast: _answers
torch_hooks.late_imports: _then
torch_hooks.library_ops: _changed
torch_hooks.module_calls: _marks
torch_hooks.scripted: _in_code
uncompiled: _asking _plain _stance
"""

# What stays, and why it may.
STAYS = {
    "caches.activation_cache._epoch": "counts: what was cast in another epoch is not used again",
    "caches.mark_proof._captured": "types of devices; a graph that was captured may be replayed whenever",
    "caches.mark_proof._found": "what was found out about each type of device",
    "caches.mark_proof._writes_by_address": "what was found out about each type of device",
    "caches.weight_cache._at_most": "numbers of bytes, a device each, counted anew where the limit is reached",
    "caches.weight_cache._backwards": "counts",
    "caches.weight_cache._alive": "weak: entries of weights that are alive",
    "caches.weight_cache._epoch": "counts: what was cast in another epoch is not used again",
    "caches.weight_cache._kept_by_graph": "weak: nothing where no node is alive",
    "caches.weight_cache._here": "a thread's own, put back by whoever set it",
    "caches.weight_cache._limit": "the user's setting",
    "caches.write_marks._harmless": "code objects of functions that wait",
    "caches.write_marks._looked_in": "modules that were looked in for such functions",
    "context.loading._current": "a context's own, put back by whoever set it",
    "context.state.around_backward": "emptied by who watches: a recording removes what it adds",
    "context.state._current": "a context's own, put back by whoever set it",
    "dispatch.placement.holders": "filled at import",
    "dispatch.dispatcher_code.NAMES": "what generated code refers to",
    "dispatch.dispatcher_code._SIGNATURES": "what generated code refers to, by number",
    "dispatch.dispatchers._specialised_for": "the policy that the dispatchers are written for; it does nothing when they stand nowhere",
    "dispatch.user_functions._changes": "counts what was registered",
    "dispatch.user_functions._registered": "what the user has registered, for every conversion to come",
    "dispatch.user_functions._rules": "weak: decorated functions",
    "fork_safe._held_by": "a thread's own, while it forks",
    "fork_safe._locks": "weak: every lock there is",
    "low_kernels._chosen": "the user's setting",
    "lists.spelling._warned": "a warning is given once",
    "ops.sites._by_others": "emptied where what was found in torch's places is not torch's own (R16)",
    "ops.sites._found": "torch's own functions, used again where torch stands as it stood",
    "patching.cache._clears": "filled at import",
    "patching.cache._stood": "torch's own objects, of which one list is kept",
    "patching.patches._installation": "an object, another one after each restore()",
    "session.compiled_policies.when_patched": "filled at import",
    "session.compiled_policies._has_compiled": "what `hmp run` asks when the script has ended, which may have reverted",
    "torch_compile.bridge._number_of": "numbers of policies, by which compiled code is guarded: at most 256",
    "torch_compile.bridge._numbers": "numbers of policies, by which compiled code is guarded: at most 256",
    "torch_compile.bridge.entering": "filled at import",
    "torch_hooks.autocast._asked_to_enable": "weak: autocast regions that are alive",
    "torch_hooks.autocast._entered": "a context's own",
    "torch_hooks.autocast._installation": "a number that tells installations apart",
    "wrapping.in_fp8._counted": "a thread's own, put back by whoever set it",
    "torch_hooks.autocast._said": "a warning is given once",
    "torch_hooks.autocast._regions": "weak: autocast regions that are alive",
    "torch_hooks.module_calls._look": "one function, taken back by revert()",
    "torch_hooks.module_calls._changes": "counts: compiled code is guarded on it",
    "torch_hooks.module_calls._numbers": "weak: numbers of policies that are alive",
    "torch_hooks.whole_models._looks_left": "counts down to a limit; revert() begins anew",
    "torch_private._mkldnn_flags": "filled at import",
    "torch_private._parts": "filled at import",
    "torch_private._written_count_parts": "filled at import",
    "wrapping.float32_products._logged": "a line is logged once",
    "wrapping.kernel_fallback._counts": "what hmp.fallbacks() shows, which outlives a conversion",
}
_CONTAINERS = {
    "deque",
    "dict",
    "list",
    "set",
    "OrderedDict",
    "Counter",
    "WeakSet",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "local",
    "ContextVar",
}


def variables() -> Iterator[str]:
    """The variables of the core's modules that hold something that can change, or are bound anew by a function."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in CORE:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bound_anew = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            else:
                continue
            is_constant = name.lstrip("_").isupper() or name == "__all__"  # in capitals: nobody changes it
            if name in bound_anew or (not is_constant and _is_container(node.value)):
                yield ".".join((*parts, name))


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, (ast.Dict, ast.List, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
        return True
    made = value.func if isinstance(value, ast.Call) else None
    made = made.value if isinstance(made, ast.Subscript) else made
    return (made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")) in _CONTAINERS


def emptied() -> list[str]:
    return [f"{module}.{name}" for line in EMPTIED.split("\n") if line for module, names in [line.split(": ")] for name in names.split()]


def test_every_variable_is_on_the_list() -> None:
    known = {*emptied(), *(name for name in STAYS if not name.startswith("dispatch.dispatcher_code."))}  # which are in capitals
    assert set(variables()) == known


def value_of(name: str) -> Any:
    module, _, variable = name.rpartition(".")
    return getattr(importlib.import_module(f"hmp.{module}"), variable)


def after_revert() -> dict[str, Any]:
    """What is in these variables once everything has been used and hmp.revert() was called."""
    gc.collect()  # an exception of another test's may hold the frames of a region in a cycle
    open_before = len(state.regions_open)  # a thread of another test's may still be in a region
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    hmp.apply(model, "habana")
    with hmp.convert(verbose=False), hmp.casts("torch-cpu"), torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 8))
        used = [name for name in emptied() if value_of(name)]
    assert len(used) > len(emptied()) // 2, used  # else nothing was there to be emptied
    hmp.revert()
    found = {name: value_of(name) for name in emptied()}
    found["context.state.regions_open"] = state.regions_open[open_before:]
    return found


def test_all_of_them_are_empty_after_revert() -> None:
    found = after_revert()
    assert found.pop("caches.activation_cache._last") == (None, None)
    assert all(casts.policy is None for casts in found.pop("session.compiled_policies._casts").values())
    assert {name: value for name, value in found.items() if value} == {}
