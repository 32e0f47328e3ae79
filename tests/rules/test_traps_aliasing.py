"""Traps where a cast copy takes a write, a name or a place that belongs to the real tensor: A, B, K4 to K6, M1, S8, S9, U7, U8."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trap_kit import Traps, refused, same

trap = Traps()
LOW = torch.bfloat16


@trap("A1")
def a_write_through_t_is_refused(run):
    x = torch.zeros(2, 3)
    with run():
        refused(lambda: x.t().add_(1))


@trap("A2")
def an_item_assignment_through_t_is_refused(run):
    x = torch.zeros(2, 3)
    with run():
        refused(lambda: x.t().__setitem__(0, torch.tensor([5.0, 5.0])))


@trap("A3")
def assigning_data_keeps_the_parameters_dtype(run):
    encoder, decoder = torch.nn.Linear(4, 3), torch.nn.Linear(3, 4)
    with run():
        decoder.weight.data = encoder.weight.t()
    same(decoder.weight.data, encoder.weight.data.T.to(LOW).float())


@trap("A5", naive_raises=RuntimeError)
def a_listed_t_feeds_an_op_that_refuses_mixtures(run):
    x, other = torch.randn(3, 4), torch.randn(4, 3)
    with run(bf16=["t"]):
        y = torch.lerp(x.t(), other, 0.25)
    same(y, torch.lerp(x.T.to(LOW), other.to(LOW), 0.25))


@trap("A7")
def relu_on_a_view_of_x_changes_x(run):
    x = torch.tensor([-1.0, -2.0, 3.0])
    with run():
        torch.relu_(x[:1])
    assert x.tolist() == [0.0, -2.0, 3.0]


@trap("B1")
def relu_inplace_changes_its_input(run):
    for call in (
        lambda x: F.relu(x, inplace=True),
        lambda x: F.relu(x, True),
        torch.nn.ReLU(inplace=True),
        lambda x: F.relu_(x),
        lambda x: x.relu_(),
    ):
        x = torch.tensor([-1.0, 1.001])
        with run():
            y = call(x)
        assert y is x
        same(x, torch.tensor([0.0, 1.001]))


@trap("B2")
def dropout_inplace_changes_its_input(run):
    for name, dims in (("dropout", 3), ("dropout1d", 3), ("dropout2d", 4), ("dropout3d", 5)):
        x = torch.ones((2, 50, 2, 2, 2)[:dims])
        with run():
            y = getattr(F, name)(x, 0.5, True, True)
        assert y is x and (x == 0).any(), name


@trap("B3")
def leaky_relu_inplace_changes_its_input(run):
    for call in (lambda x: F.leaky_relu(x, 0.5, True), torch.nn.LeakyReLU(0.5, inplace=True), lambda x: F.leaky_relu_(x, 0.5)):
        x = torch.tensor([-1.0, 1.001])
        with run():
            y = call(x)
        assert y is x
        same(x, torch.tensor([-0.5, 1.001]))


@trap("K4")
def topk_fills_out(run):
    x = torch.tensor([1.0, 3.0, 2.0], dtype=LOW)
    values, indices = torch.zeros(2, dtype=LOW), torch.zeros(2, dtype=torch.int64)
    with run():
        torch.topk(x, 2, out=(values, indices))
    same(values, torch.tensor([3.0, 2.0], dtype=LOW))
    assert indices.tolist() == [1, 2]


@trap("K5", naive_raises=RuntimeError)
def scatter_takes_float32_gates_into_a_low_tensor(run):
    logits = torch.randn(4, 8, dtype=LOW)
    with run():
        gates, experts = torch.topk(logits, 2)
        assert gates.dtype == torch.float32
        routed = torch.zeros_like(logits).scatter(-1, experts, gates)
    same(routed, torch.zeros_like(logits).scatter(-1, experts, gates.to(LOW)))


@trap("K6", naive_raises=RuntimeError)
def an_indexed_write_takes_the_destinations_dtype(run):
    hidden, image, mask = torch.zeros(4, 3, dtype=LOW), torch.randn(2, 3), torch.tensor([True, False, True, False])
    with run():
        hidden[mask] = image
        hidden[torch.tensor([1])] = image[:1]
    same(hidden, torch.stack([image[0], image[0], image[1], torch.zeros(3)]).to(LOW))


@trap("M1")
def an_augmented_assignment_keeps_the_object(run):
    for statement in ("x *= y", "x /= y", "x += y", "x -= y"):
        x = torch.full((2,), 1.001)
        names = {"x": x, "y": torch.full((2,), 1.003)}
        with run(bf16=["mul", "add"], fp32=["truediv"], promote=["sub"]):
            exec(statement, names)
        assert names["x"] is x, statement
        expected = torch.full((2,), 1.001)
        exec(statement, {"x": expected, "y": names["y"]})
        # the other operand may be rounded to x's dtype, which is its own here
        same(x, expected)


@trap("M1", naive_raises=TypeError)
def an_augmented_assignment_never_casts_a_wider_first_input(run):
    model = torch.nn.Linear(2, 2)
    alias, before = model.weight.data, model.weight.detach().clone()
    with run(), torch.no_grad():
        model.weight *= torch.tensor(2.0, dtype=LOW)
    assert model.weight.dtype == torch.float32
    same(alias, before * 2)


@trap("S8")
def t_in_place_changes_metadata_only(run):
    x = torch.randn(2, 3)
    start, before = x.data_ptr(), x.clone()
    with run():
        y = x.t_()
    assert y is x and x.data_ptr() == start
    same(x, before.T)


@trap("S9")
def out_is_filled(run):
    square, batch, vector = torch.randn(3, 3), torch.randn(1, 3, 3), torch.randn(3)
    for name, a, b in (
        ("mul", square, square),
        ("mm", square, square),
        ("matmul", square, square),
        ("bmm", batch, batch),
        ("mv", square, vector),
        ("dot", vector, vector),
    ):
        expected = getattr(torch, name)(a.to(LOW), b.to(LOW))
        out = torch.full_like(expected, 7.0, dtype=torch.float32)
        start = out.data_ptr()
        with run():
            result = getattr(torch, name)(a, b, out=out)
        assert result is out and out.data_ptr() == start, name
        torch.testing.assert_close(out, expected.float(), rtol=1e-2, atol=1e-2)


@trap("S9")
def out_of_a_float32_op_is_filled_in_its_own_dtype(run):
    x = torch.rand(5) + 1
    for name in ("log", "log2"):
        out = torch.zeros(5, dtype=LOW)
        with run():
            assert getattr(torch, name)(x, out=out) is out
        same(out, getattr(torch, name)(x).to(LOW))


@trap("U7")
def assigning_a_gradient_and_data_keeps_the_dtype(run):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 1.5)
    with run():
        p.data = p.data * 0.5
    same(p.data, torch.full((3,), 0.5))


@trap("U7", naive_raises=RuntimeError)
def assigning_a_scaled_gradient_is_accepted(run):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 1.5)
    with run():
        p.grad = p.grad * 0.5
    same(p.grad, torch.full((3,), 0.75))


@trap("U8")
def rebinding_a_registered_buffer_keeps_its_dtype(run):
    class Average(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x):
            self.mean = self.mean * 0.5 + 0.5 * x
            return self.mean

    average = Average()
    with run():
        average(torch.ones(2))
    same(average.mean, torch.full((2,), 0.5))
    assert average.state_dict()["mean"].dtype == torch.float32


test_trap_is_avoided, test_trap_catches_the_naive_caster = trap.tests()
