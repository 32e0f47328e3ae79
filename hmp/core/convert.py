"""convert() and casts(): a policy for the process or in a context. And for a whole script, whose models are not there yet."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import HmpError
from . import lists, tables
from .active import autocast, state
from .active.regions import Region
from .active.state import PROCESS, PolicyTable
from .compile import dynamo_patches, traced_functions
from .compiler_stance import untraced
from .ops import sites
from .patching import patches
from .policy import scopes
from .policy.policy import HABANA, Policy, as_policy, in_dtype
from .tables import announce
from .tables import lock as _lock
from .torch_patches import imports, module_calls
from .torch_private import dynamo


class Handle:
    """The result of `hmp.convert()`: `revert()`, or the end of a `with` block, restores the policy from before.

    Example:
        >>> handle = hmp.convert()
        >>> hmp.is_converted()
        True
        >>> handle.revert()
        >>> hmp.is_converted()
        False
    """

    def __init__(self, table: PolicyTable) -> None:
        self._table = table

    def __repr__(self) -> str:
        return f"<hmp.convert() to {self._table.user_policy.name!r}: revert() undoes it>"

    @untraced
    def revert(self) -> None:
        """Undo this conversion and all later ones. A second call does nothing."""
        with _lock:
            if self not in _converted:
                return
            del _converted[_converted.index(self) :]
            if not revert_if_unused():
                _activate_latest()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.revert()


# The conversions that have not been reverted, latest last: its policy is active.
_converted: list[Handle] = []
_regions_entered = False


@untraced
def convert(  # noqa: PLR0913
    opt_level: str = "O1",
    bf16_file_path: str | Path | None = "",
    fp32_file_path: str | Path | None = "",
    isVerbose: bool = False,
    *,
    promote_file_path: str | Path | None = "",
    policy: Policy | str | Path | None = None,
    dtype: Any = None,
    verbose: bool | None = None,
    model: torch.nn.Module | None = None,
    **list_file_paths: str | Path | None,
) -> Handle:
    """Activate a policy for the whole process. A second call replaces the policy.

    The arguments are those of Habana's call. After an exception torch is as it was before.

    Args:
        opt_level: "O1" uses the lists. "O2" runs matrix products and convolutions in the low-precision dtype and every other op in
            float32, whatever BF16 and FP32 lists are passed.
        bf16_file_path: The list of ops that run in the low-precision dtype. "" and None are Habana's default list.
        fp32_file_path: The list of ops that run in float32. "" and None are Habana's default list.
        isVerbose: Log the policy, and each distinct cast once.
        promote_file_path: The list of ops that run in the widest dtype of their inputs. "" and None are Habana's default list.
        policy: A policy, a preset's name or a folder of lists, instead of list files and "O2".
        dtype: The low-precision dtype, torch.bfloat16 or torch.float16; None takes that of the policy, else torch.bfloat16.
        verbose: Another name of `isVerbose`.
        model: The model whose modules the scoped entries (`softmax @ decoder.*`) match, as it is now.
        **list_file_paths: Lists of other kinds: `fp8_file_path` (matrix products that run in FP8), `fp32_result_file_path` (matrix products
            whose result stays float32), `saved_file_path` (ops whose saved activations are packed), and those of plug-ins. "" and None are
            an empty list.

    Returns:
        A handle that restores the policy from before, also a context manager.

    Raises:
        OpListError: A list cannot be used.
        HmpError: Other arguments are wrong, or exclude each other.

    Example:
        >>> with hmp.convert():
        ...     torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    is_verbose = isVerbose if verbose is None else verbose
    # reading the lists is within the pause too: it makes enough objects for the garbage collector to look through all of torch's
    with tables.gc_paused():
        files = {"bf16": bf16_file_path, "fp32": fp32_file_path, "promote": promote_file_path, **_by_list(list_file_paths)}
        chosen = in_dtype(choose_policy(opt_level, policy, model, files), dtype)
        with _lock:
            follow_others()
            # whatever fails, fails before anything is active
            _check_model(model, chosen, "convert(model=...)")
            if model is not None and chosen.scoped:
                table = resolved(chosen, unscripted(model, "convert(model=...)"), chosen.unscoped, is_verbose)
            else:
                table = tables.table_of(chosen, is_verbose)
            return _activate(chosen, table, is_verbose)


