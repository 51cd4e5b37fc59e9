"""`compute_loss` of every head against transformers' loss and torch's, in values and gradients."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import transformers

import easytorch
from easytorch import protocol
from easytorch.layers import deferred_head
from easytorch.layers.causal_loss import causal_lm_loss
from easytorch.layers.token_loss import HeadProduct, TokenLossOptions, token_losses
from easytorch.protocol import LossConfig, MaskInfo, compute_loss

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
VIT = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
OPT = {"vocab_size": 97, "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "gemma2": transformers.Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.5),
    "granite": transformers.GraniteConfig(**SIZES, logits_scaling=3.0),
    "mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True),
    "mpt": transformers.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=97),  # not native
    "bert": transformers.BertConfig(**SIZES),
    "t5": transformers.T5Config(**T5, decoder_start_token_id=0),
    "vit": transformers.ViTConfig(**VIT, num_attention_heads=4, num_labels=3),
}
HEADS = {
    "llama": "CausalLM",
    "gemma2": "CausalLM",
    "granite": "CausalLM",
    "mixtral": "CausalLM",
    "mpt": "CausalLM",
    "bert": "MaskedLM",
    "t5": "Seq2SeqLM",
}
IDS = torch.tensor([[5, 9, 33, 71, 8, 2], [4, 4, 90, 12, 60, 3]])
LABELS = IDS.masked_fill(IDS < 5, -100)


def model_of(name: str, head: str | None = None, **settings):
    return made(name, head) if not settings else made.__wrapped__(name, head, **settings)


@functools.cache
def made(name: str, head: str | None, **settings):
    config = copy.deepcopy(CONFIGS[name])
    for key, value in settings.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return getattr(easytorch, f"AutoModelFor{head or HEADS[name]}").from_config(config).eval()


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_same(model, loss, expected):
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    found, right = gradients(model, loss), gradients(model, expected)
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("settings", [{}, {"chunk_token_size": 3}, {"chunk_vocab_size": 20}], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_language_models_lose_what_transformers_says(name, settings, monkeypatch):
    model = model_of(name)
    called = []
    inner = deferred_head.finished
    monkeypatch.setattr(deferred_head, "finished", lambda *args: called.append(1) or inner(*args))
    output, metrics = compute_loss(model, input_ids=IDS, labels=LABELS, loss_config=LossConfig(**settings))
    assert bool(called) == bool(settings), "the logits are formed only where they are few"
    expected = model(input_ids=IDS, labels=LABELS)
    assert_same(model, metrics.loss, expected.loss)
    assert output.loss is metrics.loss
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-6)
    assert (metrics.aux_loss is None) == (name != "mixtral")
    shifted = F.pad(LABELS, (0, 1), value=-100)[:, 1:] if HEADS[name] == "CausalLM" else LABELS
    counted = shifted != -100
    assert float(metrics.weight_sum) == counted.sum()
    assert float(metrics.accuracy) == pytest.approx(
        float((expected.logits.argmax(-1) == shifted)[counted].float().mean())
    )


def by_hand(logits, labels, config: LossConfig) -> torch.Tensor:
    """The documented formula, in float64."""
    z, flat = logits.double().flatten(0, -2), labels.flatten()
    weights = None if config.class_weights is None else config.class_weights.double()
    losses = F.cross_entropy(
        z,
        flat,
        weight=weights,
        label_smoothing=config.label_smoothing,
        ignore_index=config.ignore_index,
        reduction="none",
    )
    counted = flat != config.ignore_index
    each = counted.double() if weights is None else counted * weights[torch.where(counted, flat, 0)]
    losses = losses + config.z_loss * z.logsumexp(-1).square() * each
    factor = config.loss_normalizing_factor
    again = each.sum() if config.divide_weight_sum else 1
    if config.reduction == "none":
        return losses.view(labels.shape) / again
    if factor == "AVERAGE_PER_SEQUENCE":
        return (losses.view(labels.shape).sum(1) / each.view(labels.shape).sum(1)).mean() / again
    divisors = {None: each.sum(), "NUM_REAL_TARGET_TOKENS": each.sum(), "NUM_TOTAL_TARGET_TOKENS": flat.numel()}
    divisors["NO_WEIGHT_NUM_REAL_TARGET_TOKENS"] = counted.sum()
    divisor = divisors.get(factor, factor)
    if config.num_items_in_batch is not None or config.reduction == "sum":
        divisor = config.num_items_in_batch or 1
    return losses.sum() / divisor / again


WEIGHTS = torch.linspace(2, 0, 97)  # that of class 0 counts, should an ignored label be taken for it
SETTINGS = [
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"weight": WEIGHTS},
    {"class_weights": WEIGHTS, "label_smoothing": 0.2, "z_loss": 0.01},
    {"class_weights": WEIGHTS, "z_loss": 0.01, "divide_weight_sum": True},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "z_loss": 0.1},
    {"reduction": "none", "z_loss": 0.1, "divide_weight_sum": True},
    {"reduction": "mean", "class_weights": WEIGHTS},
    {"num_items_in_batch": 13},
    {"loss_normalizing_factor": 7.0},
    {"loss_normalizing_factor": "AVERAGE_PER_SEQUENCE", "class_weights": WEIGHTS},
    {"loss_normalizing_factor": "AVERAGE_PER_SEQUENCE", "weight": WEIGHTS, "z_loss": 0.1, "divide_weight_sum": True},
    {"loss_normalizing_factor": "NUM_TOTAL_TARGET_TOKENS"},
    {"loss_normalizing_factor": "NO_WEIGHT_NUM_REAL_TARGET_TOKENS", "class_weights": WEIGHTS},
    {"ignore_index": 9},
    {"shift_tokens": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: "-".join(one))
@pytest.mark.parametrize(("name", "chunked"), [("llama", False), ("t5", True), ("gemma2", True)])
def test_settings_against_torch(name, settings, chunked):
    model, config = model_of(name), LossConfig(**settings)
    labels = IDS if "ignore_index" in settings else LABELS
    chunks = {"chunk_token_size": 5} if chunked else {}
    _, metrics = compute_loss(model, input_ids=IDS, labels=labels, loss_config=config, loss_kwargs=chunks)
    if name == "t5":
        filled = labels.masked_fill(labels == config.ignore_index, -100)
        decoder_ids = model.prepare_decoder_input_ids_from_labels(filled)
        logits = model(input_ids=IDS, decoder_input_ids=decoder_ids).logits
    else:
        logits = model(input_ids=IDS).logits
        if config.shift_tokens:
            labels = F.pad(labels, (0, 1), value=config.ignore_index)[:, 1:]
    expected = by_hand(logits, labels, config).float()
    assert_same(model, metrics.loss.sum(), expected.sum())
    torch.testing.assert_close(metrics.loss, expected, rtol=1e-5, atol=1e-6)
    if config.z_loss and name == "llama":
        kwargs = {"z_loss": 0.0, "shift_labels": labels}
        _, without = compute_loss(model, input_ids=IDS, loss_config=config, loss_kwargs=kwargs)
        part = (metrics.loss - without.loss).detach().sum()
        torch.testing.assert_close(metrics.z_loss, part, rtol=1e-3, atol=1e-5)


def test_sequences_without_labels_are_no_part_of_the_average():
    model, labels = model_of("llama"), LABELS.clone()
    labels[1] = -100
    settings = {"loss_normalizing_factor": "AVERAGE_PER_SEQUENCE"}
    found, alone = (
        compute_loss(model, input_ids=ids, labels=given, loss_config=LossConfig(**settings))[1].loss
        for ids, given in ((IDS, labels), (IDS[:1], labels[:1]))
    )
    assert_same(model, found, alone)


@pytest.mark.parametrize(
    "settings", [{}, {"class_weights": WEIGHTS}, {"class_weights": WEIGHTS, "label_smoothing": 0.1}]
)
def test_a_product_is_the_logits_it_would_make(settings):
    """With a bias, a factor and a cap together, which no family here has."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((7, 32), (97, 32), (97,)))
    labels = torch.tensor([5, -100, 96, 0, 33, 12, -100])
    options = TokenLossOptions(**settings, chunk_size=3)
    for factor in (1.0, 0.3):
        for cap in (None, 4.0):
            product = HeadProduct(hidden, weight, bias, factor, cap)
            logits = factor * (hidden @ weight.T + bias)
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            found, expected = (token_losses(one, labels, options) for one in (product, logits))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_labels_of_a_causal_model_are_its_tokens():
    model, mask = model_of("llama"), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    expected = model(input_ids=IDS, attention_mask=mask, labels=IDS.masked_fill(mask == 0, -100)).loss
    assert_same(model, model.compute_loss(IDS, attention_mask=mask)[1].loss, expected)


