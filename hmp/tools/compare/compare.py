"""compare(): a model's forward and backward under a policy, every op compared with float32."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...core import lists
from ...core.active.regions import disable_casts
from ...core.casting import dtype_name, each_tensor
from ...core.compiler_stance import running_uncompiled
from ...core.copies import clear_cache
from ...core.observe import here, listen
from ...core.policy.names import can_be_listed
from ...core.policy.policy import Policy
from ...core.torch_private import without_torch_dispatch, without_torch_function
from ...errors import HmpError
from .. import model_call
from ..aten import local, refuse_xla, storage_address
from ..formatting import provenance, two_digits
from ..model_state import changed_since, preserve_state
from ..op_owners import AtenCall
from .comparison import Comparison, ErrorSums
from .distance import Distance, distance, total
from .float32_reference import Float32Reference, Seen
from .tokens import distance_of_tokens

Tensor = torch.Tensor
Loss = Callable[..., Tensor]
_LAST_SEEN = 5  # ops that an error of the model is reported with
LEAST_SHARE = 0.005  # an op with less of the error is not worth an entry in a list, in the text and on the page


def compare(
    model: torch.nn.Module,
    batch: Any,
    policy: Policy | str | Path | None = None,
    *,
    against: Policy | str | Path | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    shift: bool = False,
) -> Comparison:
    """Compare each op of the model's forward and backward under a policy with float32: its own error, and the accumulated error.

    First the model runs once in float32 without hmp, forward and loss. If it chooses a constant or a branch by the dtype, it may take
    another path in that run; the comparison op by op follows the path under the policy. If the model raises an error, a note on the error
    names the last ops.

    In the compared run every op runs as without the comparison. In addition it runs in float32 twice: on the same inputs, and on the
    inputs that float32 would have computed. Random draws are the same in all three. This takes memory for two float32 copies of each live
    tensor, so under `torch.no_grad()` it does not grow with the depth of the model. Afterwards weights, buffers, gradients, the batch and
    the random state are as before. Only the ops of this thread are compared; a compiled model runs uncompiled. Nothing is packed in the
    compared run: a policy with a saved list runs two more steps, only for `gradient_packed`.

    Under DDP or FSDP2 call it in all processes; each compares its own batch.

    Args:
        model: The module. It is not changed.
        batch: The arguments of the call: a mapping as keywords, a tuple or list as positional arguments, anything else as the only one.
        policy: The policy of the model and the loss. Default: the one applied to the model, else the active one, else "autocast".
        against: A second policy, compared with float32 too; its errors are shown in extra columns.
        loss: A function of the model's output that returns a scalar. Default: the output's `.loss` or `["loss"]`. Without a loss, or
            under `torch.no_grad()`, only the forward pass is compared.
        shift: True for causal language models, whose logits at one position predict the next label (`Comparison.tokens`).

    Returns:
        The comparison of `policy`; `Comparison.against` is that of `against`.

    Raises:
        HmpError: For anything but a module, a scripted module, a loss that isn't a scalar, the same policy twice, and inside another
            compare().
        TypeError: `policy` is a list of policies.

    Example:
        >>> net, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
        >>> found = hmp.compare(net, x, "habana", loss=lambda output: output.square().mean())
        >>> found.output < 0.01
        True
    """
    _check(model, loss)
    if isinstance(policy, (list, tuple)):
        raise TypeError("compare() expected one policy, got several; give a second one as against=, and call compare() again for more")
    chosen = model_call.chosen_policy(model, policy)
    other = None if against is None else another(model_call.chosen_policy(model, against), chosen)
    return compare_under(model, batch, chosen, other, loss, shift=shift)


def another(against: Policy, policy: Policy) -> Policy:
    """Return `against` under a name that is not that of `policy`. Raise HmpError if it is the same policy."""
    if against == policy:
        raise HmpError(
            f"against={against.name!r} is the same policy as {policy.name!r}; leave it out, or give another one, such as "
            "policy.replace(dtype=torch.float16)"
        )
    if against.name != policy.name:
        return against
    return against.replace(name=f"{against.name} ({'2' if against.dtype is policy.dtype else dtype_name(against.dtype)})")


def compare_under(
    model: torch.nn.Module,
    batch: Any,
    policy: Policy,
    against: Policy | None,
    loss: Callable[[Any], Tensor] | None,
    scopes: torch.nn.Module | None = None,
    shift: bool = False,
) -> Comparison:
    """Return the comparison. `scopes` is the model whose modules scoped entries name, where it is inside of `model`."""
    untouched = _untouched(model, batch, loss)
    found = _compared(model, batch, policy, loss, scopes or model, untouched, shift)
    if against is None:
        return found
    return replace(found, against=_compared(model, batch, against, loss, scopes or model, untouched, shift))


def _gradient_packed(
    model: torch.nn.Module, batch: Any, policy: Policy, loss: Callable[[Any], Tensor] | None, scopes: torch.nn.Module
) -> float | None:
    """Return how far the policy's saved list alone moves the gradients: a step that packs against one that does not."""

    def gradients() -> list[Tensor]:
        written = changed_since(map(local, _tensors(model, batch)))
        with preserve_state(model, _leaves(model, batch), written), running_uncompiled(), model_call.policy_context(model, policy, scopes):
            value, _ = _loss_of(model, model_call.call(model, batch), loss)
            if value is not None:
                value.backward()
            return [_dense(local(p.grad)) for p in model.parameters() if p.grad is not None]

    packed = gradients()
    with saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):  # inside of other hooks ops keep what torch keeps
        exact = gradients()
    with torch.no_grad():
        return total((_in_double(one), _in_double(other)) for one, other in zip(packed, exact, strict=True))


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _in_double(gradient: Tensor) -> Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float64))


