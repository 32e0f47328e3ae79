"""Tables that say what other files say, or this torch: its private names, releases, extras, the lists of the nearest release.

The registry of rules: each is complete, and one that is added is chosen, carried out, explained and reported by its entry alone.

No public call shows a table of what is not there, or adds a rule.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hmp
import list_kit
from command_kit import error_without, install
from hmp.core import lists, torch_private
from hmp.core.ops import sites
from hmp.core.policy import presets
from hmp.core.rules import registry
from hmp.core.rules.plug_ins import CastRule, one_dtype_wrapper
from hmp.tools.extras import EXTRAS
from making import versions
from process_kit import ROOT, run_in_another_process, to_install

WHOLE = [run for run in versions.results() if run["tests"] == versions.DEFAULT]
FROZEN = [name.partition("@")[2] for name in hmp.policies() if name.startswith("torch-cpu@")]
HMP = Path(hmp.__file__).parent


_WITHOUT = """
    del sys.modules["hmp"]

    def without(name):
        owner, _, attribute = name.rpartition(".")
        found, path = torch, "torch"
        for part in owner.split(".")[1:]:
            path += "." + part
            found = getattr(found, part, None) or __import__("importlib").import_module(path)
        if hasattr(found, attribute):  # a torch that never had it is what is wanted
            delattr(found, attribute)
"""


@pytest.mark.slow
def test_a_torch_without_a_required_name_is_refused_when_the_first_name_is_asked_for() -> None:
    code = """
    without("torch._C._len_torch_dispatch_stack")
    torch.__version__ = "9.1.0"
    try:
        import hmp
        hmp.convert
    except Exception as error:
        print(type(error).__module__, type(error).__name__)
        print(error)
    """
    kind, said = run_in_another_process(_WITHOUT + code, with_hmp=False, path=str(HMP.parent)).splitlines()
    assert kind == "hmp.errors HmpError"
    assert all(word in said for word in ("torch 9.1.0", "torch._C._len_torch_dispatch_stack", torch_private.RELEASES_RUN[-1]))


_USED = """
    import hmp
    layer, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    wanted = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    with hmp.casts("gaudi"):
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(layer(x), wanted) and layer(x).dtype is torch.bfloat16
        layer(x).sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    assert torch.equal(layer.weight.grad, torch.ones(8, 64, dtype=torch.bfloat16).T.mm(x.bfloat16()).float())
