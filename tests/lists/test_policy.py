"""Policy: presets, files, environment, Gaudi configurations, and what one does with the value."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmp

HABANA_BF16 = """addmm batch_norm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dot dropout dropout1d
    dropout2d dropout3d group_norm instance_norm layer_norm leaky_relu linear matmul mm mul mv relu t"""
HABANA_FP32 = """binary_cross_entropy binary_cross_entropy_with_logits cross_entropy div divide embedding embedding_bag log log2
    log_softmax nll_loss smooth_l1_loss softmax topk truediv"""
BERT_BF16 = "add addmm bmm div dropout gelu iadd linear layer_norm matmul mm rsub softmax truediv"
BERT_FP32 = "embedding nll_loss log_softmax"
PUBLISHED = {
    "habana": (HABANA_BF16, HABANA_FP32),
    "resnet50": ("addmm avg_pool2d bmm conv2d dot max_pool2d mm mv relu t linear", "cross_entropy log_softmax softmax nll_loss topk"),
    "bert": (BERT_BF16, BERT_FP32),
    "habana-o2": (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d addmm mm bmm mv dot linear matmul",
        "*",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_hold_the_published_lists_to_the_letter(name: str) -> None:
    policy = hmp.Policy.load(name)
    bf16, fp32 = PUBLISHED[name]
    assert policy.bf16 == set(bf16.split())
    assert policy.fp32 == set(fp32.split())
    assert policy.dtype is torch.bfloat16
    assert name in hmp.policies()


def test_torch_cpu_holds_the_lists_of_torch_autocast_on_cpu() -> None:
    policy = hmp.Policy.load("torch-cpu")
    assert {"linear", "matmul", "conv2d", "scaled_dot_product_attention"} <= policy.bf16
    assert {"mul", "softmax", "layer_norm"}.isdisjoint(policy.bf16 | policy.fp32 | policy.promote)


def test_an_unknown_preset_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(
        hmp.OpListError,
        match=r"'torch-cpu@1\.0' is no policy; did you mean 'torch-cpu@2\.\d+' or .*\? presets are apex-o1, .*torch-cuda, .*hmp lists",
    ):
        hmp.Policy.load("torch-cpu@1.0")


def test_a_policy_is_a_frozen_value() -> None:
    one = hmp.Policy(name="a", bf16={"mm"}, fp32=["log"])
    assert one == hmp.Policy(name="b", bf16=frozenset({"mm"}), fp32=frozenset({"log"}))
    assert one.fingerprint == hmp.Policy(bf16={"mm"}, fp32={"log"}).fingerprint
    assert one != one.replace(dtype=torch.float16)
    assert one.fingerprint != one.replace(dtype=torch.float16).fingerprint
    assert len({one, hmp.Policy(bf16={"mm"}, fp32={"log"})}) == 1
    with pytest.raises(AttributeError):
        one.bf16 = frozenset()  # type: ignore[misc]


def test_a_fingerprint_stays_the_same_from_release_to_release() -> None:
    # sha256 of ["torch.bfloat16", ["mm"], ["log"], []], computed with hashlib alone
    assert hmp.Policy(bf16={"mm"}, fp32={"log"}).fingerprint == "994966a38fae"


def test_replace_save_load_and_dict_go_round(tmp_path: Path) -> None:
    policy = hmp.Policy.load("habana")
    changed = policy.replace(bf16=policy.bf16 | {"gelu"})
    assert changed.bf16 - policy.bf16 == {"gelu"}
    assert hmp.Policy.load(changed.save(tmp_path / "mine")) == changed
    assert hmp.Policy.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folder_keeps_the_low_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = hmp.Policy(bf16={"mm"}, fp32={"log"}, dtype=dtype)
    policy.replace(dtype=torch.float16).save(tmp_path)
    assert hmp.Policy.load(policy.save(tmp_path)) == policy
    assert {file.name for file in tmp_path.iterdir()} - {"dtype.txt"} == {"bf16.txt", "fp32.txt", "promote.txt"}
    assert (tmp_path / "dtype.txt").exists() == (dtype is torch.float16)


@pytest.mark.parametrize("text", ["float16", "float16\r\n", "# the low dtype\n\nfloat16  # half\n"])
def test_dtype_txt_names_the_low_dtype(tmp_path: Path, text: str) -> None:
    (tmp_path / "bf16.txt").write_text("mm\n")
    (tmp_path / "fp32.txt").write_text("log\n")
    assert hmp.Policy.load(tmp_path).dtype is torch.bfloat16
    (tmp_path / "dtype.txt").write_text(text)
    with hmp.casts(hmp.Policy.load(tmp_path)):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16


@pytest.mark.parametrize("text", ["", "float32", "float16 bfloat16", "float16\nbfloat16\n", "half"])
def test_dtype_txt_with_anything_else_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "bf16.txt").write_text("mm\n")
    (tmp_path / "fp32.txt").write_text("log\n")
    (tmp_path / "dtype.txt").write_text(text)
    with pytest.raises(hmp.OpListError, match=r"dtype\.txt:") as error:
        hmp.Policy.load(tmp_path)
    assert "float16" in str(error.value)


def test_diff_says_on_which_lists_a_name_is() -> None:
    one = hmp.Policy(bf16={"mm", "mul"}, fp32={"log"}, promote={"add"})
    other = hmp.Policy(bf16={"mm"}, fp32={"log", "mul"})
    assert one.diff(other) == {"mul": ("bf16", "fp32"), "add": ("promote", None)}
    assert one.diff(one) == {}
    assert one.diff("habana") == one.diff(hmp.Policy.load("habana")) != {}


def test_a_string_is_no_set_of_names() -> None:
    with pytest.raises(hmp.OpListError, match="is a string"):
        hmp.Policy(bf16="gelu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hmp.Policy(bf16={3}), r"bf16= holds 3, which is no op name; give names as list files spell them, such as 'linear'"),
        (lambda: hmp.Policy(fp32=["mm", None]), r"fp32= holds None, which is no op name"),
        (lambda: hmp.Policy(promote=3), r"promote=3 is no set of op names; give one, such as promote=\{'linear'\}, or leave promote= out"),
        (lambda: hmp.Policy.from_dict({"fp8": None}), r"fp8=None is no set of op names"),
        (lambda: hmp.Policy.from_dict(3), r"Policy\.from_dict\(\) takes the dict that Policy\.to_dict\(\) gave, not an object of type int"),
        (lambda: hmp.Policy.load(3), r"Policy\.load\(\) takes a preset's name \(apex-o1, .*\) or a folder, not an object of type int"),
        (lambda: hmp.Policy.from_files(3), r"3 is no path of a bf16 list; give that of a text file, or \"\" for the default list"),
        (lambda: hmp.Policy().diff(3), r"3 is no policy; give an hmp\.Policy, a preset's name \(apex-o1, .*\) or a folder"),
    ],
)
def test_what_no_policy_can_be_made_of_is_refused_with_what_to_give(make: Callable[[], object], message: str) -> None:
    with pytest.raises(hmp.HmpError, match=message):
        make()


@pytest.mark.parametrize("below", ["", "inside"])
def test_a_policy_is_not_saved_where_a_file_stands(below: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mm\n")
    target = tmp_path / "mine" / below
    with pytest.raises(hmp.HmpError, match=re.escape(f"{target}: a file stands there; name a folder for the lists")):
        hmp.Policy.load("habana").save(target)
    assert (tmp_path / "mine").read_text() == "mm\n"


@pytest.mark.parametrize(
    ("lower", "fp32"), [("LOWER_LIST", "FP32_LIST"), ("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")]
)
def test_from_env_reads_the_named_files_and_the_lower_list_wins(tmp_path: Path, lower: str, fp32: str) -> None:
    (tmp_path / "low.txt").write_text("mm\nsoftmax\n")
    (tmp_path / "full.txt").write_text("softmax\nlog\n")
    policy = hmp.Policy.from_env({lower: str(tmp_path / "low.txt"), fp32: str(tmp_path / "full.txt")})
    assert policy.bf16 == {"mm", "softmax"}
    assert policy.fp32 == {"log"}
    assert policy.promote == hmp.Policy.load("habana").promote - {"sparse.mm"}  # a synonym of the user's mm


def test_from_env_without_variables_is_the_default() -> None:
    assert hmp.Policy.from_env({}) == hmp.Policy.load("habana")


def test_from_env_names_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(hmp.OpListError, match=r"nowhere\.txt: no such file"):
        hmp.Policy.from_env({"LOWER_LIST": str(tmp_path / "nowhere.txt")})


def test_a_list_that_cannot_be_read_is_an_error_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "bf16.txt"
    file.write_text("linear\n")
    with pytest.raises(hmp.OpListError, match=r"file: cannot be read: Not a directory; check the path and its permissions$"):
        hmp.Policy.from_files(file / "file")


def test_a_policy_of_no_files_has_the_name_of_the_default_lists(tmp_path: Path) -> None:
    file = tmp_path / "bf16.txt"
    file.write_text("linear\n")
    assert (hmp.Policy.from_files().name, hmp.Policy.from_files(file).name) == ("habana", "custom")


def test_gaudi_config_has_berts_lists_for_absent_keys(tmp_path: Path) -> None:
    file = tmp_path / "gaudi_config.json"
    file.write_text(json.dumps({"use_habana_mixed_precision": True, "hmp_bf16_ops": ["linear", "conv2d"]}))
    for given in (file, tmp_path, json.loads(file.read_text())):
        policy = hmp.Policy.from_gaudi_config(given)
        assert policy.bf16 == {"linear", "conv2d"}
        assert policy.fp32 == set(BERT_FP32.split())


def test_gaudi_config_with_both_kinds_is_refused_and_unknown_keys_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(hmp.HmpError, match="both set"):
        hmp.Policy.from_gaudi_config({"use_habana_mixed_precision": True, "use_torch_autocast": True})
    with caplog.at_level(logging.WARNING, logger="hmp"):
        hmp.Policy.from_gaudi_config({"use_habana_mixed_precision": True, "use_magic": True})
    assert "use_magic" in caplog.text
    for names in ("relu", [1]):
        with pytest.raises(hmp.HmpError, match="hmp_bf16_ops is no list of op names"):
            hmp.Policy.from_gaudi_config({"use_habana_mixed_precision": True, "hmp_bf16_ops": names})


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


@pytest.mark.parametrize(
    ("name", "policy", "cast", "why"),
    [
        ("rsub", "bert", "bf16", "low dtype"),
        ("gelu", "habana", None, "left to torch"),
        ("lstm", "habana", None, "first castable input"),
        ("add", "habana", "promote", "torch itself promotes"),
        ("multiply", "habana", "bf16", "follows 'mul'"),
        ("mul_", "habana", "bf16", "\n  an in-place form: its result has the dtype of what it writes into, whatever list it is on (R5)\n"),
        ("iadd", "apex-o1", "promote", "\n  an in-place form"),
        ("gelu", "habana-o2", "fp32", "float32"),
        ("type_as", "habana-o2", None, "never touched"),
    ],
)
def test_explain_gives_the_reason(name: str, policy: str, cast: str | None, why: str) -> None:
    rule = hmp.explain(name, policy)
    assert rule.cast == cast
    assert why in str(rule)


def test_explain_says_of_norms_that_their_state_is_not_cast() -> None:
    state = "; weight, bias and statistics stay as they are where torch has a kernel for that (R9)"
    assert hmp.explain("layer_norm", "habana").why == f"its input becomes the low dtype (R1){state}"
    assert hmp.explain("layer_norm", "apex-o1").why == f"its input becomes float32 (R2){state}"
    assert f"torch.layer_norm: unlisted; it runs in its input's dtype (R7){state}" in hmp.explain("layer_norm", "torch-cpu").sites
    x, norm = torch.randn(2, 8), torch.nn.LayerNorm(8)
    with hmp.casts("habana"):
        assert torch.equal(norm(x), F.layer_norm(x.bfloat16(), (8,), norm.weight, norm.bias))  # a kernel that takes both


def test_explain_says_of_torchs_python_code_that_what_it_calls_is_decided() -> None:
    attention = hmp.explain("multi_head_attention_forward", "habana")
    calls = "left to torch, whose Python code calls ops that follow the lists"
    assert attention.sites == (f"torch.nn.functional.multi_head_attention_forward: {calls}",)
    with hmp.casts("habana"):
        net = torch.nn.MultiheadAttention(8, 2)
        assert net(*[torch.randn(3, 1, 8)] * 3)[0].dtype is torch.bfloat16


def test_explain_says_that_torch_itself_may_take_a_mixture_in_place() -> None:
    (only,) = hmp.explain("addr_", "habana").sites
    assert only.endswith("it writes into its first input; where torch takes no mixture, the other inputs become that one's dtype (R5)")


def test_explain_offers_the_nearest_name() -> None:
    with pytest.raises(hmp.OpListError, match="did you mean 'linear'"):
        hmp.explain("liner")


@pytest.mark.parametrize("converted", [False, True])
def test_explain_takes_functions_of_torchs(converted: bool) -> None:
    before = torch.matmul
    with hmp.convert(policy="habana") if converted else contextlib.nullcontext():
        assert hmp.explain(before) == hmp.explain(torch.matmul) == hmp.explain("matmul")
        for name, function in (("softmax", F.softmax), ("linalg.norm", torch.linalg.norm), ("add", torch.Tensor.add)):
            assert hmp.explain(function) == hmp.explain(name)


@pytest.mark.parametrize("given", [3, None, len, torch.nn.Linear])
def test_explain_of_anything_else_says_what_to_give(given: object) -> None:
    with pytest.raises(
        hmp.HmpError, match=r"explain\(\) takes an op's name, such as 'softmax', or a function of torch's, and .* is neither"
    ):
        hmp.explain(given)  # type: ignore[arg-type]


def test_explain_asks_the_policy_in_force() -> None:
    with hmp.casts("bert"):
        assert hmp.explain("softmax").cast == "bf16"
    with hmp.convert():
        assert hmp.explain("softmax").cast == "fp32"
    assert hmp.explain("softmax") == hmp.explain("softmax", "autocast")
