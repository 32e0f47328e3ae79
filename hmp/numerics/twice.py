"""A call of a module twice, under the casts of its run and without any: how far its tokens are from float32's while it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..casting import each_tensor
from ..context import disable_casts
from ..errors import HmpError
from ..formatting import dtype_name
from .as_before import as_before, put_back
from .calling import compiled_in, named_arguments
from .tokens import LABELS, TokenDistance, distance_of_tokens, logits_of

Tensor = torch.Tensor
LOW = (torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """A call of a module, and its arguments and labels by name."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: Mapping[str, Any]


class CallWithLogits:
    """Watches modules, until `stop()`, for the call that gives logits: the last one that ended. `batch` is where labels are that the call
    is not given."""

    def __init__(self, modules: Iterable[torch.nn.Module], batch: Any = None) -> None:
        self._found: Call | None = None
        self._batch = batch
        modules = list(modules)
        # a hook inside of compiled code would be compiled too
        compiled = [each for module in modules if (inside := compiled_in(module)) is not None for each in inside.modules()]
        self._hooks = [module.register_forward_hook(self._ended, with_kwargs=True) for module in modules if module not in compiled]

    def _ended(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = named_arguments(module, args, kwargs)
        if not any(name in given for name in LABELS):
            given |= _labels_beside(self._batch, (args, kwargs))
        if logits_of(output, given) is not None:
            self._found = Call(module, args, kwargs, given)

    def close(self) -> None:
        """Watches no more."""
        for hook in self._hooks:
            hook.remove()

    def stop(self) -> Call:
        """The call. HmpError if there was none, or one that begins in the middle of the forward."""
        self.close()
        if self._found is None:
            raise HmpError(
                "no module was called whose output has logits: an output with that name, or a tensor with a vector for each of the "
                f"integers of {', '.join(LABELS[:-1])} or {LABELS[-1]} in the batch. A compiled module's calls are not seen"
            )
        if any(tensor.grad_fn is not None for tensor in each_tensor((self._found.args, self._found.kwargs))):
            raise HmpError(
                f"the logits are those of {type(self._found.module).__name__}, which is called with what other modules computed: its call "
                "alone does not say how far they are from float32; make one module of both"
            )
        return self._found


def beside_float32(call: Call, region: contextlib.AbstractContextManager[Any]) -> TokenDistance | None:
    """The distance of the call's tokens from float32's: it is made once in `region` and once without casts, without gradients and in eval
    mode, as dropout draws other masks in other dtypes. Training mode, buffers, gradients and the random state are as before.

    HmpError for weights in a low dtype, whose run without casts is not one in float32.
    """
    module = call.module
    for name, parameter in module.named_parameters():
        if parameter.dtype in LOW:
            raise HmpError(
                f"`{name}` is {dtype_name(parameter.dtype)}, so nothing runs in float32 to compare with: keep weights in float32, which "
                "casts leave as they are"
            )
    training = [(each, each.training) for each in module.modules()]
    try:
        with as_before(module) as states, torch.no_grad():
            module.eval()
            with region:
                output = module(*call.args, **call.kwargs)
            put_back(states)
            with disable_casts():
                in_float32 = module(*call.args, **call.kwargs)
                exact = dict(zip(map(id, _tensors(output)), _tensors(in_float32), strict=True))
                return distance_of_tokens(output, call.given, None, lambda tensor: exact[id(tensor)])
    finally:
        for owner, mode in training:
            owner.training = mode


def _tensors(output: Any) -> list[Tensor]:
    """Those of an output, also of one of a class of its own with logits and a loss."""
    return [*each_tensor((output,)), *each_tensor((getattr(output, "logits", None), getattr(output, "loss", None)))]


def _labels_beside(batch: Any, call: Any) -> dict[str, Any]:
    """The labels of a batch: by their name, or the last integers of a pair that the call is not made with."""
    if isinstance(batch, Mapping):
        return {name: batch[name] for name in LABELS if name in batch}
    taken = {id(tensor) for tensor in each_tensor((call,))}
    others = [t for t in each_tensor((batch,)) if id(t) not in taken and not t.is_floating_point()]
    return {LABELS[0]: others[-1]} if others else {}
