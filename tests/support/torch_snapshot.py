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
import warnings
from typing import Any

import torch

_SCALAR = torch.ones(())
MISSING = object()
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")  # of a function


def settle_torch() -> None:
    """Let torch do what it does lazily: it patches its own optimizers' step when the first one is built."""
    for name in ("torch._dynamo", "torch.nn.parallel", "torch.optim.swa_utils", "torch.testing", "torch.utils.checkpoint"):
        importlib.import_module(name)
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


def all_of_torch() -> dict[str, Any]:
    """Every loaded module of torch and every class in one."""
    owners: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.reduce_op warns when it is looked at
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
    """The attributes of some owners by identity, and the functions among them by what they are made of."""

    def __init__(self, owners: dict[str, Any]) -> None:
        self.owners = owners
        self.accepted: set[str] = set()
        self._types = {label: type(owner) for label, owner in owners.items()}
        self._attributes = {label: dict(vars(owner)) for label, owner in owners.items()}
        named: dict[int, tuple[str, types.FunctionType]] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for label, attributes in self._attributes.items():
                for name, value in attributes.items():
                    for function in _functions_in(value):
                        named.setdefault(id(function), (f"{label}.{name}", function))
        self._names = [name for name, _ in named.values()]
        self._functions = [function for _, function in named.values()]
        self._keywords = [(at, f.__kwdefaults__) for at, f in enumerate(self._functions) if f.__kwdefaults__]
        self._cells = [(at, cell) for at, f in enumerate(self._functions) for cell in f.__closure__ or ()]
        self._parts = self._look_at_functions()
        self._settings = torch_settings() | _hooks()

    def differences(self) -> list[str]:
        """Say what is not as it was, one line each; empty when torch is untouched."""
        found = []
        for label, before in self._attributes.items():
            now = vars(self.owners[label])
            if type(self.owners[label]) is not self._types[label]:
                found.append(f"{label} is a {type(self.owners[label])} now")
            if len(before) == len(now) and all(map(operator.is_, before.values(), now.values())):
                continue  # most owners, most of the time
            for name in before.keys() | now.keys():
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                if name.startswith("__compiled_fn_"):
                    continue  # a strict export leaves its graphs among the globals of a module of torch's, with hmp and without
                if old is not new and not (_is_data(old) and _is_data(new)) and not _is_foreign(old, new):
                    found.append(f"{label}.{name}: {_show(old)} became {_show(new)}")
        for at in sorted(self._changed_functions()):
            function = self._functions[at]
            found.append(f"{self._names[at]}: the body of {function.__qualname__} is another ({function.__code__.co_filename})")
        for name, value in (torch_settings() | _hooks()).items():
            if value != self._settings[name]:
                found.append(f"{name}: {self._settings[name]} became {value}")
        return [line for line in found if line not in self.accepted]

    def accept(self) -> None:
        """What differs now is not told again."""
        self.accepted.update(self.differences())

    def _look_at_functions(self) -> list[tuple[list[int] | range, list[Any]]]:
        """Columns: the numbers of functions, and a part of each."""
        everywhere = range(len(self._functions))
        columns: list[tuple[list[int] | range, list[Any]]] = []
        columns += ((everywhere, list(map(operator.attrgetter(part), self._functions))) for part in _PARTS)
        keywords = [(at, value) for at, held in self._keywords for value in held.values()]
        columns.append(([at for at, _ in keywords], [value for _, value in keywords]))
        columns.append(([at for at, _ in self._cells], [_content(cell) for _, cell in self._cells]))
        return columns

    def _changed_functions(self) -> set[int]:
        changed: set[int] = set()
        for (numbers, before), (_, now) in zip(self._parts, self._look_at_functions(), strict=True):
            if len(before) != len(now) or not all(map(operator.is_, before, now)):
                changed.update(at for at, old, new in zip(numbers, before, now, strict=False) if not _is_the_same(old, new))
        return changed


def _is_the_same(old: Any, new: Any) -> bool:
    return old is new or (_is_data(old) and _is_data(new) and type(old) is type(new) and not isinstance(old, (types.CodeType, tuple, str)))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING


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


def torch_settings() -> dict[str, Any]:
    """Settings of the process and the thread that a test could leave changed."""
    return {
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "saved tensor hooks": getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(True) is None,
    }


def _hooks() -> dict[str, Any]:
    """What is called, or asked, besides attributes."""
    optimizer, module = sys.modules["torch.optim.optimizer"], sys.modules["torch.nn.modules.module"]
    return {
        "a tensor is a sequence": ctypes.pythonapi.PySequence_Check(ctypes.py_object(_SCALAR)),
        "mha fast path": torch.backends.mha.get_fastpath_enabled(),
        "optimizer hooks": [len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)],
        "module hooks": [len(value) for name, value in vars(module).items() if name.startswith("_global_") and hasattr(value, "__len__")],
    }


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
            waiting += [content for content in map(_content, each.__closure__ or ()) if isinstance(content, types.FunctionType)]
    return list(found.values())


def _show(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    text = repr(value) if not inspect.isclass(value) else value.__qualname__
    return text if len(text) < 100 else text[:97] + "..."
