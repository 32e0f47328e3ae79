"""Several uses of one cast, which share its memory but each have a gradient of their own."""

from __future__ import annotations

from ..casting import Tensor
from ..torch_private import unsafe_view as _unsafe_view

_view_as = Tensor.view_as  # torch's own, taken before anything is patched

# Bytes of a tensor from which sharing a cast (measured: 4 microseconds a use) is quicker than casting. Not numel(), an op in a trace.
WORTH_SHARING = 32768


def shared(source: Tensor, copy: Tensor) -> Tensor:
    """`copy`, a cast of `source` made before, as a new node of the graph: its gradient flows to `source`, in the dtype of `source`.

    The node is that of a view of `source` whose memory is then exchanged for the copy's. Autograd itself casts the gradient, because the
    node was made for the dtype of `source`; a Python autograd.Function that does so takes twice as long.
    """
    use: Tensor = _unsafe_view(source, source.shape)  # unlike view() it shares no version counter with `source`
    use.data = copy
    return _view_as(use, use)  # whose node sums the gradients of one use in the copy's dtype, as a cast does: a recurrent op makes many