def _activate(chosen: Policy, table: PolicyTable, is_verbose: bool) -> Handle:
    """Make `table` active for the process, as the latest conversion."""
    tables.patch_around_calls()
    module_calls.begin_outermost_calls()
    handle = Handle(table)
    _converted.append(handle)
    _activate_latest()
    autocast.log_if_enabled()
    if is_verbose:
        announce(chosen)
    return handle


def _by_list(paths: Mapping[str, str | Path | None]) -> dict[str, str | Path | None]:
    """Return the paths of the arguments `NAME_file_path=`, by the list.

    Raise HmpError where such a list is of a kind that is not installed, and TypeError for another keyword, as Python does.
    """
    arguments = {kind.argument: kind.name for kind in lists.kinds()}
    for given in paths:
        if given not in arguments:
            if given.endswith("_file_path"):
                raise HmpError(f"convert({given}=...): {lists.missing(given.removesuffix('_file_path'))}")
            raise TypeError(f"convert() got an unexpected keyword argument {given!r}; list files are {', '.join(arguments)}")
    return {arguments[given]: path for given, path in paths.items()}


def choose_policy(
    opt_level: str, policy: Policy | str | Path | None, model: torch.nn.Module | None, files: Mapping[str, str | Path | None]
) -> Policy:
    """Return the policy that the arguments of `convert()` ask for; `files` are those of its lists."""
    given: dict[str, Any] = {cast: file for cast, file in files.items() if file}
    if opt_level not in ("O1", "O2"):
        raise HmpError(
            f"opt_level= expected 'O1' (the lists) or 'O2' (matrix products in low precision, the rest in float32), got {opt_level!r}"
        )
    if policy is not None:
        if given:
            raise HmpError("policy= and list files exclude each other; give one of them, or Policy.from_files(...)")
        if opt_level == "O2":
            raise HmpError("policy= and opt_level='O2', which is the policy 'habana-o2', exclude each other; give one of them")
        return as_policy(policy, model)
    if opt_level == "O2":
        for kind in (each for each in lists.kinds() if each.is_optional and each.name in given):
            raise HmpError(
                f"{kind.argument}= and opt_level='O2', whose {kind.title} list is empty, exclude each other; "
                f"give policy=hmp.Policy.load('habana-o2').replace({kind.name}={{'linear', ...}})"
            )
        return as_policy("habana-o2")
    return Policy.from_files(**given) if given else as_policy(HABANA)


@untraced
def revert() -> None:
    """Undo every `convert()`, `casts()` and `apply()`: no policy is active and torch is not patched. Does nothing without one.

    A call of an applied model that is running keeps its casts, and so does a `casts()` context of another thread. torch stays patched until
    the last of them ends.

    Example:
        >>> handle = hmp.convert()
        >>> hmp.revert()
        >>> hmp.is_converted()
        False
    """
    global _regions_entered
    with _lock:
        _converted.clear()
        _activate_latest()
        module_calls.detach_applied()
        _regions_entered = False
        state.when_ended(_restore)


def _restore() -> None:
    with _lock:
        if _is_used():  # since revert()
            return
        tables.empty_all()
        module_calls.detach_all()
        patches.restore()


def _is_used() -> bool:
    """Return True if a policy can become active by itself: something is converted, a model has a policy, or a `casts()` was entered."""
    return bool(_converted or _regions_entered or module_calls.any_applied())


def revert_if_unused() -> bool:
    """Undo all patches if no policy can become active by itself, and return True if so. The caller holds the lock."""
    if _is_used():
        return False
    revert()
    return True


@contextmanager
def patched_as_before() -> Iterator[None]:
    """Make a context after which no `casts()` that was entered in it keeps torch patched. In it torch is patched once at most."""
    global _regions_entered
    before, _regions_entered = _regions_entered, True
    try:
        yield
    finally:
        with _lock:
            _regions_entered = before
            revert_if_unused()


def is_converted() -> bool:
    """Return True if a process-wide policy is active.

    Returns:
        True from `hmp.convert()` on until it is reverted; `hmp.casts()` and `hmp.apply()` do not count.

    Example:
        >>> with hmp.casts("habana"):
        ...     hmp.is_converted()
        False
    """
    return PROCESS.policy is not None


def is_in_place() -> bool:
    """Return True if torch is patched: from the first policy on until `revert()`, also while no policy is active."""
    return patches.installed()


