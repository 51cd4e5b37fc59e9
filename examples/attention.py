"""One attention: grouped heads, a sliding window, packed documents, and which implementation runs."""

import torch

from easytorch import OperationMetadata, OperationRegistry

torch.manual_seed(0)
query = torch.randn(2, 256, 8, 64, requires_grad=True)  # (B, T, H, D)
key, value = torch.randn(2, 2, 256, 2, 64).unbind(0)  # 8 heads share 2
documents = torch.repeat_interleave(torch.tensor([[0, 1], [0, 1]]), torch.tensor([100, 156]), dim=1)  # (B, T)

attention = OperationRegistry.create("attention", OperationMetadata(softmax_scale=64**-0.5))
settings = {
    "causal": True,
    "sliding_window": 64,  # the last 64 tokens, the query's own included
    "query_segment_ids": documents,
    "key_segment_ids": documents,
}
print(attention.choose(query, key, value, **settings))  # what runs, and why

output = attention(query, key, value, **settings).attention_outputs
output.square().mean().backward()

# "vanilla" is the definition that every other implementation is held to.
expected = OperationRegistry.create("vanilla")(query, key, value, **settings).attention_outputs
torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
print(tuple(output.shape), "the same as the definition")
