"""Measured traps that a naive caster may survive and that the rules still forbid.

They are A6, K1, K2, N1 to N3, P, Q, S1, S4, T1, T2, T4, U1 to U5, U14, U15.

Left out, with the reason: A4, E1 to E3, I1, I2, S2, S5, S6 are what the published lists say, to the letter; N4 to N6 are
torch.compile's, N8 is R13's; O1 and the ops of R2 without a kernel are R11's; S7 and M2 are harmless; U10 is about memory.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hmp
from trap_kit import policy, same

LOW = torch.bfloat16


def test_a6_dropout_in_eval_may_be_written_to_where_nobody_has_its_input():
    """Residual code writes into what dropout gave; in plain torch the write is seen in x too, if anybody still has x."""
    x, base = torch.ones(3), torch.ones(2, 3)
    with hmp.casts("habana"):
        y = F.dropout(x.clone(), 0.5, training=False)
        y += 1
        y[0] = 5
        for kept in (x, base[0]):
            with pytest.raises(hmp.HmpError, match="'dropout' is on a list that casts"):
                F.dropout(kept, 0.5, training=False).__iadd__(1)
        array = np.ones(3, "float32")
        with pytest.raises(hmp.HmpError, match="'dropout' is on a list that casts"):
            F.dropout(torch.from_numpy(array), 0.5, training=False).add_(1)
        for fill in (torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.kaiming_uniform_):
            with pytest.raises(hmp.HmpError, match="'dropout' is on a list that casts"):
                fill(F.dropout(base, 0.5, training=False))
    assert y.tolist() == [5.0, 2.0, 2.0] and y.dtype is LOW
    assert (x == 1).all() and (base == 1).all()


def test_k1_integers_stay_integers():
    x = torch.tensor([30, 2])
    with hmp.casts("habana"):
        same(x * x, torch.tensor([900, 4]))
        same(torch.div(x, 4, rounding_mode="floor"), torch.tensor([7, 0]))
        same(torch.topk(x, 1).values, torch.tensor([30]))
        same(x.t(), x)
        same(torch.mm(x[None], x[:, None]), torch.tensor([[904]]))
        x //= 2
        assert torch.log(x).dtype == torch.float32
    same(x, torch.tensor([15, 1]))


def test_k2_an_integer_operand_is_not_rounded_through_the_low_dtype():
    positions, one = torch.arange(255, 262), torch.ones(7, dtype=LOW)
    with hmp.casts("habana"):
        product = positions * one
    same(product, positions.mul(one))


def test_n1_a_subclass_sees_the_functions_that_torch_gave_it():
    seen = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    original = torch.mm
    x = torch.ones(2, 2).as_subclass(Logged)
    with hmp.casts("habana"):
        y = torch.mm(x, x)
    assert original in seen
    assert type(y) is Logged and y.dtype == LOW


def test_n2_an_operator_falls_back_to_a_foreign_operand():
    class Foreign:
        def __rmul__(self, other):
            return "rmul"

        __radd__ = __rtruediv__ = __rmatmul__ = __rsub__ = __rmul__

    x = torch.ones(2)
    with hmp.casts("habana"):
        assert {x * Foreign(), x + Foreign(), x / Foreign(), x @ Foreign(), x - Foreign()} == {"rmul"}


def test_n3_numpy_operands_still_work():
    x = torch.ones(3)
    with hmp.casts("habana"):
        same(x + np.ones(3, dtype=np.float32), torch.full((3,), 2.0))
        assert (x * np.float32(1.5)).tolist() == [1.5] * 3
        assert np.multiply(np.ones(3), 2.0).tolist() == [2.0] * 3


def test_p1_keywords_in_any_order():
    a, b, bias = torch.randn(2, 2), torch.randn(2, 2), torch.randn(2)
    with hmp.casts("habana"):
        same(torch.mul(other=a, input=b), b.to(LOW) * a.to(LOW))
        same(F.linear(bias=bias, weight=a, input=b), F.linear(b.to(LOW), a.to(LOW), bias.to(LOW)))
        same(torch.addmm(mat2=a, mat1=b, input=bias), torch.addmm(bias.to(LOW), b.to(LOW), a.to(LOW)))


def test_p2_inputs_that_are_not_the_first_argument():
    low, wide = torch.ones(2, 2, dtype=LOW), torch.ones(2, 2)
    with hmp.casts(policy(promote=["cat", "stack", "einsum", "meshgrid", "block_diag"])):
        assert torch.cat([low, wide]).dtype == torch.cat((wide, low)).dtype == torch.stack(tensors=[low, wide]).dtype == torch.float32
        assert torch.einsum("ij,jk", low, wide).dtype == torch.einsum("ij,jk", [low, wide]).dtype == torch.float32
        assert torch.einsum(low, [0, 1], wide, [1, 2], [0, 2]).dtype == torch.float32
        assert torch.block_diag(low, wide).dtype == torch.float32
    with hmp.casts(policy(bf16=["relu"])):
        assert torch.where(low > 0, low, wide).dtype == torch.float32
        x, y = torch.meshgrid(low[0], wide[0], indexing="ij")
        assert x.dtype == y.dtype == LOW


def test_q1_answers_that_are_not_tensors_pass_through():
    low, wide = torch.ones(2, dtype=LOW), torch.ones(2)
    with hmp.casts("habana"):
        assert torch.equal(wide, low) is torch.equal(low, wide) is True
        assert torch.allclose(low, wide) is True
        assert torch.result_type(low, wide) == torch.float32
        assert torch.can_cast(torch.float32, LOW) is True
        assert wide[0].item() == 1.0 and wide.tolist() == [1.0, 1.0] and wide.numel() == len(wide) == 2


def test_s1_dropout_draws_the_same_mask():
    x, masks = torch.ones(1000), []
    for casts in (True, False):
        torch.manual_seed(3)
        with hmp.casts("habana"):
            with hmp.enable_casts() if casts else hmp.disable_casts():
                masks.append(F.dropout(x, 0.3) == 0)
    assert torch.equal(*masks)


def test_s4_a_users_function_gets_gradients_in_the_dtype_of_its_output():
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad.dtype)
            (x,) = ctx.saved_tensors
            return 2 * grad * x

    x = torch.ones(3, requires_grad=True)
    with hmp.casts("habana"):
        Square.apply(torch.relu(x)).sum().backward()
    assert seen == [LOW]
    same(x.grad, torch.full((3,), 2.0))


def test_t1_functions_that_compose_give_what_torch_gives():
    logits, weight, target = torch.randn(4, 6), torch.randn(5, 6), torch.tensor([0, 1, 2, 3])
    torch.manual_seed(1)
    plain = F.gumbel_softmax(logits)
    torch.manual_seed(1)
    with hmp.casts("habana"):
        same(F.gumbel_softmax(logits), plain)
        if hasattr(F, "linear_cross_entropy"):
            low = F.linear_cross_entropy(logits.to(LOW), weight, target)
    if hasattr(F, "linear_cross_entropy"):
        torch.testing.assert_close(low.float(), F.linear_cross_entropy(logits, weight, target), rtol=3e-2, atol=3e-2)


def test_t2_a_low_target_does_not_narrow_the_loss():
    logits, target = torch.randn(4), torch.rand(4).to(LOW)
    with hmp.casts("habana"):
        same(F.binary_cross_entropy_with_logits(logits, target), F.binary_cross_entropy_with_logits(logits, target.float()))


def test_t4_pad_sequence_follows_its_first_input():
    with hmp.casts("habana"):
        padded = torch.nn.utils.rnn.pad_sequence([torch.ones(2, dtype=LOW), torch.ones(3)], batch_first=True)
    same(padded, torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=LOW))


@pytest.mark.parametrize("lists", [{"bf16": ["relu"]}, {"promote": ["add", "eq", "gt", "lt"]}], ids=["unlisted", "promoted"])
def test_u1_u5_what_torch_promotes_is_computed_at_the_widest(lists):
    low, wide = torch.tensor([1.0], dtype=LOW), torch.tensor([1.001])
    with hmp.casts(policy(**lists)):
        assert (low + wide).dtype == (wide + low).dtype == torch.float32
        assert not (low == wide).item() and not (wide == low).item()
        assert (wide > low).item() and (low < wide).item()
        assert torch.searchsorted(torch.tensor([1.0, 1.001]), low).item() == 0
        assert torch.searchsorted(low, wide).item() == 1
        assert not torch.isin(wide, low).item() and not torch.equal(low, wide)


def test_u2_ops_whose_meaning_is_a_dtype_are_never_touched():
    low, wide = torch.ones(2, dtype=LOW), torch.ones(2)
    with hmp.casts("habana"):
        assert wide.type_as(low).dtype == wide.to(low).dtype == LOW
        assert low.type_as(wide).dtype == low.to(wide).dtype == torch.float32
        assert torch.result_type(low, wide) == torch.float32
        assert wide.clone().copy_(low).dtype == torch.float32
        assert wide.view_as(low).dtype == wide.expand_as(low).dtype == wide.reshape_as(low).dtype == torch.float32


def test_u3_an_integer_first_input_keeps_torchs_error():
    for listed in ({"bf16": ["add"]}, {"fp32": ["add"]}, {"promote": ["add"]}, {"bf16": ["relu"]}):
        x = torch.tensor([1, 2])
        with hmp.casts(policy(**listed)), pytest.raises(RuntimeError, match="can't be cast"):
            x.add_(torch.tensor([0.9, 1.9]))
        assert x.tolist() == [1, 2]


def test_u14_u15_listed_ops_have_a_double_backward():
    for call in (lambda x, w: F.linear(x, w), lambda x, w: torch.matmul(x, w), lambda x, w: F.layer_norm(x, (4,), w[0])):
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with hmp.casts("habana"):
            y = call(x, w).float().square().sum()
            (gradient,) = torch.autograd.grad(y, w, create_graph=True)
            gradient.square().sum().backward()
        assert x.grad.dtype == w.grad.dtype == gradient.dtype == torch.float32
        assert torch.isfinite(x.grad).all()
    with hmp.casts("habana"):
        x = torch.randn(2, 3, 4, requires_grad=True)
        F.dropout1d(x, 0.5).sum().backward()
    assert x.grad.dtype == torch.float32
