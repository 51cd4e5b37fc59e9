"""torch to Flax and back, bit for bit; as a command: `easytorch convert SOURCE DESTINATION --to flax`."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from easytorch import bridge

torch.manual_seed(0)
model = BertModel(
    BertConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
)

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    model.save_pretrained(folder / "torch")
    bridge.convert(folder / "torch", folder / "flax", to="flax")
    for tensor in list(bridge.inspect(folder / "flax").tensors)[:3]:
        print(tensor.name, tensor.shape, tensor.dtype)

    bridge.convert(folder / "flax", folder / "back", to="torch")
    before, after = (load_file(folder / where / "model.safetensors") for where in ("torch", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    print(f"{len(before)} tensors came back with the same bits")
