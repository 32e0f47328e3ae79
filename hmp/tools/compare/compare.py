"""compare(): a model's forward and backward under a policy, every op compared with float32."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...core.active.regions import disable_casts
from ...core.casting import dtype_name
from ...core.convert import patched_as_before
from ...core.copies import clear_cache
from ...core.observe import here, listen
from ...core.policy.policy import Policy
from ...core.torch_private import without_torch_dispatch, without_torch_function
from ...errors import HmpError
from .. import model_call
from ..aten import local, refuse_xla, storage_address
from ..formatting import provenance
from ..model_state import preserve_state
from .comparison import Comparison, ErrorSums, Trials, distance_of_tokens
from .float32_reference import Float32Reference
from .trials import MOST_TRIALS, Draws, Ends, ModelStep, candidates, ends_of, search

Tensor = torch.Tensor
# The model took another path if it is farther than this many times its ops' errors, of at least _LEAST, from a run without hmp.
_OTHER_PATH, _LEAST = 3, 1e-3


def compare(  # noqa: PLR0913
    model: torch.nn.Module,
    batch: Any,
    policy: Policy | str | Path | None = None,
    *,
    against: Policy | str | Path | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    shift: bool = False,
    tolerance: float | None = None,
    trials: int = MOST_TRIALS,
    progress: bool | None = None,
) -> Comparison:
    """Compare each op of the model's forward and backward under a policy with float32, and measure what moving ops to the FP32 list gains.

    The model runs in float32 without hmp and under the policy, forward and backward. If it draws random numbers, or raises an error in
    float32, it is compared with what float32 gives op by op, on the path that it takes under the policy.

    In a third run each op runs in float32, too: on the same inputs, and on the inputs that float32 would have computed. Random draws are
    the same in all three. This takes memory for two float32 copies of each live tensor, so under `torch.no_grad()` it does not grow with
    the depth of the model.

    Then the step runs once more for each move of an op of one module to the FP32 list, the likeliest causes first: the ops at which a large
    accumulated error began, and those that round most. Afterwards weights, buffers, gradients, the batch and the random state are as
    before. Only the ops of this thread are compared; a compiled model runs uncompiled. Nothing is packed in these runs: a policy with a
    saved list runs one more step, only for `gradient_packed`.

    Under DDP or FSDP2 call it in all processes; each compares its own batch, and moves are not measured.

    Args:
        model: The module. It is not changed.
        batch: The arguments of the call: a mapping as keywords, a tuple or list as positional arguments, anything else as the only one.
        policy: The policy of the model and the loss. Default: the one applied to the model, else the active one, else "autocast".
        against: A second policy, compared with float32 too; its errors are shown in extra columns.
        loss: A function of the model's output that returns a scalar. Default: the output's `.loss` or `["loss"]`. Without a loss, or
            under `torch.no_grad()`, only the forward pass is compared.
        shift: True for causal language models, whose logits at one position predict the next label (`Comparison.tokens`).
        tolerance: The relative error of the output that `Comparison.trials.together` is to reach with few moves. Default: one rounding to
            the low-precision dtype, 0.0039 in bfloat16.
        trials: How many steps may be run to measure moves, for each policy; 0 for none. The default takes compare() at most three times as
            long as without them.
        progress: Write a line on stderr for each trial. Default: only on a terminal.

    Returns:
        The comparison of `policy`; `Comparison.against` is that of `against`.

    Raises:
        HmpError: For anything but a module, a scripted module, a loss that isn't a scalar, the same policy twice, an invalid `tolerance`
            or `trials`, and inside another compare().

    Example:
        >>> net, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
        >>> found = hmp.compare(net, x, "habana", loss=lambda output: output.square().mean())
        >>> found.output < 0.01
        True
    """
    _check(model, loss)
    check_search(tolerance, trials)
    chosen = model_call.chosen_policy(model, policy)
    other = None if against is None else another(model_call.chosen_policy(model, against), chosen)
    step = ModelStep(model, batch, loss)
    return compare_under(step, chosen, other, shift=shift, tolerance=tolerance, trials=trials, progress=progress)


def check_search(tolerance: float | None, trials: int) -> None:
    """Raise HmpError for numbers that cannot bound a search."""
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance >= 0):
        raise HmpError(f"invalid tolerance={tolerance!r}: expected a relative error of the output from 0 on, such as 0.01, or None")
    if not isinstance(trials, int) or trials < 0:
        raise HmpError(f"invalid trials={trials!r}: expected how many steps to try moves in, from 0 on")


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
    step: ModelStep,
    policy: Policy,
    against: Policy | None = None,
    *,
    shift: bool = False,
    tolerance: float | None = None,
    trials: int = MOST_TRIALS,
    progress: bool | None = None,
) -> Comparison:
    """Return the comparison of a step under the policy, and against another one."""
    for tensor in step.tensors():
        refuse_xla(tensor.device, "compare()")
    shown = sys.stderr is not None and (sys.stderr.isatty() if progress is None else progress)
    untouched: Ends | str
    try:
        untouched = ends_of(step, None)
    except Exception as error:
        untouched = f"the model raised {type(error).__name__}: {error}"

    def compared(chosen: Policy) -> Comparison:
        def say(text: str) -> None:
            if shown:
                print(f"hmp compare: {chosen.name}: {text}", file=sys.stderr, flush=True)

        say("comparing each op with float32")
        return _compared(step, chosen, untouched, shift, functools.partial(search, tolerance=tolerance, most=trials, say=say))

    with patched_as_before():
        found = compared(policy)
        return found if against is None else replace(found, against=compared(against))


def _compared(step: ModelStep, chosen: Policy, untouched: Ends | str, shift: bool, searched: Callable[..., Trials]) -> Comparison:
    model, statistics, draws = step.model, ErrorSums(), Draws()
    float32 = Float32Reference(statistics.add, _by_storage(step.tensors()))
    clear_cache()  # a weight cast before has lost what it was cast from
    with (
        _knowing_views(),
        preserve_state(model, step.leaves(), float32.written),
        model_call.policy_context(model, chosen, model),
        listen(float32, draws),
    ):
        try:
            output, value, source, given = step.forward()
            if value is not None:
                value.backward()
        except Exception as error:
            said = f"the last ops that compare() saw under policy {chosen.name!r}, with their errors: {statistics.last()}"
            with contextlib.suppress(AttributeError):  # an exception with slots
                error.__notes__ = [*getattr(error, "__notes__", ()), said]  # type: ignore[attr-defined]  # add_note() of Python 3.11
            raise
        with disable_casts(), without_torch_dispatch(), without_torch_function(), torch.no_grad():
            along = Ends.of(model, output, value).each(float32.reference)._replace(draws=draws.found)
            tokens = distance_of_tokens(output, given, float32.reference, shift)
    unpacked = chosen.replace(saved=()) if chosen.entries("saved") else chosen
    # without a listener to each op, in whose presence an op may round once less
    bare = ends_of(step, unpacked, *([Draws()] if draws.found else []))
    packed = ends_of(step, chosen).against(bare).gradient if value is not None and unpacked != chosen else None
    exact, notes = _exact(bare, along, untouched)
    start, rows = bare.against(exact), statistics.rows(float32.calls)
    if not model.training:
        notes.append("the model is in eval mode: dropout is off, and batch norm uses its running statistics")
    if any(bool(tensor.isnan().any()) for part in exact[:3] for tensor in part):
        notes.append("float32 gives NaN, too, and what is NaN under both counts as no error")
    return Comparison(
        policy=chosen.name,
        rows=rows,
        output=start.output,
        loss=start.loss,
        gradient=start.gradient,
        loss_value=float(bare.loss[0]) if bare.loss else None,
        loss_source=source,
        trials=searched(step, unpacked, start, exact, candidates(rows, float32.blame, model)),
        notes=tuple(notes),
        model=model._get_name(),
        low_dtype=dtype_name(chosen.dtype),
        device=next((tensor.device.type for tensor in step.tensors()), "cpu"),
        tokens=tokens,
        gradient_packed=packed,
        float32_loss_value=float(exact.loss[0]) if exact.loss else None,
        against=None,
        **provenance(),
    )


def _exact(bare: Ends, along: Ends, untouched: Ends | str) -> tuple[Ends, list[str]]:
    """Return what float32 ends in, and notes: on the path of the run under the policy, or without hmp where that is another path."""
    if along.draws:
        untouched = "the model draws random numbers, which differ between float32 and the low-precision dtype; call model.eval() first"
    if isinstance(untouched, str):
        return along, [f"not compared with a run without hmp: {untouched}"]
    far, near = bare.against(untouched), bare.against(along)
    if max(far.output or 0.0, far.loss or 0.0) <= _OTHER_PATH * max(near.output or 0.0, near.loss or 0.0, _LEAST):
        return along, []
    return untouched, [
        "the model computes something else in float32: its errors are those against a run without hmp, and more than the errors of the ops "
        "explain. It chooses a constant or a branch by the dtype, such as torch.finfo(x.dtype).eps, or by values that are nearly the same"
    ]


def _check(model: Any, loss: Any) -> None:
    model_call.check_module(model, "compare()")
    if loss is not None and not callable(loss):
        raise HmpError(f"loss= expected a function of the model's output, got {type(loss).__name__}")
    if here.aten is not None and any(isinstance(each, Float32Reference) for each in here.aten.listeners):
        raise HmpError("compare() was called inside compare(), which would count the ops of both; call one after the other")


def _by_storage(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Return the tensors by their memory, which several may share."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(storage_address(tensor), []).append(local(tensor))
    by_storage.pop(0, None)
    return by_storage


@contextmanager
def _knowing_views() -> Iterator[None]:
    """Disable inference mode, under which views have no `_base`, and leave the grad mode as it was."""
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield
