"""Modules of torch that are called alone, with a small made-up input: what their ops do with their weights shows without a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..core.convert import casts
from ..core.policy.policy import Policy
from ..core.policy.scopes import unwrapped
from ..core.torch_patches.module_calls import applied_policy

Tensor = torch.Tensor
Shapes = Sequence[Sequence[int]]
_ROWS = 16  # FP8 products take no fewer
_DIMS = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3, nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}


def _convolved(module: Any) -> Shapes:
    padding = (0,) * len(module.kernel_size) if isinstance(module.padding, str) else module.padding
    sizes = zip(module.kernel_size, module.dilation, padding, strict=True)
    return [(2, module.in_channels, *(dilation * (kernel - 1) + 1 + pad for kernel, dilation, pad in sizes))]


def _normed_channels(module: Any) -> Shapes:
    dims = next(dims for cls, dims in _DIMS.items() if isinstance(module, cls))
    return [(2, module.num_features, *(2,) * dims)]


def _recurrent(module: Any) -> Shapes:
    return [(2, 2, module.input_size)]


# By its forward, the shapes of the floating-point inputs of a module. One that looks rows up has none: it takes indices.
_SHAPES: dict[Callable[..., Any], Callable[[Any], Shapes]] = {
    nn.Linear.forward: lambda module: [(_ROWS, module.in_features)],
    nn.LayerNorm.forward: lambda module: [(2, *module.normalized_shape)],
    nn.RMSNorm.forward: lambda module: [(2, *module.normalized_shape)],
    nn.GroupNorm.forward: lambda module: [(2, module.num_channels, 2)],
    nn.MultiheadAttention.forward: lambda module: [(2, 2, module.embed_dim), (2, 2, module.kdim), (2, 2, module.vdim)],
    nn.Embedding.forward: lambda module: [],
    nn.EmbeddingBag.forward: lambda module: [],
    **{cls.forward: _normed_channels for cls in _DIMS},
    **{cls.forward: _recurrent for cls in (nn.LSTM, nn.GRU, nn.RNN)},
    **{cls.forward: _convolved for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{cls.forward: _convolved for cls in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)},
}
_OF_LIBRARIES: dict[str, Callable[[Any], Shapes]] = {
    "transformers.pytorch_utils.Conv1D": lambda module: [(_ROWS, module.weight.shape[0])],  # GPT-2's linear layers
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Alone:
    """The modules of a model that hold weights: those that can be called alone, and of the others why not.

    A call gives each one input in float32 and one in the low-precision dtype, as nobody knows which the model gives it. Modules in a part
    that has a policy of its own can't be called.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self._model = model = unwrapped(model)
        self._policy, self._why_not = policy, dict[nn.Module, str]()
        parts = [part for part in model.modules() if part is not model and applied_policy(part) is not None]
        others = {module for part in parts for module in part.modules()}
        for module in model.modules():
            why_not = "is in a part with a policy of its own" if module in others else _why_not(module)
            if why_not:
                self._why_not[module] = f"{type(module).__name__} {why_not}"

    def call(self, *, first: bool) -> list[Any]:
        """Call each module, and return what all return. On the `first` call, a module that raises is left out from then on."""
        generator = torch.Generator().manual_seed(0)
        found: list[Any] = []
        with casts(self._policy, model=self._model):
            for module in self._model.modules():
                if module in self._why_not or next(_held(module), None) is None:
                    continue
                try:
                    found += [module(*_inputs(module, dtype, generator)) for dtype in (torch.float32, self._policy.dtype)]
                except Exception as error:
                    if not first:
                        raise
                    self._why_not[module] = f"{type(module).__name__} alone raised {type(error).__name__}"
        return found

    def undecided(self) -> dict[Tensor, str]:
        """Return the weights of which a module could not be called, with the reason."""
        return {tensor: why for module, why in self._why_not.items() for tensor in _held(module)}


def _why_not(module: nn.Module) -> str:
    """Return why a module can't be called alone, "" where it can."""
    if _shapes_of(module) is None:
        return "does not say which op uses it"
    return "has hooks" if any(getattr(module, name, None) for name in _HOOKS) else ""


def _held(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _shapes_of(module: nn.Module) -> Callable[[Any], Shapes] | None:
    """Return the function that gives the shapes of a module's inputs; None where a forward that hmp does not know computes its output."""
    if "forward" in vars(module):
        return None
    owner: Any = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return _SHAPES.get(owner.forward) or _OF_LIBRARIES.get(f"{owner.__module__}.{owner.__qualname__}")


def _inputs(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    device, shapes = next(_held(module)).device, _shapes_of(module)
    assert shapes is not None
    found = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes(module)]
    return found or [torch.zeros(1, 1, dtype=torch.long, device=device)]