class _Untouched(NamedTuple):
    """What a run in float32 gives that hmp has not touched; `why_not` is why it is not compared with, "" where it is."""

    outputs: tuple[Tensor, ...] = ()
    loss: float | None = None
    why_not: str = ""

    def distance_of(self, outputs: Sequence[Tensor]) -> float | None:
        if self.why_not:
            return None
        if [t.shape for t in outputs] != [t.shape for t in self.outputs]:
            return math.inf
        return total(zip(outputs, self.outputs, strict=True))

    def distance_of_loss(self, loss: float | None) -> float | None:
        if loss is None or self.loss is None:
            return None
        return total([(torch.tensor(loss, dtype=torch.float64), torch.tensor(self.loss, dtype=torch.float64))])


def _untouched(model: torch.nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None) -> _Untouched:
    """Return the forward pass and the loss without hmp."""
    written = changed_since(map(local, _tensors(model, batch)))
    with preserve_state(model, _leaves(model, batch), written), running_uncompiled(), disable_casts():
        before = torch.get_rng_state()
        try:
            output = model_call.call(model, batch)
            value = model_call.own_loss(output) if loss is None else loss(output)
        except Exception as error:
            return _Untouched(why_not=f"the model raised {type(error).__name__}: {error}")
        if not torch.equal(before, torch.get_rng_state()):
            return _Untouched(
                why_not="the model draws random numbers, which differ between float32 and the low-precision dtype; call model.eval() first"
            )
        number = float(local(value).detach()) if isinstance(value, Tensor) and value.numel() == 1 else None
        return _Untouched(tuple(t.detach().clone() for t in _floating(output)), number)


def _floating(output: Any) -> list[Tensor]:
    return [t for t in map(local, each_tensor((output,))) if t.is_floating_point() or t.is_complex()]


def _compared(
    model: torch.nn.Module,
    batch: Any,
    chosen: Policy,
    loss: Callable[[Any], Tensor] | None,
    scopes: torch.nn.Module,
    untouched: _Untouched,
    shift: bool,
) -> Comparison:
    statistics = ErrorSums()
    float32 = Float32Reference(_recorder(statistics), _by_storage(model, batch))
    output_error = gradient_error = loss_error = loss_value = far = None
    for tensor in (*model.parameters(), *each_tensor((batch,))):
        refuse_xla(tensor.device, "compare()")
    clear_cache()  # a weight cast before has lost what it was cast from
    with (
        _knowing_views(),
        preserve_state(model, _leaves(model, batch), float32.written),
        model_call.policy_context(model, chosen, scopes),
        listen(float32),
    ):
        with _saying_what_was_seen(chosen, statistics):
            output = model_call.call(model, batch)
            value, source = _loss_of(model, output, loss)
            if value is not None:
                value.backward()
        with disable_casts(), without_torch_dispatch(), without_torch_function(), torch.no_grad():
            outputs = _floating(output)
            output_error, far = total((t, float32.reference(t)) for t in outputs), untouched.distance_of(outputs)
            tokens = distance_of_tokens(output, model_call.named_arguments(model, *model_call.arguments(batch)), float32.reference, shift)
            if value is not None:
                loss_value = float(local(value))
                loss_error = distance(local(value), float32.reference(local(value))).relative
                grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
                gradient_error = total((grad, float32.reference(grad)) for grad in grads)
    packs = gradient_error is not None and chosen.entries("saved")
    packed = _gradient_packed(model, batch, chosen, loss, scopes) if packs else None
    rows = statistics.rows()
    notes = () if model.training else ("the model is in eval mode: dropout is off, and batch norm uses its running statistics",)
    return Comparison(
        policy=chosen.name,
        rows=rows,
        output=output_error,
        loss=loss_error,
        gradient=gradient_error,
        loss_value=loss_value,
        loss_source=source,
        advice=_advice(rows),
        notes=notes,
        model=model._get_name(),
        device=_device(model),
        squares=statistics.squares,
        tokens=tokens,
        gradient_packed=packed,
        untouched_why_not=untouched.why_not,
        untouched_output=far,
        untouched_loss=untouched.distance_of_loss(loss_value),
        untouched_loss_value=None if loss_value is None else untouched.loss,
        against=None,
        **provenance(),
    )


