"""Traps where a result has the wrong dtype or value, or none: D, G2, G3, J, K3, K5, L1, R1 to R3, T3, U9, U11."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from trap_kit import Traps, same

trap = Traps()
LOW = torch.bfloat16
LOWEST = torch.finfo(torch.float32).min


@trap("D1")
def a_mask_that_is_multiplied_by_the_lowest_float_stays_finite(run):
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    with run():
        bias = (1 - mask) * LOWEST
        attention = F.softmax(torch.zeros(2, 3) + bias, dim=-1)
    assert torch.isfinite(bias).all()
    assert bias[0, 1] < -1e38
    torch.testing.assert_close(attention, torch.tensor([[0.5, 0.0, 0.5], [1 / 3] * 3]), check_dtype=False, rtol=1e-2, atol=1e-3)


@trap("D2")
def a_mask_tensor_of_the_lowest_float_stays_finite_in_sums(run):
    scores, mask = torch.zeros(2, 3, dtype=LOW), torch.tensor([[0.0, LOWEST, 0.0], [LOWEST] * 3])
    with run(bf16=["add", "sub", "where", "baddbmm", "matmul"]):
        masked = scores + mask, scores.sub(-mask), torch.where(mask < 0, mask, scores)
        product = torch.baddbmm(mask[None], torch.zeros(1, 2, 4), torch.zeros(1, 4, 3))[0]
    for each in (*masked, product):
        assert each.dtype == LOW
        assert torch.isfinite(each).all()
        torch.testing.assert_close(each.float().softmax(-1), torch.tensor([[0.5, 0.0, 0.5], [1 / 3] * 3]), rtol=1e-2, atol=1e-3)


@trap("D2", naive_raises=RuntimeError)
def a_fill_beyond_the_low_dtype_becomes_its_extreme(run):
    mask = torch.tensor([False, True])
    extreme = torch.finfo(LOW).min
    with run():
        scores = torch.matmul(torch.ones(2, 2), torch.ones(2))
        filled = scores.masked_fill(mask, LOWEST), torch.where(mask, LOWEST, scores)
        scores[mask] = LOWEST
    assert scores.dtype == LOW
    for each in (*filled, scores):
        assert each.tolist() == [2.0, extreme]


@trap("G2")
def a_number_over_a_tensor_is_one_division(run):
    x = torch.tensor([3.0])
    with run():
        y = 2.0 / x
    same(y, 2.0 / x)


@trap("G3")
def arithmetic_inside_an_unlisted_function_is_not_decided_again(run):
    x, y, variance = torch.rand(2, 3, 8) + 1, torch.rand(2, 3, 8), torch.rand(2, 3, 8) + 0.1
    target = (y > 0.5).float()
    calls = (
        lambda: F.gaussian_nll_loss(x, y, variance),
        lambda: F.lp_pool1d(x, 2, 2),
        lambda: F.lp_pool2d(x[None], 2, 2),
        lambda: F.multilabel_soft_margin_loss(x[0], target[0]),
        lambda: F.local_response_norm(x, 2),
        lambda: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"),
        lambda: F.normalize(x),
        lambda: F.softsign(x),
        lambda: F.mse_loss(x, y, weight=variance),
        lambda: F.triplet_margin_loss(x[0], y[0], variance[0], swap=True),
    )
    plain = [call() for call in calls]
    with run():
        for expected, call in zip(plain, calls, strict=True):
            torch.testing.assert_close(call(), expected, rtol=0, atol=0)


@trap("J1")
def float64_is_left_to_torch(run):
    x = torch.rand(3, 3, dtype=torch.float64) + 1
    names = ("log", "softmax", "mul", "mm", "div", "matmul", "relu", "t")
    with run():
        for name in names:
            arguments = {"softmax": (x, 0), "log": (x,), "relu": (x,), "t": (x,)}.get(name, (x, x))
            result = getattr(torch, name)(*arguments)
            assert result.dtype == torch.float64, name
        same(x * torch.ones(3, 3), x)
        assert (torch.tensor([1e-300], dtype=torch.float64).log() < -600).all()


@trap("J2", naive_raises=GradcheckError)
def gradcheck_passes_in_float64(run):
    x, weight = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with run():
        assert torch.autograd.gradcheck(lambda x, w: F.linear(x, w), (x, weight))
        assert torch.autograd.gradgradcheck(lambda x, w: F.linear(x, w), (x, weight))


@trap("J3")
def an_op_with_a_complex_input_is_left_to_torch(run):
    z, x = torch.tensor([1 + 1j, 2 - 1j]), torch.tensor([1.001, 1.003])
    with run():
        products = z * x, x * z, torch.mul(x, z), z.mul(x)
    for product in products:
        assert product.dtype == torch.complex64
        assert torch.equal(product, torch.complex(z.real * x, z.imag * x))


@trap("J4")
def float8_is_never_cast(run):
    x = torch.ones(2, 3).to(torch.float8_e4m3fn)
    with run():
        y = torch.t(x)
    assert y.dtype == torch.float8_e4m3fn and y.data_ptr() == x.data_ptr()


@trap("K3")
def an_explicit_dtype_wins(run):
    x = torch.randn(4, 64)
    with run(bf16=["softmax", "log_softmax"]):
        results = F.softmax(x, -1, dtype=torch.float32), torch.softmax(x, -1, torch.float32), x.softmax(-1, dtype=torch.float32)
        logs = F.log_softmax(x, -1, dtype=torch.float32), torch.log_softmax(x, -1, dtype=torch.float32)
    for each in results:
        same(each, F.softmax(x, -1))
    for each in logs:
        same(each, F.log_softmax(x, -1))


@trap("L1")
def a_scalar_tensor_does_not_widen_a_tensor_with_dimensions(run):
    x, scale = torch.ones(3, dtype=LOW), torch.tensor(1.5)
    with run(promote=["add", "mul", "sub", "where", "maximum", "lerp"]):
        for result in (x + scale, scale + x, x.mul(scale), torch.sub(x, scale), torch.where(x > 0, x, scale), torch.maximum(x, scale)):
            assert result.dtype == LOW
        assert torch.lerp(x, x, scale).dtype == LOW


@trap("U11")
def a_learned_scale_does_not_widen_activations(run):
    activations, scale = torch.ones(2, 3, dtype=LOW), torch.nn.Parameter(torch.tensor(1.5))
    with run(promote=["add", "mul"]):
        y = activations * scale
        y.float().sum().backward()
    same(y, torch.full((2, 3), 1.5, dtype=LOW))
    same(scale.grad, torch.tensor(6.0))


@trap("R1", naive_raises=ValueError)
def recurrent_nets_take_the_precision_of_their_input(run):
    x = torch.randn(2, 5, 3)
    low = x.to(LOW)
    for make in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        net = make(3, 4, num_layers=2, batch_first=True, bidirectional=True)
        with run():
            y, _ = net(low)
        assert y.dtype == LOW
        torch.testing.assert_close(y.float(), net(x)[0], rtol=3e-2, atol=3e-2)


@trap("R1", naive_raises=RuntimeError)
def recurrent_cells_take_the_precision_of_their_input(run):
    x = torch.randn(2, 3)
    for make in (torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell, lambda a, b: torch.nn.RNNCell(a, b, nonlinearity="relu")):
        cell = make(3, 4)
        with run():
            y = cell(x.to(LOW))
        plain = cell(x)
        y, plain = (y[0], plain[0]) if isinstance(y, tuple) else (y, plain)
        assert y.dtype == LOW
        torch.testing.assert_close(y.float(), plain, rtol=3e-2, atol=3e-2)


@trap("R2", naive_raises=RuntimeError)
def an_unlisted_op_runs_in_the_precision_of_its_first_input(run):
    x, y, slope, weight = torch.randn(2, 3), torch.randn(2, 4), torch.rand(1), torch.randn(5, 3, 4)
    with run(bf16=["relu"]):
        low = torch.relu(x)
        results = F.prelu(low, slope), F.bilinear(low, y, weight), torch.inner(low, weight[0].T), torch.einsum("ij,kj->ik", low, x)
        grid = F.grid_sample(low.reshape(1, 1, 2, 3), torch.zeros(1, 2, 2, 2), align_corners=False)
    low, slope, y, weight, x = (each.to(LOW) for each in (x.relu(), slope, y, weight, x))
    same(results[0], F.prelu(low, slope))
    same(results[1], F.bilinear(low, y, weight))
    same(results[2], torch.inner(low, weight[0].T))
    same(results[3], torch.einsum("ij,kj->ik", low, x))
    same(grid, F.grid_sample(low.reshape(1, 1, 2, 3), torch.zeros(1, 2, 2, 2, dtype=LOW), align_corners=False))


@trap("R3", naive_raises=RuntimeError)
def attention_takes_a_float_mask(run):
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
    plain = attention(x, x, x, attn_mask=mask)
    with run():
        y, weights = attention(x, x, x, attn_mask=mask)
        z, _ = attention(x, x, x, attn_mask=mask, need_weights=False)
    for each in (y, z):
        torch.testing.assert_close(each.float(), plain[0], rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(weights.float(), plain[1], rtol=5e-2, atol=5e-2)


@trap("T3", naive_raises=RuntimeError)
def huber_loss_with_a_low_target_has_a_backward(run):
    x, y = torch.randn(4, requires_grad=True), torch.randn(4).to(LOW)
    with run():
        loss = F.huber_loss(x, y)
        loss.backward()
    other = x.detach().clone().requires_grad_()
    expected = F.huber_loss(other, y.float())
    expected.backward()
    same(loss, expected)
    same(x.grad, other.grad)


@trap("U9")
def a_name_covers_its_synonyms_and_all_its_sites(run):
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    with run():
        low = [
            torch.multiply(a, b), a.multiply(b), a * b, 2.0 * a, torch._VF.mm(a, b), torch._VF.mul(a, b), torch.linalg.matmul(a, b), a @ b,
            torch._C._nn.linear(a, b), torch._C._nn.leaky_relu(a), torch._VF.relu(a),
        ]  # fmt: skip
        x = a.to(LOW)
        wide = [
            torch.special.softmax(x, 0),
            torch.special.log_softmax(x, 0),
            torch.true_divide(x, x),
            x.true_divide(x),
            x / x,
            1 / x,
            x.log2(),
            torch._VF.log(x),
        ]
    assert [each.dtype for each in low] == [LOW] * len(low)
    assert [each.dtype for each in wide] == [torch.float32] * len(wide)


test_trap_is_avoided, test_trap_catches_the_naive_caster = trap.tests()
