"""What hmp reads of torch that torch does not promise, each under a name that says what it is; and which release it is.

Everything is taken here once, at import and before anything is patched: torch's own functions and objects. What must be there and is
not ends `import hmp` with an error that names it; what may be missing has a fallback. Late modules of torch are not imported for this.

Not here: what torch.compile is made of (torch_compile/dynamo_names.py), which is looked at when that is imported, and what is read
off tensors, modules and nodes (`_version`, `_buffers`), which is checked at the end.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from .errors import HmpError

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

Tensor = torch.Tensor

# The README's table of releases says how far each was run.
RELEASES_RUN = ("2.7.0", "2.13.0", "2.15.0")


def release(text: str) -> tuple[int, ...]:
    """(2, 13) for "2.13.0+cpu" and for "torch-cpu@2.13"."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)


TORCH = release(torch.__version__)

# All that is asked of torch here, and whether it must be there.
NAMES: dict[str, bool] = {}


def _required(name: str) -> Any:
    """What torch has under that name."""
    NAMES[name] = True
    try:
        return _found(name)
    except (AttributeError, ImportError) as error:
        raise _missing(name) from error


def _optional(name: str, fallback: Any) -> Any:
    """What torch has under that name, else `fallback`."""
    NAMES[name] = False
    try:
        return _found(name)
    except (AttributeError, ImportError):
        return fallback


def _found(name: str) -> Any:
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(path)
    return found


def _missing(name: str) -> HmpError:
    return HmpError(
        f"hmp cannot work with torch {torch.__version__}: {name}, which torch does not promise and hmp needs, is missing. "
        f"hmp was run with torch {', '.join(RELEASES_RUN[:-1])} and {RELEASES_RUN[-1]}: install one of these, or a newer hmp"
    )


class Place(NamedTuple):
    """Where something of torch's stands that hmp changes or replaces: what stands there is looked up when that is done."""

    owner: Any
    attribute: str


def _place(name: str) -> Place:
    """A place where torch must have something."""
    _required(name)
    return _place_of(name)


def _places(*names: str) -> tuple[Place, ...]:
    """Those of the places where torch has something."""
    return tuple(_place_of(name) for name in names if _optional(name, None) is not None)


def _place_of(name: str) -> Place:
    owner, _, attribute = name.rpartition(".")
    return Place(_found(owner), attribute)


# --- where torch's functions stand -----------------------------------------------------------------------------------------

# The class that torch.Tensor is made from; its methods are C's.
TensorBase: type = _required("torch._C.TensorBase")
# What `torch` has its builtins from: C code looks them up in its type.
variable_functions: Any = _required("torch._C._VariableFunctions")
nn_builtins: types.ModuleType = _required("torch._C._nn")
# Its builtins are equal to those of torch, and other objects.
vf: types.ModuleType = _required("torch._VF")
# How it is written, and the namespace: ops stand there besides in torch, torch.nn.functional and torch.Tensor.
OP_NAMESPACES: tuple[tuple[str, Any], ...] = (("torch._C._nn", nn_builtins), ("torch._VF", vf))
# Where the builtins of torch.linalg and others stand too, under names such as linalg_multi_dot and _sparse_mm; and the prefix of the
# public names. A torch may have no such module for one of them.
BUILTIN_NAMESPACES: tuple[tuple[str, Any, str], ...] = tuple(
    (f"torch._C._{name}", module, f"{name}.")
    for name in ("linalg", "special", "fft", "sparse")
    if (module := _optional(f"torch._C._{name}", None)) is not None
)
# Modules whose public Python functions are ops, of those that users do not import.
OP_MODULES: tuple[str, ...] = tuple(
    _required(name).__name__ for name in ("torch._tensor", "torch._lowrank", "torch._lobpcg", "torch._jit_internal", "torch.masked._ops")
)


def is_in_c(module: object) -> TypeGuard[types.ModuleType]:
    """Whether it is a module inside torch._C."""
    return isinstance(module, types.ModuleType) and module.__name__.startswith("torch._C.")


# --- who sees a call -------------------------------------------------------------------------------------------------------

