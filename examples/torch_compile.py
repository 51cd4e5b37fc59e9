"""`torch.compile(backend="easytorch")`: a module trained on XLA (PJRT) with whatever torch is installed.

The backend is XLA where jaxlib is installed; `options={"backend": "torch"}` takes another.
"""

import importlib.util

import torch

import easytorch.frontend  # noqa: F401 - names the backend, where EasyTorch is not installed

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
backend = "xla" if importlib.util.find_spec("jaxlib") else "torch"
compiled = torch.compile(module, backend="easytorch", options={"backend": backend})

inputs = torch.randn(64, 8)
targets = inputs.sum(dim=1, keepdim=True)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
losses = []
for _ in range(30):
    loss = torch.nn.functional.mse_loss(compiled(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
print(f"on {backend}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < losses[0] / 2
torch.testing.assert_close(compiled(inputs), module(inputs), rtol=1e-4, atol=1e-5)
