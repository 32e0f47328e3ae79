"""cast_weights(): which weights are cast, that the model's numbers stay the same bits, and that it is all or none.

Oracle: the dtypes by hand from what each op is, and the outputs and gradients of the same model before.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmp

BF16, F32 = torch.bfloat16, torch.float32
POLICY = hmp.Policy("low", bf16={"linear", "conv2d"}, fp32={"softmax"})


class Net(nn.Module):
    """A weight of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
        self.first, self.again, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.again.weight = self.first.weight
        self.norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.both, self.low = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8).bfloat16()
        self.register_buffer("table", torch.randn(8, 8))
        self.register_buffer("scale", torch.randn(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        x = self.norm(self.embed(ids))
        x = self.batch_norm(self.again(F.gelu(self.first(x).float())).float()) * self.scale
        x = F.linear(x, self.both.t()).float() @ self.both
        x = self.low(F.linear(x, self.table)).float()
        return {"logits": self.head(x), "more": [x]}


IDS = torch.tensor([1, 2, 3, 4])
# What each op of Net's is: a product on the list, or one that reads float32.
LOW = {"head.weight", "first.weight", "first.bias", "again.bias", "table"}


def make() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in leaves(each)]


@contextlib.contextmanager
def applied(model: nn.Module, policy: Any) -> Iterator[None]:
    hmp.apply(model, policy)
    yield
    hmp.remove(model)


def outputs(model: nn.Module, batch: Any, policy: Any, mode: Any = torch.no_grad) -> list[torch.Tensor]:
    with applied(model, policy), mode():
        return [each.clone() for each in leaves(dict(model(**batch)) if isinstance(batch, dict) else model(batch))]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert [each.dtype for each in got] == [each.dtype for each in want]
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(got, want, strict=True))


def test_what_every_op_takes_low_is_stored_low_and_the_outputs_are_the_same_bits() -> None:
    model = make()
    parameters, before = list(model.parameters()), dtypes(model)
    want = outputs(model, IDS, POLICY)
    result = hmp.cast_weights(model, IDS, POLICY)
    assert {name for name, dtype in dtypes(model).items() if dtype is not before[name]} == LOW | {"again.weight"}
    assert {dtypes(model)[name] for name in LOW} == {BF16}
    assert [id(each) for each in model.parameters()] == [id(each) for each in parameters]
    assert model.again.weight is model.first.weight and not model.training
    for mode in (torch.no_grad, torch.inference_mode):
        same(outputs(model, IDS, POLICY, mode), want)
    stayed = {weight.name: weight.why for weight in result.weights if weight.why}
    assert stayed["norm.weight"] == stayed["embed.weight"] == stayed["scale"] == "is used in float32"
    assert stayed["never.weight"] == stayed["never.bias"] == "the batch does not reach it"
    assert stayed["both"] == "is used in bfloat16 and float32" and stayed["low.weight"] == "is used in bfloat16"
    assert stayed["batch_norm.running_mean"] == "the model may write to it"
    assert {each.name for each in result.weights if each.before != each.after} == LOW


def test_bytes_are_those_of_the_weights_and_nothing_is_kept_beside_them() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(2, 64)
    with applied(model, POLICY), torch.inference_mode():
        model(x)
        assert hmp.cache_info().bytes in (2 * 64 * 65 * 2, 2 * 64 * 65 * 6)  # without instructions in float32, too
        result = hmp.cast_weights(model, x, POLICY)
        model(x)
        assert hmp.cache_info().entries == 0
    assert result.bytes_before == 4 * 2 * 64 * 65 and result.bytes_after == 2 * 2 * 64 * 65
    assert sum(each.nbytes for each in model.parameters()) == result.bytes_after


def test_the_table_and_the_json_say_what_was_done() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.LayerNorm(4)).eval()
    result = hmp.cast_weights(model, torch.randn(2, 4), POLICY)
    text = str(result)
    assert "*.weight (3)" not in text and "0.weight" in text  # a name's first part is no number of a list in it
    assert "float32 → bfloat16" in text and "3 of 5 weights cast" in text
    values = json.loads(json.dumps(result.to_dict()))
    assert values["bytes_after"] == 3 * 16 * 2 + 2 * 4 * 4 and values["weights"][0]["after"] == "bfloat16"
    with pytest.raises(KeyError, match="expected a weight of the model, got 'x'"):
        result["x"]


@pytest.mark.parametrize(
    ("only", "policy", "low"),
    [
        ("first", POLICY, {"first.weight", "first.bias"}),
        ("*.bias", POLICY, {"first.bias", "again.bias"}),
        ("table", POLICY, {"table"}),
        (None, POLICY.replace(fp32=POLICY.fp32 | {"linear @ head"}), LOW - {"head.weight"}),
    ],
)
def test_only_takes_names_and_the_modules_around_them_and_scoped_lines_hold(only: str | None, policy: hmp.Policy, low: set[str]) -> None:
    model = make()
    want = outputs(model, IDS, policy)
    result = hmp.cast_weights(model, IDS, policy, **({"only": only} if only else {}))
    assert {each.name for each in result.weights if each.before != each.after} == low
    same(outputs(model, IDS, policy), want)


