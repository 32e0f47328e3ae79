"""cast_weights(): which weights are cast, with a batch and without one, that the model's numbers stay the same bits, that it is all or
none, and that weights of `keep` stay float32.

Oracle: the dtypes by hand from what each op is, and the outputs and gradients of the same model before.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import logging
import pickle
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
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


class Fails(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise hmp.HmpError("mine")


class Counts(nn.Linear):
    """Counts where nobody puts the count back."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counts.calls += 1
        return super().forward(x) + self.calls


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(4, 4, device="meta"), {}, "meta device"),
        (nn.LazyLinear(4), {}, "without a shape"),
        (nn.ReLU(), {}, "no floating parameters"),
        (nn.Linear(4, 4), {"policy": hmp.Policy("nothing")}, "an empty BF16 list"),
        (nn.Linear(4, 4), {"only": "lm_head.*"}, "matches no weight of the model: it holds 'weight', 'bias'"),
        (nn.Linear(4, 4), {"keep": ["weigth"]}, "keep='weigth' matches no weight of the model: did you mean 'weight'?"),
        (nn.Sequential(nn.Linear(4, 4)), {"keep": ["0.weight", "1.*"]}, "keep='1.\\*' matches no weight of the model"),
        (nn.Linear(4, 4), {"batch": "habana"}, "expected a batch as the second argument, got 'habana'; write policy='habana'"),
        (nn.Linear(4, 4), {"batch": POLICY}, "expected a batch as the second argument"),
        (Counts(4, 4), {}, "outputs differ for one batch"),
        ("model", {}, "expected a torch.nn.Module"),
        (Fails(4, 4), {}, "mine"),
    ],
)
def test_what_cannot_be_cast_is_told_and_nothing_is(model: Any, options: Any, message: str) -> None:
    before = dtypes(model) if isinstance(model, nn.Linear) else None
    with pytest.raises(hmp.HmpError, match=message):
        hmp.cast_weights(model, **{"batch": torch.randn(2, 4), "policy": POLICY, **options})
    assert before is None or dtypes(model) == before


def test_an_op_that_has_other_bits_while_a_mode_looks_on_is_no_change_of_the_outputs() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Bilinear(64, 64, 8)).eval()
    model[1].register_forward_pre_hook(lambda _, args: (args[0].float(), args[0].float()))
    assert low_of(hmp.cast_weights(model, torch.randn(4, 64), "torch-cpu")) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("with_batch", [True, False])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", pytest.param("all", marks=pytest.mark.nightly)])
def test_a_model_of_the_zoo_has_the_same_bits(name: str, with_batch: bool) -> None:
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
        result = hmp.cast_weights(model, batch if with_batch else None, "torch-cpu")
        for mode in (torch.no_grad, torch.inference_mode):
            same(run(mode), want)
        low = [weight for weight in result.weights if weight.before != weight.after]
        assert (low or each.name == "falcon") and all(weight.bytes_after * 2 == weight.bytes_before for weight in low)


# --- without a batch, by the modules ----------------------------------------------------------------------------------------


def low_of(result: hmp.types.CastWeights) -> set[str]:
    return {each.name for each in result.weights if each.before != each.after}


def test_without_a_batch_modules_of_torch_say_which_op_uses_a_weight_and_the_rest_is_told() -> None:
    model = make()
    want, before = outputs(model, IDS, POLICY), dtypes(model)
    result = hmp.cast_weights(model, policy=POLICY)
    low = {"head.weight", "first.weight", "first.bias", "again.bias", "never.weight", "never.bias"}
    assert low_of(result) == low
    assert {name for name, dtype in dtypes(model).items() if dtype is not before[name]} == low | {"again.weight"}
    same(outputs(model, IDS, POLICY), want)
    assert result.undecided == ("both", "table", "scale")
    assert {result[name].why for name in result.undecided} == {"no batch was given, and Net does not say which op uses it"}
    assert result["norm.weight"].why == result["embed.weight"].why == "is used in float32"
    assert "6 of 18 weights cast, 3 undecided; " in str(result) and "Net does not say which op uses it" in str(result)
    assert [each["name"] for each in result.to_dict()["weights"] if each["undecided"]] == list(result.undecided)


def test_without_a_batch_tied_weights_whose_ops_disagree_stay_float32() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 3.0

    for embedding, why in (
        (nn.Embedding, "is used in bfloat16 and float32"),
        (Scaled, "no batch was given, and Scaled does not say which op"),
    ):
        model = nn.Sequential(embedding(8, 16), nn.Linear(16, 8)).eval()
        model[1].weight = model[0].weight
        want = outputs(model, IDS, POLICY)
        result = hmp.cast_weights(model, policy=POLICY)
        assert low_of(result) == {"1.bias"} and result["0.weight"].why.startswith(why)
        same(outputs(model, IDS, POLICY), want)


