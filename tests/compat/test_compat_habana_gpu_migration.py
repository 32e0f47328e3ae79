"""Scripts for GPUs run on the mapped device once they import Habana's GPU migration.

Oracle: the same script written for the CPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_kit import HABANA, RUN, python
from hmp.compat import habana
from torch_snapshot import Snapshot, all_of_torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which torch.cuda is itself")
X = torch.ones(2, 3)


def migrate() -> None:
    import habana_frameworks.torch.gpu_migration  # noqa: F401


# test_compat_habana_device_map.py has every call that takes a device.
CALLS: dict[str, Callable[[Any], Any]] = {
    "Tensor.to": lambda device: X.to(device=device),
    "Tensor.cuda": lambda device: X.cuda(device, non_blocking=True),
    "Module.cuda": lambda device: nn.Linear(2, 2).cuda(device).weight,
    "torch.tensor": lambda device: torch.tensor([1.0], device=device),
    "pinned": lambda device: X.pin_memory().to(device),
    "with torch.cuda.device": lambda device: torch.cuda.device(device).__enter__() or torch.empty(2, device="cuda"),
}


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0), 0], ids=repr)
def test_calls_that_take_cuda_land_on_the_cpu_while_it_is_migrated(device: Any) -> None:
    with habana.install("cpu"):
        with pytest.raises((RuntimeError, AssertionError)):
            X.to(device)
        migrate()
        assert {name: call(device).device.type for name, call in CALLS.items()} == dict.fromkeys(CALLS, "cpu")
    with pytest.raises((RuntimeError, AssertionError)):
        X.to(device)


@pytest.mark.usefixtures("hpu_on_cpu")
def test_torch_cuda_is_what_torch_hpu_is() -> None:
    assert not torch.cuda.is_available()
    migrate()
    assert (torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device()) == (True, 1, 0)
    assert torch.cuda.get_device_name() == torch.cuda.get_device_properties(0).name == "cpu"
    assert torch.cuda.get_device_capability() == (0, 0) and torch.cuda.is_bf16_supported(including_emulation=False)
    torch.cuda.set_device("cuda:0")
    for call in (torch.cuda.synchronize, torch.cuda.empty_cache, torch.cuda.reset_peak_memory_stats):
        call()
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        end.record()
    assert start.elapsed_time(end) >= 0 and isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    torch.cuda.manual_seed_all(3)
    state, drawn = torch.cuda.get_rng_state(), torch.rand(3, device="cuda")
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(3)))
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3, device="cuda"))
    layer = nn.Linear(3, 2).cuda()
    for region, dtype in (
        (torch.autocast("cuda"), torch.bfloat16),
        (torch.cuda.amp.autocast(), torch.bfloat16),
        (torch.autocast("cuda", torch.float16), torch.float16),
        (torch.cuda.amp.autocast(dtype=torch.float16), torch.float16),
        (torch.autocast("cuda", enabled=False), torch.float32),
    ):
        with region:
            assert layer(X).dtype is dtype


@pytest.mark.usefixtures("hpu_on_cpu")
def test_torchs_own_code_knows_that_there_is_no_gpu(fresh_compiler: None) -> None:
    migrate()
    layer, x = nn.Linear(3, 2).cuda(), X.cuda()
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x))
    assert torch.equal(nn.DataParallel(layer, device_ids=[0])(x), layer(x))
    with torch.random.fork_rng():
        torch.rand(2, device="cuda")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.distributed.reduce_op warns when it is looked at
def test_uninstall_leaves_torch_as_it_was() -> None:
    before = Snapshot(all_of_torch())
    with habana.install("cpu"):
        migrate()
        assert any("torch.cuda.is_available" in line for line in before.differences())
    assert before.differences() == []
    assert not torch.cuda.is_available() and "habana_frameworks.torch.gpu_migration" not in sys.modules


TRAIN = """\
import habana_frameworks.torch.gpu_migration
import torch

assert torch.cuda.is_available()
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)).cuda()
optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.cuda.amp.GradScaler()
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, pin_memory=True)
losses = []
for x, y in loader:
    x, y = x.cuda(non_blocking=True), y.to(device, non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.amp.autocast():
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out, y)
    assert out.dtype is torch.bfloat16
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(losses)
"""
ON_CPU = {
    "import habana_frameworks.torch.gpu_migration\n": "",
    "assert torch.cuda.is_available()\n": "",
    "torch.cuda.manual_seed_all(0)\n": "",
    ").cuda()\n": ")\n",
    "x.cuda(non_blocking=True)": "x",
    "torch.cuda.amp.GradScaler()": 'torch.amp.GradScaler("cpu")',
    "torch.cuda.amp.autocast()": 'torch.autocast("cpu", torch.bfloat16)',
}


@pytest.mark.slow
@pytest.mark.parametrize("command", [HABANA, (*RUN, "--habana")], ids=["hpu=cpu", "no device map"])
def test_a_training_script_for_gpus_computes_what_it_does_when_written_for_the_cpu(command: tuple[str, ...], tmp_path: Path) -> None:
    on_cpu = functools.reduce(lambda text, pair: text.replace(*pair), ON_CPU.items(), TRAIN)
    assert on_cpu.count("cuda") == 2  # of the line that chooses a device
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "on_cpu.py").write_text(on_cpu)
    done, expected = python(*command, "train.py", cwd=tmp_path), python("on_cpu.py", cwd=tmp_path)
    assert done.returncode == expected.returncode == 0, (done.stderr, expected.stderr)
    assert done.stdout == expected.stdout