@pytest.mark.parametrize(
    ("name", "as_object"),
    [*((name, one) for name in ("llama", "mistral", "bert", "mamba2") for one in (False, True)),
     ("opt", False), ("biogpt", False), ("roberta", False)],
)  # fmt: skip
def test_packed_sequences_are_apart(name, as_object):
    more = {
        "mistral": transformers.MistralConfig(**GROUPED, sliding_window=2),
        "opt": transformers.OPTConfig(**OPT, ffn_dim=48, max_position_embeddings=16),
        "biogpt": transformers.BioGptConfig(**SIZES),  # not native; its masks are not told the positions
        "roberta": transformers.RobertaConfig(**SIZES, is_decoder=True),  # counts from its padding index
        "mamba2": transformers.Mamba2Config(
            vocab_size=97, hidden_size=32, state_size=8, num_hidden_layers=1, num_heads=8, head_dim=8, n_groups=1
        ),
    }
    torch.manual_seed(0)
    auto = getattr(easytorch, f"AutoModelFor{HEADS.get(name, 'CausalLM')}")
    model = auto.from_config(copy.deepcopy((CONFIGS | more)[name])).eval()
    segments = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 5, 5, -1, -1]])
    given = {"mask_info": MaskInfo.from_segments(segments)} if as_object else {"segment_ids": segments}
    _, metrics = compute_loss(model, input_ids=IDS, labels=IDS, loss_kwargs={"reduction": "sum"}, **given)
    parts = [IDS[:1, :3], IDS[:1, 3:], IDS[1:, :2], IDS[1:, 2:4]]
    losses = [compute_loss(model, input_ids=one, labels=one, loss_kwargs={"reduction": "sum"})[1].loss for one in parts]
    assert_same(model, metrics.loss, sum(losses))


