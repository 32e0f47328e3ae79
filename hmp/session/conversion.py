"""convert(), casts() and apply(): put a policy in force for the process, in a region, or in a module's calls."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..context import PROCESS, CompiledPolicy, Region, state, without_casts
from ..diagnostics import tell_unreachable
from ..dispatch import dispatchers, handed_out, placement, user_functions
from ..errors import HmpError
from ..lists import DEFAULT, HABANA, ListName, Policy, as_policy, scopes
from ..patching import alone, patches, references
from ..torch_compile import bridge
from ..torch_hooks import autocast, module_calls, never_cast
from ..torch_private import dynamo
from ..wrapping import Observer
from . import calls_in_flight, compiled_policies
from .compiled_policies import lock as _lock
from .log_observer import announce

M = TypeVar("M", bound=torch.nn.Module)


class Handle:
    """What `convert()` gives back: leaving its `with`, or `.revert()`, restores the policy that was in force before it."""

    def __init__(self, casts: CompiledPolicy) -> None:
        self._casts = casts

    def revert(self) -> None:
        """Restores the policy that was in force before the conversion, whatever came after it; a second call does nothing."""
        with _lock:
            if self not in _converted:
                return
            ended = _converted[_converted.index(self) :]
            del _converted[-len(ended) :]
            for each in ended:
                module_calls.unmark_scope(each._casts.scope_id)
            if _converted or module_calls.any_marked() or _regions_entered:
                _put_in_force()
            else:
                revert()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.revert()


# The conversions that no handle has taken back, latest last; that one's policy is in force.
_converted: list[Handle] = []
_regions_entered = False


def convert(  # noqa: PLR0913
    opt_level: str = "O1",
    bf16_file_path: str | Path = "",
    fp32_file_path: str | Path = "",
    isVerbose: bool = False,
    *,
    promote_file_path: str | Path = "",
    policy: Policy | str | Path | None = None,
    dtype: Any = None,
    verbose: bool | None = None,
    model: torch.nn.Module | None = None,
) -> Handle:
    """Puts a policy in force for the whole process, and gives back a handle that restores the one before.

    "" means the default list of that kind (Habana's). `opt_level` "O2" runs matrix products and convolutions in the low dtype
    and every other op in float32, whatever files are named. `policy` takes a Policy, a preset's name or a folder, and excludes
    the paths; `dtype` is the low dtype, torch.bfloat16 unless the policy says otherwise. `isVerbose` (or `verbose`) logs the
    policy, what `unreachable()` lists, and every distinct decision once. `model` is the one whose modules scoped lines
    (`softmax @ decoder.*`) speak of, as it is now; all that is outside them follows the other lines. A second call replaces the policy.
    Raises OpListError for lists that cannot be used and HmpError for other wrong arguments; torch is then as it was before.
    """
    chosen = _choose_policy(opt_level, bf16_file_path, fp32_file_path, promote_file_path, policy)
    if dtype is not None:
        chosen = chosen.replace(dtype=dtype)
    is_verbose = isVerbose if verbose is None else verbose
    with _lock, compiled_policies.gc_paused():
        was_patched = patches.installed()
        # whatever fails, fails here
        if model is None:
            scopes.refuse_without_model(chosen)
        if model is not None and chosen.scoped:
            casts = _resolved(chosen, _module(model, "convert(model=...)"), chosen.unscoped, is_verbose)
        else:
            casts = compiled_policies.compile_policy(chosen, is_verbose, for_process=True)
        if not was_patched:
            calls_in_flight.wait_for(never_cast.codes())
        handle = Handle(casts)
        _converted.append(handle)
        _put_in_force()
        autocast.say_if_enabled()
        if is_verbose:
            announce(chosen)
            tell_unreachable()
        return handle


def _choose_policy(opt_level: str, bf16: str | Path, fp32: str | Path, promote: str | Path, policy: Policy | str | Path | None) -> Policy:
    if opt_level not in ("O1", "O2"):
        raise HmpError(f"opt_level {opt_level!r} is unknown; use 'O1' (the lists) or 'O2' (products in the low dtype, the rest in float32)")
    if policy is not None:
        if str(bf16) or str(fp32) or str(promote):
            raise HmpError("policy= and list files exclude each other; give one of them, or Policy.from_files(...)")
        return as_policy(policy)
    if opt_level == "O2":
        return as_policy("habana-o2")
    if not (str(bf16) or str(fp32) or str(promote)):
        return as_policy(HABANA)
    return Policy.from_files(bf16, fp32, promote)


def revert() -> None:
    """Leaves torch as it was found: no policy in force, nothing patched, no model applied to. Does nothing without convert()."""
    global _regions_entered
    with _lock:
        _converted.clear()
        _move_process_to(CompiledPolicy(state.NOTHING, None))  # whoever holds a dispatcher calls torch's own op from now on
        compiled_policies.put_out_of_force()
        module_calls.unmark_all()
        _regions_entered = False
        stood = placement.in_place(), handed_out.counterparts()
        patches.restore()
        references.give_back(*stood)


def is_converted() -> bool:
    """Whether a process-wide policy is in force."""
    return PROCESS.policy is not None


def is_in_place() -> bool:
    """Whether anything of torch is patched: from the first policy to `revert()`, also where no policy is in force."""
    return patches.installed()


def any_applied() -> bool:
    """Whether `apply()` has put a policy on any module that is still there."""
    return module_calls.any_marked()


def casts(policy: Policy | str | Path | Callable[..., Any] = DEFAULT, *, model: torch.nn.Module | None = None) -> Any:
    """A region of the calling thread or task in which `policy` is in force: context manager and decorator; nests.

    Without a policy: "autocast", torch.autocast's own lists for the device in use.

    `model` is the one whose modules scoped lines speak of, as it is now; HmpError for a policy with such lines and no model. The
    patches that it needs stay, doing nothing elsewhere, until `hmp.revert()`.
    """
    if torch.compiler.is_dynamo_compiling():
        _refuse_tracing()
    if isinstance(policy, (types.FunctionType, types.MethodType)):
        return casts()(policy)
    chosen = _uncompiled(as_policy)(policy)
    if model is None:
        scopes.refuse_without_model(chosen)
    made = _CastsIn(chosen, model) if model is not None and chosen.scoped else lambda: compiled_policies.compile_policy(chosen)

    def choose(_: object) -> CompiledPolicy:
        global _regions_entered
        _regions_entered = True
        if torch.compiler.is_dynamo_compiling():
            _refuse_tracing()
        casts = _specialised(_uncompiled(made)())
        autocast.say_if_enabled()
        return casts

    return Region(f"casts({chosen.name!r})", choose, brings_casts=True)


bridge.entering.append(casts)


class _CastsIn:
    """A function that returns the compiled policy for a region, where the policy has scoped lines for a model.

    The model's modules are marked at the first call, and no longer once this function is garbage."""

    def __init__(self, policy: Policy, model: torch.nn.Module) -> None:
        scopes.resolve(policy, _module(model, "casts(model=...)"))  # whatever is wrong with the lines is said now
        self._policy, self._model = policy, weakref.ref(model)
        self._casts: CompiledPolicy | None = None

    def __call__(self) -> CompiledPolicy:
        casts = self._casts
        if casts is not None and casts.policy is not None:
            return casts
        with _lock:
            model = self._model()
            if model is None:
                raise HmpError(f"the model whose modules policy {self._policy.name!r} speaks of is gone; make another region")
            if self._casts is None or self._casts.policy is None:
                self._casts = _resolved(self._policy, model, self._policy.unscoped)
                weakref.finalize(self, module_calls.unmark_scope, self._casts.scope_id).atexit = False
            return self._casts


def _refuse_tracing() -> None:
    """Raises while torch.compile traces a first casts(): nothing is patched yet, nor is the bridge that would answer Dynamo. Dynamo then
    runs the frame uncompiled."""
    raise HmpError("the first hmp.casts() of a process cannot be compiled; call hmp.convert() or enter hmp.casts() once before")


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with Dynamo disabled in it, as long as nothing is patched; later hmp's bridge to torch.compile sees to that."""
    imported = dynamo()
    return function if imported is None or patches.installed() else imported.disable(function)


def apply(model: M, policy: Policy | str | Path = DEFAULT, *, verbose: bool = False) -> M:
    """`model`, whose every call runs under `policy` from now on; nothing outside its calls is cast. Without a policy it is
    "autocast", torch.autocast's own lists for the device in use.

    Works through `model(...)`, not through a direct `model.forward(...)`. Scoped lines (`softmax @ decoder.*`) are resolved for the modules
    that the model holds now; their calls follow them inside calls of the model. A deep copy of the model is applied to as well;
    a pickle of it takes no policy along. `verbose` logs the policy and every distinct decision once. `hmp.remove(model)` undoes it;
    the patches, doing nothing elsewhere, stay until `hmp.revert()`.
    """
    if not isinstance(model, torch.nn.Module):
        raise HmpError(f"apply() takes a torch.nn.Module; {type(model).__name__} is none. To decorate functions use hmp.casts(policy)")
    chosen = as_policy(policy)
    _module(model, "apply()")
    with _lock:
        casts = _resolved(chosen, model, None, verbose) if chosen.scoped else compiled_policies.compile_policy(chosen, verbose)
        module_calls.unmark(model)
        module_calls.mark(model, _specialised(casts))
    if verbose:
        announce(chosen)
    return model


def _module(model: Any, where: str) -> torch.nn.Module:
    """`model`, HmpError where it is no module or a scripted one."""
    if not isinstance(model, torch.nn.Module):
        raise HmpError(f"{where} takes a torch.nn.Module; {type(model).__name__} is none")
    if isinstance(model, torch.jit.ScriptModule):
        raise HmpError(f"{where} cannot reach into a scripted module, which is compiled; apply the policy to the module it was made of")
    return model


def _resolved(policy: Policy, model: torch.nn.Module, outside: Policy | None, is_verbose: bool = False) -> CompiledPolicy:
    """The compiled policy outside the modules that scoped lines speak of: `outside`, by default what holds in `model` itself.

    Those modules are marked with compiled policies of their own."""
    policies = scopes.resolve(policy, model)
    outside = outside or policies[model]
    scope_id = module_calls.new_scope_id()
    casts: dict[int, CompiledPolicy] = {}
    for each in (outside, *policies.values()):
        if id(each) not in casts:
            casts[id(each)] = compiled_policies.compile_for_scope(policy, each, scope_id, is_verbose)
    try:
        for module, own in scopes.differing(policies, model, outside).items():
            module_calls.mark_inside(module, casts[id(own)])
    except BaseException:
        module_calls.unmark_scope(scope_id)
        raise
    return casts[id(outside)]


def remove(model: M) -> M:
    """`model`, no longer applied to."""
    with _lock:
        module_calls.unmark(model)
    return model


def register(owner: Any, name: str, cast: ListName) -> None:
    """Makes `owner.name`, a function of the user's, an op on the "bf16", "fp32" or "promote" list, under every policy."""
    with _lock:
        user_functions.add(owner, name, cast)
        _make_again()


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """A stretch in which `observer` sees every decision, of every policy and in every thread. What is not observed has no cost."""
    with _lock:
        compiled_policies.observers.append(observer)
        _make_again()
    try:
        yield
    finally:
        with _lock:
            compiled_policies.observers.remove(observer)
            _make_again()


def _make_again() -> None:
    """Compiles every policy in use again: what is registered, or who observes, has changed."""
    if patches.installed():
        with compiled_policies.gc_paused():
            compiled_policies.make_again()
            _put_in_force()


def _put_in_force() -> None:
    """Puts the latest conversion's policy in force for the process, none where there is no conversion."""
    _move_process_to(_converted[-1]._casts if _converted else CompiledPolicy(state.NOTHING, None))


def _move_process_to(casts: CompiledPolicy) -> None:
    """Puts `casts` in force for the process; every op of every thread runs wholly under the old policy or wholly under the new one.

    For a builtin that is so by itself. A torch function in Python calls many, and is one op because its wrapper has casts off inside (R8).
    So while there are other threads it gets a wrapper that does only that before the new policy is in force, and keeps one until the
    old policy is out of force.
    """
    old = PROCESS
    if not alone():
        quiet = _quiet(casts.table.keys() - old.table.keys())
        if quiet:
            _set_process_policy(CompiledPolicy({**old.table, **quiet}, old.policy, old.fast_paths, old.given, old.scope_id))
            calls_in_flight.wait_for({patches.code_of(function) for function in quiet})
        quiet = _quiet(old.table.keys() - casts.table.keys())
        if quiet:
            _set_process_policy(CompiledPolicy({**quiet, **casts.table}, casts.policy, casts.fast_paths, casts.given, casts.scope_id))
    _set_process_policy(casts)


def _quiet(functions: Iterable[Any]) -> dict[Any, Callable[..., Any]]:
    """A table for those of the functions that are written in Python: each calls torch's own code with casts off."""
    return {f: without_casts(patches.plain(f)) for f in functions if isinstance(f, types.FunctionType)}


def _set_process_policy(casts: CompiledPolicy) -> None:
    PROCESS.table, PROCESS.policy, PROCESS.fast_paths = casts.table, casts.policy, casts.fast_paths
    PROCESS.given, PROCESS.scope_id = casts.given, casts.scope_id
    dispatchers.specialise_for(PROCESS)


def _specialised(casts: CompiledPolicy) -> CompiledPolicy:
    """`casts`; the dispatchers are written for them, unless they are for another policy that is in force."""
    if not dispatchers.is_specialised():
        with _lock:
            dispatchers.specialise_for(casts)
    return casts
