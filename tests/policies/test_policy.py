"""Policy: presets, files, environment, Gaudi configurations, folders with a base.txt, and what one does with the value."""

from __future__ import annotations

import contextlib
import json
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp
from published import LISTS, gaudi_files, needs_corpus

PUBLISHED = {
    "habana": "c0552fb79b67", "habana-o2": "25a1c39e4cf9", "resnet50": "c1329038401c", "bert": "3bd2cc9cde9f",
    "gaudi": "7b1698c7f6d7", "apex-o1": "bf78ef610808",
}  # fmt: skip


def test_the_published_lists_are_what_they_were_when_they_were_compared_with_their_sources() -> None:
    """Habana's for HMP, O2, ResNet-50 and BERT and for its autocast, and apex.amp's functional, torch and tensor overrides."""
    assert {name: hmp.Policy.load(name).fingerprint for name in PUBLISHED} == PUBLISHED
    assert PUBLISHED.keys() <= set(hmp.policies())


def test_a_policy_is_a_frozen_value() -> None:
    one = hmp.Policy(name="a", bf16={"mm"}, fp32=["log"])
    assert one == hmp.Policy(name="b", bf16=frozenset({"mm"}), fp32=frozenset({"log"}))
    assert one.fingerprint == hmp.Policy(bf16={"mm"}, fp32={"log"}).fingerprint
    assert one != one.replace(dtype=torch.float16)
    assert one.fingerprint != one.replace(dtype=torch.float16).fingerprint
    assert len({one, hmp.Policy(bf16={"mm"}, fp32={"log"})}) == 1
    with pytest.raises(AttributeError):
        one.bf16 = frozenset()  # type: ignore[misc]


def test_a_moved_op_leaves_the_other_lists_with_its_synonyms_and_is_decided_by_its_new_list() -> None:
    habana = hmp.Policy.load("habana")
    moved = habana.move("truediv", "bf16")  # its fp32.txt holds div and divide too
    assert (moved.bf16, moved.fp32) == (habana.bf16 | {"truediv"}, habana.fp32 - {"truediv", "div", "divide"})
    assert hmp.explain("truediv", moved).cast == hmp.explain("div", moved).cast == "bf16"
    assert (moved.name, habana.move("truediv", "fp32").bf16) == ("habana (changed)", habana.bf16)
    in_fp8 = hmp.Policy("mine", bf16={"einsum.autocast", "mm"}, fp8={"linear"}, saved={"gelu"}, dtype="float16")
    assert in_fp8.move("linear", "fp32").move("einsum", "fp32") == hmp.Policy(
        bf16={"mm"}, fp32={"linear", "einsum"}, saved={"gelu"}, dtype="float16"
    )
    assert in_fp8.move("mm", "fp8") == in_fp8.replace(fp8={"linear", "mm"}, bf16={"einsum.autocast"})
    o2 = hmp.Policy.load("habana-o2")  # `*` stays for the other ops
    assert o2.move("softmax", "promote") == o2.replace(promote=o2.promote | {"softmax"})


@pytest.mark.parametrize(("word", "dtype"), [("fp16", "float16"), ("half", "float16"), ("torch.float16", "float16"), ("bf16", "bfloat16")])
def test_a_dtype_has_the_words_that_others_use(word: str, dtype: str) -> None:
    low, layer, x = getattr(torch, dtype), torch.nn.Linear(4, 4), torch.randn(2, 4)
    assert hmp.Policy.load("torch-cpu").replace(dtype=word).dtype is low
    with hmp.casts("torch-cpu", dtype=word):
        assert layer(x).dtype is low
    assert hmp.apply(torch.nn.Linear(4, 4), dtype=word)(x).dtype is low
    assert hmp.apply(torch.nn.Linear(4, 4), hmp.Policy(fp32={"linear"}), outputs=word)(x).dtype is low
    policy = hmp.Policy(dtype=low, fp32={"softmax"})
    assert policy.move("softmax", word) == policy.move("softmax", "bf16")
    assert policy.move("softmax", "bf16").move("softmax", "float32") == policy
    with pytest.raises(hmp.HmpError, match=f"got '{word}'" if word != "bf16" else "got 'float16'"):
        hmp.Policy(dtype=torch.bfloat16).move("softmax", word if word != "bf16" else "float16")
    library = types.SimpleNamespace(twice=lambda t: t + t)
    hmp.register(library, "twice", word)
    with hmp.casts(hmp.Policy(dtype=low)):
        assert library.twice(x).dtype is low


