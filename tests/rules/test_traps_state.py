"""Traps where state is narrowed or torch's own Python code is cast: C, F, G1, H, N7, Q2, R4, R5, S3, U4, U6, U12, U13."""

from __future__ import annotations

import contextlib
import copy
import pickle

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hmp
from trap_kit import Traps, same, under_hmp, under_naive

trap = Traps()
LOW = torch.bfloat16


@trap("C1")
def batch_norm_moves_its_running_statistics(run):
    for norm, shape in (
        (torch.nn.BatchNorm1d(3), (8, 3)),
        (torch.nn.BatchNorm2d(3), (4, 3, 5, 5)),
        (torch.nn.BatchNorm3d(3), (4, 3, 2, 2, 2)),
    ):
        x, alone = torch.rand(shape) + 1, copy.deepcopy(norm)
        statistics = norm.running_mean, norm.running_var
        with run():
            norm(x)
        alone(x.to(LOW))
        assert (norm.running_mean, norm.running_var) == statistics
        same(norm.running_mean, alone.running_mean)
        same(norm.running_var, alone.running_var)
        assert norm.running_mean.abs().min() > 0.1


@trap("C2")
def batch_norm_keeps_its_parameters_in_float32(run):
    norm, x = torch.nn.BatchNorm1d(3), torch.randn(8, 3, requires_grad=True)
    alone, low = copy.deepcopy(norm), x.detach().to(LOW).requires_grad_()
    with run():
        y = norm(x)
        y.float().square().sum().backward()
    expected = alone(low)
    expected.float().square().sum().backward()
    same(y, expected)
    same(norm.weight.grad, alone.weight.grad)
    same(norm.running_var, alone.running_var)


@trap("C4")
def instance_norm_moves_its_running_statistics(run):
    norm, x = torch.nn.InstanceNorm1d(3, affine=True, track_running_stats=True), torch.rand(2, 3, 8) + 1
    alone = copy.deepcopy(norm)
    with run():
        norm(x)
    alone(x.to(LOW))
    same(norm.running_mean, alone.running_mean)
    assert norm.running_mean.abs().min() > 0.1


@trap("C5")
def max_norm_renormalises_the_real_weight(run):
    for lists in ({"fp32": ["embedding"]}, {"bf16": ["embedding"]}):
        for dtype in (torch.float32, LOW):
            weight = torch.full((4, 16), 5.0, dtype=dtype)
            with run(**lists):
                F.embedding(torch.tensor([1]), weight, max_norm=1.0)
            assert abs(weight[1].float().norm().item() - 1) < 0.02
            assert weight[0, 0] == 5


@trap("C5")
def max_norm_of_an_embedding_bag_renormalises_the_real_weight(run):
    for lists in ({"fp32": ["embedding_bag"]}, {"bf16": ["embedding_bag"]}):
        for dtype in (torch.float32, LOW):
            weight = torch.full((4, 16), 5.0, dtype=dtype)
            with run(**lists):
                F.embedding_bag(torch.tensor([[1]]), weight, max_norm=1.0)
            assert abs(weight[1].float().norm().item() - 1) < 0.02


@trap("F2")
def an_averaged_model_moves_as_without_casts(run):
    def averaged():
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.999))
        ema.update_parameters(model)
        torch.nn.init.zeros_(model.weight)
        for _ in range(20):
            ema.update_parameters(model)
        return ema.module.weight

    plain = averaged()
    with run():
        same(averaged(), plain)
    assert plain.max() < 0.99


@trap("G1")
def clip_grad_norm_clips_as_without_casts(run):
    def clipped(foreach):
        p = torch.nn.Parameter(torch.zeros(100))
        p.grad = torch.linspace(-3, 5, 100)
        norm = torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=foreach)
        return p.grad, norm

    for foreach in (True, False):
        gradient, norm = clipped(foreach)
        with run():
            under = clipped(foreach)
        same(under[0], gradient)
        same(under[1], norm)


@trap("H1")
def lbfgs_descends_as_without_casts(run):
    scale = torch.logspace(0, 4, 20)

    def descend():
        p = torch.nn.Parameter(torch.ones(20))
        optimizer = torch.optim.LBFGS([p], lr=0.1)

        def closure():  # of unlisted ops alone: what differs is the optimizer
            optimizer.zero_grad()
            loss = torch.addcmul(torch.zeros(20), scale, p.square()).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return p

    plain = descend()
    with run():
        same(descend(), plain)