def test_without_a_batch_what_others_code_may_do_in_a_call_is_undecided() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    class Raises(nn.Linear):
        def extra_repr(self) -> str:
            return ""

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not alone")

    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("plain", "hooked", "changed")})
    model.update({"own": Own(4, 4), "raises": Raises(4, 4)})
    calls: list[Any] = []
    model["hooked"].register_forward_hook(lambda *args: calls.append(args))
    changed: Any = model["changed"]
    changed.forward = calls.append
    result = hmp.cast_weights(model.eval(), policy=POLICY)
    assert low_of(result) == {"plain.weight", "plain.bias"} and not calls
    assert set(result.undecided) == {f"{name}.{each}" for name in model if name != "plain" for each in ("weight", "bias")}
    reasons = {name: result[f"{name}.weight"].why.removeprefix("no batch was given, and ") for name in model}
    assert reasons["hooked"] == "Linear has hooks" and reasons["changed"] == "Linear does not say which op uses it"
    assert reasons["raises"] == "Raises alone raised ValueError"


def test_without_a_batch_a_part_with_a_policy_of_its_own_is_undecided() -> None:
    inner = nn.Sequential(nn.Linear(8, 8))
    model, x = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8)).eval(), torch.ones(2, 8)
    with applied(inner, hmp.Policy("wide", fp32={"linear"})):
        want = outputs(model, x, POLICY)
        result = hmp.cast_weights(model, policy=POLICY)
        assert low_of(result) == {f"{name}.{each}" for name in "02" for each in ("weight", "bias")}
        assert result["1.0.weight"].why == "no batch was given, and Linear is in a part with a policy of its own"
        same(outputs(model, x, POLICY), want)


def test_without_a_batch_nothing_of_the_model_changes_but_dtypes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LSTM(16, 4, 2, dropout=0.5)).train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    result = hmp.cast_weights(model, policy="torch-cpu")
    assert torch.equal(torch.get_rng_state(), random) and model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name].to(tensor.dtype))
    assert low_of(result) == {name for name, _ in model.named_parameters() if not name.startswith("1.")}


# Modules with weights, the inputs of each, and the ops that use them.
KINDS: dict[str, Any] = {
    "linear": (lambda n: nn.Linear(n, 3), lambda n: [(2, n)]),
    "bilinear": (lambda n: nn.Bilinear(n, 2, 3), lambda n: [(2, n), (2, 2)]),
    "conv1d": (lambda n: nn.Conv1d(n, 4, 3, padding=2, padding_mode="reflect", dilation=2), lambda n: [(2, n, 9)]),
    "conv2d": (lambda n: nn.Conv2d(n, n, 3, padding="same", groups=n), lambda n: [(2, n, 5, 5)]),
    "conv3d": (lambda n: nn.Conv3d(n, 2, 2, stride=2), lambda n: [(1, n, 4, 4, 4)]),
    "conv_transpose1d": (lambda n: nn.ConvTranspose1d(n, 2, 3, padding=1), lambda n: [(2, n, 5)]),
    "conv_transpose2d": (lambda n: nn.ConvTranspose2d(n, 2, 2, stride=2), lambda n: [(2, n, 4, 4)]),
    "layer_norm": (lambda n: nn.LayerNorm((2, n)), lambda n: [(3, 2, n)]),
    "rms_norm": (lambda n: nn.RMSNorm(n), lambda n: [(3, n)]),
    "group_norm": (lambda n: nn.GroupNorm(1, n), lambda n: [(2, n, 4)]),
    "batch_norm": (lambda n: nn.BatchNorm2d(n), lambda n: [(2, n, 3, 3)]),
    "instance_norm": (lambda n: nn.InstanceNorm1d(n, affine=True), lambda n: [(2, n, 5)]),
    "lstm": (lambda n: nn.LSTM(n, 3, bidirectional=True), lambda n: [(4, 2, n)]),
    "gru": (lambda n: nn.GRU(n, 3, batch_first=True), lambda n: [(4, 2, n)]),
    "rnn_tanh": (lambda n: nn.RNN(n, 3, 2), lambda n: [(4, 2, n)]),
    "embedding": (lambda n: nn.Embedding(n, 3), lambda n: []),
    "embedding_bag": (lambda n: nn.EmbeddingBag(n, 3), lambda n: []),
    "matmul": (
        lambda n: nn.MultiheadAttention(2 * n, 2, kdim=n, vdim=3, add_bias_kv=True),
        lambda n: [(3, 2, 2 * n), (4, 2, n), (4, 2, 3)],
    ),
}
OPS = sorted({*KINDS, "baddbmm", "scaled_dot_product_attention", "softmax"})


MODULES = given(data=st.data())


def each_modules_outputs_are_the_same_bits(data: st.DataObject) -> None:
    """Whatever lists the ops of modules are on, and whatever dtype the model's code gives a module."""
    name, width = data.draw(st.sampled_from(sorted(KINDS))), data.draw(st.integers(1, 5))
    lists = data.draw(st.lists(st.sampled_from(["bf16", "fp32", "promote", "none"]), min_size=len(OPS), max_size=len(OPS)))
    of = {cast: {op for op, on in zip(OPS, lists, strict=True) if on == cast} for cast in ("bf16", "fp32", "promote")}
    policy = hmp.Policy("drawn", **{**of, "bf16": of["bf16"] | {"mm"}}, dtype=data.draw(st.sampled_from([BF16, torch.float16])))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    module, shapes = KINDS[name][0](width).eval(), KINDS[name][1](width)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter) / 3)  # norms have ones and zeros, which every dtype holds
    dtype = data.draw(st.sampled_from([F32, policy.dtype]))
    batch = tuple(torch.randn(shape).to(dtype) for shape in shapes) or (torch.zeros(2, 1, dtype=torch.long),)
    with applied(module, policy), torch.no_grad():
        want = [each.clone() for each in leaves([module(*batch)])]
        result = hmp.cast_weights(module)
        same(leaves([module(*batch)]), want)
    assert not result.undecided


