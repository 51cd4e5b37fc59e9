"""A Flax checkpoint as a torch model: `from_pretrained` finds it by itself."""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig

import easytorch
from easytorch import bridge

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
model = easytorch.AutoModelForCausalLM.from_config(config).eval()

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(Path(folder, "torch"))
    bridge.convert(Path(folder, "torch"), Path(folder, "flax"), to="flax")  # stands for a checkpoint of Flax
    print(sorted(path.name for path in Path(folder, "flax").iterdir()))
    loaded = easytorch.AutoModelForCausalLM.from_pretrained(Path(folder, "flax")).eval()

tokens = torch.arange(10)[None]
with torch.no_grad():
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
print(loaded.easytorch_report)