@contextmanager
def _saying_what_was_seen(chosen: Policy, statistics: ErrorSums) -> Iterator[None]:
    """Add to an error of the model's what was compared until then: the last ops that ran are next to its cause."""
    try:
        yield
    except Exception as error:
        rows = sorted(statistics.rows(), key=lambda row: row.order)
        last = [f"{row.op} ({row.direction}, {row.module or 'no module'}) in {row.dtype}: {two_digits(row.accumulated)}" for row in rows]
        seen = "; ".join(last[-_LAST_SEEN:]) or "no op"
        notes = [
            *getattr(error, "__notes__", ()),
            f"the last ops that compare() saw under policy {chosen.name!r}, with their errors against float32: {seen}",
        ]
        with contextlib.suppress(AttributeError):  # an exception with slots
            error.__notes__ = notes  # type: ignore[attr-defined]  # what add_note() of Python 3.11 does
        raise


def _device(model: torch.nn.Module) -> str:
    """Return where the model's first parameter or buffer is."""
    return next((tensor.device.type for tensor in (*model.parameters(), *model.buffers())), "cpu")


def _check(model: Any, loss: Any) -> None:
    model_call.check_module(model, "compare()")
    if loss is not None and not callable(loss):
        raise HmpError(f"loss= expected a function of the model's output, got {type(loss).__name__}")
    if here.aten is not None and any(isinstance(each, Float32Reference) for each in here.aten.listeners):
        raise HmpError("compare() was called inside compare(), which would count the ops of both; call one after the other")


def _loss_of(model: torch.nn.Module, output: Any, loss: Callable[[Any], Tensor] | None) -> tuple[Tensor | None, str]:
    """Return the scalar that backward starts from, and what it is."""
    if loss is not None:
        value, source = loss(output), "forward and backward of the given loss"
        model_call.check_loss(value, "loss(output)")
    else:
        found = model_call.own_loss(output)
        if found is None:
            return None, "forward only: no loss was given, and the model's output has none"
        value, source = found, "forward and backward of the output's own loss"
    if not torch.is_grad_enabled():
        return None, "forward only: gradients are disabled here"
    if not value.requires_grad:
        raise HmpError(_why_no_gradient(model, output, loss))
    return value, source


def _why_no_gradient(model: torch.nn.Module, output: Any, loss: Loss | None) -> str:
    """Return why no backward can start from the loss, and the remedy."""
    cut = "a .detach(), a .item() or a torch.no_grad()"
    without = "call compare() under torch.no_grad()"
    if loss is not None and any(tensor.requires_grad for tensor in each_tensor((output,))):
        return (
            f"expected a loss that requires grad, got one that doesn't: {cut} in loss(output) detaches it from the output; "
            f"remove that, or to compare only the forward pass {without}"
        )
    if any(parameter.requires_grad for parameter in model.parameters()):
        return (
            f"expected a loss that requires grad, got one that doesn't: it does not depend on the model's weights, or {cut} detaches it; "
            f"change that, or to compare only the forward pass {without}"
        )
    return f"expected a loss that requires grad, got one that doesn't: no weight of the model does; {without}"


def _recorder(statistics: ErrorSums) -> Seen:
    def seen(call: AtenCall, aten: str, dtype: torch.dtype, own: Distance | None, accumulated: Distance, is_part: bool) -> None:
        rule = None if call.owner.ruled is None else call.owner.ruled.rule
        listed = next((kind.name for kind in lists.kinds() if kind.rule is rule and not kind.adds), "")
        key = (call.owner.op, aten, call.direction, call.owner.place.module, dtype_name(dtype))
        statistics.add(key, listed, own, accumulated, is_part)

    return seen


def _advice(rows: Any) -> tuple[tuple[str, float], ...]:
    shares: dict[str, float] = {}
    low = {row.op for row in rows if row.dtype != "float32" or row.listed in lists.low()}  # the others compute in float32 already
    for row in rows:
        if row.listed != "fp32" and row.op in low and row.share > 0 and can_be_listed(row.op):
            shares[row.op] = shares.get(row.op, 0.0) + row.share
    worth = {op: share for op, share in shares.items() if share >= LEAST_SHARE}
    return tuple(sorted(worth.items(), key=lambda item: (-item[1], item[0])))


def _by_storage(model: torch.nn.Module, batch: Any) -> dict[int, list[Tensor]]:
    """Return the model's and the batch's tensors by their memory, which several may share."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in _tensors(model, batch):
        by_storage.setdefault(storage_address(tensor), []).append(local(tensor))
    by_storage.pop(0, None)
    return by_storage


def _tensors(model: torch.nn.Module, batch: Any) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), *each_tensor((batch,))]


def _leaves(model: torch.nn.Module, batch: Any) -> list[Tensor]:
    return [t for t in (*model.parameters(), *each_tensor((batch,))) if t.is_leaf]


@contextmanager
def _knowing_views() -> Iterator[None]:
    """Disable inference mode, under which views have no `_base`, and leave the grad mode as it was."""
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield
