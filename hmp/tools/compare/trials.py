"""What output, loss and gradients gain where an op computes in float32: a step of the model is run for each move, and measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...core import lists
from ...core.active.regions import disable_casts
from ...core.apply import give
from ...core.casting import each_tensor
from ...core.compiler_stance import running_uncompiled
from ...core.observe import Listener, listen
from ...core.policy.names import can_be_listed
from ...core.policy.policy import Policy
from ...core.torch_patches import module_calls
from ...errors import HmpError
from .. import model_call
from ..aten import facts, local, waited
from ..model_state import changed_since, preserve_state
from .comparison import ErrorRow, Move, MoveTrial, Trials
from .distance import total

Tensor = torch.Tensor
MOST_TRIALS = 7  # without them a comparison takes five steps' time or more, with them at most three times as long
_ALONE = 5  # trials of one move each; the others are of several moves


@dataclass
class ModelStep:
    """What compare() runs: the model's forward on a batch, and a loss."""

    model: torch.nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None

    def forward(self) -> tuple[Any, Tensor | None, str, Mapping[str, Any]]:
        """Return the output, the scalar that backward starts from or None, what that is, and the arguments of the model by their names."""
        output = model_call.call(self.model, self.batch)
        given = model_call.named_arguments(self.model, *model_call.arguments(self.batch))
        if self.loss is None:
            value = model_call.own_loss(output)
            if value is None:
                return output, None, "forward only: no loss was given, and the model's output has none", given
            source = "forward and backward of the output's own loss"
        else:
            value, source = self.loss(output), "forward and backward of the given loss"
            model_call.check_loss(value, "loss(output)")
        return output, *self.started(value, source), given

    def started(self, value: Tensor, source: str) -> tuple[Tensor | None, str]:
        """Return the loss and its source, no loss where gradients are disabled. Raise HmpError if no backward can start from it."""
        if not torch.is_grad_enabled():
            return None, "forward only: gradients are disabled here"
        if not value.requires_grad:
            raise HmpError(
                "expected a loss that requires grad, got one that doesn't: no weight of the model does, the loss does not depend on them, "
                "or a .detach(), a .item() or a torch.no_grad() in the model or in loss(output) detaches it; change that, or to compare "
                "only the forward pass call compare() under torch.no_grad()"
            )
        return value, source

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the model and of the batch."""
        return [*self.model.parameters(), *self.model.buffers(), *each_tensor((self.batch,))]

    def leaves(self) -> list[Tensor]:
        """Return those of the tensors that may get a gradient."""
        return [t for t in (*self.model.parameters(), *each_tensor((self.batch,))) if t.is_leaf]


class Ends(NamedTuple):
    """What a step ends in: the output's tensors, the loss, the gradients, and what its random ops are to draw."""

    outputs: Sequence[Tensor]
    loss: Sequence[Tensor]
    gradients: Sequence[Tensor]
    draws: list[Any] = []  # noqa: RUF012

    @classmethod
    def of(cls, model: torch.nn.Module, output: Any, loss: Tensor | None) -> Ends:
        """Return the output's real and complex tensors, the loss and the gradients of the model's weights."""
        outputs = [t for t in map(waited, each_tensor((output,))) if t.is_floating_point() or t.is_complex()]
        return cls(outputs, [] if loss is None else [waited(loss)], [waited(p.grad) for p in model.parameters() if p.grad is not None])

    def each(self, made: Callable[[Tensor], Tensor]) -> Ends:
        """Return these with what is made of each tensor."""
        return Ends(*(list(map(made, part)) for part in self[:3]))

    def against(self, exact: Ends, moves: tuple[Move, ...] = ()) -> MoveTrial:
        """Return how far these are from the exact ones."""
        return MoveTrial(moves, _far(self.outputs, exact.outputs), _far(self.loss, exact.loss), _far(self.gradients, exact.gradients))