test_p_without_a_batch_each_modules_outputs_are_the_same_bits = settings(max_examples=4)(MODULES(each_modules_outputs_are_the_same_bits))
test_p_without_a_batch_each_modules_outputs_are_the_same_bits_at_length = pytest.mark.nightly(
    settings(max_examples=1000)(MODULES(each_modules_outputs_are_the_same_bits))
)


def test_a_sparse_weight_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model.register_buffer("graph", torch.eye(4).to_sparse())
    result = hmp.cast_weights(model, policy=POLICY)
    assert (result["graph"].why, result["graph"].bytes_after) == ("has the layout torch.sparse_coo", 4 * 4)


# --- keep: what stays float32 -----------------------------------------------------------------------------------------------


def kept_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).eval()
    model.register_buffer("inv_freq", torch.arange(4) / 3)
    hmp.apply(model, POLICY)
    result = hmp.cast_weights(model, keep=["*inv_freq", "2.*"])
    assert low_of(result) == {"0.weight", "0.bias"} and result["2.weight"].why == "`keep` names it: 2.*" and not result.undecided
    return model


def narrowed(model: nn.Module) -> set[str]:
    return {name for name, dtype in dtypes(model).items() if dtype in (BF16, torch.float16)}


NARROWING: list[Any] = [
    nn.Module.half,
    nn.Module.bfloat16,
    lambda m: m.to(BF16),
    lambda m: m.to("cpu", torch.float16),
    lambda m: m.type(BF16),
]
OTHERS = {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize("narrow", NARROWING)
def test_a_models_dtype_changes_without_what_is_kept_until_remove(narrow: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = kept_model()
    model[2].weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        assert narrow(model) is model and narrowed(model) == OTHERS
    assert model[2].weight.grad.dtype is F32
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in ("inv_freq", "2.weight", "2.bias"))
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1 and "stay float32; hmp.remove(model) ends that" in told[0] and "'*inv_freq', '2.*'" in told[0]
    narrow(nn.Sequential(model))  # a model around it
    assert narrowed(model) == OTHERS
    assert {*dtypes(model.to(torch.float64)).values()} == {torch.float64}
    assert {*dtypes(model.float()).values()} == {F32}
    assert narrow(hmp.remove(model)) is model and narrowed(model) == set(dtypes(model))


def test_what_is_kept_goes_with_copies_and_to_other_processes_and_into_no_file() -> None:
    model = kept_model()
    assert narrowed(copy.deepcopy(model).half()) == OTHERS
    sent = pickle.loads(ForkingPickler.dumps(model))
    assert narrowed(sent.half()) == OTHERS
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with pytest.warns(UserWarning, match="was applied to this model when it was saved"):
        loaded = torch.load(file, weights_only=False)
    assert narrowed(loaded.half()) == set(dtypes(loaded))
    hmp.apply(model, "habana")  # another policy
    assert narrowed(model.half()) == OTHERS
    hmp.remove(sent)
    gone = weakref.ref(model)
    del model, sent, loaded
    gc.collect()
    assert gone() is None


def test_the_last_call_says_what_is_kept() -> None:
    model = kept_model()
    hmp.cast_weights(model)
    assert narrowed(model.half()) == set(dtypes(model))


def test_a_compiled_model_is_the_one_in_it(fresh_compiler: None) -> None:
    compiled: Any = torch.compile(kept_model().float(), backend="eager")
    assert low_of(hmp.cast_weights(compiled, keep="0.weight")) == {f"_orig_mod.{name}" for name in ("0.bias", "2.weight", "2.bias")}
    compiled.half()
    assert narrowed(compiled._orig_mod) == set(dtypes(compiled._orig_mod)) - {"0.weight"}


def test_tied_weights_have_all_of_their_names() -> None:
    for options in ({"keep": "again.*"}, {"only": "again.*"}):
        model = make()
        result = hmp.cast_weights(model, policy=POLICY, **options)
        assert (model.first.weight.dtype is F32) == ("keep" in options) and ("again.bias" in low_of(result)) == ("only" in options)


def test_remove_says_that_cast_weights_stay_cast(caplog: pytest.LogCaptureFixture) -> None:
    model = hmp.apply(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval(), POLICY)
    hmp.cast_weights(model)
    hmp.remove(hmp.remove(model))
    assert len(caplog.messages) == 1 and "Sequential has weights in bfloat16 beside float32 ones" in caplog.messages[0]
    assert model.float()(torch.ones(1, 4)).dtype is torch.float32
