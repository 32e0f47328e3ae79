"""Published lists and Gaudi configurations load as they stand, and the default lists are Habana's."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

import hmp
from published import LISTS, gaudi_files, needs_corpus


def names_in(file: Path) -> list[str]:
    lines = (line.split("#")[0] for line in file.read_text(encoding="utf-8-sig").splitlines())
    return [word.strip() for line in lines for word in line.split(",") if word.strip()]


def list_files() -> list[Path]:
    return sorted(LISTS.rglob("*.txt"))


@needs_corpus
def test_lists_every_name_of_a_published_list_resolves(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    for file in list_files():
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