def _far(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float | None:
    if [t.shape for t in got] != [t.shape for t in exact]:
        return math.inf
    return total(zip(got, exact, strict=True))


class Draws(Listener):
    """Notes what random ops draw, so that two runs with other random numbers are not compared."""

    follows_tensors = True

    def __init__(self) -> None:
        self.found: list[Any] = []

    def aten(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the op."""
        out = run(*args, **kwargs)
        known = facts(func)
        if known.is_random or known.draws:
            self.found += _drawn(func, known.name, known.draws, args, out)
        return out


def _drawn(func: Any, name: str, draws: bool, args: Any, out: Any) -> list[Any]:
    """Return a number that depends on all values that were drawn; of a kernel that shows none of them its name and dtype."""
    values = out if draws else out[1] if name == "native_dropout" and args[2] else None
    if isinstance(values, Tensor):
        flat = values.detach().flatten().double()
        return [float(flat @ torch.arange(1.0, len(flat) + 1, dtype=torch.float64, device=flat.device))]
    chances = [value for value, each in zip(args, func._schema.arguments, strict=False) if "dropout" in each.name]
    if values is not None or name == "native_dropout" or (any("dropout" in a.name for a in func._schema.arguments) and not any(chances)):
        return []
    return [(name, *(t.dtype for t in each_tensor((out,))))]


def ends_of(step: ModelStep, policy: Policy | None, *listeners: Listener) -> Ends:
    """Return what the step ends in under the policy, without hmp for None. The model's state is then as before."""
    written = changed_since(map(local, step.tensors()))
    region = disable_casts() if policy is None else _under(step.model, policy)
    heard = listen(*listeners) if listeners else nullcontext()
    with preserve_state(step.model, step.leaves(), written), running_uncompiled(), region, heard:
        output, value, *_ = step.forward()
        if value is not None:
            value.backward()
        return Ends.of(step.model, output, value).each(lambda tensor: tensor.detach().clone())


@contextmanager
def _under(model: torch.nn.Module, policy: Policy) -> Iterator[None]:
    """Activate the policy. A model that another one is applied to has this one meanwhile, as its calls would not follow the context."""
    called = module_calls.inside_compiled(model)
    found = module_calls.applied(called)
    if found is not None:
        give(model, policy, found.outputs, found.methods)
    try:
        with model_call.policy_context(model, policy, model):
            yield
    finally:
        if found is not None and found.applied is not None:
            module_calls.attach(called, found.applied, found.outputs, found.methods)


def candidates(rows: Sequence[ErrorRow], blame: Mapping[tuple[str, str], float], model: torch.nn.Module) -> list[Move]:
    """Return the moves to try, the likeliest first: in turn the ops that the largest accumulated error began at, and those that round most.

    An op of a module is moved there alone, an op outside of all modules everywhere.
    """
    paths = {name for name, _ in model.named_modules() if name}
    instead = {kind.name: kind.instead for kind in lists.kinds() if kind.instead}
    # the others compute in float32 already
    low = {(row.op, row.module) for row in rows if row.listed != "fp32" and (row.dtype != "float32" or row.listed in lists.low())}
    units: dict[tuple[str, str], float] = {}
    to: dict[tuple[str, str], str] = {}
    for row in rows:
        unit = row.op, row.module
        if unit in low and row.share > 0 and can_be_listed(row.op):
            units[unit] = units.get(unit, 0.0) + row.share
            to[unit] = instead.get(row.listed, to.get(unit, "fp32"))
    by_share = sorted(units, key=lambda unit: -units[unit])
    by_blame = sorted(units, key=lambda unit: (-blame.get(unit, 0.0), -units[unit]))
    ordered = [unit for pair in zip(by_blame, by_share, strict=True) for unit in pair]
    return list(dict.fromkeys(Move(f"{op} @ {path}" if path in paths else op, to[op, path]) for op, path in ordered))


def search(
    step: ModelStep,
    policy: Policy,
    start: MoveTrial,
    exact: Ends,
    moves: Sequence[Move],
    *,
    tolerance: float | None,
    most: int,
    say: Callable[[str], None],
) -> Trials:
    """Try moves one by one, then several together until the output is within the tolerance, at most `most` steps in all.

    `start` is the policy without a move, `exact` what float32 ends in.
    """
    allowed = torch.finfo(policy.dtype).eps / 2 if tolerance is None else tolerance
    tried: dict[frozenset[Move], MoveTrial] = {}
    if not most:
        return Trials(start, why_not="trials is 0")
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return Trials(start, why_not="several processes would try different ones; call compare() in one process")

    def trial(moved: tuple[Move, ...]) -> MoveTrial:
        key = frozenset(moved)
        if key not in tried:
            say(f"step {len(tried) + 1} of at most {most}, {' + '.join(move.entry for move in moved)} moved")
            tried[key] = _trial(step, policy, moved, exact)
        return tried[key]

    alone = [trial((move,)) for move in moves[: min(most, max(_ALONE, most - 3))]]
    ranked = sorted(alone, key=lambda each: (not each.gains(start), each.order.count(math.inf), each.order))
    gain = [each.moves for each in ranked if each.gains(start)] or [tuple(moves[:2])]
    often, best = Counter(move.op for move in moves), start
    everywhere = dict.fromkeys(Move(move.op, move.to) for move in moves if often[move.op] > 1)
    for added in (*gain, *((move,) for move in everywhere)):
        moved = (*(move for move in best.moves if move.op not in {each.entry for each in added}), *added)
        if best.far <= allowed or (len(tried) >= most and frozenset(moved) not in tried):
            break
        found = trial(moved)
        best = found if found.gains(best) else best
    return Trials(start, tuple(ranked), best if best.moves else None, allowed, len(moves) - len(alone))


def _trial(step: ModelStep, policy: Policy, moved: tuple[Move, ...], exact: Ends) -> MoveTrial:
    """Return how far the step is from float32 with these ops moved, or why that is not known."""
    listener = Draws()
    try:
        for entry, to in moved:
            policy = policy.move(entry, to)
        ends = ends_of(step, policy, *([listener] if exact.draws else []))
    except Exception as error:  # torch's or the model's, which may refuse another dtype
        return MoveTrial(moved, why_not=f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if listener.found != exact.draws:
        return MoveTrial(moved, why_not="draws other random numbers than the compared run; call model.eval() first")
    return ends.against(exact, moved)
