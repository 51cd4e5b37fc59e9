"""A small model with a tokenizer and a chat template, and a server of it."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
import transformers

import easytorch
from easytorch.generation.engine import Engine
from easytorch.serving.run import make_server
from easytorch.training.tokenizer import train_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    made = train_tokenizer(["the class statement binds a name to an object"] * 5, 300)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def model(tokenizer):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.5, bos_token_id=0, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    return easytorch.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def make_engine(model, tokenizer):
    return lambda **settings: Engine(model, tokenizer, **{"max_memory": 1 << 21} | settings)


@contextlib.contextmanager
def serving(app):
    """The address of `app` and its server, which runs in a thread on a free port."""
    server = make_server(app, "127.0.0.1", 0, drain_timeout=300)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "uvicorn ended before it began"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join()
