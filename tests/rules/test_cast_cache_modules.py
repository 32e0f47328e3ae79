"""Modules of torch, reparametrised weights and changes of policy: the same bits with the cast caches as without."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

import hmp
from cast_cache_kit import LOW, X, assert_caches_change_nothing, caches, each, grads, look, loss, net, params
from torch_has import SAVED_TENSORS_HOOKS
from trap_kit import policy

nn = torch.nn


EVERY_PRODUCT = policy(
    """linear matmul mm bmm mv dot addmm addbmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d bilinear
    scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell""".split()
)


def _trained(make, *inputs):
    """Two steps of two micro-batches, and before each two evaluations in each mode."""

    def scenario():
        torch.manual_seed(0)
        with hmp.casts(EVERY_PRODUCT):
            return steps_of(make())

    def steps_of(model):
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            for mode in (torch.no_grad, torch.inference_mode):
                model.eval()
                with mode():
                    seen += [_first(model(*inputs)).float() for _ in range(2)]
                model.train()
            optimizer.zero_grad()
            for _ in range(2):
                _first(model(*inputs)).float().pow(2).mean().backward()
            seen += grads(model)
            optimizer.step()
        return [torch.tensor(t.tolist()) if t.is_inference() else t for t in seen], params(model)

    return scenario


def _first(result):
    return result[0] if isinstance(result, tuple) else result


class Loop(nn.Module):
    """Cells that are called once a time step."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        h = None
        for step in x:
            h = self.cell(step, h)
        return _first(h)


