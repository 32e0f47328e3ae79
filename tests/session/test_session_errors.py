"""What convert(), casts() and remove() refuse, with torch as it was; and list files that are not given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hmp


@pytest.mark.parametrize("policy", ["habana", hmp.Policy(bf16={"linear @ 0"})], ids=["without scopes", "with scopes"])
@pytest.mark.parametrize("given", [3, "model", torch.nn.Linear])
def test_a_model_that_is_no_module_is_refused(given: object, policy: hmp.Policy | str, torch_differences: Callable[[], list[str]]) -> None:
    kind = type(given).__name__
    with pytest.raises(hmp.HmpError, match=rf"convert\(model=\.\.\.\) takes a torch\.nn\.Module; {kind} is none"):
        hmp.convert(policy=policy, model=given)  # type: ignore[arg-type]
    with pytest.raises(hmp.HmpError, match=rf"casts\(model=\.\.\.\) takes a torch\.nn\.Module; {kind} is none"):
        hmp.casts(policy, model=given)  # type: ignore[arg-type]
    with pytest.raises(hmp.HmpError, match=rf"remove\(\) takes a torch\.nn\.Module; {kind} is none"):
        hmp.remove(given)  # type: ignore[type-var]
    assert torch_differences() == [] and not hmp.is_converted()


def test_a_list_file_that_is_no_path_is_refused(torch_differences: Callable[[], list[str]]) -> None:
    with pytest.raises(hmp.OpListError, match='3 is no path of a fp32 list; give that of a text file, or "" for the default list'):
        hmp.convert(fp32_file_path=3)  # type: ignore[arg-type]
    assert torch_differences() == [] and not hmp.is_converted()


def test_none_for_a_list_file_means_that_none_is_given() -> None:
    """What argparse gives a script for an option that was left out."""
    with hmp.convert("O1", None, None, False, promote_file_path=None, fp8_file_path=None):
        assert hmp.explain("linear") == hmp.explain("linear", "habana")
    with hmp.convert(policy="bert", bf16_file_path=None):
        assert hmp.explain("softmax").policy == "bert"
