"""softplus under torch.compile, whose backward torch traces with other strides than those it computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.recurrence.softplus import softplus


def test_a_transposed_gradient_of_a_compiled_softplus_can_be_viewed() -> None:
    """As of a decay that a delta rule reads head by head, and that a product of a view of it was made of."""
    torch.manual_seed(0)
    weight, x = torch.randn(6, 4, requires_grad=True), torch.randn(2, 5, 6)
    by_head, upstream = torch.randn(2, 4, 5), torch.randn(2, 4, 5)

    def gradient(softplus, compiled: bool) -> torch.Tensor:
        def call(x: torch.Tensor) -> torch.Tensor:
            return softplus(x @ weight).transpose(1, 2) * by_head

        torch._dynamo.reset()
        run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
        return torch.autograd.grad(run(x), weight, upstream)[0]

    expected = gradient(F.softplus, False)
    assert torch.equal(gradient(softplus, False), expected)
    torch.testing.assert_close(gradient(softplus, True), expected)
