"""torch's private functions and objects that hmp uses, each under a name that says what it is, and torch's release.

They are read once, when hmp is imported and before it patches anything, so these are torch's own functions. Where torch lacks a required
one, `import hmp` raises an HmpError that names it; an optional one has a fallback. Modules that torch imports late are not imported here.

Elsewhere: torch.compile's internals are in core/compile/dynamo_names.py, read when torch._dynamo is imported. Private attributes of tensors
and modules (`_version`, `_base`) are read where they are needed; the end of this file checks that torch has them.
"""

from __future__ import annotations

import importlib
import platform
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from ..errors import HmpError

# The releases of torch that all default tests were run with: docs/releases/versions.json.
RELEASES_RUN = ("2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")


def release(text: str) -> tuple[int, ...]:
    """Major and minor version in `text`: (2, 13) for "2.13.0+cpu" and for "torch-cpu@2.13"; (0, 0) without one."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)


TORCH = release(torch.__version__)

Tensor = torch.Tensor

# Each private name that is read here → whether it is required.
NAMES: dict[str, bool] = {}


def _required(name: str) -> Any:
    """Return the object that torch has under the dotted `name`; raise HmpError where it has none."""
    NAMES[name] = True
    try:
        return _found(name)
    except (AttributeError, ImportError) as error:
        raise _missing(name) from error


def _optional(name: str, fallback: Any) -> Any:
    """Return the object that torch has under the dotted `name`, else `fallback`."""
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


def _place(name: str) -> tuple[Any, str]:
    """Return the object and the name of its attribute that hmp patches at `name`; raise HmpError where torch has nothing there."""
    _required(name)
    return _place_of(name)


def _places(*names: str) -> tuple[tuple[Any, str], ...]:
    """Return those of the places where this torch has something."""
    return tuple(_place_of(name) for name in names if _optional(name, None) is not None)


def _place_of(name: str) -> tuple[Any, str]:
    owner, _, attribute = name.rpartition(".")
    return _found(owner), attribute


# --- the namespaces of torch's functions -----------------------------------------------------------------------------------

# The base class of torch.Tensor, whose methods are written in C.
TensorBase: type = _required("torch._C.TensorBase")
# The object whose methods are the builtins of `torch`. C code looks them up in its type.
variable_functions: Any = _required("torch._C._VariableFunctions")
IN_VARIABLE_FUNCTIONS = frozenset(vars(type(variable_functions)))
# Modules whose functions ask the `__torch_function__` of subclasses, and that of no mode.
ASKING_NO_MODE = frozenset({"torch._lowrank", "torch._lobpcg"})
# Packages of torch's with classes of tensors whose `__torch_function__` computes attention itself (NestedTensor, CausalBias).
COMPUTING_ATTENTION = ("torch.nested.", "torch.nn.attention.")
# The module of torch's attention masks that have a shape and no numbers.
ATTENTION_BIASES = "torch.nn.attention.bias"
nn_builtins: types.ModuleType = _required("torch._C._nn")
vf: types.ModuleType = _required("torch._VF")  # its builtins equal those of `torch` but are other objects
# Those of its functions that torch's modules and torch.nn.functional call there. Other code calls them as `torch.lstm`; what
# torch.functional calls there is part of an op, inside which nothing is cast.
CALLED_IN_VF = frozenset(
    """
    alpha_dropout alpha_dropout_ dropout dropout_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ gru gru_cell
    lstm lstm_cell rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell threshold threshold_
    """.split()
)
# (name, namespace) of those that hold ops besides torch, torch.nn.functional and torch.Tensor.
OP_NAMESPACES: tuple[tuple[str, Any], ...] = (("torch._C._nn", nn_builtins), ("torch._VF", vf))
# The modules of which one function alone is an op.
OF_ONE_OP: dict[Any, str] = {_required("torch.nn.attention.flex_attention"): "flex_attention"}
# The higher-order op that flex_attention calls; compiled code may call it alone.
flex_attention_op: Any = _optional("torch.nn.attention.flex_attention.flex_attention_hop", None)
# Whether flex_attention takes key and value in another dtype than query.
FLEX_TAKES_MIXTURES = "allow_lowp_kv" in _optional("torch.nn.attention._utils._validate_sdpa_input.__code__.co_varnames", ())
# (name, namespace, prefix of the public names): modules that hold the builtins of torch.linalg and others as well, under names such as
# linalg_multi_dot and _sparse_mm.
BUILTIN_NAMESPACES: tuple[tuple[str, Any, str], ...] = tuple(
    (f"torch._C._{name}", _required(f"torch._C._{name}"), f"{name}.") for name in ("linalg", "special", "fft", "sparse")
)
# The private modules whose public Python functions are ops.
OP_MODULES: tuple[str, ...] = tuple(
    _required(name).__name__ for name in ("torch._tensor", "torch._lowrank", "torch._lobpcg", "torch._jit_internal", "torch.masked._ops")
)


# --- what intercepts calls: modes, `__torch_function__`, `__torch_dispatch__` ----------------------------------------------

# How many TorchFunctionModes are entered in this thread, and how many TorchDispatchModes.
function_modes: Callable[[], int] = _required("torch._C._len_torch_function_stack")
dispatch_modes: Callable[[], int] = _required("torch._C._len_torch_dispatch_stack")
function_mode_at: Callable[[int], Any] = _required("torch._C._get_function_stack_at")
pop_function_mode: Callable[[], Any] = _required("torch._C._pop_torch_function_stack")
push_function_mode: Callable[[Any], None] = _required("torch._C._push_on_torch_function_stack")
function_mode_stack: Callable[[], list[Any]] = _required("torch.overrides._get_current_function_mode_stack")
dispatch_mode_stack: Callable[[], list[Any]] = _required("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
# Context managers that switch interception off.
without_torch_function: Callable[[], AbstractContextManager[Any]] = _required("torch._C.DisableTorchFunction")
without_torch_dispatch: Callable[[], AbstractContextManager[Any]] = _required("torch._C._DisableTorchDispatch")
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _required("torch.utils._python_dispatch._disable_current_modes")
# The module of the mode that `with torch.device(...)` and torch.set_default_device() enter.
device_mode: types.ModuleType = _required("torch.utils._device")

# Wraps a function in the contexts that its first argument makes; of a generator function each step, as under torch.no_grad().
context_decorator: Callable[[Callable[[], Any], Any], Callable[..., Any]] = _required("torch.utils._contextlib.context_decorator")

# Nested lists, tuples and dicts as one flat list.
tree_leaves: Callable[[Any], list[Any]] = _required("torch.utils._pytree.tree_leaves")
tree_map: Callable[..., Any] = _required("torch.utils._pytree.tree_map")

# --- tensors and their memory ----------------------------------------------------------------------------------------------

# TensorBase's: a subclass that overrides untyped_storage() is not asked.
storage_of: Callable[[Tensor], Any] = _required("torch._C.TensorBase.untyped_storage")


def memory_of(storage: Any) -> int:
    """Return what identifies a storage's memory while it is held. data_ptr() asks for write access: copies of weights would go."""
    return int(storage._cdata)


