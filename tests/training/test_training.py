"""Training loops under every shipped policy, recurrent nets and attention, and plain arithmetic beside an applied model."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import same

LOW, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32


class Net(torch.nn.Module):
    """A little of everything: convolution, norms, attention, recurrence, embedding, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.embed = torch.nn.Embedding(4, 8)
        self.encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.gru = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, image, token):
        x = F.max_pool2d(F.relu(self.norm(self.conv(image))), 2)
        x = x.flatten(2).transpose(1, 2) + self.embed(token)[:, None]
        x, _ = self.gru(self.encoder(x))
        return self.head(F.dropout(x.mean(1), 0.1, self.training))


def _data():
    generator = torch.Generator().manual_seed(0)
    image, token = torch.randn(16, 1, 4, 4, generator=generator), torch.randint(0, 4, (16,), generator=generator)
    return image, token, (image.mean((1, 2, 3)) > 0).long() + (token > 1).long()


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in hmp.policies() if name != "habana"]


@pytest.mark.parametrize("name", ["habana", *NIGHTLY])
def test_training_in_float16_with_a_scaler_falls_under_every_shipped_policy(name):
    image, token, target = _data()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    with hmp.casts(hmp.Policy.load(name).unscoped.replace(dtype=HALF)):
        for _ in range(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image, token), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    assert all(torch.isfinite(torch.tensor(losses)))
    assert sum(losses[-5:]) / 5 < 0.7 * sum(losses[:5]) / 5, losses
    assert {p.dtype for p in model.parameters()} == {WIDE} == {b.dtype for b in model.buffers() if b.is_floating_point()}
    assert scaler.get_scale() >= 2.0**8


def _loop(model, region):
    """An ordinary loop with arithmetic of its own around the model; what it computes from the same losses must be the same."""
    total, ema, history = torch.zeros(()), torch.ones(100), []
    p = torch.nn.Parameter(torch.linspace(0.1, 1, 100))
    target = torch.arange(4) % 2
    with region:
        for step in range(10):
            output = model(torch.full((4, 2), step / 7))
            loss = F.cross_entropy(output.float(), target)
            total += loss * 32
            ema = ema * 0.999 + (1 - 0.999) * p.detach()
            p.data = p.data * 0.9
            accuracy = (output.argmax(-1) == target).float().mean() * 100
            history.append((loss.detach(), accuracy, loss.detach() / 3))
    return total.detach(), ema, p.detach(), torch.tensor(history)


def test_training_arithmetic_beside_an_applied_model_is_plain():
    name = "habana"
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with torch.no_grad():
        with hmp.casts(name):
            outputs = {step: model(torch.full((4, 2), step / 7)).float() for step in range(10)}
    # the same outputs again, from a model that computes nothing and without hmp
    hmp.revert()
    plain = _loop(lambda x: outputs[round(x[0, 0].item() * 7)], torch.no_grad())
    hmp.apply(model, name)
    ours = _loop(model, torch.no_grad())
    for a, b in zip(ours, plain, strict=True):
        same(a, b)
    assert plain[1].max() < 0.9999 and plain[2].dtype == WIDE


def test_training_gradients_of_an_applied_model_are_those_of_explicit_casts():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    hidden = F.linear(x.to(LOW), parameters[0].to(LOW), parameters[1].to(LOW))
    F.linear(hidden, parameters[2].to(LOW), parameters[3].to(LOW)).float().square().sum().backward()
    hmp.apply(model)(x).float().square().sum().backward()
    for ours, theirs in zip(model.parameters(), parameters, strict=True):
        same(ours.grad, theirs.grad)


@pytest.mark.slow
def test_hundreds_of_steps_among_conversions_and_regions_leave_nothing_alive():
    """Of a training that converts, enters regions, saves and reverts over and over, no tensor and no object stays."""
    image, token, target = _data()

    def alive(rounds):
        for _ in range(rounds):
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            with hmp.convert(policy="habana"), hmp.casts("torch-cpu"):
                for step in range(5):
                    with hmp.disable_casts() if step % 2 else hmp.enable_casts():
                        F.cross_entropy(model(image, token).float(), target).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                copied = copy.deepcopy(model.state_dict())
                with torch.inference_mode():
                    model(image, token)
                model.load_state_dict(copied)
            hmp.revert()
        del model, optimizer, copied
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(issubclass(type(each), torch.Tensor) for each in objects)

    (few, tensors), (many, later) = alive(10), alive(50)
    assert later <= tensors and many < few + 200
    assert hmp.cache_info()[:2] == (0, 0)


def test_the_fast_path_is_on_again_where_casts_are_off():
    layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        plain = layer(x)
        with hmp.casts("habana"):
            with hmp.disable_casts():
                assert torch.backends.mha.get_fastpath_enabled()
                same(layer(x), plain)
        hmp.convert()
        with hmp.disable_casts():
            same(layer(x), plain)
        hmp.revert()
        same(layer(x), plain)
