"""torch.compile and strict torch.export trace hmp's casts into their graphs, and guard compiled code on the state around it.

While Dynamo traces, hmp is a torch function mode, which it asks about every function, method and operator of torch; nothing of the mode is
left in compiled code. torch._dynamo takes seconds to import: hmp patches it once somebody else has imported it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...errors import HmpError
from .. import dispatching_ops
from ..active import state
from ..active.regions import Region, without_casts
from ..compiler_stance import running_uncompiled
from ..dispatching_ops import unpatched
from ..patching import patches
from ..patching.patched_op import PatchedOp
from ..torch_patches import imports, module_calls
from ..torch_private import reset_dynamo, without_dispatch_modes
from . import dynamo_names, traced_call, traced_functions
from .dynamo_names import dynamo
from .traced_functions import functions, variables
from .traced_state import Trace, build, compiling, trace_of


def forget_wrappers() -> None:
    """Discard the wrappers that are traced and all compiled code, after a change of what wrappers are made of."""
    traced_call.forget_wrappers()
    reset_dynamo()


def install() -> None:
    """Patch torch._dynamo and torch.export, now or once they are imported, until patches.restore()."""
    imports.after({"torch._dynamo": _reach_dynamo, "torch.export._trace": _reach_export})


def _reach_dynamo() -> None:
    missing = dynamo_names.find()
    if not missing:
        _patch_dynamo()
        return
    warnings.warn(
        f"hmp does not know the torch.compile of torch {torch.__version__} ({missing} is missing or has changed): while hmp is "
        "active, compiled functions and models run uncompiled, with casts",
        RuntimeWarning,
        stacklevel=2,
    )
    uncompiled = contextlib.ExitStack()
    uncompiled.enter_context(running_uncompiled())
    patches.on_restore(uncompiled.close)


def _reach_export() -> None:
    export = importlib.import_module("torch.export._trace")
    for name in ("_strict_export", "_strict_export_lower_to_aten_ir"):  # torch 2.7 calls the second one itself
        if name in vars(export):
            patches.wrap(export, name, _strictly_exporting)


def _strictly_exporting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have strict export run without casts but those that Dynamo traces: it calls torch's functions once more on Dynamo's graph."""

    def strict_export(*args: Any, **kwargs: Any) -> Any:
        if not functions:  # torch.compile runs everything uncompiled: there is no graph
            raise HmpError(f"hmp cannot put its casts into a strict export of torch {torch.__version__}; export with strict=False")
        return compiling(original)(*args, **kwargs)

    return strict_export


# --- patches of Dynamo ------------------------------------------------------------------------------------------------------


def _patch_dynamo() -> None:
    _fill_tables()
    traced_functions.fill_functions()
    patches.on_restore(_forget)
    patches.rebind(torch.nn.Module, module_calls.APPLIED, None)  # for guards, which are not to ask a `__getattr__` of the user's
    patches.wrap(dynamo.CatchErrorsWrapper, "__call__", _skipping_own_code)
    patches.wrap(sys.modules[dynamo.trace_frame.__module__], "trace_frame", compiling)
    patches.wrap(sys.modules[dynamo.innermost_fn.__module__], "innermost_fn", _compiling_model)
    patches.wrap(dynamo.OutputGraph, "call_user_compiler", _graph_without_casts)
    patches.wrap(dynamo.OutputGraph, "compile_subgraph", _without_mode)
    patches.wrap(dynamo.InstructionTranslatorBase, "run", _with_trace)
    patches.wrap(dynamo.BaseTorchVariable, "__init__", _of_torchs_own)
    patches.wrap(dynamo.BuiltinVariable, "call_abs", _calling_abs)
    patches.wrap(dynamo.AutocastModeVariable, "enter", traced_functions.autocast_entered)
    patches.wrap(dynamo.AutocastModeVariable, "exit", traced_functions.autocast_left)
    patches.wrap(dynamo.AutogradFunctionApplyVariable, "trace_backward_graph", traced_functions.in_backward)
    patches.wrap(dynamo.UserDefinedClassVariable, "_call_cross_entropy_loss", _calling_cross_entropy)
    patches.wrap(dynamo.TorchInGraphFunctionVariable, "call_function", traced_functions.in_graph)
    # how Dynamo calls abs() of a tensor: as it was when it first did
    getattr(dynamo.BuiltinVariable, "call_function_handler_cache", {}).clear()
    types_known, sourceless = dynamo.VariableBuilder._type_dispatch(), dynamo.SourcelessBuilder._type_handlers
    types_known[Region] = lambda builder, value: variables().Region(value, source=builder.source)
    for kind in dispatching_ops.KINDS:
        types_known[kind] = lambda builder, value: traced_functions.op_variable(value, builder.source)
        sourceless[kind] = lambda tx, value: traced_functions.op_variable(value)


