"""The models that are measured, each at three sizes, with a batch that is always the same. None has dropout."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import networks

Batch = dict[str, Any]
SIZES = ("tiny", "small", "medium")


@dataclass
class Case:
    """One model at one size. `loss()` is the forward pass of training, `output()` that of inference."""

    name: str
    size: str
    model: nn.Module
    batch: Batch
    computes_loss: bool  # the model takes the whole batch and returns its loss, as those of transformers do

    @property
    def title(self) -> str:
        return f"{self.name} {self.size}"

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def loss(self) -> Tensor:
        if self.computes_loss:
            return self.model(**self.batch).loss
        logits = self.model(self.batch["x"])
        target = self.batch["target"]
        # logits of tokens have their classes last, those of images second
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) if target.ndim == 2 else F.cross_entropy(logits, target)

    def output(self) -> Tensor:
        return self._output(self.batch)

    def one_output(self) -> Tensor:
        """Return the output for the batch's first example."""
        return self._output({name: value[:1] for name, value in self.batch.items()})

    def _output(self, batch: Batch) -> Tensor:
        if not self.computes_loss:
            return self.model(batch["x"])
        return self.model(**{name: value for name, value in batch.items() if name != "labels"}).logits

    def step(self, optimizer: torch.optim.Optimizer, run: Callable[[Callable[[], Tensor]], Tensor]) -> Tensor:
        """Make a training step: forward and loss inside `run`, then backward and optimizer outside of it."""
        loss = run(self.loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss


@dataclass(frozen=True)
class Spec:
    """The constructor of a model at each size."""

    make: Callable[..., tuple[nn.Module, Batch]]
    sizes: dict[str, dict[str, Any]]
    attention: bool = False
    transformers: bool = False


def _images(rows: int, pixels: int, labels: Tensor) -> Batch:
    return {"x": torch.randn(rows, 3, pixels, pixels), "target": labels}


def _mlp(width: int, depth: int, rows: int) -> tuple[nn.Module, Batch]:
    return networks.mlp(width, depth), {"x": torch.randn(rows, width), "target": torch.arange(rows) % 10}


def _resnet(width: int, blocks: tuple[int, ...], rows: int, pixels: int) -> tuple[nn.Module, Batch]:
    return networks.resnet(width, blocks), _images(rows, pixels, torch.arange(rows) % 10)


def _unet(width: int, levels: int, rows: int, pixels: int) -> tuple[nn.Module, Batch]:
    return networks.UNet(width, levels), _images(rows, pixels, torch.randint(4, (rows, pixels, pixels)))


def _lstm(width: int, depth: int, rows: int, length: int, vocabulary: int = 500) -> tuple[nn.Module, Batch]:
    tokens = torch.randint(vocabulary, (rows, length + 1))
    return networks.Recurrent(width, depth, vocabulary), {"x": tokens[:, :-1].contiguous(), "target": tokens[:, 1:].contiguous()}


def of_transformers(cls: str, **config: Any) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded: every model is built from a configuration
    import transformers

    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, cls)
    made = model_class.config_class(**config)
    for name, value in list(vars(made).items()):
        if "drop" in name.lower() or name.endswith("_pdrop"):
            setattr(made, name, 0.0 if isinstance(value, float) else value)
    return model_class(made)


def _vit(width: int, depth: int, rows: int, pixels: int, patch: int) -> tuple[nn.Module, Batch]:
    model = of_transformers(
        "ViTForImageClassification",
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=4 * width,
        image_size=pixels,
        patch_size=patch,
        num_labels=10,
        # by its default the class guesses a kind of problem from the labels' dtype
        problem_type="single_label_classification",
    )
    return model, {"pixel_values": torch.randn(rows, 3, pixels, pixels), "labels": torch.arange(rows) % 10}


