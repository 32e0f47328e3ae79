"""The list of what is kept packed, as a file, in a policy and in scopes; what is left in memory: each packed once, and views with it.

Gradients are those of quantised tensors; what a format's rounding does to them, beside float64."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp
import saved_oracle as oracle
from hmp.cli import main
from saved_oracle import bytes_of, only_what_is_new, packs
from trap_kit import same

pytestmark = packs

Tensor = torch.Tensor
PACKED = hmp.Policy("packed", saved=frozenset({"linear", "gelu", "mul", "relu", "softmax"}))
ROWS, WIDTH = 256, 64
FLOATS = ROWS * WIDTH
WEIGHTS = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]
WIDE = torch.randn(8, 2 * WIDTH, requires_grad=True)


def held(x: Tensor) -> Any:
    y = x + 1
    return F.gelu(y), y


def written_between(x: Tensor) -> Any:
    y = x + 1
    first = F.gelu(y)
    return first, F.gelu(y.add_(1))


def pieces_after_the_whole(x: Tensor) -> Any:
    y = x + 1
    return F.gelu(y), F.gelu(y[:128]), F.gelu(y[:, :32]), F.linear(y.view(-1, 2 * WIDTH), WIDE)


def expanded(x: Tensor) -> Any:
    return x[:64].add(1).unsqueeze(0).expand(4, -1, -1) * 1.5 + F.gelu(x[:64].add(1).unsqueeze(0).expand(4, -1, -1))


LEFT: list[tuple[Callable[[Tensor], Any], int, int]] = [
    (lambda x: list(map(F.linear, [x + 1] * 3, WEIGHTS)), FLOATS, ROWS),  # once, not three times
    # four views of one memory, and of the mul nothing: a number is no tensor
    (lambda x: [F.gelu(part) for part in (x * 3).add(0).chunk(4, 1)], FLOATS, 4 * ROWS),
    (lambda x: F.gelu(input=x + 1), FLOATS, ROWS),
    (lambda x: F.gelu((x + 1).view(8, 32, WIDTH)[:, :10]), 8 * 10 * WIDTH, 8 * 10),  # the view alone, not its base
    (held, FLOATS, ROWS),  # the caller's is the caller's
    (written_between, 2 * FLOATS, 2 * ROWS),
    (pieces_after_the_whole, FLOATS, 2 * ROWS),  # blocks of 32, of which a column's piece has its own
    (lambda x: F.gelu((x + 1).t()), FLOATS, 2 * WIDTH),  # its own rows, which are of 256
    (lambda x: F.relu(x + 1), FLOATS // 8, 0),  # a bit each
    (lambda x: F.linear(F.relu(x + 1), WEIGHTS[0]), FLOATS, ROWS),  # the numbers once, which tell their signs
    (expanded, 64 * WIDTH, 64),  # once what stands there four times
]


def test_r22_what_is_left_is_a_byte_for_each_number_and_block_once() -> None:
    with only_what_is_new() as known, hmp.casts(PACKED):
        for at, (forward, numbers, blocks) in enumerate(LEFT):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            F.gelu(x + 1)  # a thread's first packing gets memory that is used again
            kept, result = bytes_of(functools.partial(forward, x), known)
            assert kept == numbers + blocks, at
            torch.autograd.backward([each.sum() for each in (result if isinstance(result, (list, tuple)) else [result])])
            assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.native_kernels  # computed in float32, the op saves a copy of the weight
def test_r22_of_a_weights_low_precision_copy_nothing_is_kept_and_backward_has_its_bits() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, 2 * WIDTH, bias=False), torch.randn(ROWS, WIDTH, requires_grad=True)
    policy = PACKED.replace(bf16={"linear"})
    with hmp.casts(policy):
        kept, result = bytes_of(lambda: layer(x.relu() + 1))
    assert kept == FLOATS + ROWS + FLOATS // 8  # the product's input and relu's signs
    (found,) = torch.autograd.grad(result.float().sum(), x)
    low = layer.weight.detach().to(torch.bfloat16)
    expected = torch.ones(ROWS, 2 * WIDTH, dtype=torch.bfloat16) @ low
    assert torch.equal(found, expected.float() * (x > 0))


@pytest.mark.native_kernels  # computed in float32, the op saves a copy of the weight
def test_r22_of_a_batch_nothing_is_packed_but_its_low_precision_copy() -> None:
    batch, layer = torch.randn(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
    with hmp.casts(PACKED):
        assert bytes_of(lambda: layer(batch))[0] == 0
    with hmp.casts(PACKED.replace(bf16={"linear"})):
        assert bytes_of(lambda: layer(batch))[0] == FLOATS + ROWS


@pytest.mark.parametrize("listed", ["tanh", "gelu"])
def test_r22_what_an_unlisted_op_saves_too_stays_beside_the_pack(listed: str) -> None:
    """The product saves what tanh gives and gelu takes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(x)
            return F.linear(hidden, self.weight), F.gelu(hidden)

    model, x = Net(), torch.randn(ROWS, WIDTH, requires_grad=True)
    hmp.apply(model, hmp.Policy("packed", saved={listed}))
    assert bytes_of(lambda: model(x))[0] == hmp.summary(model, x).saved_bytes == 4 * FLOATS + FLOATS + ROWS