def casts(
    policy: Policy | str | Path | Callable[..., Any] = "autocast",
    *,
    dtype: torch.dtype | str | None = None,
    model: torch.nn.Module | None = None,
) -> Any:
    """Activate a policy in the calling thread or task: a context manager and a decorator. Contexts nest.

    torch stays patched until `hmp.revert()`. Outside the context the patches do nothing.

    Args:
        policy: A policy, a preset's name or a folder of lists. The default is "autocast": the lists of torch.autocast for the device of
            `model`, or else for the device in use.
        dtype: The low-precision dtype, torch.bfloat16 or torch.float16; None takes that of the policy.
        model: The model whose modules the scoped entries (`softmax @ decoder.*`) match, as it is now.

    Returns:
        A context manager, which also decorates functions, generators and coroutines.

    Raises:
        OpListError: There is no such policy, or its lists cannot be used.
        HmpError: `dtype` is another dtype, the policy has scoped entries and there is no model, or torch.compile traces the first
            `casts()` of the process.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with hmp.casts("habana"):
        ...     torch.matmul(x, x).dtype, torch.softmax(x, -1).dtype
        (torch.bfloat16, torch.float32)
    """
    if torch.compiler.is_dynamo_compiling():
        _refuse_tracing()
    if callable(policy) or isinstance(policy, (classmethod, staticmethod)):  # `@hmp.casts` without parentheses
        return casts(dtype=dtype, model=model)(policy)
    chosen = _uncompiled(as_policy)(policy, model, dtype)
    _check_model(model, chosen, "casts(model=...)")
    made: Callable[[], PolicyTable] = functools.partial(tables.table_of, chosen)
    if model is not None and chosen.scoped:
        made = _scoped_table(chosen, model)

    def choose(_: object) -> PolicyTable:
        global _regions_entered
        if torch.compiler.is_dynamo_compiling():
            _refuse_tracing()
        table: PolicyTable = _uncompiled(made)()
        if not _regions_entered:
            tables.patch_around_calls()
            _regions_entered = True
        return table

    return Region(f"casts({chosen.name!r})", choose, brings_casts=True)


traced_functions.entering.append(casts)
tables.when_patched.append(dynamo_patches.install)
tables.when_decided_anew.append(dynamo_patches.forget_wrappers)


def _scoped_table(policy: Policy, model: torch.nn.Module) -> Callable[[], PolicyTable]:
    """Return a function that returns the table for a context whose policy has scoped entries for `model`; its first call makes it."""
    scopes.resolve(policy, unscripted(model, "casts(model=...)"))  # whatever is wrong with the lists is said now
    table: PolicyTable | None = None

    def made() -> PolicyTable:
        nonlocal table
        with _lock:
            if table is None or table.policy is None:  # revert() has emptied it
                table = resolved(policy, model, policy.unscoped)
            return table

    return made


def _refuse_tracing() -> None:
    """Raise HmpError if torch.compile traces a process's first casts(): hmp cannot patch torch while Dynamo traces.

    Dynamo then runs the frame uncompiled.
    """
    raise HmpError("hmp.casts() was first entered inside compiled code; enter it, or call hmp.convert(), once before torch.compile runs")


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with Dynamo disabled in it, while nothing is patched; later hmp's patches of Dynamo disable it."""
    imported = dynamo()
    return function if imported is None or patches.installed() else imported.disable(function)


def _check_model(model: Any, policy: Policy, where: str) -> None:
    """Raise HmpError if `model` isn't a module, or the policy has scoped entries and there is no model that they could match."""
    if model is None:
        scopes.refuse_without_model(policy)
    else:
        module_of(model, where)


