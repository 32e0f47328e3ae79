"""`habana_frameworks.torch.hpex.optimizers` and `.movingavrg`: Habana's fused optimizers, on torch's fused or foreach kernels.

FusedLamb is written out here. It computes what Habana's and NVIDIA's do: the packages that have a LAMB compute another one
(pytorch-optimizer does not correct the bias of the moments and clamps a weight's norm to 10) or depend on torchvision (timm).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

import torch

from ...core.active.regions import disable_casts

__all__ = ["FusedAdagrad", "FusedAdamW", "FusedEMA", "FusedLamb", "FusedLars", "FusedResourceApplyMomentum", "FusedSGD"]

Tensors = list[torch.Tensor]

_AT_LEAST_0 = (lambda value: bool(value >= 0), "a number >= 0")
_FRACTION = (lambda value: bool(0 <= value < 1), "a number >= 0 and < 1")
_FRACTIONS = (lambda value: all(0 <= each < 1 for each in value), "numbers >= 0 and < 1")
_EXPECTED: dict[str, Any] = {"betas": _FRACTIONS, "decay": _FRACTION}


def _check(optimizer: str, **values: Any) -> None:
    """Raise ValueError for the first value out of its range."""
    for name, value in values.items():
        is_right, expected = _EXPECTED.get(name, _AT_LEAST_0)
        if not is_right(value):
            raise ValueError(f"{optimizer}: {name}= expected {expected}, got {value!r}")


def _call(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of a step's closure, called with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


# The device types for which torch 2.7 has fused kernels of SGD and AdamW.
FUSED = frozenset({"cpu", "cuda", "xpu", "mps"})


class _OnFusedKernels(torch.optim.Optimizer):
    """A mixin before a class of torch's: sets `fused` for parameter groups whose devices are all in `fused_on`, else `foreach`."""

    fused_on: Set[str] = FUSED

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and choose its kernels."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        fused = all(p.device.type in self.fused_on and p.is_floating_point() and p.layout is torch.strided for p in group["params"])
        group["fused"], group["foreach"] = fused, not fused


class FusedAdamW(_OnFusedKernels, torch.optim.AdamW):
    """torch.optim.AdamW with Habana's defaults: `eps` is 1e-6 (torch: 1e-8) and `weight_decay` 0 (torch: 1e-2).

    The state has the names of torch.optim.AdamW's.

    Args:
        params: The parameters, or dicts of parameter groups.
        lr: The learning rate, >= 0.
        betas: The decay rates of the first and the second moment, >= 0 and < 1.
        eps: Added to the root of the second moment, >= 0.
        weight_decay: The decoupled weight decay, >= 0.
        bias_correction: Divide both moments by `1 - beta ** step`.

    Raises:
        ValueError: A value is out of its range.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedAdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        _check("FusedAdamW", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, lr, betas, eps, weight_decay)
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
        self.defaults["bias_correction"] = bias_correction

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        has_complex = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        steps: Tensors = lists[-1]  # step() gives the kernel this list, and the state keeps its tensors
        if steps and not group.get("bias_correction", True):
            torch._foreach_add_(steps, 1)
            steps[:] = [torch.full_like(step, math.inf) for step in steps]  # the correction is 1 after infinitely many steps
        return has_complex


class FusedSGD(_OnFusedKernels, torch.optim.SGD):
    """torch.optim.SGD on torch's fused kernels.

    Args:
        params: The parameters, or dicts of parameter groups.
        lr: The learning rate, >= 0.
        momentum: The momentum factor, >= 0.
        dampening: The dampening of the momentum.
        weight_decay: The L2 penalty, >= 0.
        nesterov: Use Nesterov momentum.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """


class FusedAdagrad(_OnFusedKernels, torch.optim.Adagrad):
    """torch.optim.Adagrad, on the CPU on torch's fused kernel and elsewhere on foreach kernels.

    Args:
        params: The parameters, or dicts of parameter groups.
        lr: The learning rate, >= 0.
        lr_decay: The decay of the learning rate, >= 0.
        weight_decay: The L2 penalty, >= 0.
        initial_accumulator_value: The first value of the sum of squared gradients, >= 0.
        eps: Added to the root of that sum, >= 0.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedAdagrad(model.parameters())
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    fused_on = frozenset({"cpu"})