def test_a_preset_of_a_release_has_the_name_that_was_asked_for() -> None:
    assert hmp.Policy.load("torch-cpu@2.12").name == "torch-cpu@2.12"
    assert hmp.Policy.load("torch-cpu@2.12").bf16 == hmp.Policy.load("torch-cpu@2.7").bf16


def test_a_name_for_several_ops_keeps_those_that_are_not_moved() -> None:
    moved = hmp.Policy(bf16={"mkldnn_convolution"}).move("conv2d", "fp32")
    assert (moved.bf16, moved.fp32) == ({"conv1d", "conv3d"}, {"conv2d"})


def test_a_name_for_several_ops_keeps_those_that_an_entry_with_a_scope_does_not_take() -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Conv1d(2, 2, 1), "two": torch.nn.Conv2d(2, 2, 1)})
    with hmp.convert(model=model, policy=hmp.Policy(bf16={"mkldnn_convolution"}, fp32={"conv2d @ *"})):
        assert (model["one"](torch.ones(1, 2, 3)).dtype, model["two"](torch.ones(1, 2, 3, 3)).dtype) == (BF16, F32)


def test_an_entry_with_a_scope_is_moved_among_those_of_its_scope() -> None:
    policy = hmp.Policy(bf16={"softmax", "softmax @ decoder", "linear @ decoder"}, saved={"gelu @ decoder"})
    moved = policy.move("softmax @ decoder", "fp32")
    assert moved == hmp.Policy(bf16={"softmax", "linear @ decoder"}, fp32={"softmax @ decoder"}, saved={"gelu @ decoder"})
    assert policy.move("softmax", "fp32").entries("bf16") == ["linear @ decoder", "softmax @ decoder"]


def test_a_move_that_cannot_be_says_what_was_expected() -> None:
    policy = hmp.Policy(bf16={"linear"})
    with pytest.raises(hmp.errors.OpListError, match=r"softmx.*softmax"):
        policy.move("softmx", "fp32")
    with pytest.raises(hmp.errors.OpListError, match="the FP8 list expected a matrix product"):
        policy.move("softmax", "fp8")
    for cast in ("saved", "float64"):
        with pytest.raises(hmp.HmpError, match="expected one of the lists 'fp8', 'fp32_result', 'bf16', 'fp32', 'promote'"):
            policy.move("gelu", cast)  # type: ignore[arg-type]
    with pytest.raises(hmp.HmpError, match=r"got \{'gelu'\}"):
        policy.move({"gelu"}, "fp32")  # type: ignore[arg-type]


def test_diff_says_on_which_lists_a_name_is() -> None:
    one = hmp.Policy(bf16={"mm", "mul"}, fp32={"log"}, promote={"add"})
    other = hmp.Policy(bf16={"mm"}, fp32={"log", "mul"})
    assert one.diff(other) == {"mul": ("bf16", "fp32"), "add": ("promote", None)}
    assert one.diff(one) == {}
    assert one.diff("habana") == one.diff(hmp.Policy.load("habana")) != {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hmp.Policy(bf16="gelu"), r"bf16= expected a set of op names, got 'gelu'"),
        (lambda: hmp.Policy.from_gaudi_config({"use_habana_mixed_precision": True, "use_torch_autocast": True}), r"both set"),
        (lambda: hmp.Policy.from_gaudi_config({"use_habana_mixed_precision": True, "hmp_bf16_ops": "relu"}), r"hmp_bf16_ops"),
        (lambda: hmp.Policy(bf16={3}), r"bf16= expected a set of op names, got \(3,\)"),
        (lambda: hmp.Policy(promote=3), r"promote= expected a set of op names, got 3"),
        (lambda: hmp.Policy.from_dict(3), r"Policy\.from_dict\(\) .* int"),
        (lambda: hmp.Policy.load(3), r"Policy\.load\(\) .* int"),
        (lambda: hmp.Policy.from_files(3), r"expected a string or a path, got 3"),
        (lambda: hmp.Policy().diff(3), r"expected an hmp.Policy, .*, got 3"),
        (lambda: hmp.explain(3), r"explain\(\) .* 3"),
        (lambda: hmp.explain("liner"), r"did you mean 'linear'"),
        (lambda: hmp.Policy(fp8={"linear"}, fp8_recipe="columnwise"), r"columnwise"),
        (lambda: hmp.Policy(fp8={"linear"}, fp8_kernel="fast"), r"fast"),
    ],
)
def test_what_no_policy_can_be_made_of_is_refused_with_what_to_give(make: Callable[[], object], message: str) -> None:
    with pytest.raises(hmp.HmpError, match=message):
        make()


