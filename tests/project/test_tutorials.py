"""The tutorials run from top to bottom, as the notebooks that they are sources of."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
# What a reader is to see in each: without it the cells ran, and taught nothing.
SEEN = {
    "from_an_hmp_script": ("No module named 'habana_frameworks'", "did you mean 'relu'", "tensor(22.3750, dtype=torch.bfloat16)"),
    "lists_of_your_own": (" (chosen) ", "lists: tuned", "linear            # "),
    "nan_to_repaired_list": (
        "`matmul` (bmm) made Inf out of finite inputs: in likeness",
        "{'matmul': ('bf16', 'fp32')}",
        "repaired: loss 0.",
    ),
}


def test_every_tutorial_is_tested() -> None:
    assert [source.stem for source in SOURCES] == list(SEEN)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
@pytest.mark.native_kernels  # the texts have the figures of a processor with instructions
@pytest.mark.slow
def test_a_tutorial_runs_as_a_notebook(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jupytext = pytest.importorskip("jupytext", reason="notebooks are made with jupytext, of the extras docs and test")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are executed with nbclient, of the extras docs and test")
    pytest.importorskip("ipykernel", reason="notebooks run in ipykernel, of the extras docs and test")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this Python, and not another of the user's
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = jupytext.reads(jupytext.writes(jupytext.read(source), fmt="ipynb"), fmt="ipynb")
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert [text for text in SEEN[source.stem] if text not in shown] == []
