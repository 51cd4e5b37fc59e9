"""One family of each block on xla: a forward and a train step as on the CPU, and eight tokens from two programs.

The decoder and the encoder are in test_models.py and test_generation.py.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from easytorch.generation import generate_tokens
from easytorch.operations.dispatch.check import relative_rms_error

FORWARD, GRADIENT = 1e-5, 5e-5
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
# block -> (family, class, its config's class, sizes)
BLOCKS = {
    "experts": ("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", SIZES | {
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "moe_intermediate_size": 24,
    }),
    "latent attention": ("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", SIZES | {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "first_k_dense_replace": 2,
    }),
    "recurrent": ("mamba2", "Mamba2ForCausalLM", "Mamba2Config", {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8,
        "n_groups": 2, "chunk_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
        "initializer_range": 0.2,
    }),
    "encoder-decoder": ("t5", "T5ForConditionalGeneration", "T5Config", {
        "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }),
    "tower": ("vit", "ViTForImageClassification", "ViTConfig", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
        "patch_size": 4, "num_labels": 5, "initializer_range": 0.2,
    }),
}  # fmt: skip
GENERATE = ("experts", "latent attention", "recurrent")


@pytest.fixture(scope="module", params=BLOCKS)
def block(request):
    return request.param


@pytest.fixture(scope="module")
def models(block):
    """The same model on the CPU and on xla."""
    import transformers

    family, name, config, sizes = BLOCKS[block]
    torch.manual_seed(0)
    model_class = getattr(importlib.import_module(f"easytorch.models.{family}"), name)
    model = model_class(getattr(transformers, config)(**sizes)).eval()
    return model, copy.deepcopy(model).to("xla")


def inputs(block):
    generator = torch.Generator().manual_seed(1)
    if block == "tower":
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([1, 4])}
    ids = torch.randint(2, 97, (2, 11), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(1) if block == "encoder-decoder" else ids}


def step(model, batch):
    """Logits and loss, every gradient, and the weights after a step, on the host."""
    device = next(model.parameters()).device
    batch = {name: one.to(device) for name, one in batch.items()}
    if model.can_generate():
        batch["use_cache"] = False
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer.zero_grad()
    output = model(**batch)
    output.loss.backward()
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    optimizer.step()
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()
    weights = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
    return output.logits.detach().cpu(), output.loss.detach().cpu(), {n: g.cpu() for n, g in grads.items()}, weights


def test_eight_tokens_are_the_cpus_from_two_programs(block, models, count_programs) -> None:
    if block not in GENERATE:
        pytest.skip("no causal language model")
    on_cpu, on_xla = models
    ids = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0

    def tokens(model):
        return torch.stack(list(generate_tokens(model, ids, mask, max_new_tokens=8)), dim=1)

    want = tokens(on_cpu)
    assert len(want.unique()) > 3
    assert count_programs(lambda: torch.testing.assert_close(tokens(on_xla), want)) == 2, "the prompt's and a step's"
    assert count_programs(lambda: tokens(on_xla)) == 0


def test_a_train_step_is_the_cpus(block, models, count_programs) -> None:
    on_cpu, on_xla = models
    on_cpu, on_xla, batch = copy.deepcopy(on_cpu).train(), copy.deepcopy(on_cpu).to("xla").train(), inputs(block)
    logits, loss, grads, weights = step(on_cpu, batch)
    got_logits, got_loss, got_grads, got_weights = step(on_xla, batch)
    assert relative_rms_error(got_logits, logits) < FORWARD and relative_rms_error(got_loss, loss) < FORWARD
    assert grads.keys() == got_grads.keys() and len(grads) > 10
    for name, grad in grads.items():
        off = (got_grads[name] - grad).square().mean().sqrt() / grad.square().mean().sqrt().clamp(min=1e-3)
        assert off < GRADIENT, name
    for name, weight in weights.items():
        torch.testing.assert_close(got_weights[name], weight, rtol=1e-4, atol=1e-6)
    assert count_programs(lambda: step(on_xla, batch)) <= 1, "the second step; the third adds none"
    assert count_programs(lambda: step(on_xla, batch)) == 0