def test_frozen_leaves_what_is_trained_and_gradients_are_the_same_bits() -> None:
    class Lora(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x) + self[2](self[1](x))

    torch.manual_seed(0)
    adapted = [Lora(nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 2), nn.Linear(2, 16)) for _ in range(2)]
    model, x = nn.Sequential(adapted[0], nn.GELU(), adapted[1]), torch.randn(4, 16)

    def gradients() -> list[torch.Tensor]:
        with applied(model, POLICY):
            loss = model(x).float().square().mean()
            return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))

    want = gradients()
    result = hmp.cast_weights(model, x, POLICY, frozen=True)
    low = {each.name for each in result.weights if each.before != each.after}
    assert low == {"0.0.weight", "0.0.bias", "2.0.weight", "2.0.bias"} and result["0.1.weight"].why == "is trained"
    same(gradients(), want)


@pytest.mark.parametrize("as_numpy", [False, True])
def test_a_weight_whose_dtype_the_code_asks_for_stays(as_numpy: bool) -> None:
    class Asks(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self["asked"].weight
            scale = torch.from_numpy(weight.detach().numpy().sum(0)) if as_numpy else x.to(weight.dtype)
            return self["other"](x) * scale + self["asked"](x)

    model, x = Asks({"asked": nn.Linear(8, 8), "other": nn.Linear(8, 8)}).eval(), torch.randn(3, 8)
    want = outputs(model, x, POLICY)
    result = hmp.cast_weights(model, x, POLICY)
    assert result["asked.weight"].why == "the outputs would change" and model["asked"].weight.dtype is F32
    assert model["other"].weight.dtype is BF16
    same(outputs(model, x, POLICY), want)


def test_a_parametrized_weight_stays_and_a_float16_policy_stores_float16() -> None:
    model, x = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)).eval(), torch.randn(2, 8)
    policy = POLICY.replace(dtype=torch.float16)
    want = outputs(model, x, policy)
    result = hmp.cast_weights(model, x, policy)
    assert model[1].weight.dtype is torch.float16
    assert {each.name for each in result.weights if each.before != each.after} == {"0.bias", "1.weight", "1.bias"}
    same(outputs(model, x, policy), want)


class Fails(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise hmp.HmpError("mine")


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) + self.calls


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(4, 4, device="meta"), {}, "meta device"),
        (nn.LazyLinear(4), {}, "without a shape"),
        (nn.ReLU(), {}, "no floating parameters"),
        (nn.Linear(4, 4), {"policy": hmp.Policy("nothing")}, "empty BF16 and FP8 lists"),
        (nn.Linear(4, 4), {"only": "lm_head.*"}, "matches no weight"),
        (Counts(4, 4), {}, "different numbers for the same batch"),
        ("model", {}, "expected a torch.nn.Module"),
        (Fails(4, 4), {}, "mine"),
    ],
)
def test_what_cannot_be_cast_is_told_and_nothing_is(model: Any, options: Any, message: str) -> None:
    before = dtypes(model) if isinstance(model, nn.Linear) else None
    with pytest.raises(hmp.HmpError, match=message):
        hmp.cast_weights(model, torch.randn(2, 4), **{"policy": POLICY, **options})
    assert before is None or dtypes(model) == before


def test_recurrent_layers_are_stored_low_too() -> None:
    model, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)
    want = outputs(model, x, "torch-cpu")
    result = hmp.cast_weights(model, x, "torch-cpu")
    assert result.bytes_after * 2 == result.bytes_before
    same(outputs(model, x, "torch-cpu"), want)


@pytest.mark.parametrize("name", ["gpt2", "llama", pytest.param("all", marks=pytest.mark.nightly)])
def test_a_model_of_the_zoo_has_the_same_bits(name: str) -> None:
    pytest.importorskip("transformers")
    from model_zoo import MODELS
    from model_zoo.kit import build, feed, floats, seed_all

    for each in MODELS.values() if name == "all" else [MODELS[name]]:
        if not each.available:
            continue
        model = build(each).eval()
        batch = feed(each, model)

        def run(mode: Any, model: Any = model, batch: Any = batch) -> list[torch.Tensor]:
            seed_all(3)
            with applied(model, "torch-cpu"), mode():
                return [each.clone() for each in floats(model(**batch))]

        want = run(torch.no_grad)
        result = hmp.cast_weights(model, batch, "torch-cpu")
        for mode in (torch.no_grad, torch.inference_mode):
            same(run(mode), want)
        low = [weight for weight in result.weights if weight.before != weight.after]
        assert low and all(weight.bytes_after * 2 == weight.bytes_before for weight in low)


def test_save_pretrained_and_back(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    from model_zoo import MODELS
    from model_zoo.kit import build, feed

    model = build(MODELS["llama"]).eval()
    batch = feed(MODELS["llama"], model)
    hmp.cast_weights(model, batch, "torch-cpu")
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype is BF16
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=F32)
    assert wide.lm_head.weight.dtype is F32 and torch.equal(wide.lm_head.weight, model.lm_head.weight.float())
    want = outputs(wide, dict(batch), "torch-cpu")
    hmp.cast_weights(wide, batch, "torch-cpu")
    same(outputs(wide, dict(batch), "torch-cpu"), want)
