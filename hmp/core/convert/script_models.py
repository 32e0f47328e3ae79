"""A policy with scoped entries for a whole script: they hold in the outermost modules that the script calls."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from ..active import PROCESS, PolicyTable
from ..patching import patches
from ..policy import ListEntry, Policy, scopes
from ..torch_patches import module_calls
from ..torch_private import dynamo
from . import policy_tables
from .conversion import activate, choose_policy, convert


def convert_script(opt_level: str, policy: Policy | str | Path | None, files: Mapping[str, str], is_verbose: bool) -> CalledModules | None:
    """Return `convert()` for a script whose models are not there yet. Return what finds them, None for a policy without scoped entries."""
    chosen = choose_policy(opt_level, policy, None, files)
    if not chosen.scoped:
        convert(policy=chosen, verbose=is_verbose)
        return None
    with policy_tables.lock:
        was_patched = patches.installed()
        found = CalledModules(chosen, is_verbose)
        activate(chosen, found.outside, was_patched, is_verbose)
    module_calls.look_at_calls(found.look_at)
    return found


class CalledModules:
    """Resolves a policy's scoped entries for each module that is called outside of all others, at its first call."""

    def __init__(self, policy: Policy, is_verbose: bool) -> None:
        self.classes: set[str] = set()  # of the modules that were found
        self._policy, self._verbose = policy, is_verbose
        self._unmatched = dict.fromkeys(scopes.of_user(policy))
        # by id: what a WeakSet does for a look is Python code, which torch.compile would compile
        self._outermost: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._inside: dict[int, weakref.ref[torch.nn.Module]] = {}  # what they contain
        self._by_policy: dict[Policy, PolicyTable] = {}
        self.outside = policy_tables.scoped_table(policy, policy.unscoped, module_calls.new_scope_id(), is_verbose)

    @property
    def unmatched(self) -> tuple[ListEntry, ...]:
        """Return the scoped entries that matched no module so far, but for those of presets."""
        return tuple(self._unmatched)

    def look_at(self, module: torch.nn.Module, is_traced: bool) -> bool:
        """Resolve the entries for `module`; return False where there is nothing to do."""
        if id(module) in self._outermost or PROCESS.scope_id != self.outside.scope_id:  # the script has converted, or reverted, itself
            return False
        if is_traced and id(module) in self._inside:  # the call around it is in no frame
            return False
        if module_calls.is_inside_another(module, sys._getframe(1)) or isinstance(module, torch.jit.ScriptModule):
            return False
        imported = dynamo()
        (self._resolve if imported is None else imported.disable(self._resolve))(module)
        return True

    def _resolve(self, module: torch.nn.Module) -> None:
        with policy_tables.lock:
            self.classes.add(type(module_calls.inside_compiled(module)).__name__)
            for entry in scopes.matched(self._policy, module):
                self._unmatched.pop(entry, None)
            policies = scopes.resolve(self._policy, module, may_match_nothing=True)
            for each, own in scopes.differing(policies, module, self._policy.unscoped).items():
                module_calls.attach_scoped(each, self._table(own))
            for each in module.modules():
                _remember(self._inside, each)
            _remember(self._outermost, module)

    def _table(self, own: Policy) -> PolicyTable:
        if own not in self._by_policy:
            self._by_policy[own] = policy_tables.scoped_table(self._policy, own, self.outside.scope_id, self._verbose)
        return self._by_policy[own]


def _remember(numbers: dict[int, weakref.ref[torch.nn.Module]], module: torch.nn.Module) -> None:
    def forget(reference: object, number: int = id(module)) -> None:
        if numbers.get(number) is reference:
            del numbers[number]

    numbers[id(module)] = weakref.ref(module, forget)
