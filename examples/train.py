"""A language model trained on a text file, and text from it; `easytorch train` takes the same settings as flags."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

import easytorch
from easytorch.training import TrainingConfig, train

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "corpus.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    result = train(
        TrainingConfig(
            text=(str(folder / "corpus.txt"),),
            output=str(folder / "run"),
            model={"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                   "num_attention_heads": 4, "num_key_value_heads": 2},
            vocab_size=300, block_size=32, batch_size=8, steps=40, learning_rate=1e-2, warmup_steps=4, device="cpu",
        )
    )  # fmt: skip

    # What it leaves is a folder as transformers writes it.
    model = easytorch.AutoModelForCausalLM.from_pretrained(result.checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    prompt = tokenizer("The quick", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    print(tokenizer.decode(tokens[0]))
