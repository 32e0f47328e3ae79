"""hmp.compare() on whole models: it decides as hmp does without it, leaves no trace, repeats itself, and holds few tensors."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch

import hmp
from hmp.numerics.aten import refuse_xla
from hmp.numerics.shadow import Shadows
from trap_kit import policy, same


def net(*, dropout: float = 0.5) -> torch.nn.Sequential:
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 4)]
    return torch.nn.Sequential(*layers, torch.nn.Softmax(-1))


def squares(output: torch.Tensor) -> torch.Tensor:
    return (output.float() ** 2).sum()


def test_dropout_is_the_same_in_all_runs_and_the_next_time():
    model, x = net(), torch.randn(6, 8)
    first, again = (hmp.compare(model, x, "habana", loss=squares) for _ in range(2))
    assert first.to_dict() | {"date": ""} == again.to_dict() | {"date": ""}
    assert first.output < 0.02  # with other masks it would be around one
    dropped = [r for r in first.rows if r.op == "dropout"]
    assert dropped and all(r.accumulated < 0.02 for r in dropped)


def test_what_is_drawn_in_low_precision_is_drawn_once():
    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = x.bfloat16()
            noise = torch.randn_like(low) + torch.empty_like(low).uniform_()
            return (low + noise) * torch.bernoulli(torch.full_like(low, 0.5))

    comparison = hmp.compare(Noisy(), torch.randn(64), policy())
    assert comparison.output < 0.01


def test_the_model_and_the_batch_are_as_before():
    model, x = net(), torch.randn(6, 8, requires_grad=True)
    model(x).sum().backward()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": x}
    before = {name: (t, t.detach().clone(), t.grad, None if t.grad is None else t.grad.clone()) for name, t in tensors.items()}
    state = torch.get_rng_state()
    hmp.compare(model, x, "habana", loss=squares)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": x}
    for name, (tensor, value, grad, grad_value) in before.items():
        assert after[name] is tensor and after[name].grad is grad, name
        same(tensor, value)
        if grad is not None:
            same(grad, grad_value)
    assert torch.equal(torch.get_rng_state(), state)


def test_all_that_shares_memory_with_what_is_written_is_as_before():
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(8)
            self.register_buffer("first", whole[:4])
            self.register_buffer("second", whole[4:])

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.first.add_(1)
            return x.mul_(2) + y

    model, both = Counts(), torch.randn(6, 4)
    before = both.clone()
    hmp.compare(model, (both[:3], both[3:]), "habana")
    same(both, before)
    same(model.first, torch.zeros(4))


def test_an_exception_in_the_model_leaves_it_as_before():
    class Fails(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm(x)
            raise ValueError("mine")

    model = Fails()
    with pytest.raises(ValueError, match="mine"):
        hmp.compare(model, torch.randn(4, 2))
    assert float(model.norm.running_mean.abs().sum()) == 0.0 and int(model.norm.num_batches_tracked) == 0
    assert not hmp.casts_enabled()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many references are held after each op."""
    counts: list[int] = []
    keep = Shadows._keep

    def counting(self: Shadows, *args: Any) -> None:
        keep(self, *args)
        counts.append(len(self))

    monkeypatch.setattr(Shadows, "_keep", counting)
    return counts


def test_a_deeper_model_holds_no_more_references(held: list[int]):
    def most(depth: int) -> int:
        held.clear()
        with torch.no_grad():
            hmp.compare(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(depth))), torch.randn(2, 8), "habana")
        return max(held)

    assert most(24) == most(3) < 12


@pytest.mark.slow
def test_nothing_stays_in_memory():
    def tensors() -> list[torch.Tensor]:
        gc.collect()
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    model, x = net(), torch.randn(6, 8)
    hmp.compare(model, x, "habana", loss=squares)
    before = tensors()  # kept, so that no later tensor gets the id of one of them
    comparison = hmp.compare(model, x, "habana", loss=squares)
    assert not [tensor.shape for tensor in tensors() if id(tensor) not in set(map(id, before))]
    assert comparison.rows


