"""Every optimizer of torch by its class and way: a loop over the weights, foreach, and fused where the processor has a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OTHERS = (torch.optim.SparseAdam, torch.optim.LBFGS, getattr(torch.optim, "Muon", None))  # sparse gradients, a closure, matrices alone
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
WAYS: dict[str, dict[str, Any]] = {"": {"foreach": False}, "-foreach": {"foreach": True, "weight_decay": 0.0123}, "-fused": {"fused": True}}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    f"{kind.__name__}{way}": lambda p, kind=kind, options=options: kind(p, lr=0.01, **options)
    for way, options in WAYS.items()
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind not in (torch.optim.Optimizer, *OTHERS)
    if (kind in FUSED or way != "-fused") and (kind is not torch.optim.Rprop or "weight_decay" not in options)
}
if hasattr(torch.optim, "Muon"):  # torch 2.9 and later
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon([next(iter(p))], lr=0.01)
