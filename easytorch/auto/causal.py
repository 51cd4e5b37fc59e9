"""Whether a causal language model predicts each token from those before it alone, which a config does not say."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from easytorch.auto.failures import FAILURES
from easytorch.auto.tiny import ATTEMPTS, shrunken

MOST_WEIGHTS = 8_000_000


def sees_future(model: Any) -> bool:
    """Whether the prediction after a token changes with the tokens that follow. The model is run, and left in eval
    mode; what it raises is passed on."""
    tokens = torch.tensor([[0, 1], [0, 2]], dtype=torch.int64, device=model.device)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens, labels=tokens, use_cache=False).logits
    first = logits[:, 0].float()
    return not torch.allclose(first[0], first[1], rtol=1e-3, atol=1e-4 * float(first.abs().max()))


def refusal(config: Any) -> str | None:
    """Why models of a transformers config cannot be trained to predict the next token; None where they can, and where
    no small model of the config (`shrunken`) runs, of which only the model itself can tell."""
    from transformers import AutoModelForCausalLM

    from easytorch.auto import AutoModelForCausalLM as Native

    # transformers' own class needs no kernel that is compiled at first use
    stock = type(config) in AutoModelForCausalLM._model_mapping
    auto: Any = AutoModelForCausalLM if stock else Native
    random = torch.random.get_rng_state()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # BERT says what is found here
    try:
        for attempt, (_, _, fewer_layers, _) in enumerate(ATTEMPTS):
            if not fewer_layers:
                continue
            try:
                small = shrunken(config, attempt)
                with torch.device("meta"):
                    outline = auto.from_config(copy.deepcopy(small))
                if sum(one.numel() for one in outline.parameters()) > MOST_WEIGHTS:
                    continue
                model = auto.from_config(small, dtype=torch.float32)
                return why_future(model) if sees_future(model) else None
            except FAILURES:
                continue
    finally:
        logging.disable(before)
        torch.random.set_rng_state(random)
    return None


def why_future(model: Any) -> str:
    """What is said of a model that `sees_future`."""
    return (
        f"{type(model).__name__} sees the tokens that it is to predict; give a causal model, or "
        f'"is_decoder": true where the architecture has it'
    )
