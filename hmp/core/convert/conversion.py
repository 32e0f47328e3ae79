"""convert() and casts(): a policy for the process or in a context."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import HmpError
from .. import lists, low_kernels, observe
from ..active import PROCESS, PolicyTable, Region, autocast, state
from ..compile import dynamo_patches, traced_functions
from ..compiler_stance import untraced
from ..dispatch import decisions, user_functions
from ..patching import patches
from ..policy import DEFAULT, HABANA, ListName, Policy, as_policy, in_dtype, scopes
from ..torch_ops import sites
from ..torch_patches import imports, module_calls
from ..torch_private import dynamo
from . import policy_tables
from .policy_tables import announce
from .policy_tables import lock as _lock


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
    with policy_tables.gc_paused():
        files = {"bf16": bf16_file_path, "fp32": fp32_file_path, "promote": promote_file_path, **_by_list(list_file_paths)}
        chosen = in_dtype(choose_policy(opt_level, policy, model, files), dtype)
        with _lock:
            return _convert(chosen, model, is_verbose)


def _convert(chosen: Policy, model: torch.nn.Module | None, is_verbose: bool) -> Handle:
    was_patched = patches.installed()
    follow_others()
    # whatever fails, fails before anything is active
    _check_model(model, chosen, "convert(model=...)")
    if model is not None and chosen.scoped:
        table = resolved(chosen, unscripted(model, "convert(model=...)"), chosen.unscoped, is_verbose)
    else:
        table = policy_tables.table_of(chosen, is_verbose)
    return activate(chosen, table, was_patched, is_verbose)


def activate(chosen: Policy, table: PolicyTable, was_patched: bool, is_verbose: bool) -> Handle:
    """Make `table` active for the process, as the latest conversion."""
    try:
        policy_tables.patch_around_calls()
        module_calls.begin_outermost_calls()
    except BaseException:
        if not was_patched:
            revert()
        raise
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
        kinds = (kind for kind in lists.kinds() if kind.is_optional and kind.name in given)
        for kind in kinds:
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
        policy_tables.empty_all()
        module_calls.detach_all()
        patches.restore()


def _is_used() -> bool:
    """Return True if a policy can become active by itself: something is converted, a model has a policy, or a `casts()` was entered."""
    return bool(_converted or _regions_entered or any_applied())


def revert_if_unused() -> bool:
    """Undo all patches if no policy can become active by itself, and return True if so. The caller holds the lock."""
    if _is_used():
        return False
    revert()
    return True


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


def any_applied() -> bool:
    """Return True if a policy is applied to any module that is alive."""
    return module_calls.any_applied()


def casts(
    policy: Policy | str | Path | Callable[..., Any] = DEFAULT,
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
    made = _CastsIn(chosen, model) if model is not None and chosen.scoped else lambda: policy_tables.table_of(chosen)

    def choose(_: object) -> PolicyTable:
        global _regions_entered
        if torch.compiler.is_dynamo_compiling():
            _refuse_tracing()
        table: PolicyTable = _uncompiled(made)()
        if not _regions_entered:
            policy_tables.patch_around_calls()
            _regions_entered = True
        return table

    return Region(f"casts({chosen.name!r})", choose, brings_casts=True)


traced_functions.entering.append(casts)


class _CastsIn:
    """Returns, when called, the table for a context whose policy has scoped entries for a model.

    The first call makes it; it lasts as long as this object.
    """

    def __init__(self, policy: Policy, model: torch.nn.Module) -> None:
        scopes.resolve(policy, unscripted(model, "casts(model=...)"))  # whatever is wrong with the lines is said now
        self._policy, self._model = policy, weakref.ref(model)
        self._table: PolicyTable | None = None

    def __call__(self) -> PolicyTable:
        table = self._table
        if table is not None and table.policy is not None:
            return table
        with _lock:
            model = self._model()
            if model is None:
                raise HmpError(
                    f"hmp.casts({self._policy.name!r}, model=...): the model was deleted; make a new context with a model that exists"
                )
            if self._table is None or self._table.policy is None:
                self._table = resolved(self._policy, model, self._policy.unscoped)
            return self._table


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


def unscripted(model: Any, where: str) -> torch.nn.Module:
    """Return `model`; raise HmpError if it isn't a module, or is a scripted one."""
    module = module_of(model, where)
    if isinstance(module, torch.jit.ScriptModule):
        raise HmpError(f"{where} got a scripted module, whose ops are compiled; pass the module that it was made of")
    return module


