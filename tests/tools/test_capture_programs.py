"""Programs as they are: wrapped models, scripts whose models are not known beforehand, threads, and what else looks at the calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import hmp
from thread_kit import in_threads


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))


NAMES = ["0", "1.0", "1.1", "1", "2", "", "(inputs)"]


def modules(path: Path) -> list[str]:
    return [call.module for call in hmp.types.Capture.load(path).calls]


@pytest.fixture
def one_process() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_what_is_wrapped_around_a_model_is_no_part_of_its_names(tmp_path: Path, one_process: None) -> None:
    inner = net()
    inner[1] = checkpoint_wrapper(inner[1])
    for model in (nn.DataParallel(inner), nn.parallel.DistributedDataParallel(inner)):
        with hmp.capture(tmp_path / "a", model):
            model(torch.randn(3, 4)).sum().backward()
        assert modules(tmp_path / "a") == NAMES
        with hmp.capture(tmp_path / "a", calls=1):  # a script's own
            model(torch.randn(3, 4))
        assert modules(tmp_path / "a") == NAMES


def test_without_a_model_every_outermost_module_is_one(tmp_path: Path) -> None:
    """The first with parameters has no prefix, others that of their class; each is captured as often as is asked for."""
    first, second, third, loss = net(), net(), net(), nn.MSELoss()
    with hmp.capture(tmp_path / "a", calls=1) as found:
        for _ in range(2):
            for model in (first, second, third):
                loss(model(torch.randn(3, 4)), torch.zeros(3, 2))
    others = ["Sequential", "Sequential2"]
    wanted = [*NAMES, "MSELoss", "MSELoss(inputs)"]
    for name in others:
        wanted += [f"{name}.{each}" for each in NAMES[:-2]] + [name, f"{name}(inputs)"]
    assert sorted(modules(tmp_path / "a")) == sorted(wanted)
    assert {call.root for call in found.calls} == {"", "MSELoss", *others}


def test_what_is_called_outermost_has_inputs_whatever_holds_it(tmp_path: Path) -> None:
    """A LightningModule's own forward need not run; and a call that failed leaves nothing running."""
    holder = nn.Module()
    holder.model, holder.metric = net(), nn.Identity()
    with hmp.capture(tmp_path / "a", holder) as found:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            holder.model(torch.randn(3, 5))
        holder.metric(holder.model(torch.randn(3, 4)))
    names = ["model.0", "model.1.0", "model.1.1", "model.1", "model.2", "model", "(inputs)", "metric", "(inputs)"]
    assert [(call.module, call.step) for call in found.calls] == list(zip(names, [0] * 7 + [1] * 2, strict=True))


def test_a_model_compiled_in_place_is_refused_with_the_remedy(tmp_path: Path, fresh_compiler: None) -> None:
    model, x = nn.Sequential(net()), torch.randn(3, 4)
    model[0].compile(backend="eager")
    with pytest.raises(hmp.HmpError, match=r'torch\.compiler\.set_stance\("force_eager"\)'), hmp.capture(tmp_path / "a"):
        model[0](x)
    with torch.compiler.set_stance("force_eager"), hmp.capture(tmp_path / "a"):
        model[0](x)
    assert modules(tmp_path / "a") == NAMES


def test_another_look_at_the_ops_sees_none_of_the_captures_own(tmp_path: Path) -> None:
    model, x, lists = net(), torch.randn(3, 4), hmp.Policy(bf16={"linear"})

    def looked_at() -> tuple[int, list[Any]]:
        with hmp.casts(lists), FlopCounterMode(display=False) as counter, hmp.record() as report, hmp.detect_nonfinite():
            model(x)
        return counter.get_total_flops(), [(row.op, row.module, row.dtypes, row.calls, row.casts) for row in report.rows]

    wanted = looked_at()
    with hmp.capture(tmp_path / "a", model):
        assert looked_at() == wanted
    assert modules(tmp_path / "a") == NAMES


def test_threads_write_one_capture_and_captures_nest(tmp_path: Path) -> None:
    model = net()
    with hmp.capture(tmp_path / "a", model), hmp.capture(tmp_path / "b", model[1]):
        in_threads(model, [torch.randn(3, 4) for _ in range(4)])
    assert sorted(modules(tmp_path / "a")) == sorted(4 * NAMES)
    assert sorted(modules(tmp_path / "b")) == sorted(4 * ["0", "1", "", "(inputs)"])
    numbers = [call.number for call in hmp.types.Capture.load(tmp_path / "a").calls if call.module == "1.0"]
    assert numbers == [0, 1, 2, 3]


def test_a_model_that_calls_itself_is_one_call(tmp_path: Path) -> None:
    class Again(nn.Sequential):
        def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return self[0](self(x, times - 1) if times else x)

    model = Again(nn.Linear(4, 4))
    with hmp.capture(tmp_path / "a", model, calls=1) as found:
        model(torch.randn(3, 4))
    assert modules(tmp_path / "a") == ["0", "", "0", "", "(inputs)"]
    torch.testing.assert_close(found.values(3, 0), model[0](found.values(1, 0)).detach())


def test_the_rank_is_that_of_the_script_which_joins_and_leaves_the_others_in_the_region(tmp_path: Path) -> None:
    model = net()
    with hmp.capture(tmp_path / "a.capture") as found:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            model(torch.randn(3, 4))
        finally:
            torch.distributed.destroy_process_group()
    assert found.path == tmp_path / "a.rank1.capture" and [each.name for each in tmp_path.iterdir()] == [found.path.name]


def test_a_module_that_answers_to_every_name_is_no_wrapper(tmp_path: Path) -> None:
    class Forwards(nn.Module):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name in ("layer", "_modules", "_parameters") else self.layer

    model = Forwards()
    model.layer = nn.Linear(4, 4)
    model.forward = lambda x: model.layer(x)
    with hmp.capture(tmp_path / "a", model):
        model(torch.randn(3, 4))
    assert modules(tmp_path / "a") == ["layer", "", "(inputs)"]
