"""Every private name of torch.compile that hmp uses. find() looks for all of them before any is used."""

from __future__ import annotations

import inspect
import pkgutil
import types
from typing import Any

# Module below torch._dynamo and name in it; of a function, the first parameters that it must have.
NAMES = """
convert_frame:CatchErrorsWrapper.__call__ self frame
convert_frame:ConvertFrameReturn
convert_frame:trace_frame code globals locals
eval_frame:innermost_fn fn
external_utils:wrap_inline fn
guards:GuardBuilder.ID_MATCH self guard
guards:install_guard
exc:TorchRuntimeError
exc:UnspecializeRestartAnalysis
output_graph:OutputGraph.call_user_compiler self gm example_inputs
output_graph:OutputGraph.install_global_by_id self prefix value
side_effects:SideEffects.load_cell self cellvar
source:AttrSource
symbolic_convert:InstructionTranslatorBase.import_source self module_name
symbolic_convert:InstructionTranslatorBase.run self
trace_rules:get_torch_obj_rule_map
variables.base:VariableTracker.build tx value source
variables.builder:SourcelessBuilder._type_handlers
variables.builder:VariableBuilder._type_dispatch
variables.builtin:BuiltinVariable.call_abs self tx arg
variables.builtin:populate_builtin_to_tensor_fn_map
variables.ctx_manager:AutocastModeVariable.enter self tx
variables.ctx_manager:AutocastModeVariable.exit self tx
variables.ctx_manager:ContextWrappingVariable.reconstruct_type self codegen
variables.functions:UserFunctionVariable
variables.higher_order_ops:AutogradFunctionApplyVariable.trace_backward_graph self tx
variables.higher_order_ops:TorchHigherOrderOperatorVariable._call_function self tx args kwargs
variables.torch:BaseTorchVariable.__init__ self value
variables.torch:TorchInGraphFunctionVariable._get_handlers
variables.torch:TorchInGraphFunctionVariable.call_function self tx args kwargs
variables.torch:get_overridable_functions
variables.torch_function:TorchFunctionModeVariable.call_torch_function self tx fn types args kwargs
variables.user_defined:UserDefinedClassVariable._call_cross_entropy_loss self tx args kwargs
exc:FakeTensorObservedException
exc:handle_observed_exception
"""
# From torch 2.15 on the traced program may catch what fake tensors refuse; None before.
LATER_NAMES = "exc:FakeTensorObservedException", "exc:handle_observed_exception"

dynamo: Any = types.SimpleNamespace()  # the classes and functions among these, once find() has found them


def find() -> str:
    """Put all of Dynamo's classes and functions that hmp uses into `dynamo`.

    Returns:
        The first name that this torch lacks or has with other parameters, "" for none.
    """
    for line in NAMES.strip().splitlines():
        name, *parameters = line.split()
        module, _, path = name.partition(":")
        owner = path.partition(".")[0]  # the class, of a method
        try:
            value = pkgutil.resolve_name(f"torch._dynamo.{name}")
            if parameters and [*inspect.signature(value).parameters][: len(parameters)] != parameters:
                raise AttributeError(name)
            setattr(dynamo, owner, pkgutil.resolve_name(f"torch._dynamo.{module}:{owner}"))
        except (AttributeError, ImportError):
            if name not in LATER_NAMES:
                return f"torch._dynamo.{name}".replace(":", ".")
            setattr(dynamo, owner, None)
    return ""
