"""hmp under captured CUDA graphs: a replay computes with the weights and inputs of now, and so does eager code beside it.

A replay writes memory that torch does not see written: no version grows. What is right is what plain torch gives
with every cast written out, captured or not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import hmp
from device_kit import (
    DEVICE,
    F16,
    F32,
    WIDTH,
    Net,
    Plain,
    all_same,
    allocated,
    batch,
    lists,
    loss_of,
    on_cuda,
    parameters,
    policy,
    same,
    synchronize,
    tensor,
)
from hmp.compat import habana

GRAPHS = "kernels are captured as graphs there alone"
REPLAYS = 6


def captured(function: Callable[[], object], warmed_up: Callable[[], object] = lambda: None) -> torch.cuda.CUDAGraph:
    """A graph of `function`, run a few times before on a side stream, as torch's manual wants it; `warmed_up` is called between."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    warmed_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


class Inference:
    """A captured no_grad forward of a net with a static input."""

    def __init__(self, net: torch.nn.Module, inference_mode: bool = False) -> None:
        self.net, self.x, self.y = net, batch()[0], torch.empty(0)
        self.mode = torch.inference_mode if inference_mode else torch.no_grad
        self.graph = captured(self._forward)

    def _forward(self) -> None:
        with self.mode():
            self.y = self.net(self.x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.y


def _explicit(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the weights of now give in plain torch."""
    plain = Plain()
    plain.load_state_dict(net.state_dict())
    with torch.no_grad(), hmp.disable_casts():
        return plain(x)


@on_cuda(GRAPHS)
def test_a_replayed_forward_has_the_weights_of_now() -> None:
    """Written by methods, by .data, by an optimizer, by load_state_dict: a replay casts the weights as they are then."""
    for inference_mode in (False, True):
        net = Net()
        with hmp.convert(policy=lists()):
            with torch.no_grad():
                for _ in range(3):
                    net(batch()[0])  # what could be kept is kept before the capture
            run = Inference(net, inference_mode)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for number in range(REPLAYS):
                x = batch(20 + number)[0]
                same(run(x), _explicit(net, x), f"replay {number}, inference_mode {inference_mode}")
                if number % 3 == 0:
                    with torch.no_grad():
                        net.first.weight.mul_(1.5)
                elif number % 3 == 1:
                    net.second.weight.data.neg_()
                    net.load_state_dict({name: value * 0.75 for name, value in net.state_dict().items()})
                else:
                    loss_of(net, *batch(number)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                same(net(x).detach(), _explicit(net, x), f"eager after replay {number}")


class Training:
    """A captured training step: forward, loss, backward, and the optimizer's step."""

    def __init__(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer
        self.x, self.y = batch()
        self.loss, self.set_to_none = torch.empty(0), True
        self.graph = captured(self._step, self._warmed_up)

    def _warmed_up(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # the gradients are made in the graph's memory
        self.set_to_none = False

    def _step(self) -> None:
        loss = loss_of(self.net, self.x, self.y)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def __call__(self, number: int) -> torch.Tensor:
        x, y = batch(60 + number)
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.loss.clone()


def _trained(net: torch.nn.Module, make: Callable[..., torch.optim.Optimizer], **options: object) -> list[torch.Tensor]:
    step = Training(net, make(net.parameters(), lr=0.01, **options))
    seen = []
    for number in range(REPLAYS):
        seen.append(step(number))
        with torch.no_grad():
            seen.extend(net(batch(3)[0]).to(F32) for _ in range(2))  # eager, between replays
    return seen + parameters(net)


@on_cuda(GRAPHS)
def test_a_replayed_training_step_equals_explicit_casts() -> None:
    """Both captured: losses, evaluations between replays and weights agree to the bit, and the weights move."""
    for make, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"capturable": True, "foreach": True}),
        (torch.optim.AdamW, {"capturable": True, "fused": True}),
    ):
        want = _trained(Plain(), make, **options)
        assert not torch.equal(want[-1], parameters(Plain())[-1]), "the weights do not move"
        with hmp.convert(policy=lists()):
            got = _trained(Net(), make, **options)
        hmp.revert()
        all_same(got, want, f"{make.__name__} {options}")


@on_cuda(GRAPHS)
def test_no_copy_of_the_graph_s_memory_outlives_the_graph() -> None:
    """A captured graph owns a pool of memory. Once graph, net and results are dropped, all of it is free."""

    def once() -> None:
        net = Net()
        with hmp.convert(policy=lists()):
            run = Inference(net)
            run(batch()[0])
            with torch.no_grad():
                for _ in range(3):
                    net(run.y.to(F32).repeat(1, WIDTH // run.y.shape[1]))
            synchronize()

    once()  # what libraries take once is taken
    before = allocated()
    once()
    after = allocated()
    assert after == before, (before, after)
    print(f"{before:,} bytes allocated before and after")


@on_cuda(GRAPHS)
def test_masks_beyond_float16_are_captured_without_asking_the_device() -> None:
    """R12: scores and mask saturate in the graph. To ask the device for a number while it captures would raise."""
    mask = torch.full((8, 8), torch.finfo(F32).min, device=DEVICE).triu(1)
    static, weight, out = tensor(4, 8, 8), tensor(8, 8, seed=3), torch.empty(4, 8, 8, device=DEVICE)

    def attend() -> None:
        scores = F.linear(static, weight)
        out.copy_(torch.softmax(torch.add(scores, mask), -1) + torch.softmax(scores.masked_fill(mask < 0, torch.finfo(F32).min), -1))

    with hmp.convert(policy=policy(bf16="linear add softmax", dtype=F16)), torch.no_grad():
        graph = captured(attend)
        for number in range(REPLAYS):
            static.copy_(tensor(4, 8, 8, seed=number))
            graph.replay()
            assert bool(out.isfinite().all()), number
            assert bool((out.sum(-1) - 2).abs().max() < 0.05), number
            assert not bool(out.masked_select(mask.expand_as(out) < 0).any()), number


@on_cuda(GRAPHS)
def test_an_hpu_graph_runs_its_step_once_at_the_capture_and_once_a_replay() -> None:
    x, total = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    with habana.install("cuda"):
        graph = torch.hpu.HPUGraph()
        with torch.hpu.graph(graph):
            total.add_(x)
        assert total.tolist() == [1] * 4
        x.fill_(2)
        graph.replay()
        assert total.tolist() == [3] * 4
        synchronize()
        with torch.hpu.stream(torch.hpu.Stream()):
            graph = torch.hpu.HPUGraph()
            graph.capture_begin()
            total.mul_(x)
            graph.capture_end()
            graph.replay()
        synchronize()
        assert total.tolist() == [12] * 4
