"""No optimizer's step leaves a stale copy of a weight behind, whatever runs between its steps."""

from __future__ import annotations

import pytest
import torch

import hmp
from cast_cache_kit import LOW, X, Y, assert_caches_change_nothing, assert_same_bits, caches, each, grads, look, loss, net, params

# SparseAdam takes sparse gradients alone, which no product with a cast weight gives.
PLAIN = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam", "LBFGS", "Muon")
)
_CANDIDATES = [(name, {option: True}) for name in PLAIN for option in ("foreach", "fused", "capturable", "differentiable")]
BETWEEN = ("nothing", "no_grad", "inference_mode", "accumulation", "both")


def _takes(name, options):
    try:
        p = torch.nn.Parameter(torch.ones(2, 2))
        optimizer = getattr(torch.optim, name)([p], lr=0.01, **options)
        p.grad = torch.ones(2, 2)
        if options.get("differentiable"):
            return False  # steps with a graph: a leaf that requires grad cannot be written
        optimizer.step()
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return False
    return True


VARIANTS = [(name, {}) for name in PLAIN] + [v for v in _CANDIDATES if _takes(*v)]


def _training(make, between, steps=3):
    def scenario():
        model, seen = net(), []
        optimizer = make(model)
        for _ in range(steps):
            if between in ("no_grad", "both"):
                seen.append(look(model))
            if between == "inference_mode":
                with torch.inference_mode():
                    model(X)
                    seen.append(model(X).float().tolist())
            optimizer.zero_grad()
            for _ in range(3 if between in ("accumulation", "both") else 1):
                loss(model).backward()
            seen.append(grads(model))
            optimizer.step()
        return [torch.tensor(s) if isinstance(s, list) and isinstance(s[0], list) else s for s in seen], params(model), look(model)

    return scenario


@pytest.mark.sampled(3)
@pytest.mark.parametrize("between", BETWEEN)
def test_training_with_any_optimizer_is_the_same_with_caches(between):
    def check(variant):
        name, options = variant
        assert_caches_change_nothing(_training(lambda m: getattr(torch.optim, name)(m.parameters(), lr=0.05, **options), between))

    each(VARIANTS, check)


def test_fused_steps_are_among_the_variants():
    fused = {name for name, options in VARIANTS if "fused" in options}
    assert {"SGD", "Adam", "AdamW", "Adagrad"} <= fused
    assert {name for name, options in VARIANTS if "foreach" in options} >= {"SGD", "AdamW", "RMSprop", "Rprop", "Adafactor"} & set(PLAIN)


def test_lbfgs_and_its_closure_are_the_same_with_caches():
    def scenario():
        model, seen = net(), []
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3)

        def closure():
            optimizer.zero_grad()
            value = loss(model)
            value.backward()
            seen.append(look(model))
            return value

        for _ in range(2):
            optimizer.step(closure)
        return seen, params(model)

    assert_caches_change_nothing(scenario)


def test_a_graph_held_over_fused_steps_keeps_its_own_numbers():
    def scenario():
        model, held = net(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        for _ in range(3):
            held.append(model(X))
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        held[-1].float().sum().backward()  # what was saved for it is of the last step but one
        return held, params(model), grads(model)

    assert_caches_change_nothing(scenario, hits=False)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_training_is_what_explicit_casts_give(accumulate, fused):
    """Plain torch, no hmp: the casts written out by hand at each use."""

    def trained(forward):
        model, seen = net(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        for _ in range(3):
            for _ in range(2):
                with torch.no_grad():
                    seen.append(forward(model, X).float())
            optimizer.zero_grad()
            for _ in range(accumulate):
                (forward(model, X).float() - Y).pow(2).mean().backward()
            seen += grads(model)
            optimizer.step()
        return seen + params(model)

    def by_hand(model, x):
        for layer in model:
            x = torch.relu(x) if isinstance(layer, torch.nn.ReLU) else _linear(x, layer)
        return x

    def _linear(x, layer):
        return torch.nn.functional.linear(x.to(LOW), layer.weight.to(LOW), layer.bias.to(LOW))

    want = trained(by_hand)
    with caches(True):
        got = trained(lambda model, x: model(x))
        assert hmp.cache_info().hits > 0
    assert_same_bits(got, want)
