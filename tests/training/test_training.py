"""Training loops under every shipped policy, and that nothing of them stays alive."""

from __future__ import annotations

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