def module_of(model: Any, where: str) -> torch.nn.Module:
    """Return `model`; raise HmpError if it isn't a module."""
    if not isinstance(model, torch.nn.Module):
        raise HmpError(f"{where} expected a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    return model


def unscripted(model: torch.nn.Module, where: str) -> torch.nn.Module:
    """Return `model`; raise HmpError if it is a scripted one."""
    if isinstance(model, torch.jit.ScriptModule):
        raise HmpError(f"{where} got a scripted module, whose ops are compiled; pass the module that it was made of")
    return model


def resolved(policy: Policy, model: torch.nn.Module, others: Policy | None, is_verbose: bool = False) -> PolicyTable:
    """Return the table for code outside the modules that scoped entries match, and give those modules tables of their own.

    The policy of that code is `others`, by default the one that applies in `model` itself.
    """
    policies = scopes.resolve(policy, model)
    others = others or policies[module_calls.inside_compiled(model)]
    scope_id = module_calls.new_scope_id()
    by_policy: dict[int, PolicyTable] = {}
    for each in (others, *policies.values()):
        if id(each) not in by_policy:
            by_policy[id(each)] = tables.scoped_table(policy, each, scope_id, is_verbose)
    for module, own in scopes.differing(policies, model, others).items():
        module_calls.attach_scoped(module, by_policy[id(own)])
    table = by_policy.pop(id(others))
    table.parts = tuple(by_policy.values())
    return table


def follow_others() -> None:
    """Cast in the Python functions, too, that other code has put in the places of torch's since torch was patched."""
    with _lock:
        if patches.installed() and sites.look_again():
            tables.decide_anew()


def _followed(replace: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `replace`, a library's method that replaces a function of torch's at a time of its own, and has hmp look after it."""

    def replacing(self: Any) -> None:
        replace(self)
        follow_others()

    return replacing


# ZeRO-3 replaces F.linear.
_ZERO = "deepspeed.runtime.zero.partition_parameters"
_follow_zero = functools.partial(
    patches.wrap_by_name, _ZERO, "InsertPostInitMethodToModuleSubClasses._enable_mem_efficient_linear", _followed
)
tables.when_patched.append(lambda: imports.after({_ZERO: _follow_zero}))


def _activate_latest() -> None:
    """Make the latest conversion's policy active for the process; no policy if there is no conversion."""
    table = _converted[-1]._table if _converted else PolicyTable(state.NO_REPLACEMENTS, None)
    PROCESS.replacements, PROCESS.policy = table.replacements, table.policy
    PROCESS.user_policy, PROCESS.scope_id = table.user_policy, table.scope_id
    state.process_table = table


# --- a policy with scoped entries for a whole script: they hold in the outermost modules that the script calls ------------------


def convert_script(opt_level: str, policy: Policy | str | Path | None, files: Mapping[str, str], is_verbose: bool) -> CalledModules | None:
    """Return `convert()` for a script whose models are not there yet. Return what finds them, None for a policy without scoped entries."""
    chosen = choose_policy(opt_level, policy, None, files)
    if not chosen.scoped:
        convert(policy=chosen, verbose=is_verbose)
        return None
    with _lock:
        found = CalledModules(chosen, is_verbose)
        _activate(chosen, found.table, is_verbose)
    module_calls.look_at_calls(found.look_at)
    return found


class CalledModules:
    """Resolves a policy's scoped entries for each module that is called outside of all others, at its first call."""

    def __init__(self, policy: Policy, is_verbose: bool) -> None:
        self.classes: set[str] = set()  # of the modules that were found
        self._policy = policy
        self.unmatched = scopes.of_user(policy)  # the scoped entries that matched no module so far, but for those of presets
        # by id: what a WeakSet does for a look is Python code, which torch.compile would compile
        self._outermost: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._inside: dict[int, weakref.ref[torch.nn.Module]] = {}  # what they contain
        scope_id = module_calls.new_scope_id()
        self._table_of = functools.cache(lambda own: tables.scoped_table(policy, own, scope_id, is_verbose))
        self.table: PolicyTable = self._table_of(policy.unscoped)

    def look_at(self, module: torch.nn.Module, is_traced: bool) -> bool:
        """Resolve the entries for `module`; return False where there is nothing to do."""
        if id(module) in self._outermost or PROCESS.scope_id != self.table.scope_id:  # the script has converted, or reverted, itself
            return False
        if is_traced and id(module) in self._inside:  # the call around it is in no frame
            return False
        if module_calls.is_inside_another(module, sys._getframe(1)) or isinstance(module, torch.jit.ScriptModule):
            return False
        imported = dynamo()
        (self._resolve if imported is None else imported.disable(self._resolve))(module)
        return True

    def _resolve(self, module: torch.nn.Module) -> None:
        with _lock:
            self.classes.add(type(module_calls.inside_compiled(module)).__name__)
            found = scopes.matched(self._policy, module)
            self.unmatched = [entry for entry in self.unmatched if entry not in found]
            policies = scopes.resolve(self._policy, module, may_match_nothing=True)
            for each, own in scopes.differing(policies, module, self._policy.unscoped).items():
                module_calls.attach_scoped(each, self._table_of(own))
            for each in module.modules():
                _remember(self._inside, each)
            _remember(self._outermost, module)


def _remember(numbers: dict[int, weakref.ref[torch.nn.Module]], module: torch.nn.Module) -> None:
    number = id(module)
    numbers[number] = weakref.ref(module, lambda _: numbers.pop(number, None))
