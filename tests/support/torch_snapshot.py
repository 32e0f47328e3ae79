"""What torch looks like, object by object, and how it differs from an earlier look.

Taken before hmp patches anything; independent of hmp, which must not be asked whether it cleaned up.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import operator
import sys
import types
from typing import Any

import torch

_SCALAR = torch.ones(())
MODULES = ["torch"] + [
    f"torch.{name}"
    for name in """
    _C._nn _VF _tensor _tensor_str amp amp.autocast_mode amp.grad_scaler autograd autograd.function autograd.gradcheck autograd.graph
    backends.mha fft functional linalg masked nn nn.functional nn.init nn.modules.activation nn.modules.module nn.modules.rnn
    nn.modules.transformer nn.parallel nn.parallel.data_parallel nn.parallel.parallel_apply nn.parallel.replicate nn.utils
    nn.utils.clip_grad nn.utils.rnn optim optim.optimizer optim.swa_utils overrides sparse special testing testing._comparison
    utils._device utils.checkpoint utils.data utils.data._utils.collate utils.data._utils.fetch utils.data._utils.worker
    utils.data.dataloader
    """.split()
]
MISSING = object()
_code_of = operator.attrgetter("__code__")


def settle_torch() -> None:
    """Let torch do what it does lazily: it patches its own optimizers' step when the first one is built."""
    importlib.import_module("torch._dynamo")
    with contextlib.suppress(ModuleNotFoundError):  # expecttest, which it needs in some releases
        importlib.import_module("torch.testing._internal.common_utils")  # replaces ScriptFunction.__call__ when it is imported
    for cls in vars(torch.optim).values():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            cls([torch.nn.Parameter(torch.zeros(1, 1))])
    # these remember a class when they are first asked about an object, as make_fx does
    for module, name in (("torch._opaque_base", "OpaqueBase"), ("torch._custom_class_base", "CustomClassBase")):
        base: Any = getattr(sys.modules.get(module), name, None)
        if base is not None:
            isinstance(0, type("Opaque", (base,), {}))


def torch_owners() -> dict[str, Any]:
    """The modules and classes whose attributes are compared after every test."""
    owners: dict[str, Any] = {name: _module(name) for name in MODULES}
    classes = [torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch.amp.GradScaler, torch.amp.autocast, torch.Generator]
    classes += [torch._C._VariableFunctionsClass, torch._C.TensorBase, torch.autograd.Function]
    classes += [torch.utils.data.DataLoader, torch.utils.data.Dataset]
    for name in ("torch.optim", "torch.optim.optimizer", "torch.optim.swa_utils", "torch.utils.checkpoint", "torch.utils.data.dataloader"):
        classes += [value for value in vars(_module(name)).values() if isinstance(value, type) and value.__module__.startswith("torch")]
    classes += [torch.nn.Module, *(cls for cls in subclasses(torch.nn.Module) if cls.__module__.startswith("torch"))]
    owners.update({f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes})
    return owners


def all_of_torch() -> dict[str, Any]:
    """Every loaded module of torch and every class in one: compared once, at the end of the session."""
    owners: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            owners[name] = module
            for value in list(vars(module).values()):
                if isinstance(value, type) and (value.__module__ or "").split(".")[0] == "torch":
                    owners[f"{value.__module__}.{value.__qualname__}"] = value
    owners.pop("torch.compiler._cache.CacheInfo", None)  # modules of torch.compile's leave something there when they are imported
    return owners


def subclasses(cls: type) -> list[type]:
    """Every class below cls that is alive."""
    found: dict[type, None] = {}
    waiting = [cls]
    while waiting:
        for child in waiting.pop().__subclasses__():
            if child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


class Snapshot:
    """The attributes of some owners by identity, their functions by body, and torch's process-wide dispatchers."""

    def __init__(self, owners: dict[str, Any]) -> None:
        self.owners = owners
        self.types = {label: type(owner) for label, owner in owners.items()}
        self.attributes = {label: dict(vars(owner)) for label, owner in owners.items()}
        self.bodies: dict[int, tuple[str, types.FunctionType, tuple[Any, ...]]] = {}
        for label, attributes in self.attributes.items():
            for name, value in attributes.items():
                for function in _functions_in(value):
                    if id(function) not in self.bodies:
                        self.bodies[id(function)] = (f"{label}.{name}", function, _body(function))
        self._functions = [function for _, function, _ in self.bodies.values()]
        self._codes = [function.__code__ for function in self._functions]
        self.dispatchers = dispatchers()

    def differences(self, whole_bodies: bool = True) -> list[str]:
        """Say what is not as it was, one line each; empty when torch is untouched. Of bodies the code alone where not `whole_bodies`."""
        found = []
        for label, before in self.attributes.items():
            now = vars(self.owners[label])
            if type(self.owners[label]) is not self.types[label]:
                found.append(f"{label} is a {type(self.owners[label])} now")
            if len(before) == len(now) and all(map(operator.is_, before.values(), now.values())) and all(map(operator.eq, before, now)):
                continue  # most owners, most of the time
            for name in before.keys() | now.keys():
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                if old is not new and not (_is_data(old) and _is_data(new)) and not _is_foreign(old, new):
                    found.append(f"{label}.{name}: {_show(old)} became {_show(new)}")
        have_their_code = all(map(operator.is_, map(_code_of, self._functions), self._codes))
        for name, function, body in () if have_their_code and not whole_bodies else self.bodies.values():
            if function.__code__ is not body[1][0] or (whole_bodies and not _same_body(body, _body(function))):
                found.append(f"{name}: the body of {function.__qualname__} is another ({function.__code__.co_filename})")
        for name, value in dispatchers().items():
            if value != self.dispatchers[name]:
                found.append(f"dispatcher {name}: {self.dispatchers[name]} became {value}")
        return found