class FusedResourceApplyMomentum(torch.optim.SGD):
    """TensorFlow's momentum, `accum = momentum * accum + grad; param -= lr * accum`: torch.optim.SGD without dampening.

    Args:
        params: The parameters, or dicts of parameter groups.
        lr: The learning rate, >= 0.
        momentum: The momentum factor, >= 0.
        weight_decay: The L2 penalty, >= 0.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedResourceApplyMomentum(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float = 0) -> None:
        super().__init__(params, lr, momentum, weight_decay=weight_decay)


class FusedLamb(torch.optim.Optimizer):
    """LAMB: Adam's update of each parameter, scaled to `lr` times the norm of the parameter.

    Args:
        params: The parameters, or dicts of parameter groups.
        lr: The learning rate, >= 0.
        bias_correction: Divide both moments by `1 - beta ** step`.
        betas: The decay rates of the first and the second moment, >= 0 and < 1.
        eps: Added to the root of the second moment, >= 0.
        weight_decay: The weight decay, >= 0. Parameters of a group with 0 take Adam's update unscaled, unless `use_nvlamb`.
        adam_w_mode: Add the weight decay to the update; False adds it to the gradient.
        grad_averaging: Multiply the gradient by `1 - betas[0]` in the first moment.
        set_grad_none: What `zero_grad()` does without an argument: set gradients to None, or fill them with 0.
        max_grad_norm: All gradients together are first scaled down to this norm, if theirs is greater; 0 does not scale.
        use_nvlamb: Scale the update of every parameter, with and without weight decay.
        fused: Accepted for Habana's scripts; has no effect.

    Raises:
        ValueError: A value is out of its range.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedLamb(model.parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        fused: bool = False,
    ) -> None:
        _check("FusedLamb", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm, "use_nvlamb": use_nvlamb,
        }  # fmt: skip
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set the gradients to None or fill them with 0: as the argument says, else as `set_grad_none` did."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; return the closure's loss."""
        loss = _call(closure)
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        gradients = [p.grad for _, params in groups for p in params]
        if not gradients:
            return loss
        for each in gradients:
            if not (each.is_floating_point() and each.layout is torch.strided):
                raise RuntimeError(
                    f"FusedLamb: expected dense gradients of real numbers, got one of dtype {each.dtype} and layout {each.layout}; "
                    "give such parameters to another optimizer"
                )
        norm = torch.nn.utils.get_total_norm(_at_least_float32(gradients))
        for group, params in groups:
            if params:
                self._update(group, params, norm)
        return loss

    def _update(self, group: dict[str, Any], params: Tensors, norm: torch.Tensor) -> None:
        group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        decay, limit = group["weight_decay"], group["max_grad_norm"]
        first, second = ([self._moment(param, name) for param in params] for name in ("exp_avg", "exp_avg_sq"))
        weights = _at_least_float32(params)
        gradients = _at_least_float32([param.grad for param in params if param.grad is not None])
        if limit > 0:
            gradients = [gradient / (norm.to(gradient) / limit).clamp(min=1) for gradient in gradients]
        if decay and not group["adam_w_mode"]:
            gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        corrections = [1 - beta ** group["step"] if group["bias_correction"] else 1 for beta in (beta1, beta2)]
        denominators = torch._foreach_sqrt(torch._foreach_div(second, corrections[1]))
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(first, corrections[0]), denominators)
        if decay and group["adam_w_mode"]:
            torch._foreach_add_(updates, weights, alpha=decay)
        if decay or group["use_nvlamb"]:
            norms = zip(torch._foreach_norm(weights), torch._foreach_norm(updates), strict=True)
            for update, (of_weight, of_update) in zip(updates, norms, strict=True):
                update.mul_(torch.where((of_weight > 0) & (of_update > 0), of_weight / of_update, 1.0))
        for param, weight, update in zip(params, weights, updates, strict=True):
            param.copy_(weight.sub(update, alpha=group["lr"]))

    def _moment(self, param: torch.Tensor, name: str) -> torch.Tensor:
        state = self.state[param]
        found = state.get(name)
        if found is None:
            found = torch.zeros_like(param, memory_format=torch.preserve_format)
        state[name] = _at_least_float32([found])[0]  # load_state_dict() casts it to the parameter's dtype
        moment: torch.Tensor = state[name]
        return moment


def _at_least_float32(tensors: Any) -> Tensors:
    """Return the tensors, those of low precision in float32."""
    return [each if each.dtype in (torch.float32, torch.float64) else each.float() for each in tensors]