def _tokens(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(5, vocabulary, (rows, length))


def _bert(width: int, depth: int, rows: int, length: int, vocabulary: int = 1000) -> tuple[nn.Module, Batch]:
    model = of_transformers(
        "BertForMaskedLM",
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, -length // 4 :] = 0
    return model, {"input_ids": _tokens(rows, length, vocabulary), "attention_mask": mask, "labels": _tokens(rows, length, vocabulary)}


def _gpt2(width: int, depth: int, rows: int, length: int, vocabulary: int = 1000) -> tuple[nn.Module, Batch]:
    model = of_transformers(
        "GPT2LMHeadModel",
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=depth,
        n_head=4,
        n_positions=length,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    tokens = _tokens(rows, length, vocabulary)
    return model, {"input_ids": tokens, "labels": tokens}


def _t5(width: int, depth: int, rows: int, length: int, vocabulary: int = 1000) -> tuple[nn.Module, Batch]:
    model = of_transformers(
        "T5ForConditionalGeneration",
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // 4,
        d_ff=4 * width,
        num_layers=depth,
        num_decoder_layers=depth,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    target = _tokens(rows, length // 2, vocabulary)
    start = torch.zeros(rows, 1, dtype=torch.long)
    return model, {
        "input_ids": _tokens(rows, length, vocabulary),
        "attention_mask": torch.ones(rows, length, dtype=torch.long),
        "decoder_input_ids": torch.cat([start, target[:, :-1]], 1),
        "labels": target,
    }


def _sizes(**values: tuple[Any, Any, Any]) -> dict[str, dict[str, Any]]:
    return {size: {name: value[at] for name, value in values.items()} for at, size in enumerate(SIZES)}


_TEXT = _sizes(width=(32, 128, 256), depth=(2, 4, 4), rows=(2, 4, 4), length=(16, 64, 96))
_TEXT_TO_TEXT = _sizes(width=(32, 128, 256), depth=(2, 3, 3), rows=(2, 4, 4), length=(16, 64, 96))
_PATCHES = _sizes(width=(32, 128, 256), depth=(2, 4, 5), rows=(2, 4, 4), pixels=(32, 32, 64), patch=(8, 4, 8))
MODELS: dict[str, Spec] = {
    "mlp": Spec(_mlp, _sizes(width=(32, 256, 1024), depth=(2, 4, 4), rows=(16, 64, 256))),
    "resnet": Spec(_resnet, _sizes(width=(8, 16, 32), blocks=((1, 1), (1, 1, 1), (2, 2, 2)), rows=(4, 8, 8), pixels=(16, 32, 48))),
    "vit": Spec(_vit, _PATCHES, attention=True, transformers=True),
    "bert": Spec(_bert, _TEXT, attention=True, transformers=True),
    "gpt2": Spec(_gpt2, _TEXT, attention=True, transformers=True),
    "t5": Spec(_t5, _TEXT_TO_TEXT, attention=True, transformers=True),
    "lstm": Spec(_lstm, _sizes(width=(32, 128, 256), depth=(1, 2, 2), rows=(4, 8, 16), length=(8, 32, 64))),
    "unet": Spec(_unet, _sizes(width=(8, 16, 24), levels=(2, 2, 3), rows=(1, 2, 4), pixels=(16, 32, 64))),
}


def build(name: str, size: str, device: str = "cpu", seed: int = 0) -> Case:
    """Return the model in training mode with its batch on `device`; weights and batch are drawn from `seed`."""
    spec = MODELS[name]
    torch.manual_seed(seed)
    model, batch = spec.make(**spec.sizes[size])
    model = model.train().to(device)
    return Case(name, size, model, {key: value.to(device) for key, value in batch.items()}, computes_loss=spec.transformers)


def available(names: list[str]) -> tuple[list[str], str]:
    """Return the models that can be built here, and how to get the others, "" if there are none."""
    import importlib.util

    if importlib.util.find_spec("transformers") is not None:
        return names, ""
    missing = [name for name in names if MODELS[name].transformers]
    hint = f"without {', '.join(missing)}: they need transformers (pip install -e '.[bench]')" if missing else ""
    return [name for name in names if name not in missing], hint