class Unflattened(nn.Module):
    """A recurrent net whose flat weights lie in one buffer, as on a GPU."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(16, 8)
        flat = torch.cat([p.detach().reshape(-1) for p in self.rnn.parameters()])
        for p in self.rnn.parameters():
            p.data, flat = flat[: p.numel()].view_as(p), flat[p.numel() :]

    def forward(self, x):
        return self.rnn(x)


SEQUENCE = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(5))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(6))
WITH_GRAD = SEQUENCE.clone().requires_grad_()


def _tied():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    return model


MODELS = {
    "bilinear": (lambda: nn.Bilinear(16, 16, 4), X, X),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)), IMAGE),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), IMAGE),
    "gru": (lambda: nn.GRU(16, 8, batch_first=True), WITH_GRAD),
    "lstm with projections": (lambda: nn.LSTM(16, 8, proj_size=4), SEQUENCE),
    "flat weights": (Unflattened, SEQUENCE),
    "lstm cell": (lambda: Loop(nn.LSTMCell(16, 8)), SEQUENCE),
    "attention": (lambda: nn.MultiheadAttention(16, 2), SEQUENCE, SEQUENCE, SEQUENCE),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0), SEQUENCE, SEQUENCE),
    "tied": (_tied, X),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(16, 8)), X),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(16, 8)), X),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(16, 16)), X),
    "pruned": (lambda: nn.utils.prune.l1_unstructured(nn.Linear(16, 8), "weight", amount=0.5), X),
}


def test_a_module_of_torch_is_the_same_with_caches():
    def check(name):
        make, *inputs = MODELS[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_caches_change_nothing(_trained(make, *inputs), hits=name != "flat weights")

    each(MODELS, check)


def test_parametrizations_that_are_cached_are_the_same_with_caches():
    def scenario():
        layer = parametrizations.weight_norm(nn.Linear(16, 8))
        seen = []
        for _ in range(2):
            with parametrize.cached():
                sum(layer(X).float().pow(2).mean() for _ in range(3)).backward()
                seen += [*grads(layer), look(layer)]
        with torch.no_grad():
            layer.weight = layer.weight * 0.5
        seen.append(look(layer))
        parametrize.remove_parametrizations(layer, "weight")
        return seen, look(layer), params(layer)

    assert_caches_change_nothing(scenario)


def test_every_way_that_linear_computes_a_batch_gives_the_same_bits():
    """linear chooses its kernel by shape, bias, strides and by what needs a gradient: a copy must not change the choice."""
    shapes = [(16,), (4, 16), (5, 1, 16), (3, 4, 16)]
    modes = [torch.no_grad, torch.inference_mode, torch.enable_grad]

    def check(case):
        shape, bias, mode = case

        def scenario():
            layer = nn.Linear(16, 48, bias=bias)
            x, turned = torch.randn(shape), torch.randn(2, 5, 16)[:, ::2].transpose(0, 1)
            with mode():
                out = [f(layer) for _ in range(2) for f in (lambda m: m(x), lambda m: m(turned), lambda m: x @ m.weight.T)]
                layer.requires_grad_(False)
                out += [f(layer) for _ in range(2) for f in (lambda m: m(x), lambda m: m(turned), lambda m: x @ m.weight.T)]
            needs = torch.tensor([o.requires_grad for o in out])
            return [torch.tensor(o.float().tolist()) for o in out], needs

        assert_caches_change_nothing(scenario, hits=bias or mode is not torch.enable_grad)

    each(list(itertools.product(shapes, [True, False], modes)), check)


def test_parameters_made_in_inference_mode_are_cast_each_time():
    def scenario():
        with torch.inference_mode():
            model = net()
            outputs = [model(X).float() for _ in range(3)]
            for p in model.parameters():
                p.mul_(0.5)
            outputs += [model(X).float() for _ in range(2)]
            x = X.clone()
            outputs += [model(x).float(), model(x.mul_(2)).float()]
        with torch.no_grad():
            outputs += [model(X).float(), model(x).float(), net()(x).float()]
        loss(net(), X).backward()
        return [torch.tensor(o.tolist()) for o in outputs]

    assert_caches_change_nothing(scenario, hits=False)


def test_parameters_without_a_shape_yet_are_left_alone():
    with caches(True):
        model, lazy = net(), nn.LazyLinear(8)
        look(model)  # copies are held, so that there is something to forget
        lazy.half().float()
        lazy.weight.data = lazy.weight.data
        assert lazy(X).dtype is LOW


def test_a_class_of_the_users_sees_no_more_calls_for_data_than_without_hmp():
    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    calls: list = []
    seeing = X.clone().as_subclass(Seeing)
    with caches(True):
        look(net())
        for read in (lambda: seeing.data, lambda: setattr(seeing, "data", X.clone().as_subclass(Seeing))):
            calls.clear()
            with hmp.disable_casts():
                read()
            assert len(calls) == 1


@pytest.mark.parametrize("trains", [True, False])
def test_a_sparse_weight_is_cast_at_each_use(trains):
    if trains and not SAVED_TENSORS_HOOKS:
        pytest.skip("this torch does not tell of saved-tensor hooks: an op that saved tensors and found no kernel is not run again")
    dense = torch.eye(16) * torch.arange(16.0)
    with caches(True), warnings.catch_warnings(), torch.set_grad_enabled(trains):
        warnings.simplefilter("ignore")  # torch's sparse layouts are in beta
        for weight in (dense.to_sparse(), dense.to_sparse_csr()):
            parameter = torch.nn.Parameter(weight, requires_grad=trains)
            for _ in range(3):
                got = torch.mm(parameter, X.t())
                torch.testing.assert_close(got.detach().float(), dense @ X.t(), rtol=0.02, atol=0.02, check_dtype=False)
        assert hmp.cache_info().entries == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("trains", [True, False])
def test_a_nested_tensor_is_cast_at_each_use(trains):
    """It has no shape by which a copy would be found again. Without a gradient, activations are kept from 1 MiB on."""
    parts, w = [torch.full((rows, 256), 1.0 / rows) for rows in (400, 700)], torch.eye(8, 256)
    nested = torch.nested.nested_tensor(parts, requires_grad=trains)
    with caches(True), torch.set_grad_enabled(trains):
        found = [torch.nn.functional.linear(nested, w) for _ in range(3)]
        if trains:
            found[0].to_padded_tensor(0.0).float().sum().backward()
            assert nested.grad.dtype is torch.float32
    for result in found:
        for got, part in zip(result.unbind(), parts, strict=True):
            assert torch.equal(got, (part.to(LOW).float() @ w.t()).to(LOW))
