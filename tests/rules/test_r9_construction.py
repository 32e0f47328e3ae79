"""R9: modules are constructed with casts off, however their classes came by a constructor."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

import hmp
from trap_kit import same

LOW = torch.bfloat16


def _same_state(built: torch.nn.Module, plain: torch.nn.Module) -> None:
    ours, theirs = dict(built.named_parameters()), dict(plain.named_parameters())
    ours.update(built.named_buffers())
    theirs.update(plain.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same(value, theirs[name])
    assert set(built.state_dict()) == set(plain.state_dict())


def _inits() -> torch.nn.Module:
    """A module whose constructor computes: tables, rescaled weights, buffers."""

    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inverse", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
            self.register_buffer("angles", torch.arange(5000.0)[:, None] * self.inverse)
            self.weight = torch.nn.Parameter(torch.randn(4, 4) * 0.02)
            self.product = torch.nn.Parameter(torch.matmul(torch.eye(4) * 1.001, torch.ones(4)))
            self.linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
            self.spectral = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
            self.layers = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.LSTM(3, 4), torch.nn.TransformerEncoderLayer(4, 1))

    class Derived(Rotary):
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.scaled = torch.nn.Parameter(self.weight * 3.001)

    return Derived()


@pytest.mark.parametrize("enter", [hmp.convert, lambda: hmp.casts("bert")], ids=["convert", "bert"])
def test_r9_a_module_built_under_casts_has_the_same_parameters_and_buffers(enter):
    torch.manual_seed(5)
    plain = _inits()
    torch.manual_seed(5)
    with enter():
        built = _inits()
    _same_state(built, plain)


def test_r9_casts_are_on_again_after_a_constructor_and_after_one_that_raises():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            assert torch.relu(torch.ones(1)).dtype == torch.float32
            raise ValueError("broken")

    with hmp.casts("habana"):
        with pytest.raises(ValueError, match="broken"):
            Broken()
        assert torch.relu(torch.ones(1)).dtype == LOW
        torch.nn.Linear(2, 2)
        assert torch.relu(torch.ones(1)).dtype == LOW


def _tiny_transformers():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
    tiny = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 64}
    return {
        "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**small, num_key_value_heads=2)),
        "ctrl": lambda: transformers.CTRLModel(transformers.CTRLConfig(**tiny, dff=32)),
        "roformer": lambda: transformers.RoFormerModel(transformers.RoFormerConfig(**small, embedding_size=16, max_position_embeddings=32)),
    }


def test_r9_transformers_models_are_the_same_when_made_or_loaded_after_convert(tmp_path):
    """from_pretrained computes the tables that no file holds, sinusoids among them, after the constructor."""
    plain, loaded = {}, {}
    for name, make in _tiny_transformers().items():
        torch.manual_seed(7)
        plain[name] = make()
        plain[name].save_pretrained(tmp_path / name)
        loaded[name] = type(plain[name]).from_pretrained(tmp_path / name, dtype=LOW)
    hmp.convert()
    for name, make in _tiny_transformers().items():
        torch.manual_seed(7)
        _same_state(make(), plain[name])
        _same_state(type(plain[name]).from_pretrained(tmp_path / name), plain[name])
        _same_state(type(plain[name]).from_pretrained(tmp_path / name, dtype=LOW), loaded[name])


def _weight(module, size):
    module.weight = torch.nn.Parameter(torch.randn(size, size) * 0.02)


def _dataclass_module() -> type[torch.nn.Module]:
    @dataclasses.dataclass(eq=False)
    class Module(torch.nn.Module):
        size: int

        def __post_init__(self):
            super().__init__()
            _weight(self, self.size)

    return Module


def _mixin_module() -> type[torch.nn.Module]:
    class Mixin:
        def __init__(self, size):
            super().__init__()
            _weight(self, size)

    return type("Module", (Mixin, torch.nn.Module), {})


def _late_module() -> type[torch.nn.Module]:
    module = type("Module", (torch.nn.Module,), {})
    module.__init__ = lambda self, size: (torch.nn.Module.__init__(self), _weight(self, size))[0]
    return module


def _wrapped_module() -> type[torch.nn.Module]:
    class Module(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            _weight(self, size)

    original = Module.__init__
    Module.__init__ = lambda self, size: original(self, size)  # as deepspeed's zero.Init does
    return Module


def test_r9_every_way_of_giving_a_class_its_constructor():
    ways = (_dataclass_module, _mixin_module, _late_module, _wrapped_module)
    classes = [make() for make in ways]
    hmp.convert()
    for cls in [*classes, *(make() for make in ways)]:
        torch.manual_seed(6)
        built = cls(4)
        with hmp.disable_casts():
            torch.manual_seed(6)
            same(built.weight.data, torch.randn(4, 4) * 0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that somebody wrapped the constructor after hmp did
        hmp.revert()


EVERY_VIEW = hmp.Policy("views", bf16={"reshape", "view", "t", "contiguous", "clone", "narrow", "mul", "add"})


def test_r9_from_pretrained_narrows_no_weight_in_any_thread(tmp_path, monkeypatch):
    plain = _tiny_transformers()["llama"]()
    plain.save_pretrained(tmp_path)
    hmp.convert(policy=EVERY_VIEW)
    _same_state(type(plain).from_pretrained(tmp_path), plain)
    with hmp.disable_casts():
        _same_state(type(plain).from_pretrained(tmp_path), plain)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    _same_state(type(plain).from_pretrained(tmp_path), plain)


def test_r9_files_of_weights_are_read_and_written_as_they_are(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"a": torch.randn(3, 2) * 1.001, "sparse": torch.randn(3, 2).to_sparse()}
    dense = {"a": state["a"]}
    hmp.convert(policy=EVERY_VIEW.replace(bf16=EVERY_VIEW.bf16 | {"sparse_coo_tensor"}))
    torch.save(state, tmp_path / "a.pt")
    safetensors.save_file(dense, tmp_path / "a.safetensors")
    for loaded in (
        torch.load(tmp_path / "a.pt"),
        safetensors.load_file(tmp_path / "a.safetensors"),
        safetensors.load((tmp_path / "a.safetensors").read_bytes()),
    ):
        assert torch.equal(loaded["a"], state["a"])
        assert "sparse" not in loaded or loaded["sparse"].dtype is torch.float32