# getset descriptors; torch annotates them as the values that they give
data_of: Any = _required("torch._C.TensorBase.data")
grad_of: Any = _required("torch._C.TensorBase.grad")
# The layout (`Tensor.layout`) of oneDNN's tensors.
MKLDNN: Any = _required("torch._mkldnn")


# The number of the stream in use on a CUDA device.
raw_cuda_stream: Any = _optional("torch._C._cuda_getCurrentRawStream", None)
# Puts low-precision weights of a recurrent layer into one buffer, of which they become views; None where torch was built without it.
flatten_cudnn_weights: Callable[..., Tensor] | None = _optional("torch._cudnn_rnn_flatten_weight", None)
# A product of float8 matrices, None where torch has none: what `hmp doctor` tries.
scaled_mm: Callable[..., Tensor] | None = _optional("torch._scaled_mm", None)
# FBGEMM's kernels for a CPU, None where torch has none: float32 rows as bytes with a scale and an offset each, and back.
pack_rows: Callable[[Tensor], Tensor] | None = _optional("torch.ops.quantized.embedding_bag_byte_prepack", None)
unpack_rows: Callable[[Tensor], Tensor] = _optional("torch.ops.quantized.embedding_bag_byte_unpack", None)


def mkldnn_supports(name: str) -> bool | None:
    """Return True if oneDNN has fast kernels for "bf16" or "fp16" on this processor, which torch asks before it calls them.

    None: no oneDNN.
    """
    ask, trace = _mkldnn_flags[name], trace_here()
    if ask is None:
        return None
    try:
        set_trace(None)  # hmp may be used first inside torch.jit.trace(), which takes no op that returns a bool
        return bool(ask())
    finally:
        set_trace(trace)