def resolved(policy: Policy, model: torch.nn.Module, outside: Policy | None, is_verbose: bool = False) -> PolicyTable:
    """Return the table for code outside the modules that scoped entries match, and give those modules tables of their own.

    The policy of that code is `outside`, by default the one that applies in `model` itself.
    """
    policies = scopes.resolve(policy, model)
    outside = outside or policies[module_calls.inside_compiled(model)]
    scope_id = module_calls.new_scope_id()
    by_policy: dict[int, PolicyTable] = {}
    for each in (outside, *policies.values()):
        if id(each) not in by_policy:
            by_policy[id(each)] = policy_tables.scoped_table(policy, each, scope_id, is_verbose)
    for module, own in scopes.differing(policies, model, outside).items():
        module_calls.attach_scoped(module, by_policy[id(own)])
    table = by_policy.pop(id(outside))
    table.parts = tuple(by_policy.values())
    return table


@untraced
def register(owner: Any, name: str, cast: ListName) -> None:
    """Put a function of your own on a list, under every policy: its inputs are cast, and ops inside it are not cast again.

    Args:
        owner: The module or class that has the function.
        name: The name of the function in `owner`.
        cast: The list: "bf16", "fp32" or "promote".

    Raises:
        HmpError: `owner` has no such function, hmp or torch owns it, or `cast` is not one of the lists.

    Example:
        >>> import types
        >>> mine = types.SimpleNamespace(scale=lambda x: x * 2)
        >>> hmp.register(mine, "scale", "bf16")
        >>> with hmp.casts("habana"):
        ...     mine.scale(torch.ones(2)).dtype
        torch.bfloat16
    """
    with _lock:
        user_functions.add(owner, name, cast)
        _rebuild_all()


def set_low_kernels(choice: str) -> str:
    """Choose how the CPU computes matrix products, convolutions and recurrent ops in bfloat16 and float16. Return the choice before.

    Where a processor has no instructions for a low-precision dtype, torch's kernels for it take 10 to 90 times float32's time. hmp then
    rounds the inputs to the low-precision dtype, computes in float32 and rounds the result: the numbers of an accelerator, at about
    float32's speed. Gradients are computed likewise. The choice holds for the process, and policies in use follow it at once; it overrides
    HMP_LOW_KERNELS.

    Args:
        choice: "auto", the default, does so for each dtype that the processor has no instructions for. "native" always uses torch's
            kernels, bit for bit as torch.autocast does. "float32" never does, whatever the processor has.

    Returns:
        The choice that was in effect before.

    Raises:
        HmpError: `choice` isn't one of the three.

    Example:
        >>> before = hmp.set_low_kernels("native")
        >>> hmp.set_low_kernels(before)
        'native'
    """
    with _lock:
        computed_before = low_kernels.computed_in_float32()
        before = low_kernels.choose(choice)
        if low_kernels.computed_in_float32() != computed_before and patches.installed():
            state.DTYPE_REPAIRS = decisions.dtype_repairs()
            _rebuild_all()
            dynamo_patches.forget_wrappers()
        return before


def _rebuild_all() -> None:
    """Build every policy in use again, after a change of the registered functions or of those that listen."""
    if patches.installed():
        with policy_tables.gc_paused():
            policy_tables.rebuild_all()
            _activate_latest()


def _rebuild_for_listeners() -> None:
    with _lock:
        _rebuild_all()


observe.rebuild = _rebuild_for_listeners


def follow_others() -> None:
    """Cast in the Python functions, too, that other code has put in the places of torch's since torch was patched."""
    with _lock:
        if patches.installed() and sites.look_again():
            decisions.forget()
            state.DTYPE_REPAIRS = decisions.dtype_repairs()
            _rebuild_all()
            dynamo_patches.forget_wrappers()


# The code of a library that replaces a function of torch's at a time of its own: module, class, method. ZeRO-3 replaces F.linear.
_REPLACES = ("deepspeed.runtime.zero.partition_parameters", "InsertPostInitMethodToModuleSubClasses", "_enable_mem_efficient_linear")


def _follow_library() -> None:
    module, name, method = _REPLACES
    cls = getattr(sys.modules[module], name, None)
    replace = getattr(cls, method, None)
    if replace is None:
        return

    @functools.wraps(replace)
    def replacing(self: Any) -> None:
        replace(self)
        follow_others()

    patches.rebind(cls, method, replacing)


policy_tables.when_patched.append(lambda: imports.after({_REPLACES[0]: _follow_library}))


def _activate_latest() -> None:
    """Make the latest conversion's policy active for the process; no policy if there is no conversion."""
    table = _converted[-1]._table if _converted else PolicyTable(state.NO_REPLACEMENTS, None)
    PROCESS.replacements, PROCESS.policy = table.replacements, table.policy
    PROCESS.user_policy, PROCESS.scope_id = table.user_policy, table.scope_id
    state.process_table = table