def _wrapped(name: str) -> Any:
    """Return a property that reads and sets the attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optim, name), lambda self, value: setattr(self.optim, name, value), doc="The wrapped optimizer's."
    )


class FusedLars(torch.optim.Optimizer):
    """LARS: another optimizer steps with gradients scaled to `eeta` times the norm of their parameter.

    A gradient becomes `(grad + weight_decay * param) * eeta * |param| / (|grad| + weight_decay * |param| + eps)`, or stays as it is where
    a norm is 0. State, groups and learning rates are those of `optimizer`. Attributes of it that torch asks an optimizer for (does `step`
    unscale gradients?) are not forwarded, because this `step` does otherwise.

    Args:
        optimizer: The optimizer that makes the step.
        skip_mask: A value for each parameter, in the order of the groups. True: LARS and the optimizer's weight decay. False: neither
            (Habana's scripts: biases and batch norms). Parameters of groups that are added later get True.
        eeta: The trust coefficient, >= 0.
        eps: Added to the denominator, >= 0.

    Raises:
        ValueError: `skip_mask` has not one value for each parameter, or a number is below 0.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> momentum = FusedResourceApplyMomentum(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = FusedLars(momentum, skip_mask=[param.ndim > 1 for param in model.parameters()])
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    optim: torch.optim.Optimizer
    defaults = _wrapped("defaults")
    state = _wrapped("state")
    param_groups = _wrapped("param_groups")

    def __init__(self, optimizer: torch.optim.Optimizer, skip_mask: Sequence[Any], eeta: float = 0.001, eps: float = 1e-8) -> None:
        _check("FusedLars", eeta=eeta, eps=eps)
        self.__setstate__({"optim": optimizer})  # what torch's constructor sets, without groups of its own
        self.skip_mask = [bool(each) for each in skip_mask]
        self.eeta, self.eps = eeta, eps
        self._check_mask()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("optim", "eeta", "eps", "skip_mask")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "optim" in state:
            super().__setstate__(state)
        else:  # load_state_dict() gives the state and the groups
            self.optim.__setstate__(state)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call the wrapped optimizer's, which has defaults of its own."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the group to the wrapped optimizer; its parameters get LARS."""
        self.optim.add_param_group(param_group)
        self.skip_mask += [True] * len(self.param_groups[-1]["params"])

    def _check_mask(self) -> None:
        count = sum(len(group["params"]) for group in self.param_groups)
        if len(self.skip_mask) != count:
            raise ValueError(
                f"FusedLars: skip_mask= expected {count} values, one for each parameter in their order, got {len(self.skip_mask)}"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients and have the wrapped optimizer update the parameters; return the closure's loss."""
        loss = _call(closure)
        self._check_mask()  # the wrapped optimizer may have got another group
        mask = iter(self.skip_mask)
        decays = [(group, group["weight_decay"]) for group in self.param_groups if "weight_decay" in group]
        try:
            for group in self.param_groups:
                decay = group.get("weight_decay", 0)
                for param in group["params"]:
                    if next(mask) and param.grad is not None:
                        self._scale(param, param.grad, decay)
            for group, _ in decays:
                group["weight_decay"] = 0
            self.optim.step()
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
        return loss

    def _scale(self, param: torch.Tensor, grad: torch.Tensor, decay: float) -> None:
        dtype = torch.float64 if param.dtype is torch.float64 else torch.float32
        of_param, of_grad = (torch.linalg.vector_norm(each, dtype=dtype) for each in (param, grad))
        ratio = self.eeta * of_param / (of_grad + decay * of_param + self.eps)
        has_norms = (of_param > 0) & (of_grad > 0)
        scaled = (grad.to(ratio) + decay * param.to(ratio)) * ratio
        grad.copy_(torch.where(has_norms, scaled, grad.to(ratio)))


class FusedEMA:
    """An exponential moving average of a model's weights, as detection scripts keep one.

    After the n-th `update` each floating-point tensor of `ema` is `d * ema + (1 - d) * model` with `d = decay * (1 - exp(-n / 2000))`,
    which follows the model faster at the beginning. Other tensors are copied.

    Args:
        model: The model, also inside DataParallel or DistributedDataParallel.
        decay: The decay after many updates, >= 0 and < 1.
        updates: The number of updates to start from.

    Raises:
        ValueError: `decay` or `updates` is out of its range.

    Attributes:
        ema: The average, a copy of the model in evaluation mode.
        updates: The number of updates so far.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> average = FusedEMA(model)
        >>> average.update(model)
        >>> average.updates, round(average.decay(1), 6)
        (1, 0.0005)
        >>> average.update_attr(model, include=["in_features"])
    """

    def __init__(self, model: torch.nn.Module, decay: float = 0.9999, updates: int = 0) -> None:
        _check("FusedEMA", decay=decay, updates=updates)
        self.ema = copy.deepcopy(_unwrapped(model)).eval().requires_grad_(False)
        self.updates = updates
        self.base_decay = decay

    def decay(self, updates: float) -> float:
        """Return the decay of an update.

        Args:
            updates: The number of the update, from 1.

        Returns:
            A number >= 0 and < 1.
        """
        return self.base_decay * (1 - math.exp(-updates / 2000))

    @torch.no_grad()
    @disable_casts
    def update(self, model: torch.nn.Module) -> None:
        """Follow the model by one step.

        Args:
            model: The model, with the state of the one that the average was made of.
        """
        self.updates += 1
        decay = self.decay(self.updates)
        theirs = _unwrapped(model).state_dict()
        for name, ours in self.ema.state_dict().items():
            value = theirs[name].to(ours.device)
            if ours.is_floating_point():
                ours.copy_(ours * decay + value.to(ours.dtype) * (1 - decay))
            else:
                ours.copy_(value)

    def update_attr(
        self, model: torch.nn.Module, include: Collection[str] = (), exclude: Collection[str] = ("process_group", "reducer")
    ) -> None:
        """Copy the model's public attributes to `ema`.

        Args:
            model: The model.
            include: The names of attributes to copy; empty for all.
            exclude: The names of attributes to leave out.
        """
        for name, value in vars(model).items():
            if (not include or name in include) and not name.startswith("_") and name not in exclude:
                setattr(self.ema, name, value)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DataParallel or DistributedDataParallel."""
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        inner: torch.nn.Module = model.module
        return inner
    return model