@pytest.mark.parametrize("name", ["codegen", "openai-gpt"])
def test_a_class_that_does_not_keep_them_apart_is_refused(name):
    if name == "codegen" and hasattr(transformers.models.codegen.modeling_codegen, "ALL_ATTENTION_FUNCTIONS"):
        name = "openai-gpt"  # CodeGen was written anew in transformers 5.24, and keeps them apart
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4}
    more = {"rotary_dim": 4} if name == "codegen" else {}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **sizes, **more))
    model.train()
    with pytest.raises(ValueError, match=r"does not keep packed|cannot be told which tokens"):
        compute_loss(model, input_ids=IDS, segment_ids=torch.zeros_like(IDS))
    assert all(module.training for module in model.modules())


def test_classes():
    torch.manual_seed(0)
    pixels = torch.randn(4, 3, 8, 8)
    model = model_of("vit", "ImageClassification")
    for labels, problem in (
        (torch.tensor([0, 2, 1, 0]), "single_label_classification"),
        (torch.rand(4, 3).round(), "multi_label_classification"),
        (torch.rand(4, 3), "regression"),
    ):
        config = LossConfig(classification_problem_type=problem, num_classification_labels=3)
        _, metrics = compute_loss(model, pixel_values=pixels, labels=labels, loss_config=config)
        model.config.problem_type = problem
        assert_same(model, metrics.loss, model(pixel_values=pixels, labels=labels).loss)
        model.config.problem_type = None
        logits = model(pixel_values=pixels).logits
        if problem == "single_label_classification":
            each = F.cross_entropy(logits, labels, reduction="none")
        elif problem == "regression":
            each = F.mse_loss(logits, labels, reduction="none")
        else:
            each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        for settings, expected in (
            ({"reduction": "none"}, each), ({"reduction": "sum"}, each.sum()), ({"reduction": "mean"}, each.mean()),
            ({"num_items_in_batch": 7}, each.sum() / 7), ({"num_items_in_batch": torch.tensor(5)}, each.sum() / 5),
        ):  # fmt: skip
            config = LossConfig(classification_problem_type=problem, **settings)
            _, metrics = compute_loss(model, pixel_values=pixels, labels=labels, loss_config=config)
            torch.testing.assert_close(metrics.loss, expected, rtol=1e-5, atol=1e-6)
    weights = torch.tensor([1.0, 2.0, 0.5])
    labels = torch.tensor([0, 2, 1, 0])
    _, metrics = compute_loss(
        model, pixel_values=pixels, labels=labels, loss_config=LossConfig(weight=weights, label_smoothing=0.1)
    )
    expected = F.cross_entropy(model(pixel_values=pixels).logits, labels, weight=weights, label_smoothing=0.1)
    assert_same(model, metrics.loss, expected)
    assert model.config.problem_type is None, "the labels of one call say nothing of the next"


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize(
    "head", ["TokenClassification", "QuestionAnswering", "SequenceClassification", "MultipleChoice"]
)
def test_other_heads(name, head):
    if (name, head) == ("llama", "MultipleChoice"):
        pytest.skip("transformers has none")
    model = model_of(name, head, num_labels=2, pad_token_id=0)
    labels = {"labels": torch.tensor([1, 0])}
    ids = IDS
    if head == "TokenClassification":
        labels = {"labels": (IDS % 2).masked_fill(IDS < 5, -100)}
    elif head == "QuestionAnswering":
        labels = {"start_positions": torch.tensor([1, 9]), "end_positions": torch.tensor([3, 4])}
    elif head == "MultipleChoice":
        ids = torch.stack([IDS, IDS.flip(-1)], 1)
    _, metrics = compute_loss(model, input_ids=ids, **labels)
    assert_same(model, metrics.loss, model(input_ids=ids, **labels).loss)
    assert metrics.accuracy is not None


