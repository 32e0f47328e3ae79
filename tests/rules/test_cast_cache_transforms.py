"""Function transforms, traces and fake tensors see casts, never a copy that was kept; and they leave none behind."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.func import functional_call, grad, hessian, jvp, vmap

import hmp
from cast_cache_kit import LOW, X, assert_caches_change_nothing, assert_same_bits, caches, each, grads, look, loss, net

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.jit")


def _trained():
    """A model whose weights have been used again, so that they would be shared, and in this step."""
    model = net()
    for _ in range(3):
        loss(model).backward()
    return model


def _around(transform):
    """The transform before, between and after plain forwards of the same weights and inputs."""

    def scenario():
        model, seen = _trained(), []
        for _ in range(2):
            seen.append(transform(model))
            loss(model).backward()
            seen += [look(model), transform(model), grads(model)]
        return seen

    return scenario


def _value(model):
    return lambda x: model(x).float().pow(2).sum()


@torch.enable_grad()
def _batched_grad(model, x):
    return torch.autograd.grad(model(x).float() + model(x), x, torch.eye(32).view(32, 4, 8), is_grads_batched=True)


# One of each kind; what they give by themselves, tests/properties/test_p9_gradients.py asks.
TRANSFORMS = {
    "grad": lambda m: grad(_value(m))(X),
    "vmap": lambda m: vmap(m)(X),
    "jvp": lambda m: jvp(lambda x: m(x).float(), (X,), (X,)),
    "hessian": lambda m: hessian(_value(m))(X[0]),
    "grad of functional_call": lambda m: grad(lambda p: functional_call(m, p, (X,)).float().pow(2).sum())(dict(m.named_parameters())),
    "per-sample gradients": lambda m: vmap(
        grad(lambda p, x: functional_call(m, p, (x,)).float().pow(2).sum()), in_dims=(None, 0)
    )({k: v.detach() for k, v in m.named_parameters()}, X),
    "ensembles": lambda m: vmap(lambda p: functional_call(m, p, (X,)))(
        {k: torch.stack([v.detach(), v.detach() * 2]) for k, v in m.named_parameters()}
    ),
    "a closed-over activation": lambda m: vmap(lambda s: m(X).float() * s)(torch.arange(3.0)),
    "batched grad": lambda m: _batched_grad(m, X.clone().requires_grad_()),
}  # fmt: skip


def test_a_function_transform_is_the_same_with_caches():
    each(TRANSFORMS, lambda name: assert_caches_change_nothing(_around(TRANSFORMS[name])))


@pytest.mark.parametrize("grad_on", [False, True])
def test_a_trace_follows_later_changes_of_the_weights(grad_on):
    def scenario():
        model = _trained() if grad_on else net()
        seen = [] if grad_on else [look(model)]
        with torch.set_grad_enabled(grad_on), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, (X,), check_trace=False)
        for _ in range(2):
            seen += [traced(X), look(traced), look(model)]
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
        return seen, traced(X + 1)

    assert_caches_change_nothing(scenario)


def test_make_fx_holds_the_cast_and_not_its_result():
    from torch.fx.experimental.proxy_tensor import make_fx

    with caches(True):
        model = _trained()
        look(model)
        parameters = dict(model.named_parameters())
        graph = make_fx(lambda p, x: functional_call(model, p, (x,)))(parameters, X)
        assert_same_bits([graph(parameters, X).float()], [look(model)])
        doubled = {k: v * 2 for k, v in parameters.items()}
        assert_same_bits([graph(doubled, X)], [functional_call(model, doubled, (X,))])


def test_fake_tensors_and_real_ones_do_not_meet():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def scenario():
        model = _trained()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert model(mode.from_tensor(X)).shape == (4, 8)
            with torch.no_grad():
                model(mode.from_tensor(X))
        seen = look(model)
        loss(model).backward()
        with FakeTensorMode(), torch.no_grad():
            built = torch.nn.Linear(16, 8)
            assert built(torch.empty(2, 16)).dtype is built(torch.empty(2, 16)).dtype is LOW
        return seen, grads(model)

    assert_caches_change_nothing(scenario)


def test_weights_without_data_are_cast_too():
    with caches(True), torch.no_grad():
        layer, x = torch.nn.Linear(16, 8, device="meta"), torch.empty(4, 16, device="meta")
        for _ in range(3):
            assert layer(x).shape == (4, 8) and layer(x).dtype is LOW
        layer.weight.data = torch.empty(5, 16, device="meta")
        layer.bias.data = torch.empty(5, device="meta")
        assert layer(x).shape == (4, 5)
        layer.to_empty(device="cpu")
        torch.nn.init.ones_(layer.weight), torch.nn.init.zeros_(layer.bias)
        assert torch.equal(layer(torch.ones(4, 16)).float(), torch.full((4, 5), 16.0))


@pytest.mark.native_kernels
def test_a_dispatch_mode_sees_every_cast():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._to_copy.default
            return func(*args, **(kwargs or {}))

    with caches(True), torch.no_grad():
        model = net()
        look(model)
        with Counting() as mode:
            model(X)
        assert mode.count == 5
        assert hmp.cache_info().entries == 4
