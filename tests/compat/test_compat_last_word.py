"""R17 in everybody's trainers: lists of an applied model hold inside the torch.autocast around it; verify=True; accelerate's own loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import hmp
from command_kit import RUN, python
from innermost_kit import Head, X, assert_by_the_lists, autocast, by_hand, write_lists
from training_by_hand import assert_same_weights, batches, net, sgd, train_by_hand

accelerate = pytest.importorskip("accelerate")

BF16, F32 = torch.bfloat16, torch.float32
ORDERS = pytest.mark.parametrize("order", ["before", "behind"])


pytestmark = pytest.mark.usefixtures("forget_accelerator")


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    return write_lists(tmp_path)


@ORDERS
def test_accelerate(lists, order):
    model, accelerator = Head(), accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    call = accelerator.prepare(hmp.apply(model, lists)) if order == "before" else hmp.apply(accelerator.prepare(model), lists)
    assert_by_the_lists(model, call)
    with autocast():
        assert_by_the_lists(model, call, enabled=True)


@ORDERS
def test_fsdp2_in_a_region(lists, order, process_group):
    model, plain = Head(), Head()
    plain.load_state_dict(model.state_dict())
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    if order == "before":
        hmp.apply(model, lists)
    for each in (model.body, model.lm_head, model):
        fully_shard(each, mesh=mesh)
    if order == "behind":
        hmp.apply(model, lists)
    with autocast():
        out = model(X)
    out.sum().backward()
    wanted = by_hand(plain)
    torch.testing.assert_close((out.detach(), model.lm_head.weight.grad.full_tensor()), wanted, rtol=0, atol=1e-6)


# --- transformers


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))


def trained(model: Any, folder: Path, *callbacks: Any, **arguments: Any) -> tuple[float, set[torch.dtype]]:
    """The loss of two steps of a Trainer, and the dtypes of lm_head's results."""
    import transformers

    seen: set[torch.dtype] = set()
    model.lm_head.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    made = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (8,), generator=made) for _ in range(4)]
    settings = transformers.TrainingArguments(
        str(folder / "run"), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        **arguments,
    )  # fmt: skip
    data = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = transformers.Trainer(model, settings, train_dataset=data, callbacks=list(callbacks))
    return trainer.train().training_loss, seen


@pytest.mark.slow
def test_transformers_trainer_has_the_same_numbers_whatever_its_own_precision_is(lists, tmp_path):
    from hmp.compat.transformers import HMPCallback

    wanted = trained(llama(), tmp_path, HMPCallback(lists))
    assert wanted[1] == {F32}
    for arguments in ({"bf16": True}, {"fp16": True}, {"bf16": True, "gradient_checkpointing": True}):
        model = llama()
        assert trained(model, tmp_path, HMPCallback(lists, verify=True), **arguments) == wanted, arguments
        assert model.lm_head.weight.dtype is F32
    assert trained(hmp.apply(llama(), lists), tmp_path, bf16=True) == wanted


# --- hmp run --verify

VOID = """
import torch
model = torch.nn.Linear(4, 4)
for step in range(5):
    with torch.autocast("cpu", enabled=False):
        model(torch.ones(2, 4))
"""


@pytest.mark.slow
def test_hmp_run_verifies_the_first_steps(tmp_path):
    (tmp_path / "train.py").write_text(VOID)
    done = python(*RUN, "--verify", "--policy", "autocast", "train.py", cwd=tmp_path)
    assert done.returncode == 1 and "did not follow their lists" in done.stderr and "train.py:5" in done.stderr, done.stderr


# --- accelerate's own loop under convert()


def train(around_prepare: Callable[[], Any] = lambda: None, **kwargs: Any) -> tuple[list[float], nn.Module]:
    """The losses and the model after two epochs of accelerate's loop."""
    accelerator = accelerate.Accelerator(mixed_precision="no", cpu=True, **kwargs)
    network = net()
    optimizer = sgd(network.parameters())
    prepared, optimizer, data = accelerator.prepare(network, optimizer, batches())
    around_prepare()
    losses = []
    for _ in range(2):
        for x, y in data:
            with accelerator.accumulate(prepared):
                loss = F.mse_loss(prepared(x).float(), y)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    return losses, network


@pytest.mark.parametrize(("accumulate", "late"), [(1, False), (2, True)], ids=["converted before", "converted after prepare"])
def test_its_loop_under_convert_trains_as_explicit_casts_do(accumulate: int, late: bool):
    if not late:
        hmp.convert()
    found = train(around_prepare=hmp.convert if late else lambda: None, gradient_accumulation_steps=accumulate)
    hmp.revert()
    wanted = train_by_hand(lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05), accumulate)
    assert found[0] == wanted[0]
    assert_same_weights(found[1], wanted[1])
    assert found[0] != train(gradient_accumulation_steps=accumulate)[0], "the precision makes no difference here"
