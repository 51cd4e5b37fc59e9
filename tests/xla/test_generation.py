"""The decode loop on xla: the CPU's tokens, from as few programs as promised."""

from __future__ import annotations

import copy

import pytest
import torch

from easytorch.generation import generate_tokens


@pytest.fixture(scope="module", params=["native", "transformers"])
def models(request):
    """The same Llama on the CPU and on xla."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    if request.param == "native":
        from easytorch.models.llama import LlamaForCausalLM

        model = LlamaForCausalLM(config).eval()
    else:
        model = transformers.LlamaForCausalLM(config).eval()
    return model, copy.deepcopy(model).to("xla")


def prompt(length, rows=2):
    ids = torch.randint(2, 97, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[-1, : length // 3] = 0
    return ids, mask


def generate(model, length, new, rows=2, **settings):
    tokens = generate_tokens(model, *prompt(length, rows), max_new_tokens=new, **settings)
    return torch.stack(list(tokens), dim=1)


def test_greedy_tokens_equal_the_cpu(models):
    on_cpu, on_xla = models
    want = generate(on_cpu, 9, 30)
    assert len(want.unique()) > 5
    assert torch.equal(generate(on_xla, 9, 30), want)


def test_sampled_tokens_equal_the_cpu(models):
    """One seed, one sequence, on every device. The logits differ by rounding, which a draw very rarely turns."""
    settings = {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 4}
    want = generate(models[0], 9, 20, **settings)
    assert torch.equal(generate(models[1], 9, 20, **settings), want)


def test_programs_do_not_grow_with_tokens_or_prompts(models, count_programs):
    _, on_xla = models
    rows = 3  # a batch no other test has compiled
    assert count_programs(lambda: generate(on_xla, 16, 5, rows)) == 2, "the prompt's program and a step's"
    # five to forty tokens, and every length of prompt in the bucket: nothing new
    assert count_programs(lambda: [generate(on_xla, length, 40, rows) for length in (3, 7, 11, 16)]) == 0
    # the next bucket: its prompt, and nothing for the step on a cache of the same length
    assert count_programs(lambda: generate(on_xla, 20, 12, rows)) == 1


def test_sampling_and_ends_are_in_the_same_programs(models, count_programs):
    _, on_xla = models
    settings = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "eos_token_id": [3, 4]}
    assert count_programs(lambda: generate(on_xla, 10, 20, 4, seed=1, **settings)) <= 3
    settings |= {"temperature": 0.5, "top_p": 0.7}
    assert count_programs(lambda: generate(on_xla, 10, 30, 4, seed=2, **settings)) == 0


def test_stops_at_the_end_token(models):
    on_cpu, on_xla = models
    end = int(generate(on_cpu, 9, 8)[0, 5])
    want = generate(on_cpu, 9, 30, eos_token_id=end)
    assert torch.equal(generate(on_xla, 9, 30, eos_token_id=end), want)


def test_tokens_come_back_where_the_prompt_is(models):
    ids, mask = prompt(9)
    token = next(generate_tokens(models[1], ids.to("xla"), mask.to("xla"), max_new_tokens=2))
    assert token.device.type == "xla"
    assert torch.equal(token.cpu(), next(generate_tokens(models[1], ids, mask, max_new_tokens=2)))
