"""The parameters of the builtins that models call most, so that a dispatcher can check the dtypes of exactly those that hold tensors.

An op that is not in the table, or has other parameters in this release of torch, has a dispatcher of `*args, **kwargs`.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from ..torch_private import schemas_of
from .sites import NAMESPACES, Site

Holds = Literal["tensor", "tensor?", "number", "tensors", "other", "absent"]
_MARKS: dict[str, Holds] = {"!": "tensor", "?": "tensor?", "~": "number", "*": "tensors", "-": "absent"}

# op: parameters. Suffixes: `!` a tensor, `?` a tensor or None, `~` a tensor or a number, `*` a list of tensors, `-` rarely passed; without
# one no tensor. Parameters after `|` may be omitted; those after `;` are keyword-only.
_TABLE = """
linear: input! weight! bias?=None
matmul: input! other!
mm: input! mat2! out_dtype-
bmm: input! mat2! out_dtype-
mv: input! vec!
dot: input! tensor!
addmm: input! mat1! mat2! out_dtype- _fifth- ; beta- alpha-
baddbmm: input! batch1! batch2! out_dtype- _fifth- ; beta- alpha-
addbmm: input! batch1! batch2! _fourth- _fifth- ; beta- alpha-
conv1d: input! weight! bias?=None stride=1 padding=0 dilation=1 groups=1
conv2d: input! weight! bias?=None stride=1 padding=0 dilation=1 groups=1
conv3d: input! weight! bias?=None stride=1 padding=0 dilation=1 groups=1
conv_transpose1d: input! weight! bias?=None stride=1 padding=0 output_padding=0 groups=1 dilation=1
conv_transpose2d: input! weight! bias?=None stride=1 padding=0 output_padding=0 groups=1 dilation=1
conv_transpose3d: input! weight! bias?=None stride=1 padding=0 output_padding=0 groups=1 dilation=1
rnn_tanh_cell: input! hx! w_ih! w_hh! b_ih?=None b_hh?=None
rnn_relu_cell: input! hx! w_ih! w_hh! b_ih?=None b_hh?=None
gru_cell: input! hx! w_ih! w_hh! b_ih?=None b_hh?=None
scaled_dot_product_attention: query! key! value! attn_mask?=None dropout_p=0.0 is_causal=False ; scale=None enable_gqa=False
layer_norm: input! normalized_shape weight?=None bias?=None eps=1e-05 cudnn_enable=True
group_norm: input! num_groups weight?=None bias?=None eps=1e-05 cudnn_enabled=True
batch_norm: input! weight? bias? running_mean? running_var? training momentum eps cudnn_enabled
softmax: input! dim dtype-
log_softmax: input! dim dtype-
dropout: input! p train
add: input! other~ _third- ; alpha-
sub: input! other~ _third- ; alpha-
mul: input! other~
div: input! other~ ; rounding_mode-
true_divide: input! other~
truediv: input! other~
radd: input! other~
rmul: input! other~
add_: input! other~ | ; alpha
sub_: input! other~ | ; alpha
mul_: input! other~
iadd: input! other~
isub: input! other~
imul: input! other~
setitem: input! index value
masked_fill: input! mask value~
masked_fill_: input! mask value~
cat: tensors* dim=0
stack: tensors* dim=0
gelu: input! ; approximate='none'
relu: input!
silu: input!
sigmoid: input!
tanh: input!
exp: input!
log: input!
sqrt: input!
rsqrt: input!
square: input!
abs: input!
neg: input!
sin: input!
cos: input!
erf: input!
t: input!
transpose: input! dim0 dim1
unsqueeze: input! dim
mean: input! | dim keepdim=False ; dtype-
sum: input! | dim keepdim=False ; dtype-
"""
# Names of numpy's that torch accepts for a parameter as well.
ALIASES = {"input": ("x", "a", "x1"), "other": ("x2",), "dim": ("axis",), "keepdim": ("keepdims",)}
# The rarely passed parameters for which None means the same as not passed.
_NONE_IS_NOTHING = frozenset({"out", "dtype", "out_dtype", "rounding_mode"})
_NAMESPACES = frozenset(where for where, _, prefix in NAMESPACES if not prefix)


class Parameter(NamedTuple):
    """One parameter: its name, what it holds, its default as Python source ("" for none), whether it is keyword-only, and whether a call
    may omit it."""

    name: str
    holds: Holds
    default: str = ""
    by_keyword: bool = False
    optional: bool = False


class Signature(NamedTuple):
    """The parameters of a builtin, in order. `holds` is "absent" for those that are rarely passed: `out`, numpy's names."""

    parameters: tuple[Parameter, ...]

    @property
    def usual(self) -> tuple[Parameter, ...]:
        """The parameters that usual calls pass."""
        return tuple(p for p in self.parameters if p.holds != "absent")

    @property
    def rare(self) -> tuple[Parameter, ...]:
        """The parameters that are rarely passed."""
        return tuple(p for p in self.parameters if p.holds == "absent")


def signature_of(site: Site) -> Signature | None:
    """The signature of the builtin at `site`; None where the table lacks it or this torch gives it other parameters."""
    if site.python or site.where not in _NAMESPACES:
        return None
    return _signature(site.op, site.where == "torch.Tensor", site.attribute.startswith("__"))


@functools.cache
def _signature(op: str, method: bool, dunder: bool) -> Signature | None:
    text = _texts().get(op)
    if text is None:
        return None
    found: list[Parameter] = []
    by_keyword = optional = False
    for word in text.split():
        if word == "|":
            optional = True
        elif word == ";":
            by_keyword = True
        else:
            word, _, default = word.partition("=")
            holds = _MARKS.get(word[-1], "other")
            name = word if holds == "other" else word[:-1]
            if holds == "absent" and name in _NONE_IS_NOTHING:
                default = "None"
            found.append(Parameter("self" if method and name == "input" else name, holds, default, by_keyword, optional))
    if dunder:
        return Signature(tuple(found))
    schemas = [s for s in schemas_of("aten::" + op) if any("Tensor" in str(a.type) for a in s.arguments)]
    known = {p.name for p in found} | {"out"}
    for schema in schemas:
        if not known.issuperset(found[0].name if a.name == "self" else a.name for a in schema.arguments):
            return None  # this release of torch has parameters that the table lacks
    found += [Parameter(alias, "absent", "", True) for p in tuple(found) for alias in ALIASES.get(p.name, ())]
    if not method and any(a.name == "out" for s in schemas for a in s.arguments):
        found.append(Parameter("out", "absent", "None", True))
    return Signature(tuple(found))


@functools.cache
def _texts() -> dict[str, str]:
    return {op: text for op, _, text in (line.partition(":") for line in _TABLE.strip().splitlines())}
