"""Trains tiny models of other packages under torch.autocast and under hmp's preset of its lists, and compares the bits and the time.

`.ci/releases programs` runs one program, its argument, in an environment that has the package, and reads the JSON object printed last.
Without an argument every program is run whose package is installed, and each prints a line.

Each of three steps starts from equal weights and random state in both. "gradients" counts the parameters whose gradients have equal bits in
all steps. The others are "R21" if they are those of `torch.autocast(cache_enabled=False)`, which casts a weight anew for each use, and so
sums the gradients of its uses in float32, as hmp does by that rule; a gradient that differs from both is a failure.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hmp

warnings.simplefilter("ignore")
hmp.low_kernels.set_low_kernels("native")  # as torch.autocast computes, on each processor
torch.set_num_threads(1)
STEPS, TIMED = 3, 15
# Encoders, decoders of text, mixtures of experts, state spaces, encoder-decoders, images, both.
ZOO = (
    *("bert", "deberta-v2", "modernbert", "gpt2", "bloom", "opt", "llama", "gemma2", "falcon", "mixtral", "qwen2-moe", "mamba2", "jamba"),
    *("t5", "bart", "vit", "resnet", "swinv2", "detr", "clip", "llava"),
)


@dataclasses.dataclass
class Program:
    """A model, whose call `run(model)` returns what is compared, a tensor or a tuple of tensors, and its optimizer."""

    model: nn.Module
    run: Callable[[nn.Module], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(model.parameters(), lr=0.01)


def unet() -> Program:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    noisy, text, times = torch.randn(2, 4, 16, 16), torch.randn(2, 7, 32), torch.tensor([10, 500])
    return Program(model, lambda model: model(noisy, times, encoder_hidden_states=text).sample)


def denoising() -> Program:
    """Three steps of sampling in one call: each weight is used three times."""

    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet().model

        def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            for t in (500, 300, 100):
                x = x - 0.1 * self.unet(x, t, encoder_hidden_states=text).sample
            return x

    noise, text = torch.randn(2, 4, 16, 16), torch.randn(2, 7, 32)
    return Program(Sampler(), lambda model: model(noise, text))


def autoencoder() -> Program:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = AutoencoderKL(block_out_channels=(32, 64), norm_num_groups=8, latent_channels=4, sample_size=32, **blocks)
    images = torch.rand(2, 3, 32, 32)
    return Program(model, lambda model: model(images, sample_posterior=True).sample)


def graph_network() -> Program:
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([GCNConv(16, 32), GATConv(32, 16, heads=2), SAGEConv(32, 32)])
            self.head = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, edges).relu()
            return self.head(global_mean_pool(x, batch))

    x, edges, batch = torch.randn(60, 16), torch.randint(0, 60, (2, 300)), torch.arange(60) // 20
    return Program(Graphs(), lambda model: model(x, edges, batch))


def segmentation() -> Program:
    from monai.networks.nets import UNet

    model = UNet(spatial_dims=3, in_channels=1, out_channels=3, channels=(8, 16, 32), strides=(2, 2), num_res_units=2)
    volumes = torch.randn(2, 1, 16, 16, 16)
    return Program(model, lambda model: model(volumes))


def swin() -> Program:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(3, 3, 3, 3), spatial_dims=2)
    images = torch.randn(1, 1, 64, 64)
    return Program(model, lambda model: model(images))


def image_geometry() -> Program:
    """A spatial transformer: a network finds an affine map, kornia warps, blurs and describes the image."""
    import kornia

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.find = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 6))
            self.describe = kornia.feature.HardNet(pretrained=False)

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
            maps = torch.eye(2, 3) + 0.01 * self.find(images).view(-1, 2, 3)
            warped = kornia.geometry.warp_affine(images, maps, (32, 32))
            edges = kornia.filters.sobel(kornia.filters.gaussian_blur2d(warped, (3, 3), (1.0, 1.0)))
            return edges, self.describe(kornia.color.rgb_to_grayscale(warped))

    images = torch.rand(4, 3, 32, 32)
    return Program(Transformer(), lambda model: model(images))


def gaussian_process() -> Program:
    import gpytorch

    x = torch.linspace(0, 1, 40)
    y = torch.sin(6 * x)

    class Process(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.features = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.features(x)
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.process = Process(gpytorch.likelihoods.GaussianLikelihood())
            self.loss = gpytorch.mlls.ExactMarginalLogLikelihood(self.process.likelihood, self.process)

        def forward(self) -> torch.Tensor:
            return -self.loss(self.process(x), y)

    return Program(Loss(), lambda model: model())


def private_training() -> Program:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16), nn.Tanh(), nn.Linear(16, 4))
    images = torch.randn(8, 1, 8, 8)

    def private(model: nn.Module) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        return DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8)

    return Program(GradSampleModule(net), lambda model: model(images), private)


def differential_equation() -> Program:
    from torchdiffeq import odeint

    return _equation(odeint)


def adjoint_equation() -> Program:
    from torchdiffeq import odeint_adjoint

    return _equation(odeint_adjoint)


def _equation(solve: Any) -> Program:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.net(y**3) - t * y

    class Equation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = Field()

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return solve(self.field, y, torch.linspace(0, 1, 5), method="rk4")

    y = torch.randn(16, 4)
    return Program(Equation(), lambda model: model(y))


def adapters() -> Program:
    import peft
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, attn_implementation="sdpa", **sizes))
    lora = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    words = torch.randint(0, 100, (2, 16))
    return Program(peft.get_peft_model(model, lora), lambda model: model(input_ids=words).logits)


def of_zoo(name: str) -> Program:
    """A model of transformers from the tests' zoo, in training mode, without dropout."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from model_zoo import MODELS, kit

    model = kit.build(MODELS[name])
    batch = kit.feed(MODELS[name], model)
    return Program(model, lambda model: tuple(each for each in kit.floats(kit.forward(model, batch)) if each.requires_grad))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "diffusers UNet2DConditionModel": unet,
    "diffusers sampling": denoising,
    "diffusers AutoencoderKL": autoencoder,
    "torch_geometric GCNConv GATConv SAGEConv": graph_network,
    "monai UNet": segmentation,
    "monai SwinUNETR": swin,
    "kornia warp_affine HardNet": image_geometry,
    "gpytorch ExactGP": gaussian_process,
    "opacus GradSampleModule": private_training,
    "torchdiffeq odeint": differential_equation,
    "torchdiffeq odeint_adjoint": adjoint_equation,
    "peft LoRA": adapters,
} | {f"transformers {name}": partial(of_zoo, name) for name in ZOO}