def test_an_in_place_write_through_a_view_reaches_the_reference():
    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(2, 4)
            out[0] = (x * 3).bfloat16()
            out[1].copy_(x).mul_(2)
            return out * 1

    x = torch.randn(4)
    comparison = hmp.compare(Writes(), x, policy())
    exact = torch.stack((x * 3, x * 2))
    got = torch.stack(((x * 3).bfloat16().float(), x * 2))
    assert comparison.output == pytest.approx(float((got - exact).norm() / exact.norm()), rel=1e-4)


def test_a_cast_that_hmp_remembers_is_still_compared_with_its_weight():
    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with hmp.casts("habana"), torch.no_grad():
        model(x)  # the cast weight is in the cache from here on
        comparison = hmp.compare(model, x)
    products = [r for r in comparison.rows if r.aten == "addmm"]
    exact = model(x).detach()
    with hmp.casts("habana"), torch.no_grad():
        got = model(x).double()
    assert products[0].isolated == pytest.approx(float((got - exact).norm() / exact.norm()), rel=1e-4)


def test_the_policy_in_force_is_the_default_policy_of_a_comparison():
    model, x = net(), torch.randn(6, 8)
    assert hmp.compare(model, x).policy == hmp.Policy.load("autocast").name
    with hmp.casts("apex-o1"):
        assert hmp.compare(model, x).policy == "apex-o1"
    with hmp.convert(policy="bert"):
        assert hmp.compare(model, x).policy == "bert"


def test_what_rounds_less_than_half_a_percent_of_it_is_no_advice():
    comparison = hmp.compare(net(), torch.randn(6, 8), "habana", loss=squares)
    shares = {}
    for row in comparison.rows:
        shares[row.op] = shares.get(row.op, 0.0) + (row.share if row.listed != "fp32" else 0.0)
    assert dict(comparison.advice) == {op: pytest.approx(share) for op, share in shares.items() if share >= 0.005}
    assert min(shares.values()) < 0.005, "nothing to leave out"
    assert "(0%)" not in str(comparison)