"""
# what is read of a function itself is no name of torch's
OPTIONAL = [name for name, required in torch_private.NAMES.items() if not required and "__code__" not in name]


@pytest.mark.slow
def test_without_optional_names_hmp_works() -> None:
    removed = _WITHOUT + "".join(f"    without({name!r})\n" for name in OPTIONAL)
    run_in_another_process(removed + _USED, with_hmp=False, path=str(HMP.parent))


def test_the_error_of_another_torch_names_the_releases_whose_tests_were_run() -> None:
    assert set(torch_private.RELEASES_RUN) == {run["torch"].partition("+")[0] for run in WHOLE}


@pytest.mark.parametrize(
    ("version", "release", "warned"),
    [
        ("2.13.0+cpu", "2.13", False),
        ("2.7.1", "2.7", False),
        ("2.11.0+cu130", "2.11", False),
        ("2.14.1", "2.14", False),
        ("2.99.0a0+git1", "2.15", True),
        ("2.4.0", "2.7", True),
    ],
)
def test_a_torch_whose_lists_are_not_known_has_those_of_the_nearest_older_release_and_a_warning(
    version: str, release: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert [f"2.{minor}" for minor in range(7, 16)] == FROZEN, "change the versions above with the lists that are kept"
    presets._frozen.cache_clear()
    monkeypatch.setattr(torch, "__version__", version)
    with caplog.at_level(logging.WARNING, logger="hmp"):
        assert hmp.Policy.load("torch-cpu").name == f"torch-cpu@{release}"
        hmp.Policy.load("torch-cpu")
    said = [r.getMessage() for r in caplog.records if "no autocast lists" in r.getMessage()]
    assert len(said) == warned
    assert all(part in each for each in said for part in (version, f"torch-cpu@{release}", ".ci/autocast-lists torch-cpu FOLDER"))
    presets._frozen.cache_clear()


def test_the_table_says_what_pyproject_says() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra, wanted in EXTRAS.items():
        (listed,) = re.findall(rf"^{extra} = \[(.*?)\]", text, re.MULTILINE)
        ours = [f"{'scikit-learn' if name == 'sklearn' else name}{oldest and f'>={oldest}'}" for name, oldest in wanted.items()]
        assert sorted(re.findall(r'"(.*?)"', listed)) == sorted(ours)


MODULES = [
    ("hmp.tools.pages.html", "jinja2", "3.0.3", "a report's page needs", "report"),
    ("hmp.tools.pages.html", "matplotlib", "3.7.5", "a report's page needs", "report"),
    ("hmp.compat.transformers", "transformers", "4.24.0.dev0", "hmp.compat.transformers needs", "transformers"),
]


@pytest.mark.parametrize("is_there", [False, True], ids=["not installed", "too old"])
@pytest.mark.parametrize(("module", "package", "release", "who", "extra"), MODULES)
def test_a_module_names_what_it_needs(
    module, package, release, who, extra, is_there, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_there:
        install(tmp_path, monkeypatch, package, release)
        said = f"{who} {package} {EXTRAS[extra][package]} or later, and {release} is installed: {to_install(extra)}"
    else:
        said = f"{who} {package}, not installed here: {to_install(extra)}"
    assert error_without(module, *([] if is_there else [package])) == said


def test_every_rule_has_its_name_a_number_of_the_page_and_a_sentence_of_its_own() -> None:
    assert [getattr(registry, rule.name) for rule in registry.RULES] == list(registry.RULES)
    page = (ROOT / "docs" / "pages" / "reference" / "lists.md").read_text(encoding="utf-8")
    assert {rule.number for rule in registry.RULES} <= set(re.findall(r"^\| (R\d+) \|", page, re.MULTILINE))
    assert len({rule.sentence for rule in registry.RULES}) == len(registry.RULES)


@pytest.fixture
def second() -> Iterator[CastRule]:
    rule = CastRule(
        "SECOND_LIST",
        label="second",
        sentence="its second input is cast to the low-precision dtype",
        make=one_dtype_wrapper,
        only=frozenset({1}),
        is_list=True,
        dtype=lambda low_dtype: low_dtype,
    )
    lists.add(lists.ListKind(name="second", title="second", contents="ops whose second input is rounded", module=__name__, rule=rule))
    yield rule
    hmp.revert()
    list_kit.remove("second")


def test_a_rule_on_the_second_input_alone_is_one_entry(second: CastRule, caplog: pytest.LogCaptureFixture) -> None:
    policy = hmp.Policy("mine", second={"hypot", "addmv"})
    x, y = torch.tensor([3.0, 6.0]), torch.tensor([4.001, 8.001])  # bfloat16 has neither of the second
    matrix, low = y.outer(y), x.bfloat16()
    with hmp.record() as report, hmp.convert(policy=policy, verbose=True):
        for found in (torch.hypot(x, y), torch.hypot(input=x, other=y), torch.hypot(other=y, input=x), x.hypot(y)):
            assert torch.equal(found, torch.tensor([5.0, 10.0]))
        assert torch.hypot(y, x).tolist() != [5.0, 10.0]  # not the first
        for added in (torch.addmv(low, matrix, low), torch.addmv(low, mat=matrix, vec=low)):
            assert torch.equal(added, low.addmv(matrix.bfloat16(), low))
        with pytest.raises(RuntimeError, match=r"dtype|expected scalar type"):  # torch refuses it; no kernel is missing
            torch.addmv(x, matrix, x)
        for call in (
            lambda: torch.hypot(x.double(), y),
            lambda: torch.hypot(other=y, input=x.double()),
        ):  # an input in float64: left to torch
            assert torch.equal(call(), x.double().hypot(y.double()))
        assert hmp.fallbacks() == {}
    rows = {(row.op, row.rule, row.source, row.compute, row.casts > 0) for row in report.rows if row.op in ("hypot", "addmv")}
    assert {row[:3] for row in rows} == {("hypot", "second", "hypot"), ("addmv", "second", "addmv")}
    assert ("hypot", "second", "hypot", "float32", True) in rows and ("addmv", "second", "addmv", "bfloat16", True) in rows
    logged = caplog.text
    assert "hypot (second)" in logged and "float32 -> bfloat16" in logged and "kernel" not in logged
    assert hmp.explain("addmv", policy).why == second.sentence


def test_a_rule_on_inputs_that_no_op_has_is_an_error() -> None:
    rule = CastRule(
        "OTHER", label="other", sentence="", make=one_dtype_wrapper, only=frozenset({"third", 4}), dtype=lambda low_dtype: low_dtype
    )
    with pytest.raises(hmp.HmpError, match=r"name parameters of hypot\(input, other\), got 4, third"):
        registry.op_rule(sites.sites_of("hypot")[0], rule, torch.bfloat16)
    with pytest.raises(hmp.HmpError, match="to say its `dtype`, got OTHER without one"):
        CastRule("OTHER", label="other", sentence="", make=one_dtype_wrapper, only=frozenset({1}))


def test_two_rules_with_one_label_are_an_error(second: CastRule) -> None:
    for label in ("second", "in place", "bf16"):
        rule = CastRule("OTHER", label=label, sentence="", make=one_dtype_wrapper)
        with pytest.raises(hmp.HmpError, match=f"no other rule has, got '{label}' of OTHER"):
            lists.add(lists.ListKind(name="other", title="other", contents="", module=__name__, rule=rule))
    assert "other" not in lists.names()


NEW_OP = """
import torch
library = torch.library.Library("aten", "FRAGMENT")
library.define("foo(Tensor self, Tensor mat2, Tensor? scale=None) -> Tensor")
plain = torch.mm

