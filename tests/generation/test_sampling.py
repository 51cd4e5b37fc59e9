"""Sampling functions against transformers' logits processors, and the distribution of the random numbers."""

from __future__ import annotations

import pytest
import torch

from easytorch.generation.sampling import (
    Sampler,
    SamplingConfig,
    gumbel_noise,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)


@pytest.fixture
def logits():
    return 3 * torch.randn(5, 97, generator=torch.Generator().manual_seed(0))


def processors():
    from transformers.generation import logits_process

    return logits_process


def sampler(config, rows=1, eos=(), prompt=None):
    prompt = torch.zeros(rows, 1, dtype=torch.int64) if prompt is None else prompt
    return Sampler(config, prompt, torch.ones_like(prompt), list(eos), 0, torch.device("cpu"))


@pytest.mark.parametrize("top_k", [1, 2, 50, 97, 1000])
def test_top_k_equals_transformers(logits, top_k):
    assert torch.equal(keep_top_k(logits, top_k), processors().TopKLogitsWarper(top_k)(None, logits))


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_equals_transformers(logits, top_p):
    kept = keep_top_p(logits, top_p)
    assert torch.equal(kept, processors().TopPLogitsWarper(top_p)(None, logits))
    assert kept.isfinite().any(dim=-1).all()


def test_top_p_keeps_the_smallest_sufficient_set():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert keep_top_p(logits, 0.6).isfinite().tolist() == [[True, True, False, False]]
    for top_p in (1e-9, 1e-30):  # less than what a float32 sum of probabilities resolves
        assert keep_top_p(logits, top_p).isfinite().tolist() == [[True, False, False, False]]
        uniform = keep_top_p(torch.zeros(3, 1000), top_p)
        assert uniform.isfinite().sum(-1).tolist() == [1, 1, 1]


def test_padding_has_not_occurred():
    """A token that stands in the prompt as padding alone is not penalized."""
    prompt, mask = torch.tensor([[3, 3, 5], [7, 8, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    config = SamplingConfig(repetition_penalty=10.0)
    logits = torch.full((2, 9), -1.0)
    logits[:, 3], logits[:, 4], logits[:, 5] = 2.0, 1.0, 3.0
    made = Sampler(config, prompt, mask, [], 0, torch.device("cpu"))
    assert made(logits).tolist() == [3, 5]
    assert made(logits).tolist() == [4, 4], "3 and 5 have occurred now"


def test_repetition_penalty_equals_transformers(logits):
    tokens = torch.tensor([[1, 5, 5], [0, 2, 96], [7, 7, 7], [3, 4, 5], [9, 8, 7]])
    seen = torch.zeros(5, 97, dtype=torch.bool).scatter(1, tokens, True)
    expected = processors().RepetitionPenaltyLogitsProcessor(1.7)(tokens, logits)
    torch.testing.assert_close(penalize_repetition(logits, seen, 1.7), expected)


def test_whole_chain_keeps_the_tokens_transformers_keeps(logits):
    prompt = torch.arange(15).reshape(5, 3)
    chain = processors().LogitsProcessorList(
        [
            processors().RepetitionPenaltyLogitsProcessor(1.3),
            processors().TemperatureLogitsWarper(2.5),
            processors().TopKLogitsWarper(9),
            processors().TopPLogitsWarper(0.8),
        ]
    )
    allowed = chain(prompt, logits).isfinite()
    settings = {"temperature": 2.5, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.3}
    drawn = torch.zeros_like(allowed)
    for seed in range(200):
        tokens = sampler(SamplingConfig(seed=seed, **settings), prompt=prompt)(logits)
        drawn |= torch.nn.functional.one_hot(tokens, 97).bool()
    assert not (drawn & ~allowed).any()
    assert drawn.sum() > 2 * len(drawn), "sampling gives more than the most probable token"


def test_draws_follow_the_probabilities():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 20_000
    noise = gumbel_noise(torch.tensor(3), torch.tensor(7), (rows, 4))
    counts = torch.bincount((probabilities.log() + noise).argmax(-1), minlength=4)
    # chi-square with 3 degrees of freedom: 16.3 is passed once in a thousand
    assert ((counts - rows * probabilities).square() / (rows * probabilities)).sum() < 16.3


def test_noise_is_finite_and_differs_by_seed_step_row_and_token():
    noise = gumbel_noise(torch.tensor(0), torch.tensor(0), (300, 5000))
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.01  # Euler's constant
    for seed, step in [(1, 0), (0, 1), (2**31 - 1, 0)]:
        other = gumbel_noise(torch.tensor(seed), torch.tensor(step), (300, 5000))
        assert abs(torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]) < 0.01
    assert abs(torch.corrcoef(noise[:2])[0, 1]) < 0.05


def test_one_seed_one_sequence_whatever_stands_beside():
    logits = torch.zeros(3, 50)
    config = SamplingConfig(temperature=1.0, seed=11)
    alone, among = sampler(config), sampler(config, rows=3)
    first = [(alone(logits[:1]), among(logits)) for _ in range(5)]
    assert all(torch.equal(a, b[:1]) for a, b in first)
    assert len({int(a) for a, _ in first}) > 1


def test_no_seed_draws_one_from_the_default_generator():
    def draw():
        return sampler(SamplingConfig(temperature=1.0), rows=8)(torch.zeros(8, 1000)).tolist()

    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    assert draw() == first != second


def test_ended_rows_give_padding():
    pick = sampler(SamplingConfig(), rows=2, eos=(3, 4))
    logits = torch.eye(6)
    assert pick(logits[[4, 1]]).tolist() == [4, 1]
    assert pick(logits[[2, 3]]).tolist() == [0, 3]
    assert pick(logits[[2, 2]]).tolist() == [0, 0]
    assert pick.finished.all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_impossible_settings(setting, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**setting)