def residue_on_modules(package_folder: str) -> list[str]:
    """Attributes of any living nn.Module class, users' included, whose code or type is from the package in that folder."""
    found = []
    for cls in subclasses(torch.nn.Module):
        if cls.__module__.startswith("hmp."):  # the demo's own model
            continue
        for name, value in list(vars(cls).items()):
            files = [function.__code__.co_filename for function in _functions_in(value)]
            if any(file.startswith(package_folder) for file in files) or type(value).__module__.split(".")[0] == "hmp":
                found.append(f"{cls.__module__}.{cls.__qualname__}.{name} is left behind: {_show(value)}")
    return found


def dispatchers() -> dict[str, Any]:
    """Process-wide and thread-wide settings that a test, or hmp, could leave changed."""
    optimizer, module = _module("torch.optim.optimizer"), _module("torch.nn.modules.module")
    return {
        "default dtype": torch.get_default_dtype(),
        "a tensor is a sequence": ctypes.pythonapi.PySequence_Check(ctypes.py_object(_SCALAR)),
        "grad": torch.is_grad_enabled(),
        "mha fast path": torch.backends.mha.get_fastpath_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "optimizer hooks": [len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)],
        "module hooks": [len(value) for name, value in vars(module).items() if name.startswith("_global_") and hasattr(value, "__len__")],
        "saved tensor hooks": getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(True) is None,
    }


def _module(name: str) -> Any:
    # torch._VF, and parallel_apply behind the function of its name, are found in sys.modules only
    if name not in sys.modules:
        try:
            importlib.import_module(name)
        except ImportError:
            parent, _, child = name.rpartition(".")
            return getattr(_module(parent), child)
    return sys.modules[name]


def _is_data(value: Any) -> bool:
    # counters and caches of torch's own come and go; what can be called or looked up through must stay
    return not callable(value) and not hasattr(type(value), "__get__")


def _is_foreign(old: Any, new: Any) -> bool:
    if old is MISSING:
        # Lightning replaces these of DataLoader and BatchSampler for a while, and leaves object's own where they were inherited
        if new is object.__setattr__ or new is object.__delattr__:
            return True
        # transformers hangs Module.smart_apply on torch when it first builds a model
        return str(getattr(new, "__module__", "")).split(".")[0] == "transformers"
    # Lightning wraps torch.compile when it is imported, each of the two packages once
    return str(getattr(new, "__globals__", {}).get("__name__", "")).split(".")[0] in ("lightning", "lightning_fabric")


def _functions_in(value: Any) -> list[types.FunctionType]:
    """The Python functions that make up an attribute: behind static, class and property wrappers, decorators and closures."""
    found: dict[int, types.FunctionType] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, (staticmethod, classmethod, types.MethodType)):
            waiting.append(each.__func__)
        elif isinstance(each, property):
            waiting += [each.fget, each.fset, each.fdel]
        elif isinstance(each, types.FunctionType) and id(each) not in found:
            found[id(each)] = each
            waiting.append(each.__dict__.get("__wrapped__"))
            waiting += [content for content in _cells(each) if isinstance(content, types.FunctionType)]
    return list(found.values())


def _cells(function: types.FunctionType) -> tuple[Any, ...]:
    if function.__closure__ is None:
        return ()
    contents = []
    for cell in function.__closure__:
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # not filled yet
            contents.append(MISSING)
    return tuple(contents)


def _body(function: types.FunctionType) -> tuple[Any, ...]:
    named = function.__kwdefaults__ or {}
    facts = (function.__name__, function.__qualname__, function.__module__, function.__doc__, tuple(named))
    # torch keeps caches in the dictionary of a function
    holds = (function.__code__, function.__globals__, function.__dict__.get("__wrapped__"), *(function.__defaults__ or ()), *named.values())
    return facts, holds, _cells(function)


def _same_body(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    (facts, holds, cells), (facts_now, holds_now, cells_now) = before, now
    if facts != facts_now or len(holds) != len(holds_now) or not all(map(operator.is_, holds, holds_now)):
        return False
    return all(a is b or (_is_data(a) and _is_data(b)) for a, b in zip(cells, cells_now, strict=True))


def _show(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    text = repr(value) if not inspect.isclass(value) else value.__qualname__
    return text if len(text) < 100 else text[:97] + "..."