def test_an_applied_policy_is_the_policy_of_a_comparison():
    model = hmp.apply(net(), "bert")
    assert hmp.compare(model, torch.randn(6, 8)).policy == "bert"
    with pytest.raises(hmp.HmpError, match="policy 'bert' is applied to the model, whose calls follow it and not 'habana'"):
        hmp.compare(model, torch.randn(6, 8), "habana")


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_whose_kernels_keep_notes_for_backward(kind: type):
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(4, 8, num_layers=2, dropout=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    model, x, lists = Recurrent(), torch.randn(5, 3, 4), policy(bf16={"lstm", "gru", "rnn_tanh"})
    torch.manual_seed(1)
    with hmp.casts(lists):
        loss = squares(model(x)).item()
    torch.manual_seed(1)
    comparison = hmp.compare(model, x, lists, loss=squares)
    assert comparison.loss_value == loss
    assert 0 < comparison.output < 0.02 and 0 < comparison.gradient < 0.02
    assert comparison.advice[0][0] in ("lstm", "gru", "rnn_tanh")


def test_complex_weights_and_outputs_count_with_both_parts():
    class Spectral(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.weight = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(self.layer(x)) * self.weight

    def loss(out: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(out).square().mean()

    model, x = Spectral(), torch.randn(4, 8)

    def run(cast: Any) -> list[torch.Tensor]:
        weights = [p.detach().clone().requires_grad_() for p in (model.layer.weight, model.layer.bias, model.weight)]
        hidden = torch.nn.functional.linear(cast(x), *map(cast, weights[:2])).float()
        out = torch.fft.rfft(hidden) * weights[2]
        return [out.detach(), *torch.autograd.grad(loss(out), weights)]

    def numbers(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.view_as_real(t).flatten() if t.is_complex() else t.flatten() for t in tensors])

    low, exact = run(lambda t: t.bfloat16()), run(lambda t: t)
    output, gradient = (
        float((numbers(a) - numbers(b)).norm() / numbers(b).norm()) for a, b in ((low[:1], exact[:1]), (low[1:], exact[1:]))
    )
    comparison = hmp.compare(model, x, policy(bf16={"linear"}), loss=loss)
    assert comparison.output == pytest.approx(output, rel=1e-3)
    assert comparison.gradient == pytest.approx(gradient, rel=1e-3)


def test_without_a_loss_only_forward_is_compared():
    comparison = hmp.compare(net(), (torch.randn(6, 8),), "habana")
    assert comparison.loss is comparison.gradient is None
    assert {r.direction for r in comparison.rows} == {"forward"}
    assert str(comparison).startswith("policy 'habana' against float32, forward only: no loss was given, and the output has none\n")


def test_the_outputs_own_loss_is_taken_and_a_mapping_is_keywords():
    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, *, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(inputs)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    comparison = hmp.compare(WithLoss(), {"inputs": torch.randn(3, 4), "labels": torch.tensor([0, 1, 1])})
    assert comparison.loss_source == "forward and backward of the output's own loss"
    assert {r.op for r in comparison.rows if r.direction == "backward"} >= {"linear", "cross_entropy"}
    assert {r.module for r in comparison.rows} >= {"layer", "WithLoss"}


def test_json(tmp_path: Any):
    comparison = hmp.compare(net(), torch.randn(6, 8), "habana", loss=squares)
    read = json.loads(comparison.to_json(tmp_path / "it.json").read_text())
    assert read["policy"] == "habana" and len(read["rows"]) == len(comparison.rows)
    assert read["advice"][0]["op"] == comparison.advice[0][0]
    names = "op aten direction module dtype isolated accumulated isolated_ulps accumulated_ulps"
    assert set(read["rows"][0]) >= set(names.split())


class Detached(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: hmp.compare(torch.sin, torch.ones(1)),
            "compare() takes a torch.nn.Module and a batch; builtin_function_or_method is no module",
        ),
        (
            lambda: hmp.compare(net(), torch.randn(6, 8), loss=lambda out: out),
            "loss(output) is Tensor of shape (6, 4); return a tensor with one element",
        ),
        (lambda: hmp.compare(net(), torch.randn(6, 8), loss=lambda out: 1.0), "loss(output) is float; return a tensor with one element"),
        (
            lambda: hmp.compare(torch.nn.ReLU(), torch.ones(1), loss=lambda out: out.sum()),
            "the loss needs no gradient: nothing that it was computed from does; call compare() under torch.no_grad()",
        ),
        (
            lambda: hmp.compare(net(), torch.randn(6, 8), loss=lambda out: out.detach().sum()),
            "the loss needs no gradient: the output does, and a .detach(), a .item() or a torch.no_grad() in loss(output) cuts it off; "
            "take that out, or to compare the forward alone call compare() under torch.no_grad()",
        ),
        (
            lambda: hmp.compare(Detached(), torch.randn(6, 8), loss=torch.sum),
            "the loss needs no gradient: weights of the model do, and have no part in it, or a .detach(), a .item() or a torch.no_grad() "
            "on the way cuts it off; take that out, or to compare the forward alone call compare() under torch.no_grad()",
        ),
        (
            lambda: hmp.compare(net(), torch.randn(6, 8), loss=3),
            "loss= takes a function of the model's output, not an object of type int",
        ),
        (
            lambda: hmp.compare(net(), torch.randn(6, 8), loss=lambda out: hmp.compare(net(), torch.randn(6, 8)).loss),
            "compare() inside compare(): the inner one would count the outer one's ops; call one after the other",
        ),
    ],
)
def test_wrong_use_is_an_error_that_says_what_to_do(call: Any, message: str):
    with pytest.raises(hmp.HmpError) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("detached", ["loss", "model"])
def test_what_a_loss_without_a_gradient_is_told_to_do_works(detached: str):
    model = net() if detached == "loss" else Detached()
    with torch.no_grad():
        comparison = hmp.compare(model, torch.randn(6, 8), loss=lambda out: out.detach().sum())
    assert comparison.output is not None and comparison.gradient is None


def test_a_checkpointed_models_recomputation_is_compared_as_forward():
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    comparison = hmp.compare(Checkpointed(), torch.randn(2, 4), loss=lambda out: out.sum())
    of_linear = [(r.aten, r.direction) for r in comparison.rows if r.op == "linear" for _ in range(r.calls)]
    # torch recomputes as far as backward needs it: the casts of input, weight and bias
    assert of_linear.count(("_to_copy", "forward")) == 6 and ("mm", "backward") in of_linear
    assert comparison.gradient < 0.02


