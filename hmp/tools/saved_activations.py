"""The meter of what is kept for backward, which summary(), record(), benchmark() and tune() count with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch

from ..core.active.regions import disable_casts
from ..core.observe import Listener, listen, modules
from ..core.torch_private import memory_of, without_dispatch_modes
from .aten import local

# The autograd nodes of ops that copy or view a tensor.
_COPIES = ("ToCopy", "View", "UnsafeView", "T", "Transpose", "Permute", "Clone", "Alias")


class SavedActivations(Listener):
    """Counts the bytes of the tensors that this thread keeps for backward, by the module that is running.

    Each storage counts once, for the first module that keeps it; parameters and `own` tensors are left out. `by_module` counts all others,
    `weights_by_module` those of them that are copies of weights in another dtype. Of a checkpoint its inputs count, and nothing inside.
    Sparse tensors don't count. What hooks of the program keep for themselves is not seen.
    """

    def __init__(self, own: Iterable[torch.Tensor] = ()) -> None:
        own = list(own)
        self.by_module: Counter[str] = Counter()  # the path of the module → bytes
        self.weights_by_module: Counter[str] = Counter()
        self.was_called = False
        self._weights = [local(each) for each in own if isinstance(each, torch.nn.Parameter)]
        self._counted = {memory_of(each.untyped_storage()) for each in own if each.layout is torch.strided}
        self._held: list[object] = []  # a freed address would be used again

    @property
    def bytes(self) -> int:
        """Return what is kept: activations and copies of weights."""
        return self.by_module.total()

    @property
    def weight_bytes(self) -> int:
        """Return what copies of weights are of that."""
        return self.weights_by_module.total()

    def saved(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is kept."""
        self.was_called = True
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # of a sparse tensor
            return
        address = memory_of(storage)
        if not storage.nbytes() or address in self._counted:
            return
        self._counted.add(address)
        self._held.append(storage)
        self.by_module[modules.path] += storage.nbytes()
        if _is_of_weight(base) or (base.grad_fn is None and any(_is_cast_of(weight, base) for weight in self._weights)):
            self.weights_by_module[modules.path] += storage.nbytes()

    def kept(self, op: str, tensor: torch.Tensor, nbytes: int | None) -> str:
        """Count what an op keeps in a form of its own: instead of `saved`."""
        self.was_called = True
        if nbytes is None:
            self.saved(tensor)
        else:
            self.by_module[modules.path] += nbytes
        return modules.path

    def changed(self, about: str, saved: int, seconds: float, errors: list[tuple[float, float]]) -> None:
        """Count what packing it again avoided."""
        self.by_module[about] -= saved

    def let_go(self) -> None:
        """Hold no memory any more: nothing else will be counted."""
        self._held.clear()
        self._weights.clear()


def saved_by(step: Callable[[], object], own: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes that a step, which is run, keeps for backward, the tensors `own` left out."""
    found = SavedActivations(own)
    with listen(found):
        step()
    return found.bytes


def _is_of_weight(tensor: torch.Tensor) -> bool:
    """Return True if autograd knows the tensor as a copy of a parameter."""
    node = tensor.grad_fn
    while node is not None and node.name().removesuffix("0").removesuffix("Backward") in _COPIES:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), torch.nn.Parameter)


def _is_cast_of(weight: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if the tensor has a weight's values, rounded: autograd doesn't know where the cast of a frozen weight comes from.

    In FP8 it has a scale, and only the signs can be compared; on the meta device only the shapes.
    """
    if weight.numel() != tensor.numel() or not tensor.is_floating_point() or weight.device != tensor.device:
        return False
    if tensor.is_meta:
        return tensor.shape in (weight.shape, weight.mT.shape if weight.dim() > 1 else weight.shape)
    with disable_casts(), without_dispatch_modes(), torch.no_grad():
        wide = tensor.float()
        for given in (weight.float(), weight.float().mT) if weight.dim() > 1 else (weight.float(),):
            if given.shape == wide.shape and given.any():
                if tensor.itemsize == 1 and torch.equal(wide.sign(), torch.where(wide == 0, 0, given.sign())):
                    return True
                if torch.allclose(wide, given, rtol=2**-7, atol=1e-7):
                    return True
    return False
