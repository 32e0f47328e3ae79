"""What a Gaudi configuration and Gaudi's training arguments hold, take, write and refuse; what it asks for is what one gets."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp
from hmp.compat import gaudi_config
from hmp.compat.habana.optimizers import FusedAdamW
from hmp.compat.optimum_habana.arguments import GaudiTrainingArguments
from hmp.compat.optimum_habana.configuration import GaudiConfig
from oracle import BF16, F32
from published import gaudi_files

CONFIGS = gaudi_files()


def test_a_folder_a_file_and_what_was_saved_are_read(tmp_path: Path) -> None:
    values = {"use_habana_mixed_precision": True, "hmp_bf16_ops": ["linear"], "hmp_fp32_ops": ["softmax"], "use_fused_adam": True}
    (tmp_path / "gaudi_config.json").write_text(json.dumps(values))
    (tmp_path / "other.json").write_text(json.dumps({"use_fused_clip_norm": True}))
    config = GaudiConfig.from_pretrained(tmp_path, cache_dir=None, revision="main", use_auth_token=None, use_fused_adam=False)
    assert (config.hmp_bf16_ops, config.use_habana_mixed_precision, config.use_fused_adam) == (["linear"], True, False)
    assert config.policy is not None
    assert (config.policy.bf16, config.policy.fp32) == ({"linear"}, {"softmax"})
    other = GaudiConfig.from_pretrained(str(tmp_path / "other.json"))
    assert (other.use_fused_clip_norm, other.policy) == (True, None)
    config.save_pretrained(tmp_path / "made" / "here")
    again = GaudiConfig.from_pretrained(tmp_path / "made" / "here")
    assert again == config != other
    assert GaudiConfig.from_dict(again.to_dict()) == again
    assert "use_fused_adam=False" in repr(again)


def test_what_cannot_be_meant_is_refused_and_unknown_keys_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "gaudi_config.json").write_text("{")
    with pytest.raises(hmp.HmpError, match=r"gaudi_config\.json: cannot be read: Expecting"):
        GaudiConfig.from_pretrained(tmp_path)
    (tmp_path / "gaudi_config.json").write_text("[]")
    with pytest.raises(hmp.HmpError, match=r"gaudi_config\.json: expected a JSON object .* got list"):
        GaudiConfig.from_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "hmp"):
        assert GaudiConfig(use_magic=3).policy is None
    assert "unknown Gaudi configuration keys: use_magic" in caplog.text


@pytest.mark.usefixtures("hpu_on_cpu")
def test_arguments_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"use_lazy_mode, gaudi_config_name: .*; set use_habana=True"):
        GaudiTrainingArguments(str(tmp_path), use_lazy_mode=True, gaudi_config_name="here")
    with pytest.raises(ValueError, match=r"expected bf16 and fp16 to be False, .*; set use_habana_mixed_precision"):
        GaudiTrainingArguments(str(tmp_path), use_habana=True, bf16=True)
    with pytest.raises(ValueError, match="throughput_warmup_steps= expected a number >= 0, got -1"):
        GaudiTrainingArguments(str(tmp_path), use_habana=True, throughput_warmup_steps=-1)


def test_training_is_on_the_device_that_hpu_is_mapped_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hmp.compat.optimum_habana.arguments.actual_device", lambda: torch.device("cuda"))
    assert not GaudiTrainingArguments(str(tmp_path), use_habana=True).use_cpu


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


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hmp.HmpError, match=r"expected a torch\.nn\.Module .* got dict"):
        gaudi_config.apply({}, {})
    with pytest.raises(hmp.HmpError, match="No such file"):
        gaudi_config.apply(tmp_path / "gaudi_config.json", torch.nn.Linear(2, 2))
    assert not hmp.is_converted()
