"""The data: scikit-learn's bundled 8 x 8 handwritten digits, split once and for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits

_TEST_SIZE = 597  # of 1797: one picture is a sixth of a percentage point
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits:
    """1200 pictures to train on and 597 to test on: float32 (N, 1, 8, 8) in 0..1, and int64 labels (N,)."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load() -> Digits:
    """Return the digits, split the same way at every call."""
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    test, train = order[:_TEST_SIZE], order[_TEST_SIZE:]
    return Digits(images[train], labels[train], images[test], labels[test])
