"""Handwritten digits, which ship with scikit-learn: a residual network and a vision transformer."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..workloads import models, networks
from .task import ACCURACY, Task, annealed

Batch = tuple[Tensor, Tensor]
ROWS = 48
_KEPT_APART = 600


@functools.cache
def digits() -> tuple[Batch, Batch]:
    """Return training and held-out images, each (images, classes): 8 by 8 pixels from 0 to 16, writers mixed."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32)[order]
    classes = torch.tensor(found.target, dtype=torch.long)[order]
    return (images[_KEPT_APART:], classes[_KEPT_APART:]), (images[:_KEPT_APART], classes[:_KEPT_APART])


def batches(seed: int, rows: int = ROWS) -> list[Batch]:
    """Return one pass over the training images in an order drawn from `seed`."""
    images, classes = digits()[0]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return [(images[part], classes[part]) for part in order.split(rows) if len(part) == rows]


def as_input(images: Tensor, channels: int = 3) -> Tensor:
    """Return pixels around 0, the same in each channel."""
    return (images.unsqueeze(1).expand(-1, channels, -1, -1) - 5) / 6


def accuracy(model: nn.Module, logits: Any) -> float:
    """Return the share of held-out images whose class has the largest of `logits(model, images)`."""
    images, classes = digits()[1]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = (logits(model, images).argmax(-1) == classes).float().mean().item()
    model.train(was_training)
    return right


def _resnet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return networks.resnet(12, (1, 1))


def _resnet_logits(model: nn.Module, images: Tensor) -> Tensor:
    return model(as_input(images))


def vit(seed: int, width: int = 48, patch: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return models.of_transformers(
        "ViTForImageClassification",
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * width,
        image_size=8,
        patch_size=patch,
        num_channels=1,
        num_labels=10,
        problem_type="single_label_classification",
        attn_implementation="eager",  # its matmul and softmax are ops to decide about
    )


def _vit_logits(model: nn.Module, images: Tensor) -> Tensor:
    return model(pixel_values=as_input(images, 1)).logits


def _task(name: str, about: str, model: Any, logits: Any, rate: float, steps: int, transformers: bool = False) -> Task:
    return Task(
        name,
        about,
        model,
        batches,
        lambda model, batch: F.cross_entropy(logits(model, batch[0]), batch[1]),
        annealed(rate, steps // 4),
        steps,
        ACCURACY,
        metric=lambda model: accuracy(model, logits),
        transformers=transformers,
    )


TASKS = [
    _task("resnet", "residual network on scikit-learn's digits, accuracy on 600 kept apart", _resnet, _resnet_logits, 3e-3, 144),
    _task("vit", "ViT on scikit-learn's digits, accuracy on 600 kept apart", vit, _vit_logits, 2e-3, 400, transformers=True),
]