@trap("H2")
def optimizers_step_as_without_casts(run):
    makers = [lambda p: torch.optim.RAdam([p], lr=0.01), lambda p: torch.optim.Rprop([p])]
    if hasattr(torch.optim, "Muon"):  # torch 2.9 and later
        makers.append(lambda p: torch.optim.Muon([p]))

    def trained(make):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 20).reshape(4, 5))
        optimizer = make(p)
        for step in range(8):
            p.grad = torch.sin(torch.arange(20.0) + step).reshape(4, 5)
            optimizer.step()
        return p

    differ = []
    for make in makers:
        plain = trained(make)
        with run():
            differ.append(not torch.equal(trained(make), plain))
    assert not any(differ), differ


@trap("U6")
def adamw_with_a_tensor_lr_steps_as_without_casts(run):
    def trained():
        p = torch.nn.Parameter(torch.linspace(-1, 1, 20))
        optimizer = torch.optim.AdamW([p], lr=torch.tensor(1e-3), weight_decay=0.0123)
        for _ in range(3):
            p.grad = torch.ones(20)
            optimizer.step()
        return p

    plain = trained()
    with run():
        same(trained(), plain)


@trap("N7", naive_raises=pickle.PicklingError)
def what_took_a_function_before_still_pickles(run):
    layer = torch.nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)
    with run():
        restored = pickle.loads(pickle.dumps(layer))
        assert pickle.loads(pickle.dumps(F.relu)) is F.relu
    assert restored.activation is F.relu is layer.activation


@trap("R4")
def attention_in_eval_has_the_precision_of_training(run):
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with run():
        trained = attention(x, x, x, need_weights=False)[0], layer(x)
        with torch.no_grad():
            evaluated = attention(x, x, x, need_weights=False)[0], layer(x)
    assert trained[0].dtype == LOW
    for a, b in zip(trained, evaluated, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@trap("R5")
def a_layer_that_is_built_under_casts_knows_its_activation(run):
    with run():
        layer = torch.nn.TransformerEncoderLayer(4, 1, 8)
    assert layer.activation_relu_or_gelu == 1
    assert layer.activation is F.relu


def _checkpointed(run, use_reentrant):
    weight = torch.randn(4, 4)

    def block(x):
        # two results that a cast changes, one of which is saved for backward in its own dtype
        return torch.sin(torch.matmul(x, weight))

    x = torch.randn(4, 4, requires_grad=True)
    with run():
        block(x).sum().backward()
        expected, x.grad = x.grad, None
        y = checkpoint(block, x, use_reentrant=use_reentrant)
    assert y.dtype == LOW
    y.sum().backward()
    same(x.grad, expected)


@trap("S3", naive_raises=torch.utils.checkpoint.CheckpointError)
def a_checkpoint_is_recomputed_outside_as_inside(run):
    _checkpointed(run, use_reentrant=False)


@trap("U4")
def a_reentrant_checkpoint_is_recomputed_outside_as_inside(run):
    _checkpointed(run, use_reentrant=True)


@trap("U12")
def layer_and_group_norm_keep_their_parameters_in_float32(run):
    x, weight, bias = torch.randn(4, 8), torch.rand(8) + 0.5, torch.randn(8)
    with run():
        layered, grouped = F.layer_norm(x, (8,), weight, bias), F.group_norm(x, 2, weight, bias)
    same(layered, F.layer_norm(x.to(LOW), (8,), weight, bias))
    same(grouped, F.group_norm(x.to(LOW), 2, weight, bias))


@trap("U13")
def batch_norm_with_some_parameters_absent(run):
    x, weight, mean, variance = torch.rand(8, 3), torch.rand(3), torch.zeros(3), torch.ones(3)
    with run():
        y = F.batch_norm(x, mean, variance, None, None, True, 0.5)
        z = F.batch_norm(x, None, None, weight, None, True)
    kept = torch.zeros(3), torch.ones(3)
    same(y, F.batch_norm(x.to(LOW), *kept, None, None, True, 0.5))
    same(mean, kept[0])
    same(z, F.batch_norm(x.to(LOW), None, None, weight, None, True))


@trap("F1")
def an_ema_beside_an_applied_model_is_plain_arithmetic(run):
    model = torch.nn.Linear(1, 1)
    # the naive caster has no scope; hmp casts the calls of the model and nothing beside them
    if run is under_hmp:
        hmp.apply(model)
    with run() if run is under_naive else contextlib.nullcontext():
        ema, p = torch.ones(1), torch.zeros(1)
        for _ in range(100):
            assert model(torch.ones(1)).dtype == LOW
            ema = ema * 0.999 + (1 - 0.999) * p
    assert abs(ema.item() - 0.999**100) < 1e-4


test_trap_is_avoided, test_trap_catches_the_naive_caster = trap.tests()
