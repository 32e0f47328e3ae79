"""The demo itself: a classifier of handwritten digits, trained in float32 and under hmp, and what ran where."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hmp

POLICY = "habana"
_BATCH, _TEST, _POINTS = 64, 597, 1.0  # of 1,797 pictures: one of the test pictures is a sixth of a percentage point


class Net(nn.Module):
    """Two convolutions, an attention block over what they make of the picture, and a linear layer: all in plain torch functions."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.conv1, self.norm1 = nn.Conv2d(1, width // 2, 3, padding=1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv2, self.norm2 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.position, self.norm3 = nn.Embedding(16, width), nn.LayerNorm(width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of (N, 1, 8, 8) pictures."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.relu(self.norm2(self.conv2(x))).flatten(2).transpose(1, 2)
        x = x + self.position(torch.arange(x.shape[1], device=x.device))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm3(x)).chunk(3, -1))
        weights = F.softmax(torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1)), -1)
        x = x + self.out(torch.matmul(F.dropout(weights, 0.1, self.training), v).transpose(1, 2).flatten(2))
        logits: torch.Tensor = self.head(x.sum(1) / x.shape[1])
        return logits


class Training:
    """The network, its optimizer and its data."""

    def __init__(self) -> None:
        bunch = load_digits()
        order = torch.randperm(len(bunch.data), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(bunch.data, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16.0
        labels = torch.tensor(bunch.target, dtype=torch.int64)[order]
        self.images, self.labels = images[_TEST:], labels[_TEST:]
        self.test_images, self.test_labels = images[:_TEST], labels[:_TEST]
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, chosen: torch.Tensor | slice = slice(_BATCH)) -> torch.Tensor:
        """Train with the chosen pictures, and return the loss."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.images[chosen]), self.labels[chosen])
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, epochs: int) -> None:
        """Train, with a learning rate that decays; an incomplete last batch of an epoch is left out."""
        each = len(self.images) // _BATCH
        decay = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.05, total_iters=epochs * each)
        for _ in range(epochs):
            for chosen in torch.randperm(len(self.images))[: each * _BATCH].split(_BATCH):
                self.step(chosen)
                decay.step()

    def accuracy(self) -> float:
        """Return the percentage of the test pictures that are classified correctly."""
        self.model.eval()
        with torch.no_grad():
            right = int((self.model(self.test_images).argmax(1) == self.test_labels).sum())
        self.model.train()
        return 100.0 * right / _TEST


def demonstrate(epochs: int) -> int:
    """Benchmark, train, record and verify; return 0 if the check passed, else 1."""
    print("Benchmarks a training step of a small network for handwritten digits in float32, under torch.autocast and under hmp,")
    print("trains it in float32 and under hmp, and checks that each op ran in the dtype that its list says.")
    training = Training()
    result = hmp.benchmark(
        training.step, ["float32", "torch.autocast", POLICY], model=training.model, optimizer=training.optimizer, rounds=3, steps=1
    )
    print(f"\n{result}")

    accuracy = []
    # process-wide, as the call was published: backward and the optimizer too
    for precision in (nullcontext(), hmp.convert(policy=POLICY)):
        with precision:
            training = Training()
            training.train(epochs)
            accuracy.append(training.accuracy())
    print(f"\naccuracy on {_TEST} other pictures: float32 {accuracy[0]:.1f} %, hmp {POLICY} {accuracy[1]:.1f} %")

    with hmp.convert(policy=POLICY), hmp.record() as report:
        training.step()
    failures = []
    try:
        report.verify()
    except hmp.HmpError as error:
        failures.append(str(error))
    if abs(accuracy[0] - accuracy[1]) > _POINTS:
        failures.append(f"expected accuracies within {_POINTS:g} percentage point of each other, got more")
    for failure in failures:
        print(f"check failed: {failure}")
    if not failures:
        low, wide = (", ".join(sorted({row.op for row in report.rows if row.rule == rule})) for rule in ("bf16", "fp32"))
        print(f"check passed: {low} ran in bfloat16 and {wide} in float32; the accuracy is within {_POINTS:g} point of float32's")
    return 1 if failures else 0
