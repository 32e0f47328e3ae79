"""R15: torch's code that runs around a model is never cast.

It is gradient scaling and clipping, initialisers, tests, printing and data loading; optimizers are in optimizers.py.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator

import torch
import torch.nn.utils.prune

from .. import torch_private
from ..active import without_casts
from ..patching import patches
from .torchs_functions import find, python_function_at

# module → its functions; "Class.method" for methods
_WITHOUT_CASTS: dict[str, tuple[str, ...]] = {
    "torch.amp.grad_scaler": ("GradScaler.scale", "GradScaler.unscale_", "GradScaler.step", "GradScaler.update"),
    "torch.nn.utils.clip_grad": (
        "clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_",
    ),
    # these compute a weight once, and store it
    "torch.nn.utils.spectral_norm": ("remove_spectral_norm", "spectral_norm"),
    "torch.nn.utils.weight_norm": ("remove_weight_norm", "weight_norm"),
    "torch.nn.utils.parametrizations": ("orthogonal", "spectral_norm", "weight_norm"),
    "torch.nn.utils.parametrize": ("register_parametrization", "remove_parametrizations"),
    "torch.optim.swa_utils": ("AveragedModel.update_parameters",),
    "torch.autograd.gradcheck": ("gradcheck", "gradgradcheck"),
    "torch.testing": ("assert_close", "assert_allclose", "make_tensor"),
    "torch.utils.data.dataloader": ("DataLoader.__iter__",),
}  # fmt: skip


def install() -> None:
    """Makes these functions run with casts off, until patches.restore()."""
    for function in _functions():
        patches.swap(function, without_casts(patches.unpatched(function)))


def _functions() -> Iterator[types.FunctionType]:
    for module_name, names in _WITHOUT_CASTS.items():
        for name in names:
            function = find(module_name, name)
            if function is not None:
                yield function
    yield from filter(None, map(python_function_at, torch_private.AROUND_A_MODEL))
    for name, function in vars(torch.nn.init).items():
        if isinstance(function, types.FunctionType) and not name.startswith("_"):
            yield function
    for function in (*vars(torch.nn.utils.prune).values(), *vars(torch.nn.utils.fusion).values()):
        if isinstance(function, types.FunctionType) and function.__module__.startswith("torch.nn.utils."):
            yield function
    for scheduler in vars(torch.optim.lr_scheduler).values():
        step = vars(scheduler).get("step") if inspect.isclass(scheduler) else None
        if isinstance(step, types.FunctionType):
            yield step


def codes() -> set[types.CodeType]:
    """The code objects of all functions that are swapped, such as those above, and of backward: calls of them that began before install()
    must end before a policy becomes active.

    Not of data loading, in which a thread may wait for any time.
    """
    return {code for function, code in patches.swapped_functions() if not str(function.__module__).startswith("torch.utils.data")}