def test_tensors_on_xla_are_refused() -> None:
    with pytest.raises(hmp.HmpError, match=r"compare\(\) cannot follow tensors on XLA .*; move the model and its batch to the CPU"):
        refuse_xla(torch.device("xla"), "compare()")


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_view_on_a_list_that_casts_goes_on_from_its_inputs_reference(mode: Any):
    """Its result is an alias of the cast copy, which is made below what a dispatch mode sees."""
    net, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Flatten(), torch.nn.Dropout(0.5)).eval(), torch.randn(4, 8)
    with mode():
        exact = net(x).detach()
        comparison = hmp.compare(net, x, policy(bf16={"linear", "flatten", "dropout"}))
        lossy = hmp.compare(net[1:], x, policy(bf16={"flatten", "dropout"}))
        weight, bias = net[0].weight, net[0].bias
        low = torch.nn.functional.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).detach()
    assert comparison.output == pytest.approx(float((low - exact).norm() / exact.norm()), rel=1e-3)
    assert lossy.output == pytest.approx(float((x.bfloat16() - x).norm() / x.norm()), rel=1e-3)


class _ByDtype(torch.nn.Module):
    """Picks a constant by the dtype, as many losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.softmax(self.layer(x), -1)
        return {"loss": -(y.clamp_min(torch.finfo(y.dtype).eps)).log().min(), "y": y}


def test_a_run_without_hmp_is_its_first_column():
    torch.manual_seed(0)
    model, x = _ByDtype(), 30 * torch.randn(8, 64)
    plain = model(x)["loss"].item()
    with hmp.casts("torch-cpu"):
        cast = model(x)["loss"].item()
    found = hmp.compare(model, x, "torch-cpu")
    assert abs(cast - plain) > 0.5 * abs(plain)
    assert found.untouched_loss_value == pytest.approx(plain) and found.loss_value == pytest.approx(cast)
    assert found.untouched_loss == pytest.approx(abs(cast - plain) / abs(plain))
    assert found.loss is not None and found.loss < 0.01  # the float32 beside each op goes the policy's way
    first = str(found).splitlines()[1]
    assert first.startswith("  relative distance from a float32 run without hmp: output ")
    assert f"({plain:.5g} became {cast:.5g})" in first
    assert "goes another way in float32" in str(found)
    assert found.to_dict()["untouched_loss_value"] == found.untouched_loss_value


def test_a_branch_by_dtype_and_a_model_whose_ops_account_for_the_distance():
    class Branch(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y[:, :4] if y.dtype is torch.bfloat16 else y

    x = torch.randn(4, 8)
    assert hmp.compare(Branch(), x, "torch-cpu").untouched_output == float("inf")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    with torch.no_grad():
        plain = model(x)
    for under in ("torch-cpu", hmp.Policy("nothing")):
        found = hmp.compare(model, x, under)
        with hmp.casts(under), torch.no_grad():
            distance = (model(x).float() - plain).norm() / plain.norm()
        assert found.untouched_output == pytest.approx(distance.item(), rel=1e-3)
        assert "goes another way" not in str(found)
    dropping = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout())
    found = hmp.compare(dropping, x, "torch-cpu")
    assert found.untouched_output is None and "draws random numbers" in str(found)
    assert hmp.compare(dropping.eval(), x, "torch-cpu").untouched_output < 0.01


def test_a_model_that_raises_is_told_with_what_was_seen():
    class Raises(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.layer(x))
            if y.dtype is torch.bfloat16:
                raise KeyError("label")
            return y

    model = Raises()
    weight = model.layer.weight.clone()
    with pytest.raises(KeyError, match="label") as caught:
        hmp.compare(model, torch.randn(2, 4), "torch-cpu")
    (note,) = caught.value.__notes__
    assert note.startswith("compare() under policy 'torch-cpu@") and "linear (forward, layer) in bfloat16: 0.00" in note and "tanh" in note
    assert torch.equal(model.layer.weight, weight) and model.layer.weight.grad is None
