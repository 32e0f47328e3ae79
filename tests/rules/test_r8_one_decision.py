"""R8: one op, one decision. What torch's own code calls inside an op is not decided again; structure is user code."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmp
from oracle import BF16, F32, assert_same, by_explicit_casts, outcome
from strategies import Leaf, build
from trap_kit import policy

# What torch's Python code calls inside other functions (torch-surface.md, "Nesting").
INNER = frozenset(
    """mul truediv div add sub rsub pow log exp sqrt rsqrt sum mean abs sign neg reciprocal matmul mm bmm addmm baddbmm linear
    softmax log_softmax relu clamp clamp_min clamp_max norm linalg.vector_norm
    avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d dropout dot
    cat stack maximum where sigmoid tanh square expand_as unsqueeze sort cumsum layer_norm batch_norm floor_divide
    linalg.svd linalg.qr max argmax gather threshold mse_loss pairwise_distance log_sigmoid""".split()
)


def inner_in_bf16(*but: str) -> hmp.Policy:
    return policy(bf16=INNER - set(but))


def x(*shape: int, values: str = "normal") -> Leaf:
    return Leaf(shape, F32, values=values, seed=sum(shape))


# Public functions of torch.nn.functional with Python bodies; none is on a list here.
COMPOSITES = {
    "gaussian_nll_loss": (lambda a, b, c: F.gaussian_nll_loss(a, b, c, full=True), [x(3), x(3), x(3, values="positive")]),
    "kl_div": (lambda a, b: F.kl_div(a, b, reduction="batchmean"), [x(2, 3), x(2, 3, values="probability")]),
    "multilabel_soft_margin_loss": (lambda a, b: F.multilabel_soft_margin_loss(a, b), [x(2, 3), x(2, 3, values="probability")]),
    "triplet_margin_with_distance_loss": (lambda a, b, c: F.triplet_margin_with_distance_loss(a, b, c), [x(2, 3), x(2, 3), x(2, 3)]),
    "local_response_norm": (lambda a: F.local_response_norm(a, 2), [x(1, 4, 3, 3)]),
    "lp_pool1d": (lambda a: F.lp_pool1d(a, 2.0, 2), [x(1, 2, 6, values="positive")]),
    "normalize": (lambda a: F.normalize(a, dim=-1), [x(2, 3)]),
    "tanhshrink": (lambda a: F.tanhshrink(a), [x(3)]),
    "softmin": (lambda a: F.softmin(a, 0), [x(3)]),
    "gumbel_softmax": (lambda a: F.gumbel_softmax(a, hard=True), [x(2, 3)]),
    "mse_loss(weight)": (lambda a, b, c: F.mse_loss(a, b, weight=c), [x(3), x(3), x(3, values="positive")]),
    "smooth_l1_loss": (lambda a, b: F.smooth_l1_loss(a, b), [x(3), x(3)]),
    "cosine_embedding_loss": (lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(2)), [x(2, 3), x(2, 3)]),
    "cross_entropy": (lambda a, b: F.cross_entropy(a, b), [x(2, 3), x(2, 3, values="probability")]),
    "bilinear": (lambda a, b, c: F.bilinear(a, b, c), [x(2, 3), x(2, 4), x(5, 3, 4)]),
    "rms_norm": (lambda a: F.rms_norm(a, (3,)), [x(2, 3)]),
    "scaled_dot_product_attention": (lambda a: F.scaled_dot_product_attention(a, a, a), [x(1, 2, 3, 4)]),
    "torch.norm": (lambda a: torch.norm(a, p=3), [x(2, 3)]),
    "torch.svd_lowrank": (lambda a: torch.svd_lowrank(a, 2)[1], [x(4, 3)]),
    "torch.einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), [x(4, 3), x(3, 2)]),
    "x ** y reversed": (lambda a: 2.0**a, [x(3)]),
    "2.0 / x": (lambda a: 2.0 / a, [x(3)]),
}
# what names the outer op itself, by its own name or a synonym's
OWN = {
    "smooth_l1_loss": ("smooth_l1_loss",), "cross_entropy": ("cross_entropy",), "torch.norm": ("norm",),
    "mse_loss(weight)": ("mse_loss",), "2.0 / x": ("truediv", "div"), "x ** y reversed": ("pow",),
}  # fmt: skip


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.get_default_device], ids=["no mode", "a mode"])
def test_r8_an_unlisted_function_is_one_op_whatever_it_calls_inside(mode: Any) -> None:
    """gaussian_nll_loss or lp_pool would otherwise come back in bf16 (trap G3)."""
    expected = {name: outcome(call, build(tree)) for name, (call, tree) in COMPOSITES.items()}
    own = {op for ops in OWN.values() for op in ops}
    for names, lists in ((COMPOSITES.keys() - OWN, inner_in_bf16()), (OWN.keys(), inner_in_bf16(*own))):
        with hmp.casts(lists), mode():
            assert torch.mul(torch.ones(2), 2.0).dtype is BF16  # the policy is on
            got = {name: outcome(COMPOSITES[name][0], build(COMPOSITES[name][1])) for name in names}
        for name, each in got.items():
            assert expected[name].error is None, expected[name].message
            assert_same(each, expected[name])
    with hmp.casts(hmp.Policy(bf16={"sub"})), mode():
        assert F.tanhshrink(torch.ones(2)).dtype is F32  # whose code has an operator, and no name of an op on the list


@pytest.mark.parametrize(("rule", "start", "end"), [("fp32", BF16, F32), ("bf16", F32, BF16)])
def test_r8_a_listed_function_is_one_op_whatever_it_calls_inside(rule: str, start: torch.dtype, end: torch.dtype) -> None:
    """torch computes `2.0 / x` as reciprocal and mul, which may be on the other list (trap G2)."""
    inner = {"bf16": "fp32", "fp32": "bf16"}[rule]
    listed = {"gaussian_nll_loss", "normalize", "lp_pool1d", "kl_div", "truediv"}
    calls = {name: COMPOSITES["2.0 / x" if name == "truediv" else name] for name in listed}
    trees = {name: [Leaf(leaf.shape, start, values=leaf.values, seed=leaf.seed) for leaf in tree] for name, (_, tree) in calls.items()}
    expected = {name: by_explicit_casts(calls[name][0], build(tree), {}, end) for name, tree in trees.items()}
    with hmp.casts(policy(**{rule: listed, inner: INNER - {"truediv", "div"}})):
        got = {name: outcome(calls[name][0], build(tree)) for name, tree in trees.items()}
    for name in listed:
        assert got[name].results[0].dtype is end
        assert_same(got[name], expected[name])


def casts_in_graph(result: torch.Tensor) -> int:
    """How many casts stand between a result and its leaves."""
    seen, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return sum("ToCopy" in node.name() for node in seen)


LAYERED = {
    "softmax": (lambda a: F.softmax(a, 0), F32),
    "Softmax": (lambda a: torch.nn.Softmax(0)(a), F32),
    "cross_entropy": (lambda a: F.cross_entropy(a[None], torch.tensor([1]), label_smoothing=0.1), F32),
    "bce": (lambda a: F.binary_cross_entropy_with_logits(a, torch.ones(3, dtype=a.dtype)), F32),
    "dropout": (lambda a: F.dropout(a, 0.5), BF16),
    "layer_norm": (lambda a: F.layer_norm(a, (3,)), BF16),
    "relu": (lambda a: F.relu(a), BF16),
    "gelu": (lambda a: F.gelu(a), None),
    "softmin": (lambda a: F.softmin(a, 0), None),
    "normalize": (lambda a: F.normalize(a, dim=0), None),
}


def test_r8_the_two_layers_of_one_op_are_decided_once() -> None:
    """F.x is a Python function that calls torch.x or Tensor.x: no second cast in the graph."""
    leaves = {(name, dtype): Leaf((3,), dtype, seed=1) for name in LAYERED for dtype in (F32, BF16)}
    want = {}
    for (name, dtype), leaf in leaves.items():
        call, to = LAYERED[name]
        want[name, dtype] = casts_in_graph(call(leaf.build() if to is None else leaf.build().to(to)))
    with hmp.casts("habana"):
        assert {(name, dtype): casts_in_graph(LAYERED[name][0](leaf.build())) for (name, dtype), leaf in leaves.items()} == want


MASKS = {
    "no mask": {"need_weights": True},
    "float mask": {"attn_mask": torch.randn(5, 5), "need_weights": True},
    "bool mask": {"attn_mask": torch.eye(5, dtype=torch.bool), "need_weights": False},
    "padding": {"key_padding_mask": torch.tensor([[False, False, False, True, True], [False] * 5])},
}


@pytest.mark.parametrize("preset", ["habana", "bert"])
def test_r8_attention_has_the_same_precision_in_eval_as_in_training(preset: str) -> None:
    """The eval fast path computes in float32 inside one C call (trap R4); float masks raise in a naive caster (R3)."""
    module, a = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    plain = {mask: module(a, a, a, **options)[0] for mask, options in MASKS.items()}
    with hmp.casts(preset):
        for mask, options in MASKS.items():
            trained, weights = module.train()(a, a, a, **options)
            module.eval()
            with torch.no_grad():
                evaluated, weights_too = module(a, a, a, **options)
            with torch.inference_mode():
                inferred, _ = module(a, a, a, **options)
            assert trained.dtype is BF16  # out_proj is a linear, which both presets have on the BF16 list
            # F.multi_head_attention_forward is structure: habana has its softmax on the FP32 list
            assert weights is None or preset == "bert" or weights.dtype is F32
            assert evaluated.dtype is inferred.dtype is BF16 and torch.equal(evaluated, trained) and torch.equal(inferred, trained)
            assert (weights is None) == (weights_too is None)
            assert weights is None or torch.equal(weights, weights_too)
            torch.testing.assert_close(trained.float(), plain[mask], rtol=0.1, atol=0.05)


def encoder_layer(**options: Any) -> torch.nn.TransformerEncoderLayer:
    torch.manual_seed(3)
    return torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)


@pytest.mark.parametrize("preset", ["habana", "bert"])
def test_r8_an_encoder_layer_has_the_same_precision_in_eval_as_in_training(preset: str) -> None:
    a = torch.randn(2, 5, 8)
    for options in ({}, {"norm_first": True}, {"activation": "gelu"}, {"bias": False}):
        layer = encoder_layer(**options)
        with hmp.disable_casts():
            plain = layer(a)
        with hmp.casts(preset):
            trained = layer.train()(a)
            with torch.no_grad():
                evaluated = layer.eval()(a)
        assert evaluated.dtype is trained.dtype and torch.equal(evaluated, trained), options
        assert not torch.equal(trained.float(), plain)  # it did run in another precision
        torch.testing.assert_close(trained.float(), plain, rtol=0.1, atol=0.1)


def test_r8_an_encoder_layer_built_before_convert_has_it_too() -> None:
    """Its activation is the F.relu of then, taken as a default argument (trap R5)."""
    layer, a = encoder_layer(), torch.randn(2, 5, 8)
    hmp.convert()
    later = encoder_layer()
    assert later.activation is F.relu and later.activation_relu_or_gelu == 1
    later.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(layer.eval()(a), later.eval()(a))
    assert torch.equal(layer.train()(a), later.train()(a))