@pytest.mark.parametrize(
    ("lower", "fp32"), [("LOWER_LIST", "FP32_LIST"), ("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")]
)
def test_from_env_reads_the_named_files_and_the_lower_list_wins(tmp_path: Path, lower: str, fp32: str) -> None:
    (tmp_path / "low.txt").write_text("mm\ncat\nsoftmax\ntanh @ encoder.*\n")
    (tmp_path / "full.txt").write_text("softmax\nlog\ntanh @ encoder.*\n")
    policy = hmp.Policy.from_env({lower: str(tmp_path / "low.txt"), fp32: str(tmp_path / "full.txt")})
    assert policy.bf16 == {"mm", "cat", "softmax"}
    assert policy.fp32 == {"log"}
    assert "tanh @ encoder.*" in policy.entries("bf16") and "tanh @ encoder.*" not in policy.entries("fp32")
    assert policy.promote == hmp.Policy.load("habana").promote - {"sparse.mm", "concat", "concatenate"}  # synonyms of the user's


def test_names_for_the_same_op_are_no_difference() -> None:
    def diff(one: set[str], other: set[str], **fp32: set[str]) -> dict[str, tuple[str | None, str | None]]:
        return hmp.Policy(bf16=one).diff(hmp.Policy(bf16=other, **fp32))

    assert diff({"mul"}, {"multiply"}) == {}
    assert diff({"linear"}, {"F.linear"}) == {}
    assert diff({"mul"}, {"mul", "multiply"}) == {}
    assert diff({"mul"}, {"mul"}, fp32={"multiply"}) == {"multiply": ("bf16", "fp32")}
    assert diff({"mul"}, set(), fp32={"multiply"}) == {"mul": ("bf16", "fp32"), "multiply": ("bf16", "fp32")}
    assert diff({"*"}, {"exp"}) == {"*": ("bf16", None)}
    assert diff({"gru"}, {"gru.autocast"}) == {"gru": ("bf16", None), "gru.autocast": (None, "bf16")}


def test_explain_says_list_place_sites_and_synonyms() -> None:
    rule = hmp.explain("truediv", "habana")
    assert rule.cast == "fp32"
    assert rule.path is not None
    assert Path(rule.path).name == "fp32.txt"
    assert Path(rule.path).read_text().splitlines()[(rule.line or 0) - 1] == "truediv"
    assert set(rule.synonyms) == {"div", "divide", "true_divide"}
    assert any("Tensor.__rtruediv__" in site for site in rule.sites)
    assert "on the fp32 list of policy 'habana'" in str(rule)


def test_explain_gives_the_line_with_the_ops_own_name_before_another_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "low.txt").write_text("_softmax\nsoftmax\n")
    assert hmp.explain("softmax", hmp.Policy.from_files(bf16=tmp_path / "low.txt")).line == 2