def test_r22_a_list_is_read_kept_beside_the_others_and_written_again(tmp_path: Path) -> None:
    (tmp_path / "saved.txt").write_text("gelu\nlinear @ *.mlp\n")
    (tmp_path / "saved_recipe.txt").write_text("int8\n")
    (tmp_path / "base.txt").write_text("habana\n")
    policy, habana = hmp.Policy.load(tmp_path), hmp.Policy.load("habana")
    assert policy.entries("saved") == ["gelu", "linear @ *.mlp"] and policy.saved_recipe == "int8"
    assert [policy.entries(cast) for cast in habana.lists] == [habana.entries(cast) for cast in habana.lists]  # takes nothing from these
    assert hmp.Policy.load(policy.save(tmp_path / "again")) == policy == hmp.Policy.from_dict(policy.to_dict())
    kept = {"gelu (saved)": ("saved", None), "linear @ *.mlp (saved)": ("saved", None)}
    assert policy.diff("habana") == {"(saved recipe)": ("int8", "fp8"), **kept}
    assert policy.fingerprint != policy.replace(saved_recipe="fp8").fingerprint
    habana.save(tmp_path / "again")
    assert not (tmp_path / "again" / "saved.txt").exists() and not (tmp_path / "again" / "saved_recipe.txt").exists()
    with pytest.raises(hmp.HmpError, match=r"saved_recipe= expected .*, got 'int4'"):
        policy.replace(saved_recipe="int4")


def test_r22_a_scoped_line_packs_in_its_modules_alone() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("here", "there")})
    policy = hmp.Policy("scoped", saved={"linear @ here"})

    def run(name: str) -> int:
        x = torch.randn(64, 64, requires_grad=True)
        kept, _ = bytes_of(lambda: (model[name](x * 2), model["here"](torch.ones(64, 64)))[0], known)
        return kept

    with only_what_is_new() as known, hmp.casts(policy, model=model):
        run("here")  # a thread's first packing gets memory that is used again
        assert run("here") < 64 * 64 * 1.1 and run("there") == 64 * 64 * 4


def test_r22_what_cannot_be_packed_is_an_error_that_says_why_and_nothing_kept_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "saved.txt").write_text("gelu\nadd\nsqrt_\nlinalg.solve\namax\n*\n")
    assert main(["check", str(tmp_path)]) == 1
    told = capsys.readouterr().out.splitlines()
    found = {line.split(": ")[1]: line.split()[0] for line in told if "saved.txt:" in line}
    assert found == {"gelu": "ok", "add": "note", "sqrt_": "error", "linalg.solve": "error", "amax": "error", "*": "ok"}
    for name in ("log", "torch.nn.utils.parametrize.cached"):
        with pytest.raises(hmp.errors.OpListError, match=name):
            hmp.Policy(saved={name})
    assert "packed as int8 (R22)" in str(hmp.explain("gelu", "saved8"))


@pytest.mark.native_kernels  # computed in float32, the op saves a copy of the weight
def test_r22_a_recording_adds_up_what_was_kept() -> None:
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(128, 64)
    hmp.apply(model, hmp.Policy("packed", bf16={"linear"}, saved={"linear", "gelu"}))
    with hmp.record() as report:
        model(x).float().sum().backward()
    rows = {(row.op, row.module): row for row in report.kept}
    # a float32 batch as its bfloat16 copy; the second layer's weight in bfloat16, of which nothing is left
    assert rows["linear", "0"].nbytes == 128 * 64 * 2 and rows["gelu", "1"].nbytes == 128 * 128 * 2
    assert rows["linear", "2"].nbytes == 128 * 128 * 2 + 64 * 128 * 2
    assert rows["gelu", "1"].left == 128 * 128 * 129 // 128 and 0.01 < rows["gelu", "1"].error < 0.04
    assert hmp.types.Report.from_dict(report.to_dict()).kept == report.kept and report.merge(report).kept[0].tensors == 2
    assert "Packed activations" in str(report)


OPS = frozenset({"linear", "gelu", "softmax", "layer_norm", "dropout", "scaled_dot_product_attention"})


# The ops, as a model calls them.
PLAIN = SimpleNamespace(
    first=lambda *args: F.linear(*args),
    linear=lambda *args: F.linear(*args),
    behind_attention=lambda *args: F.linear(*args),
    gelu=lambda x: F.gelu(x),
    dropout=lambda x: F.dropout(x, 0.1),
    softmax=lambda x: F.softmax(x, -1),
    layer_norm=lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
    attention=lambda *args: F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in args)),
)