def test_experts():
    model = model_of("mixtral", output_router_logits=False)
    _, plain = compute_loss(model, input_ids=IDS)
    output, metrics = compute_loss(model, input_ids=IDS, loss_config=LossConfig(router_aux_loss_coef=0.5))
    expected = model(input_ids=IDS, labels=IDS, output_router_logits=True).aux_loss
    assert plain.aux_loss is None and type(output).__name__ == "MoeCausalLMOutputWithPast"
    torch.testing.assert_close(metrics.aux_loss, expected.detach())
    torch.testing.assert_close(metrics.loss - plain.loss, 0.5 * expected, rtol=1e-4, atol=1e-6)
    total = 0.5 * expected + model(input_ids=IDS, labels=IDS).loss
    assert_same(model, metrics.loss, total)
    output, metrics = compute_loss(model.model, input_ids=IDS, loss_config=LossConfig(router_aux_loss_coef=0.5))
    assert type(output).__name__ == "MoeModelOutputWithPast"
    torch.testing.assert_close(metrics.loss, 0.5 * expected)


def test_a_loss_of_the_users_own():
    model = model_of("llama", vocab_size=97)  # no other test's
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    _, metrics = compute_loss(model, input_ids=IDS, labels=IDS)
    assert_same(model, metrics.loss, model(input_ids=IDS).logits.square().mean())


BAD_CONFIGS = [
    {"label_smoothing": 1.5}, {"label_smoothing": True}, {"z_loss": -1.0}, {"z_loss": float("nan")},
    {"reduction": "median"}, {"reduction": "sum", "num_items_in_batch": 3}, {"chunk_token_size": 0},
    {"chunk_token_size": 2, "chunk_vocab_size": 2}, {"class_weights": [1.0, -1.0]}, {"ignore_index": 1.0},
    {"weight": [1.0], "class_weights": [1.0]}, {"problem_type": "ranking"}, {"compute_dtype": "fp8"},
    {"loss_normalizing_factor": "ALL"}, {"loss_normalizing_factor": 0}, {"num_labels": 0},
    {"loss_normalizing_factor": float("inf")}, {"loss_normalizing_factor": [3.0]}, {"num_items_in_batch": 0},
    {"num_items_in_batch": -2}, {"num_items_in_batch": "3"}, {"num_items_in_batch": torch.tensor([3, 4])},
    {"num_items_in_batch": torch.tensor(0)}, {"class_weights": "heavy"}, {"class_weights": [float("inf")]},
    {"shift_tokens": "no"}, {"break_on_nan": 1}, {"divide_weight_sum": 3},
]  # fmt: skip