@pytest.mark.parametrize(
    ("name", "policy", "cast", "why"),
    [
        ("rsub", "bert", "bf16", "low-precision dtype"),
        ("gelu", "habana", None, "left to torch"),
        ("lstm", "habana", None, "first floating-point input"),
        ("add", "habana", "promote", "torch itself promotes"),
        ("multiply", "habana", "bf16", "follows 'mul'"),
        (
            "mul_",
            "habana",
            "bf16",
            "\n  an in-place op: its result keeps the dtype of the tensor that it writes to, whatever list it is on (R5)\n",
        ),
        ("iadd", "apex-o1", "promote", "\n  an in-place op"),
        ("gelu", "habana-o2", "fp32", "float32"),
        ("type_as", "habana-o2", None, "never casts"),
    ],
)
def test_explain_gives_the_reason(name: str, policy: str, cast: str | None, why: str) -> None:
    rule = hmp.explain(name, policy)
    assert rule.cast == cast
    assert why in str(rule)


@pytest.mark.parametrize("converted", [False, True])
def test_explain_takes_functions_of_torchs(converted: bool) -> None:
    before = torch.matmul
    with hmp.convert(policy="habana") if converted else contextlib.nullcontext():
        assert hmp.explain(before) == hmp.explain(torch.matmul) == hmp.explain("matmul")
        for name, function in (("softmax", F.softmax), ("linalg.norm", torch.linalg.norm), ("add", torch.Tensor.add)):
            assert hmp.explain(function) == hmp.explain(name)


def names_in(file: Path) -> list[str]:
    lines = (line.split("#")[0] for line in file.read_text(encoding="utf-8-sig").splitlines())
    return [word.strip() for line in lines for word in line.split(",") if word.strip()]


