"""What an Optimum Gaudi configuration asks for is what one gets: casts, optimizer and clip function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.compat import gaudi_config
from hmp.compat.habana.optimizers import FusedAdamW
from oracle import BF16, F32
from published import gaudi_files

CONFIGS = gaudi_files()


@pytest.mark.skipif(not CONFIGS, reason="the published configurations are not beside this checkout")
def test_published_configurations_train_a_model_as_they_say() -> None:
    for file in CONFIGS:
        values = json.loads(file.read_text())
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        setup = gaudi_config.apply(file, model)
        optimizer_class, clip = setup
        assert (optimizer_class is FusedAdamW) is values.get("use_fused_adam", False)
        assert hmp.is_converted()
        out = model(torch.randn(2, 8))
        assert (out.dtype is BF16) is ("linear" in values["hmp_bf16_ops"])
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        before = model.weight.clone()
        out.float().square().mean().backward()
        gradient = model.weight.grad.clone()
        with hmp.disable_casts():
            norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
            clipped = gradient * (0.01 / (norm.item() + 1e-6))
        found = clip(model.parameters(), 0.01)
        assert found.item() == pytest.approx(norm.item(), rel=1e-5)
        torch.testing.assert_close(model.weight.grad, clipped)
        optimizer.step()
        assert model.weight.dtype is F32
        assert not torch.equal(model.weight, before)
        setup.revert()
        assert not hmp.is_converted()


def test_lists_and_defaults_are_those_of_the_configuration() -> None:
    model = torch.nn.Linear(2, 2)
    setup = gaudi_config.apply({"use_habana_mixed_precision": True, "hmp_bf16_ops": ["softmax"], "hmp_fp32_ops": ["linear"]}, model)
    assert F.softmax(torch.randn(3), 0).dtype is BF16
    assert model(torch.randn(1, 2).bfloat16()).dtype is F32
    assert setup.optimizer is torch.optim.AdamW
    hmp.revert()
    gaudi_config.apply({"use_torch_autocast": True}, model)
    assert F.softmax(torch.randn(3), 0).dtype is BF16  # BERT's list
    hmp.revert()
    gaudi_config.apply({"use_habana_mixed_precision": True, "hmp_opt_level": "O2"}, model)
    assert F.softmax(torch.randn(3).bfloat16(), 0).dtype is F32
    assert model(torch.randn(1, 2)).dtype is BF16


def test_a_configuration_without_mixed_precision_casts_nothing() -> None:
    model = torch.nn.Linear(2, 2)
    setup = gaudi_config.apply({"use_fused_clip_norm": True, "use_magic": 3}, model)
    assert (setup.config["use_magic"], setup.config["use_torch_autocast"]) == (3, False)
    assert setup.handle is None
    assert not hmp.is_converted()
    model(torch.ones(1, 2)).sum().backward()
    assert setup.clip(max_norm=0.5).item() > 0.5  # the model's own parameters
    setup.revert()


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hmp.HmpError, match=r"takes a configuration and a torch\.nn\.Module; dict is none"):
        gaudi_config.apply({}, {})
    with pytest.raises(hmp.HmpError, match="no such file"):
        gaudi_config.apply(tmp_path / "gaudi_config.json", torch.nn.Linear(2, 2))
    assert not hmp.is_converted()
