"""R15: torch's code that runs around a model is never cast.

It is gradient scaling and clipping, initialisers, tests, printing and data loading; optimizers are in optimizers.py.
"""

from __future__ import annotations

import inspect
import types

import torch
import torch.nn.utils.prune

from .. import torch_private
from ..active import without_casts
from ..patching import patches
from .torchs_functions import wrap

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
    for module_name, names in _WITHOUT_CASTS.items():
        for name in names:
            wrap(module_name, name, without_casts)
    for place in torch_private.AROUND_A_MODEL:
        patches.wrap(*place, without_casts)
    for name in [*vars(torch.nn.init)]:
        if not name.startswith("_"):
            patches.wrap(torch.nn.init, name, without_casts)
    for module in (torch.nn.utils.prune, torch.nn.utils.fusion):
        for name, function in [*vars(module).items()]:
            if str(getattr(function, "__module__", "")).startswith("torch.nn.utils."):
                patches.wrap(module, name, without_casts)
    for scheduler in [*vars(torch.optim.lr_scheduler).values()]:
        if inspect.isclass(scheduler) and "step" in vars(scheduler):
            patches.wrap(scheduler, "step", without_casts)


def codes() -> set[types.CodeType]:
    """The code objects of all functions that are wrapped, such as those above, and of backward: calls of them that began before install()
    must end before a policy becomes active.

    Not of data loading, in which a thread may wait for any time.
    """
    wrapped = patches.wrapped_functions()
    return {function.__code__ for function in wrapped if not str(function.__module__).startswith("torch.utils.data")}