@needs_corpus
def test_lists_every_name_of_a_published_list_resolves(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    for file in sorted(LISTS.rglob("*.txt")):
        rule = "fp32" if "fp32" in file.name else "bf16"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            policy = hmp.Policy.from_files(**({"bf16": empty, "fp32": empty, "promote": empty} | {rule: file}))
        names = names_in(file)
        assert names
        for name in names:
            found = hmp.explain(name, policy)
            assert found.sites and found.cast == rule, f"{name} of {file.name} covers no function"


@needs_corpus
@pytest.mark.parametrize("file", gaudi_files(), ids=lambda p: p.stem)
def test_lists_a_published_gaudi_configuration_is_a_policy(file: Path) -> None:
    config = json.loads(file.read_text())
    for source in (file, config):
        policy = hmp.Policy.from_gaudi_config(source)
        assert set(policy.bf16) == set(config["hmp_bf16_ops"]) and set(policy.fp32) == set(config["hmp_fp32_ops"])


BF16, F32 = torch.bfloat16, torch.float32


def folder(path: Path, **files: str) -> Path:
    for name, text in files.items():
        (path / f"{name}.txt").write_text(text)
    return path


def test_the_base_decides_what_the_lists_do_not_name(tmp_path: Path) -> None:
    base = hmp.Policy.load("bert")
    policy = hmp.Policy.load(folder(tmp_path, base="# Habana's for BERT\nbert\n", fp32="gelu\nmatmul\n", bf16="softmax\n"))
    assert {"gelu", "matmul"} <= policy.fp32 and "softmax" in policy.bf16
    for cast in ("bf16", "fp32"):
        assert getattr(policy, cast) - {"gelu", "matmul", "softmax"} == getattr(base, cast) - {"gelu", "matmul", "softmax"}
    assert policy.promote == base.promote
    assert not policy.bf16 & policy.fp32 and policy.name == tmp_path.name
    assert hmp.Policy.load(policy.save(tmp_path / "saved")) == policy and not (tmp_path / "saved" / "base.txt").exists()
    x = torch.randn(4, 4)
    with hmp.casts(policy):
        assert (x @ x).dtype is F32 and torch.mm(x, x).dtype is BF16 and torch.softmax(x, -1).dtype is BF16


def test_a_promote_list_takes_ops_from_the_base_and_from_the_default_lists(tmp_path: Path) -> None:
    """R4: a list of the user's wins over a default list. A copy of Habana's promote list, which has ops of its BF16 list, changes none."""
    habana = hmp.Policy.load("habana")
    copied = [*sorted(habana.promote), "linear"]
    over_base = hmp.Policy.load(folder(tmp_path, base="habana", promote="\n".join(copied)))
    over_default = hmp.Policy.from_files(promote=tmp_path / "promote.txt")
    assert "mul" in habana.promote & habana.bf16
    x = torch.randn(4, 4)
    for policy in (over_base, over_default):
        assert policy == habana.replace(bf16=habana.bf16 - {"linear"}, promote=habana.promote | {"linear"})
        with hmp.casts(policy):
            assert torch.nn.functional.linear(x, x).dtype is F32 and torch.mm(x, x).dtype is BF16 and (x * x).dtype is BF16


class Model(torch.nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.body = torch.nn.Linear(32, 32)
        self.add_module(head, torch.nn.Linear(32, 16))
        self.name = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(self.body(x))


@pytest.mark.parametrize("head", ["lm_head", "out"])
def test_fp8_is_autocast_with_layers_in_fp8_but_for_the_head(head: str) -> None:
    torch.manual_seed(0)
    model, x = Model(head), torch.randn(16, 32)
    with hmp.casts("autocast"):
        hidden = torch.nn.functional.linear(x, model.body.weight, model.body.bias)
    with hmp.record() as report:
        y = hmp.apply(model, "fp8")(x)
    dtypes = {row.module: row.compute for row in report.grouped("module") if row.calls}
    assert dtypes["body"] == "float8_e4m3fn"
    assert dtypes[head] == ("float8_e4m3fn" if head == "out" else "bfloat16")
    assert y.dtype is hidden.dtype is BF16
    unscoped, autocast = hmp.Policy.load("fp8").unscoped, hmp.Policy.load("autocast")
    assert unscoped.fp8 == {"linear", "addmm"} == autocast.bf16 - unscoped.bf16
    assert (unscoped.fp32, unscoped.promote, unscoped.dtype) == (autocast.fp32, autocast.promote, BF16)


def test_a_base_may_have_a_base_and_lines_for_single_modules(tmp_path: Path) -> None:
    policy, fp8 = hmp.Policy.load(folder(tmp_path, base="fp8", fp32="softmax")), hmp.Policy.load("fp8")
    assert [entry.text for entry in policy.scoped] == [entry.text for entry in fp8.scoped]
    assert (policy.fp8, policy.bf16) == (fp8.fp8, fp8.bf16)
    own = hmp.Policy.load(folder(tmp_path, fp32="linear"))  # an op that the list names is the list's, everywhere
    assert (own.scoped, own.fp8) == ((), {"addmm"}) and "linear" in own.fp32
    torch.manual_seed(0)
    model = hmp.apply(Model("lm_head"), policy)
    with hmp.record() as report:
        model(torch.randn(16, 32))
    assert [row.compute for row in report.rows if row.op == "linear"] == ["float8_e4m3fn", "bfloat16"]


def test_fp8_needs_a_model_and_says_so() -> None:
    with pytest.raises(hmp.HmpError, match=r"fp8/bf16.txt:\d+: .* needs a model, .* use hmp.apply\(model, policy\)"):
        hmp.convert(policy="fp8")
    assert not hmp.is_converted()


def test_save_writes_over_what_it_wrote_and_never_over_what_somebody_else_did(tmp_path: Path) -> None:
    policy = hmp.Policy("mine", bf16={"linear"}, fp32={"softmax"})
    for each in (policy, policy.move("softmax", "bf16"), policy):
        assert hmp.Policy.load(each.save(tmp_path / "saved")) == each
    (tmp_path / "saved" / "README.md").write_text("not a list")
    policy.save(tmp_path / "saved")
    for name, file, text in (("based", "base.txt", "autocast\n"), ("noted", "fp32.txt", "softmax  # for the loss\n")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / file).write_text(text)
        with pytest.raises(hmp.HmpError, match=f"{name}: expected a new folder or one that save.. wrote, got lists written by hand"):
            policy.save(folder)
        assert {each.name: each.read_text() for each in folder.iterdir()} == {file: text}


def test_a_folder_in_which_no_op_is_low_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "fp32.txt").write_text("softmax\n")
    for _ in range(2):
        hmp.Policy.load(tmp_path)
    assert [message.partition(": ")[2].split("; ")[0] for message in caplog.messages] == ["no list has an op that runs in low precision"]
    (tmp_path / "base.txt").write_text("autocast\n")
    caplog.clear()
    hmp.Policy.load(tmp_path)
    assert not caplog.messages