@pytest.mark.parametrize("settings", BAD_CONFIGS, ids=str)
def test_bad_settings(settings):
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        LossConfig(**settings)


def test_bad_calls():
    llama, bert, vit = model_of("llama"), model_of("bert"), model_of("vit", "ImageClassification")
    pixels = torch.zeros(2, 3, 8, 8)
    tokens = {"input_ids": IDS, "labels": LABELS}
    pictures = {"pixel_values": pixels, "labels": torch.zeros(2, 3)}
    for model, error, batch, match in (
        (bert, ValueError, {"input_ids": IDS}, "needs labels"),
        (llama, TypeError, tokens | {"loss_config": {}}, "must be a LossConfig"),
        (llama, TypeError, tokens | {"loss_kwargs": [1]}, "must be a dict of settings, not list"),
        (llama, TypeError, tokens | {"labels": LABELS.tolist()}, "are a tensor, not list"),
        (llama, TypeError, tokens | {"loss_kwargs": {"smoothing": 0.1}}, "smoothing"),
        (llama, ValueError, tokens | {"loss_kwargs": {"class_weights": [1.0]}}, "1 numbers for 97 labels"),
        (llama, ValueError, tokens | {"loss_kwargs": {"router_aux_loss_coef": 0.1}}, "no routers"),
        (llama, ValueError, tokens | {"labels": LABELS[:, :4]}, "positions"),
        (llama, ValueError, tokens | {"labels": LABELS + 90}, "labels must be in"),
        (llama, ValueError, tokens | {"segment_ids": IDS[:, :2]}, "shape"),
        (llama, ValueError, tokens | {"segment_ids": torch.tensor([[0, 1, 0, 0, 0, 0]] * 2)}, "side by side"),
        (llama, TypeError, tokens | {"mask_info": IDS}, "MaskInfo"),
        (llama.model, TypeError, {"input_ids": IDS}, "no head"),
        (bert, ValueError, tokens | {"loss_kwargs": {"shift_labels": IDS}}, "shift_labels"),
        (vit, ValueError, {"pixel_values": pixels, "labels": torch.zeros(2, 2)}, "shape"),
        (vit, ValueError, pictures | {"loss_kwargs": {"z_loss": 1.0}}, "z_loss"),
        (model_of("t5"), ValueError, tokens | {"segment_ids": IDS}, "an encoder and a decoder"),
        (model_of("mpt"), ValueError, tokens | {"segment_ids": IDS}, "no position_ids"),
    ):
        with pytest.raises(error, match=match):
            compute_loss(model, **batch)
    with pytest.raises(FloatingPointError, match="nan"):
        compute_loss(llama, input_ids=IDS, labels=LABELS * 0 - 100, loss_config=LossConfig(break_on_nan=True))
    assert not any("forward" in vars(module) for module in llama.modules())


def test_a_head_that_does_something_else_with_its_logits(monkeypatch):
    model = model_of("mpt")
    inner = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: squared(inner(*args, **kwargs)))
    _, metrics = compute_loss(model, input_ids=IDS, loss_config=LossConfig(chunk_token_size=2))
    expected = F.cross_entropy(model(input_ids=IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert_same(model, metrics.loss, expected)


def squared(output):
    output.logits = output.logits.square()
    return output


def test_it_is_a_method_and_a_function():
    model = model_of("llama")
    assert torch.equal(
        model.compute_loss(IDS, LABELS)[1].loss, protocol.compute_loss(model, input_ids=IDS, labels=LABELS)[1].loss
    )


@pytest.mark.parametrize("chunked", [{}, {"chunk_token_size": 2}, {"chunk_token_size": 2, "z_loss": 0.1}], ids=str)
def test_a_batch_without_labels_has_gradients_of_zero(chunked):
    """As torch's `cross_entropy`, whose mean is NaN then; the model's own loss without logits too."""
    model = easytorch.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]))
    labels = torch.full((2, 5), -100)
    hidden = torch.ones(2, 5, 32, requires_grad=True)
    model.compute_loss(torch.ones_like(labels), labels, loss_config=LossConfig(**chunked))[1].loss.backward()
    own = causal_lm_loss(hidden, model.lm_head.weight, labels)
    own.backward()
    assert own.isnan() and not hidden.grad.any()
    assert all(not one.grad.any() for one in model.parameters())
