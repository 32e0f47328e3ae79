"""R12 where masks meet scores: rows that are masked whole stay finite on every path that a model takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import hmp

LOW_DTYPES = [torch.bfloat16, torch.float16]
MIN = torch.finfo(torch.float32).min


def masked_row() -> torch.Tensor:
    mask = torch.zeros(2, 3)
    mask[0] = MIN
    return mask


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("softmax", [lambda x: x.softmax(-1), lambda x: F.softmax(x, -1), lambda x: torch.special.softmax(x, -1)])
def test_r12_float32_scores_with_a_mask_reach_a_low_softmax_finite(softmax, dtype) -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    with hmp.casts(hmp.Policy(dtype=dtype, bf16={"softmax"})):
        weights = softmax(scores + masked_row())
        assert weights.dtype is dtype
        weights.float().square().sum().backward()
    assert torch.allclose(weights[0].float(), torch.full((3,), 1 / 3), atol=1e-2)
    assert torch.isfinite(scores.grad).all()


@pytest.mark.parametrize("preset", ["bert", "habana"])
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_r12_attention_with_a_row_masked_whole_is_finite(preset: str, dtype: torch.dtype) -> None:
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 2, 4, requires_grad=True)
    mask = torch.zeros(2, 2)
    mask[0] = MIN
    with hmp.casts(hmp.Policy.load(preset).replace(dtype=dtype)):
        out, weights = attention(x, x, x, attn_mask=mask)
        out.float().sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(weights).all()
    assert all(torch.isfinite(p.grad).all() for p in attention.parameters())


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_r12_a_mask_times_a_mask_is_finite(dtype: torch.dtype) -> None:
    keep = torch.tensor([[False, True], [False, False]])
    with hmp.casts(hmp.Policy(dtype=dtype, bf16={"mul"})):
        for product in (torch.full((2, 2), MIN) * keep, keep * torch.full((2, 2), MIN)):
            assert product.tolist() == [[0.0, torch.finfo(dtype).min], [0.0, 0.0]]


def test_r12_sums_with_a_scalar_beyond_float16_saturate_listed_or_not() -> None:
    limit = torch.finfo(torch.float16).max
    with hmp.casts(hmp.Policy.load("habana").replace(dtype=torch.float16)):
        scores = torch.eye(2) @ torch.eye(2)
        assert (scores - 1e9).tolist() == (scores + -1e9).tolist() == (-1e9 + scores).tolist() == [[-limit] * 2] * 2
        assert (1e9 - scores).tolist() == [[limit] * 2] * 2
        alias = scores
        scores[0] += -1e9
        scores -= 1e9
        assert scores is alias
        assert scores.tolist() == [[-limit] * 2] * 2
        assert (scores + float("-inf")).isinf().all()


def test_r12_an_index_is_no_value() -> None:
    with hmp.casts(hmp.Policy.load("habana").replace(dtype=torch.float16)):
        x = torch.zeros(100_000, dtype=torch.float16)
        x[70_000] = 1e9
    assert x[70_000] == torch.finfo(torch.float16).max
    assert x.count_nonzero() == 1


def test_r12_nested_tensors_are_no_masks() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    with hmp.casts("habana"):
        assert (nested * nested).dtype is torch.bfloat16
        assert (nested * 2.0).dtype is torch.bfloat16


def test_r12_saturating_sums_leave_torchs_refusal_of_out_with_gradients() -> None:
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    with hmp.casts(hmp.Policy(bf16={"linear"}, dtype=torch.float16)), pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.add(x, 1e9, out=torch.empty(3, dtype=torch.float16))


@pytest.mark.parametrize(("masked", "more"), [(0.0, 0), (torch.finfo(torch.float32).min, 1)], ids=["no mask", "a mask"])
def test_r12_a_low_softmax_saves_a_bool_an_element_more_than_the_plain_one_if_something_is_masked(masked: float, more: int) -> None:
    saved = []

    def note(tensor):
        saved.append(tensor.nbytes)
        return tensor

    scores = torch.randn(8, 8)
    scores[0, 0] = masked
    scores.requires_grad_()
    with hmp.casts(hmp.Policy(bf16={"softmax"})), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        scores.softmax(-1)
    assert sum(saved) == 64 * (2 + more)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", ["torch.softmax", "F.softmax", "Tensor.softmax", "F.log_softmax"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_r12_softmax_into_an_explicit_low_dtype_keeps_masked_rows_finite(call: str, low: torch.dtype) -> None:
    scores = torch.full((2, 4), torch.finfo(torch.float32).min)
    scores[1, 2] = 0.0
    function = {
        "torch.softmax": lambda x: torch.softmax(x, -1, dtype=low),
        "F.softmax": lambda x: torch.nn.functional.softmax(x, -1, dtype=low),
        "Tensor.softmax": lambda x: x.softmax(-1, low),
        "F.log_softmax": lambda x: torch.nn.functional.log_softmax(x, dim=-1, dtype=low).exp(),
    }[call]
    with hmp.casts("habana"):
        result = function(scores)
    assert result.dtype in (low, torch.float32)  # exp is on the FP32 list
    torch.testing.assert_close(result.float(), torch.tensor([[0.25] * 4, [0.0, 0.0, 1.0, 0.0]]), rtol=1e-2, atol=1e-3)
    assert torch.softmax(scores, -1, dtype=torch.float16).isnan().any()  # what plain torch does