def x86_multiplies_bfloat16() -> bool | None:
    """Return True if this processor has avx512_bf16 or AMX; None if it isn't an x86 processor, or this torch does not say."""
    if platform.machine() not in ("x86_64", "AMD64") or None in _x86_flags:
        return None
    return any(ask() for ask in _x86_flags)


_x86_flags: tuple[Any, ...] = tuple(_optional(f"torch.cpu._is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
_mkldnn_flags: dict[str, Any] = {name: _optional(f"torch.ops.mkldnn._is_mkldnn_{name}_supported", None) for name in ("bf16", "fp16")}
# The processor's flags by name, as cpuinfo has them; empty where this torch does not say.
cpu_capabilities: Callable[[], dict[str, Any]] = _optional("torch._C._cpu._get_cpu_capability", dict)

# --- autograd --------------------------------------------------------------------------------------------------------------

# The id of the backward that this thread runs, -1 for none.
graph_task: Callable[[], int] = _required("torch._C._current_graph_task_id")
current_node: Callable[[], Any] = _required("torch._C._current_autograd_node")
sequence_number: Callable[[], int] = _required("torch.autograd._get_sequence_nr")
functorch_level: Callable[[], Any] = _required("torch._C._functorch.peek_interpreter_stack")
is_functorchs: Callable[[Tensor], bool] = _required("torch._C._functorch.is_functorch_wrapped_tensor")
# What backward() and autograd.grad() call, and the class that callbacks are attached to.
RUN_BACKWARD = _place("torch.autograd.graph._engine_run_backward")
Future: type = _required("torch._C.Future")
# Returns the (pack, unpack) hooks active in this thread or None; with the argument True inside a trace as well. The function itself is
# None where torch lacks it (2.7).
saved_tensors_hooks: Callable[[bool], Any] | None = _optional("torch._C._autograd._top_saved_tensors_default_hooks", None)
are_saved_tensors_hooks_allowed: Callable[[], bool] = _required("torch._C._autograd._saved_tensors_hooks_is_enabled")
push_saved_tensors_hooks: Callable[[Any, Any], None] = _required("torch._C._autograd._push_saved_tensors_default_hooks")
pop_saved_tensors_hooks: Callable[[], None] = _required("torch._C._autograd._pop_saved_tensors_default_hooks")

# What torch.func.grad() and the like call, and whether it can leave the hooks that are active on their stack (not in 2.7).
DISABLE_HOOKS = _place("torch._C._autograd._saved_tensors_hooks_disable")
can_be_disabled = "fail_if_non_empty" in (getattr(*DISABLE_HOOKS).__doc__ or "")

# Modules with a global variable that torch rebinds: it is read at each use.
_forward_ad: Any = torch.autograd.forward_ad
_required("torch.autograd.forward_ad._current_level")
_profiler: Any = torch.autograd.profiler
_required("torch.autograd.profiler._is_profiler_enabled")

# A view for which autograd makes a node and no relation to what is viewed. torch.Tensor has it under no name.
unsafe_view: Callable[[Tensor, torch.Size], Tensor] = _required("torch._C._get_operation_overload")("aten::_unsafe_view", "")[0]
has_storage: Callable[[Tensor], bool] = _required("torch._C._has_storage")
hooks_with_keywords: dict[int, bool] = _optional("torch.nn.modules.module._global_forward_hooks_with_kwargs", {})  # of modules, by number


def in_plain_autograd() -> bool:
    """Return True if this thread is in no torch.jit trace, no function transform and no forward-mode differentiation."""
    return trace_here() is None and in_no_transform()


def is_only_heard() -> bool:
    """Return True if no dispatch mode is active but that of hmp's tools, which changes no value."""
    return all(getattr(mode, "only_listens", False) for mode in dispatch_mode_stack())


def may_exchange_memory() -> bool:
    """Return True if a tensor may be given other memory: no dispatch mode is active but those of hmp's tools that allow it."""
    return not dispatch_modes() or all(getattr(mode, "allows_exchanged_memory", False) for mode in dispatch_mode_stack())


def in_no_transform() -> bool:
    """Return True if this thread is in no function transform and no forward-mode differentiation."""
    return functorch_level() is None and _forward_ad._current_level < 0


def is_profiled() -> bool:
    """Return True if torch.autograd.profiler is running."""
    return bool(_profiler._is_profiler_enabled)


# --- torch.jit -------------------------------------------------------------------------------------------------------------

schemas_of: Callable[[str], list[Any]] = _required("torch._C._jit_get_schemas_for_operator")
all_schemas: Callable[[], list[Any]] = _required("torch._C._jit_get_all_schemas")
# The state of the torch.jit trace that this thread is making, None for none.
trace_here: Callable[[], Any] = _required("torch._C._get_tracing_state")
set_trace: Callable[[Any], None] = _required("torch._C._set_tracing_state")


def is_in_trace() -> bool:
    """Return True if torch.jit traces the calling code. An error of an op ends its trace, and torch crashes if the code then goes on."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.jit._trace":
        frame = frame.f_back
    return frame is not None


_builtins: Any = _required("torch.jit._builtins")
# Returns the ATen name of a builtin, from a table that its first call fills.
BUILTIN_FINDER = _place("torch.jit._builtins._find_builtin")
_required("torch.jit._builtins._builtin_table")


def builtin_table() -> dict[int, str]:
    """torch.jit's table: id() of a builtin → its ATen name. Empty until torch.jit first needs it."""
    return _builtins._builtin_table or {}


# --- torch's dispatcher: what has kernels where ----------------------------------------------------------------------------


def dispatch_key(functionality: str, device: str) -> str:
    """Return the name of a dispatch key: "AutocastCUDA"."""
    return f"{functionality}{torch._C._dispatch_key_for_device(device)}"


OpOverload, OpOverloadPacket = torch._ops.OpOverload, torch._ops.OpOverloadPacket
_AUTOCAST_KEYS = tuple(name for name in dir(torch._C.DispatchKey) if name.startswith("Autocast") and name != "AutocastFunctionality")
_OF_TORCH = ("aten::", "prim::", "prims::")


def is_of_library(name: str) -> bool:
    """Return True for "torchvision::nms", False for an op of torch's own."""
    return not name.startswith(_OF_TORCH)


def has_autocast_kernel(op: Any, device: str = "") -> bool:
    """Return True if the overload, or one of the packet, has an autocast kernel of its own: for that type of device, or for any."""
    keys = (dispatch_key("Autocast", device),) if device else _AUTOCAST_KEYS
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in _names(op) for key in keys)


def _names(op: Any) -> list[str]:
    if isinstance(op, OpOverload):
        return [op.name()]
    name = op._qualified_op_name
    return [f"{name}.{overload}" if overload not in ("", "default") else name for overload in op.overloads()]


def name_of(op: Any) -> str:
    """Return "torchvision::nms" for the packet or one of its overloads."""
    name: str = op.name() if isinstance(op, OpOverload) else op._qualified_op_name
    return name


def library_ops() -> Iterator[Any]:
    """Yield the packets of libraries' ops with an autocast kernel of their own, and their overloads, that Python code has asked for."""
    names: set[str] = set()
    for key in _AUTOCAST_KEYS:
        names.update(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    for name in {name.partition(".")[0] for name in names if not name.startswith(_OF_TORCH)}:
        namespace, _, op = name.partition("::")
        packet = getattr(vars(torch.ops).get(namespace), "__dict__", {}).get(op)
        if isinstance(packet, OpOverloadPacket):
            yield packet
            yield from (each for each in list(vars(packet).values()) if isinstance(each, OpOverload))


class WithOwnHash:
    """A function that replaces the builtin of an op, by whose hash torch finds the op in its tables."""

    __slots__ = ("builtin", "function")

    def __init__(self, builtin: Callable[..., Any], function: Callable[..., Any]) -> None:
        self.builtin, self.function = builtin, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.builtin)

    def __eq__(self, other: object) -> bool:
        return self.builtin == getattr(other, "builtin", other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builtin, name)


def replace_builtin(op: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have calls of the packet or overload call what `make` returns for its builtin. torch.jit compiles them as before."""
    if not isinstance(op._op, WithOwnHash):
        new = WithOwnHash(op._op, make(op._op))
        torch.jit._builtins._get_builtin_table()[id(new)] = torch.jit._builtins._find_builtin(op._op)
        op._op = new


def restore_builtin(op: Any) -> None:
    """Undo `replace_builtin`."""
    if isinstance(op._op, WithOwnHash):
        torch.jit._builtins._get_builtin_table().pop(id(op._op), None)
        op._op = op._op.builtin


# --- torch.autocast --------------------------------------------------------------------------------------------------------

is_any_autocast_enabled: Callable[[], bool] = _required("torch._C._is_any_autocast_enabled")
is_autocast_available: Callable[[str], bool] = _required("torch._C._is_autocast_available")
# on Gaudi: whether torch.autocast is enabled for "hpu" is kept by torch itself, as for every device.
_DEVICE_TYPES = tuple(filter(is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu")))
_privateuse1: Callable[[], str] = _required("torch._C._get_privateuse1_backend_name")
_is_autocast_enabled: Callable[[str], bool] = torch.is_autocast_enabled


def devices_in_autocast() -> list[str]:
    """Return the device types that torch.autocast is enabled for in this thread."""
    known = (*_DEVICE_TYPES, _privateuse1())
    return [device for device in known if _is_autocast_enabled(device)] if is_any_autocast_enabled() else []


def _code_inside(function: str, name: str) -> types.CodeType:
    """Return the code of what `function` makes; raise HmpError where that has another name."""
    for each in _required(f"{function}.__code__.co_consts"):
        if isinstance(each, types.CodeType) and each.co_name == name:
            return each
    raise _missing(f"{function}.{name}")


# Functions that these two decorated may be older than hmp's patches; they are recognised by the code object that they share.
CUSTOM_FORWARD = _code_inside("torch.amp.autocast_mode.custom_fwd", "decorate_fwd")
CUSTOM_BACKWARD = _code_inside("torch.amp.autocast_mode.custom_bwd", "decorate_bwd")
AUTOCAST_INIT = _required("torch.amp.autocast_mode.autocast.__init__.__code__")

# --- torch's code around a model -------------------------------------------------------------------------------------------

# In these functions nothing is cast.
AROUND_A_MODEL = (
    _place("torch._tensor_str._str"),
    _place("torch.utils.data.dataloader._BaseDataLoaderIter.__next__"),
    _place("torch.utils.data._utils.worker._worker_loop"),
    # of model.to(bfloat16): it changes dtypes on purpose
    _place("torch.nn.Module._apply"),
    # public, without the underscore, in later releases
    *_places("torch.nn.utils.clip_grad._get_total_norm", "torch.nn.utils.clip_grad._clip_grads_with_norm_"),
)
# Wraps `step` of an optimizer's class when the first instance is made.
STEP_HOOKER = _place("torch.optim.Optimizer._patch_step_function")


def checkpoint_generator() -> tuple[Any, str]:
    """Return the place of the generator that checkpoint(use_reentrant=False) runs its function in.

    Imports torch.utils.checkpoint, which `import torch` does not in torch 2.7.
    """
    importlib.import_module("torch.utils.checkpoint")
    name = "torch.utils.checkpoint._checkpoint_without_reentrant_generator"
    # torch 2.15 and later call this one; the old name only forwards to it
    return (*_places(f"{name}_impl"), _place(name))[0]


# --- modules that torch imports late: None or empty until something has imported them --------------------------------------


def dynamo() -> Any:
    """Return the module torch._dynamo, None until something has imported it: that takes seconds."""
    return sys.modules.get("torch._dynamo")


DYNAMOS_MODULES = "torch._dynamo.variables.nn_module"


# Where the function is that calls of every module pass, after their `__call__`.
CALL_OF_MODULES: tuple[Any, str] = (torch.nn.Module, "_call_impl")


def tell_dynamo_of_call_impl(own: Any) -> None:
    """Have Dynamo take `own` for torch's `_call_impl` of modules; it takes what it finds there at its import, and skips that."""
    for name in ("torch._dynamo.utils", DYNAMOS_MODULES):
        module = sys.modules.get(name)
        if hasattr(module, "unpatched_nn_module_call_impl"):
            vars(module).update(unpatched_nn_module_call_impl=own)


def dynamo_foldable() -> dict[Any, Any]:
    """Dynamo's table of functions whose results it treats as constants; empty until Dynamo is imported."""
    found: dict[Any, Any] = getattr(sys.modules.get("torch._dynamo.variables.torch"), "constant_fold_functions", {})
    return found


def reset_dynamo() -> None:
    """Discards torch.compile's compiled code and Dynamo's tables of functions. Does nothing until Dynamo is imported."""
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
    """Return the class FakeTensorMode, None until something has imported its module."""
    return getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensorMode", None)


def is_traced(tensor: Tensor) -> bool:
    """Return True if the tensor stands for a plain one of the same shape and dtype while torch.export or AOTAutograd traces."""
    return type(tensor).__module__ in ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


def is_exporting_to_onnx() -> bool:
    """Return True inside torch.onnx.export(), unless it was given a program of torch.export."""
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def stream_of(tensor: torch.Tensor) -> int | None:
    """Return the stream of this thread that ops on the tensor are queued on, None on the CPU and where a device has no streams."""
    if tensor.is_cuda:
        return int(raw_cuda_stream(tensor.device.index))
    if tensor.is_cpu or tensor.device.type == "xla":
        return None
    try:
        return int(torch.accelerator.current_stream(tensor.device).stream_id)
    except (RuntimeError, AttributeError, ValueError):  # another device is torch.accelerator's, or this one has none
        return None


# --- weak references to tensors, of a kind that the installed torch supports ------------------------------------------------

# Refers to a tensor weakly. Up to torch 2.10 one that a plain weak reference gives is freed under its Python object with its graph.
WeakTensor: Any = weakref.ref if TORCH >= (2, 11) else TensorWeakRef


# --- attributes that are read elsewhere: here only that torch has them -----------------------------------------------------

for _name in (
    "torch.Tensor._base",
    "torch.Tensor._cdata",
    "torch.Tensor._version",
    "torch.UntypedStorage._cdata",
    "torch.nn.Module._call_impl",
    "torch.nn.Module._compiled_call_impl",
):
    _required(_name)