def foo(input, mat2, scale=None):  # its scale is float32
    if input.dtype is not mat2.dtype or (scale is not None and scale.dtype is not torch.float32):
        raise RuntimeError("expected mat1 and mat2 to have the same dtype")
    return plain(input, mat2)

library.impl("foo", foo, "CompositeImplicitAutograd")
torch.foo = torch.nn.functional.oof = torch.ops.aten.foo
from hmp.core.ops import table
table._row("foo=oof", table.FOREIGN, table.PRODUCTS, table.SLOW_WITHOUT_INSTRUCTIONS, table.MIXED_RAISES, kept="scale")
import hmp
a, b = torch.tensor([[1.001, 2.002], [3.003, 4.004]]), torch.tensor([[1.5, -2.25], [0.375, 1.125]])
want = plain(a.bfloat16(), b.bfloat16())
with hmp.convert(policy=hmp.Policy("mine", bf16={"foo"})), hmp.record() as report:
    assert all(torch.equal(found, want) for found in (torch.foo(a, b), torch.foo(a, mat2=b), torch.foo(a.bfloat16(), b)))
assert {row.rule for row in report.rows if row.op == "foo"} == {"bf16"}
with hmp.convert(policy=hmp.Policy("other", bf16={"linear"})):  # unlisted: the first input's dtype
    assert torch.equal(torch.foo(a.bfloat16(), b), want) and torch.foo(a, b).dtype is torch.float32
with hmp.convert(policy=hmp.Policy("synonym", bf16={"oof"})):
    assert torch.equal(torch.foo(a, b, scale=torch.ones(1)), want)
try:
    table._row("foo", table.VIEWS)
except ValueError as error:
    print(error)
"""


def test_an_op_of_a_new_release_is_one_row_of_the_table() -> None:
    assert "got two of foo" in run_in_another_process(NEW_OP)