# How many modes are in force in this thread.
function_modes: Callable[[], int] = _required("torch._C._len_torch_function_stack")
dispatch_modes: Callable[[], int] = _required("torch._C._len_torch_dispatch_stack")
function_mode_at: Callable[[int], Any] = _required("torch._C._get_function_stack_at")
function_mode_stack: Callable[[], list[Any]] = _required("torch.overrides._get_current_function_mode_stack")
dispatch_mode_stack: Callable[[], list[Any]] = _required("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
# Stretches in which some that see calls do not.
without_torch_function: Callable[[], AbstractContextManager[Any]] = _required("torch._C.DisableTorchFunction")
without_torch_function_of_classes: Callable[[], AbstractContextManager[Any]] = _required("torch._C.DisableTorchFunctionSubclass")
without_torch_dispatch: Callable[[], AbstractContextManager[Any]] = _required("torch._C._DisableTorchDispatch")
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _required("torch.utils._python_dispatch._disable_current_modes")
# The `__torch_function__` of a class that answers for no call.
no_torch_function: Any = _required("torch._C._disabled_torch_function_impl")
if not TYPE_CHECKING:
    TorchDispatchMode = _required("torch.utils._python_dispatch.TorchDispatchMode")
# The module with the mode that a device as a context or as the default is.
device_mode: types.ModuleType = _required("torch.utils._device")

# Lists, tuples and dicts of values, as one flat list and back.
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _required("torch.utils._pytree.tree_flatten")
tree_unflatten: Callable[[Any, Any], Any] = _required("torch.utils._pytree.tree_unflatten")
tree_leaves: Callable[[Any], list[Any]] = _required("torch.utils._pytree.tree_leaves")

# --- tensors and their memory ----------------------------------------------------------------------------------------------

# TensorBase's: hmp notes who asks a Tensor for its storage.
storage_of: Callable[[Tensor], Any] = _required("torch._C.TensorBase.untyped_storage")
# How many hold a storage, by its address, and how many in C++ hold a tensor.
owners_of_storage: Callable[[int], int] = _required("torch._C._storage_Use_Count")
holders_of_tensor: Callable[[Tensor], int] = _required("torch._C.TensorBase._use_count")
# getset descriptors; torch's annotations speak of the values behind them
data_of: Any = _required("torch._C.TensorBase.data")
grad_of: Any = _required("torch._C.TensorBase.grad")
# The layout of oneDNN's tensors.
MKLDNN: Any = _required("torch._mkldnn")


class CopyOnWrite(NamedTuple):
    """Memory whose copy is put off until somebody writes to it: whether a tensor's is such memory, what makes it so, and what runs a graph
    that does without letting go of the GIL."""

    is_pending: Callable[[Tensor], bool]
    lazy_clone: Callable[[Tensor], Tensor]
    run_graph: Callable[..., Any]


# All of it or nothing: with None no memory is marked, and no copy is kept.
_parts = [_optional(f"torch._C.{name}", None) for name in ("_is_cow_tensor", "_VariableFunctions._lazy_clone", "_jit_interpret_graph")]
copy_on_write = None if None in _parts else CopyOnWrite(*_parts)
# A product of float8 matrices, None where torch has none: what `hmp doctor` tries.
scaled_mm: Callable[..., Tensor] | None = _optional("torch._scaled_mm", None)
# Dynamo's guards, which compare much of a tensor in one call. Without them each question is asked by itself.
tensor_guards: Any = _optional("torch._C._dynamo.guards.TensorGuards", None)

# --- autograd --------------------------------------------------------------------------------------------------------------

# -1 where this thread is not in a backward
graph_task: Callable[[], int] = _required("torch._C._current_graph_task_id")
current_node: Callable[[], Any] = _required("torch._C._current_autograd_node")
sequence_number: Callable[[], int] = _required("torch.autograd._get_sequence_nr")
functorch_level: Callable[[], Any] = _required("torch._C._functorch.peek_interpreter_stack")
is_functorchs: Callable[[Tensor], bool] = _required("torch._C._functorch.is_functorch_wrapped_tensor")
# What backward() and autograd.grad() call, the engine behind it, and what a callback is attached to.
run_backward: types.FunctionType = _required("torch.autograd.graph._engine_run_backward")
ENGINE = _place("torch.autograd.Variable._execution_engine")
Future: type = _required("torch._C.Future")
# (pack, unpack) in force here, None for none; with True also inside a trace. None where this torch does not say (2.7).
saved_tensors_hooks: Callable[[bool], Any] | None = _optional("torch._C._autograd._top_saved_tensors_default_hooks", None)


def _nothing_kept(key: str) -> bool:
    return False


# What autograd keeps for its threads, by name. A torch that does not say (and before 2.9) keeps nothing.
is_kept_in_thread: Callable[[str], bool] = _optional("torch._C._is_key_in_tls", _nothing_kept)
kept_in_thread: Any = None if is_kept_in_thread is _nothing_kept else _required("torch._C._get_obj_in_tls")

# Modules with a variable that is bound anew.
_forward_ad: Any = torch.autograd.forward_ad
_required("torch.autograd.forward_ad._current_level")
_profiler: Any = torch.autograd.profiler
_required("torch.autograd.profiler._is_profiler_enabled")


def in_plain_autograd() -> bool:
    """Whether a graph of plain autograd is made: not a trace, not a function transform, not forward-mode differentiation."""
    return trace_here() is None and functorch_level() is None and _forward_ad._current_level < 0


def is_profiled() -> bool:
    """Whether torch's profiler runs."""
    return bool(_profiler._is_profiler_enabled)


# --- torch.jit -------------------------------------------------------------------------------------------------------------

schemas_of: Callable[[str], list[Any]] = _required("torch._C._jit_get_schemas_for_operator")
all_schemas: Callable[[], list[Any]] = _required("torch._C._jit_get_all_schemas")
parse_graph: Callable[[str], Any] = _required("torch._C.parse_ir")
# The trace that this thread is making, None for none.
trace_here: Callable[[], Any] = _required("torch._C._get_tracing_state")
set_trace: Callable[[Any], None] = _required("torch._C._set_tracing_state")
ScriptModule: type = _required("torch._C.ScriptModule")
# What makes a trace of the first function among its arguments.
TRACERS = (
    _place("torch._C._create_function_from_trace"),
    _place("torch._C._create_graph_by_tracing"),
    _place("torch._C.ScriptModule._create_method_from_trace"),
)
_builtins: Any = _required("torch.jit._builtins")
# Tells the name of the op that a function is, by a table that it fills when it is first asked.
BUILTIN_FINDER = _place("torch.jit._builtins._find_builtin")
_required("torch.jit._builtins._builtin_table")


def builtin_table() -> dict[int, str]:
    """The names of ops by the id of the function, empty as long as nobody has asked."""
    return _builtins._builtin_table or {}


# --- torch.autocast --------------------------------------------------------------------------------------------------------

is_any_autocast_enabled: Callable[[], bool] = _required("torch._C._is_any_autocast_enabled")
is_autocast_available: Callable[[str], bool] = _required("torch._C._is_autocast_available")
# What custom_fwd(cast_inputs=...) casts with.
AUTOCAST_CAST = _place("torch.amp.autocast_mode._cast")

# --- code of torch around a model ------------------------------------------------------------------------------------------

# It is never cast (R15).
AROUND_A_MODEL = (
    _place("torch._tensor_str._str"),
    _place("torch.utils.data.dataloader._BaseDataLoaderIter.__next__"),
    _place("torch.utils.data._utils.worker._worker_loop"),
    # model.to(bfloat16) gives parameters and buffers another dtype on purpose
    _place("torch.nn.Module._apply"),
    # these have no underscore in later releases
    *_places("torch.nn.utils.clip_grad._get_total_norm", "torch.nn.utils.clip_grad._clip_grads_with_norm_"),
)
# Hooks the step of an optimizer's class when its first instance is made.
STEP_HOOKER = _place("torch.optim.Optimizer._patch_step_function")


def checkpoint_generator() -> Place:
    """What a checkpoint that is not reentrant calls with the function. Imports torch.utils.checkpoint, which torch 2.7 does not."""
    importlib.import_module("torch.utils.checkpoint")
    name = "torch.utils.checkpoint._checkpoint_without_reentrant_generator"
    # torch 2.15 and later: the old name hands its arguments on to this one, which torch itself calls
    return (*_places(f"{name}_impl"), _place(name))[0]


# --- what torch imports late, if it is imported ----------------------------------------------------------------------------


def dynamo() -> Any:
    """torch.compile's Dynamo, which takes seconds to import; None where nobody has."""
    return sys.modules.get("torch._dynamo")


def dynamo_foldable() -> dict[Any, Any]:
    """Functions whose results Dynamo takes for constants; empty where nobody has imported it."""
    found: dict[Any, Any] = getattr(sys.modules.get("torch._dynamo.variables.torch"), "constant_fold_functions", {})
    return found


def reset_dynamo() -> None:
    """Compiled code and tables of torch.compile's are forgotten; it is not imported for that."""
    imported = dynamo()
    if imported is None or not hasattr(imported, "reset"):
        return
    compiled = getattr(sys.modules.get("torch._dynamo.convert_frame"), "output_codes", None)
    if getattr(compiled, "seen", True):
        imported.reset()
    for module, names in _DYNAMO_TABLES.items():
        for name in names:
            clear = getattr(getattr(sys.modules.get(module), name, None), "cache_clear", None)
            if clear is not None:
                clear()


_DYNAMO_TABLES = {
    "torch._dynamo.trace_rules": ("get_torch_obj_rule_map", "get_tensor_method"),
    "torch._dynamo.variables.torch": ("get_overridable_functions", "tracing_state_functions"),
}


def fake_tensor_mode() -> Any:
    """The class FakeTensorMode, None where nobody has imported it."""
    return getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensorMode", None)


# --- what is read off objects, where they are ------------------------------------------------------------------------------

for _name in (
    "torch.Tensor._base",
    "torch.Tensor._version",
    "torch.UntypedStorage._cdata",
    "torch.nn.Module._call_impl",
    "torch.nn.Module._compiled_call_impl",
):
    _required(_name)