def _fill_tables() -> None:
    """Have Dynamo make its tables of torch's functions, and hold torch's own in them."""
    populate = dynamo.populate_builtin_to_tensor_fn_map
    with without_dispatch_modes():  # the first convert() may be inside one
        state.call_without_casts(populate)
    tables = [table for name, table in populate.__globals__.items() if isinstance(table, dict) and not name.startswith("__")]
    for table in (*tables, dynamo.TorchInGraphFunctionVariable._get_handlers()):
        for key in [key for key, value in table.items() if unpatched(key) is not key or unpatched(value) is not value]:
            value = table.pop(key)
            table[unpatched(key)] = unpatched(value)


def _forget() -> None:
    """Take hmp's entries out of Dynamo's tables; those of functions are discarded where the patches are (reset_dynamo)."""
    functions.clear()
    for kind in (Region, *dispatching_ops.KINDS):
        dynamo.VariableBuilder._type_dispatch().pop(kind, None)
        dynamo.SourcelessBuilder._type_handlers.pop(kind, None)


def _skipping_own_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo skip hmp's own frames, which run as plain Python after a graph break, but for what hmp compiles itself."""

    def __call__(self: Any, frame: Any, *args: Any) -> Any:
        is_skipped = traced_functions.is_own(frame.f_globals) and frame.f_code not in traced_functions.COMPILED_HERE
        return dynamo.ConvertFrameReturn() if is_skipped else original(self, frame, *args)

    return __call__


def _compiling_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile compile, for what was compiled before, the model where one is applied, not its `forward`, which has no policy.

    And a call of a PatchedOp, whose own code Dynamo skips.
    """

    def innermost_fn(fn: Any, *rest: Any) -> Any:
        if isinstance(fn, PatchedOp):
            return dynamo.wrap_inline(fn)
        model = module_calls.inside_compiled(fn)
        return model if model is not fn and module_calls.applied(model) else original(fn, *rest)

    return innermost_fn


def _with_trace(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have each frame begin with a Trace of its own, and with its guard; the calls that it inlines share both."""

    def run(self: Any) -> None:
        if not hasattr(self.symbolic_torch_function_state, "hmp"):
            traced_functions.update_tables()
            self.symbolic_torch_function_state.hmp = Trace(self, variables().Mode)
        original(self)

    return run


def _of_torchs_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo take the functions that replace torch's for torch's own."""
    return lambda self, value, **named: original(self, unpatched(value), **named)


def _graph_without_casts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have compiled graphs run without casts: they hold their own, and call torch's functions by names that hmp has patched."""

    def call_user_compiler(self: Any, gm: Any, example_inputs: Any) -> Any:
        with _backward_outside() if getattr(self, "hmp_backward_is_outside", False) else contextlib.nullcontext():
            compiled = original(self, gm, example_inputs)
        return functools.wraps(compiled)(without_casts(compiled))

    return call_user_compiler


def _without_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have the code that Dynamo makes restore the program's modes, where traced code has entered one: hmp's is there while it traces."""

    def compile_subgraph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        with trace_of(tx).under(trace_of(tx).current.off):
            return original(self, tx, *args, **kwargs)

    return compile_subgraph


def _backward_outside() -> AbstractContextManager[Any]:
    """Inside it AOTAutograd traces backward as eager code runs it, outside of torch.autocast.

    Else it would be as in the context around the graph, which is off for the ops of a policy.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    if not hasattr(config, "backward_pass_autocast"):
        return contextlib.nullcontext()
    return config.patch(backward_pass_autocast="off")  # type: ignore[no-any-return]


def _calling_abs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have Python's `abs()` of a tensor call the method, for it adds a node to the graph past all modes."""

    def call_abs(self: Any, tx: Any, arg: Any) -> Any:
        return build(tx, torch.Tensor.abs).call_function(tx, [arg], {}) if arg.is_tensor() else original(self, tx, arg)

    return call_abs


def _calling_cross_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have a CrossEntropyLoss that traced code makes call F.cross_entropy, for which Dynamo adds a node to the graph past all modes."""

    def _call_cross_entropy_loss(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        made = original(self, tx, args, kwargs)  # which refuses wrong arguments
        named = {**dict(zip(_OF_CROSS_ENTROPY, args, strict=False)), **kwargs}
        function = build(tx, torch.nn.functional.cross_entropy)
        made.fn = lambda *tensors, **by_name: function.call_function(tx, list(tensors), {**by_name, **named})
        return made

    return _call_cross_entropy_loss


_OF_CROSS_ENTROPY = tuple(inspect.signature(torch.nn.CrossEntropyLoss).parameters)