class Training:
    """A program, made from one seed, that is trained by one way of casting."""

    def __init__(self, make: Callable[[], Program], context: Callable[[], Any], policy: str | None = None) -> None:
        torch.manual_seed(0)
        program = make()
        self.run, self.context, self.model = program.run, context, program.model
        if policy:
            hmp.apply(self.model, policy)
        self.optimizer = program.optimizer(self.model)

    def step(self, seed: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor | None]]:
        """One step: forward, a loss in float32, backward and optimizer; what the model returned, and the gradients."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        with self.context():
            found = self.run(self.model)
        found = found if isinstance(found, tuple) else (found,)
        sum((each.float() - 0.5).square().mean() for each in found).backward()
        self.optimizer.step()
        return found, {name: weight.grad for name, weight in self.model.named_parameters() if weight.requires_grad}


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both have one dtype and equal bits."""
    if one is None or other is None:
        return one is other
    return one.dtype is other.dtype and torch.equal(one, other)


def compared(make: Callable[[], Program]) -> dict[str, str]:
    autocast = Training(make, lambda: torch.autocast("cpu", torch.bfloat16))
    uncached = Training(make, lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
    ours = Training(make, contextlib.nullcontext, "torch-cpu")
    float32 = Training(make, contextlib.nullcontext)
    trained = [name for name, weight in ours.model.named_parameters() if weight.requires_grad]
    outputs, other, unexplained = True, set(), set()
    for step in range(STEPS):
        state = copy.deepcopy(autocast.model.state_dict())
        for training in (uncached, ours, float32):
            training.model.load_state_dict(state)
        (found, gradients), (_, anew), (returned, own) = (training.step(step) for training in (autocast, uncached, ours))
        plain, _ = float32.step(step)
        assert not any(map(same, found, plain)), "torch.autocast casts nothing that matters here"
        outputs = outputs and len(found) == len(returned) and all(map(same, found, returned))
        other |= {name for name in trained if not same(own[name], gradients[name])}
        unexplained |= {name for name in other if not same(own[name], anew[name])}
    cells = {
        "parameters": f"{sum(weight.numel() for weight in ours.model.parameters()):,}",
        "outputs": f"equal, {', '.join(dict.fromkeys(str(each.dtype).removeprefix('torch.') for each in returned))}"
        if outputs
        else "fails: differ",
        "gradients": f"{len(trained) - len(other)} of {len(trained)}",
        "the rest": f"fails: {', '.join(sorted(unexplained))}" if unexplained else "R21" if other else "",
    }
    return cells | {"time": f"{ratio(ours, autocast):.2f}"}


def ratio(*trainings: Training) -> float:
    """The first's thread time of a step over the second's, each the least of many that take turns."""
    least = [float("inf")] * 2
    for turn in range(TIMED):
        for number, training in enumerate(trainings):
            begun = time.thread_time()
            training.step(turn)
            least[number] = min(least[number], time.thread_time() - begun)
    return least[0] / least[1]


def result(name: str) -> dict[str, str]:
    release = {"release": importlib.metadata.version(name.split()[0])}
    try:
        return release | compared(PROGRAMS[name])
    except Exception as error:  # the others are run too
        traceback.print_exc()
        return release | {"outputs": f"fails: {type(error).__name__}: {error}"}


def installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name.split()[0]))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(result(sys.argv[1])))
    else:
        for name in filter(installed, PROGRAMS):
            print(name, *(f"{column}: {cell}" for column, cell in result(name).items()), sep=" | ", flush=True)
