"""Gradients are the same with the cast caches as without, above all those of activations; test_weights_used_again.py asks of weights."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import hmp
from cast_cache_kit import LOW, Heads, assert_caches_change_nothing, assert_same_bits, caches, each, grads, look, loss, net, params
from low_kernels_kit import products_as_computed

WIDTH = 2**15
WIDE = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5))  # 512 KiB, which is shared beside threads too


def _leaf():
    return WIDE.clone().requires_grad_()


def _layer():
    torch.manual_seed(2)
    return torch.nn.Linear(WIDTH, 8)


@sdpa_kernel(SDPBackend.MATH)  # the kernel that can be differentiated twice; which one torch takes is another from release to release
def double_backward():
    model, x = Heads(WIDTH), _leaf()
    for _ in range(2):
        value = F.softplus(model(x).float()).sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        gradient.float().pow(2).sum().backward()
    return gradient, x.grad, grads(model)


def an_input_that_stops_needing_a_gradient():
    model, other, x = _layer(), _layer().requires_grad_(False), _leaf()
    held = model(x)
    x.requires_grad_(False)
    free = other(x)
    assert not free.requires_grad
    x.requires_grad_(True)
    again = other(x)
    (held.float().sum() + again.float().sum()).backward()
    return x.grad, grads(model), free


def an_activation_in_another_grad_mode():
    model, x = Heads(WIDTH), _leaf()
    h = model.norm(x)
    with torch.no_grad():
        first = model.q(h)
    second = model.q(h)
    with torch.no_grad():
        third = model.k(h)
    assert second.requires_grad and not first.requires_grad and not third.requires_grad
    second.float().sum().backward()
    return first, second, third, x.grad, grads(model)


def an_activation_changed_before_backward():
    model, x = Heads(WIDTH), _leaf()
    h = model.norm(x)
    out = model.q(h).float().sum() + model.k(h).float().sum()
    h.mul_(2)
    out = out + model.v(h).float().sum()
    out.backward()  # only casts of h were saved: the old ones for q and k
    return x.grad, grads(model)


def weights_written_by_a_hook_in_backward():
    model = net()

    def step(p):
        with torch.no_grad():
            p.sub_(0.1 * p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    seen = []
    for _ in range(3):
        loss(model).backward()
        seen.append(look(model))
    return seen, params(model)


def saved_tensors_may_be_changed():
    model, x = Heads(WIDTH), _leaf()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        for _ in range(2):
            h = model.norm(x)
            out = model.q(h).float().sum() + model.k(h).float().sum()
            out.backward()
    return x.grad, grads(model)


@sdpa_kernel(SDPBackend.MATH)
def forward_mode():
    model, seen = Heads(WIDTH), []
    for _ in range(2):
        loss(model, WIDE).backward()
    for _ in range(2):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(WIDE, torch.ones_like(WIDE))
            seen += [t for _ in range(2) for t in forward_ad.unpack_dual(model(x).float())]
            with torch.no_grad():
                seen += [t for _ in range(2) for t in forward_ad.unpack_dual(model.q(x).float())]
    return seen


SCENARIOS = {
    name: value
    for name, value in list(globals().items())
    if inspect.isfunction(value) and value.__module__ == __name__ and not name.startswith(("_", "test"))
}
# no cast may be saved in these: each asks whether the caches step aside
STEPS_ASIDE = {
    "an_input_that_stops_needing_a_gradient", "forward_mode", "saved_tensors_may_be_changed",
}  # fmt: skip


def test_gradients_are_the_same_with_caches():
    each(SCENARIOS, lambda name: assert_caches_change_nothing(SCENARIOS[name], hits=name not in STEPS_ASIDE))


def test_an_input_whose_copy_was_kept_without_a_gradient_starts_to_need_one():
    def found(x, cast):
        layer = _layer()
        weight, bias = (cast(p) for p in layer.parameters())
        with torch.no_grad():
            held = [F.linear(cast(x), weight, bias) for _ in range(2)]
        x.requires_grad_()
        F.linear(cast(x), weight, bias).float().pow(2).sum().backward()
        return [*held, x.grad, *grads(layer)]

    x = torch.randn(8, WIDTH)  # 1 MiB, from which on a copy is kept without a gradient
    with products_as_computed():
        want = found(x.clone(), lambda tensor: tensor.to(LOW))
    with caches(True):
        before = hmp.cache_info().hits
        got = found(x.clone(), lambda tensor: tensor)
        assert hmp.cache_info().hits > before
    assert_same_bits(got, want)