def quantised(recipe: str) -> SimpleNamespace:
    """The same with what backward gets quantised, but for the batch, which the caller holds."""
    functions = {"gelu": oracle.Gelu, "dropout": oracle.Dropout, "softmax": oracle.Softmax, "linear": oracle.Linear}
    functions |= {"layer_norm": oracle.LayerNorm, "attention": oracle.Attention}
    ops = {name: lambda *args, apply=function.apply: apply(*args, recipe) for name, function in functions.items()}
    # the attention's result is kept by the attention, too, whose rows are those of one head
    return SimpleNamespace(**ops, first=F.linear, behind_attention=lambda *args: oracle.Linear.apply(*args, recipe, 32))


class Bert(nn.Module):
    """A block with an attention of each kind, and products that take one input three times."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.to(dtype)

    def forward(self, x: torch.Tensor, ops: Any) -> torch.Tensor:
        def linear(layer: nn.Linear, x: torch.Tensor, call: Any = ops.linear) -> torch.Tensor:
            return call(x, layer.weight, layer.bias)

        x = ops.first(x, self.layers[0].weight, self.layers[0].bias)
        y = ops.layer_norm(x, self.norm.weight, self.norm.bias)
        q, k, v = (linear(self.layers[i], y).view(2, 32, 2, 32) for i in (1, 2, 3))
        attended = ops.attention(q, k, v).transpose(1, 2).reshape(2, 32, 64)
        x = x + ops.dropout(linear(self.layers[4], attended, ops.behind_attention))
        q, k, v = (linear(self.layers[i], y).view(2, 32, 2, 32).transpose(1, 2) for i in (5, 6, 7))
        scores = torch.matmul(q, k.transpose(2, 3)) / 32**0.5
        x = x + torch.matmul(ops.softmax(scores), v).transpose(1, 2).reshape(2, 32, 64)
        return x + linear(self.down, ops.gelu(linear(self.up, x)))


def step(model: Bert, x: torch.Tensor, ops: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    result = model(x, ops)
    result.float().square().mean().backward()
    return [result.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.native_kernels
@pytest.mark.parametrize("recipe", ["fp8", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r22_gradients_are_those_of_quantised_tensors_and_the_result_is_torchs(recipe: str, dtype: torch.dtype) -> None:
    model, x = Bert(dtype), torch.randn(2, 32, 64, dtype=dtype).mul(3)
    exact = step(model, x, PLAIN)
    expected = step(model, x, quantised(recipe))
    with hmp.casts(hmp.Policy("packed", saved=OPS, saved_recipe=recipe)):
        found = step(model, x, PLAIN)
    same(found[0], exact[0])
    same(found, expected)
    rounds_nothing = recipe == "bf16" and dtype is torch.bfloat16
    assert all(torch.equal(*pair) for pair in zip(found, exact, strict=True)) is rounds_nothing
    assert hmp.fallbacks() == {}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(64, affine=False)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.gelu(self.first(self.norm(x))), 0.1))


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


def test_packing_alone_moves_gradients_as_quantised_tensors_do(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 64)
    names = dict(model.named_parameters())
    torch.manual_seed(7)
    # by hand, of quantised tensors; what is computed of the batch alone is saved as it is
    hidden = F.linear(F.batch_norm(x, None, None, training=True), model.first.weight, model.first.bias)
    hidden = oracle.Dropout.apply(oracle.Gelu.apply(hidden, "fp8"), "fp8")
    loss = squares(oracle.Linear.apply(hidden, model.second.weight, model.second.bias, "fp8"))
    packed = dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))
    torch.manual_seed(7)
    exact = dict(zip(names, torch.autograd.grad(squares(model(x)), list(names.values())), strict=True))
    model.norm.reset_running_stats()

    def relative(*names: str) -> float:
        found, wanted = (torch.cat([each[name].double().flatten() for name in names]) for each in (packed, exact))
        return float((found - wanted).norm() / wanted.norm())

    torch.manual_seed(7)
    compared = hmp.compare(model, x, hmp.Policy("eight bits", saved={"gelu", "linear", "dropout"}, saved_recipe="fp8"), loss=squares)
    assert compared.gradient_packed == pytest.approx(relative(*names), rel=1e-6)
    # nothing else is rounded under this policy, and what is compared with float32 packs nothing
    assert compared.gradient == 0.0
    assert int(model.norm.num_batches_tracked) == 0 and all(p.grad is None for p in model.parameters())
    assert "error of the gradient by packing alone" in str(compared)
    values = json.loads(compared.to_json(tmp_path / "compared.json").read_text(encoding="utf-8"))
    assert values["gradient_packed"] == compared.gradient_packed


def test_a_model_with_an_applied_policy_is_told_of_too_and_one_without_a_saved_list_is_not() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 64)
    found = hmp.compare(model, x, "saved8", loss=squares).gradient_packed
    hmp.apply(model, "saved8")
    applied = hmp.compare(model, x, loss=squares).gradient_packed
    assert found == applied and found is not None and 0 < found < 0.05
    with torch.no_grad():
        assert hmp.compare(model, x).gradient_packed is None
    hmp.remove(model)
    assert hmp.compare(model, x, "torch-cpu", loss=squares).gradient_packed is None
