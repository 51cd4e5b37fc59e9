"""Compares `compute_loss` with torch written by hand in float64: every setting of `LossConfig`, and every two together,
with every head, values and gradients.

    python scripts/check_losses.py [--heads causal experts ...] [--pairs 40]

What a head does not take must be refused by name. Exit status 1 where one differs.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of this checkout, installed or not

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402

import easytorch  # noqa: E402
from easytorch.protocol import LossConfig, compute_loss  # noqa: E402

SIZES = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
MOE = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 41}
VIT = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
LLAMA, BERT = transformers.LlamaConfig(**SIZES, pad_token_id=0), transformers.BertConfig(**SIZES)
# head: auto class, config, number of labels
HEADS: dict[str, tuple[str, Any, int | None]] = {
    "causal": ("CausalLM", LLAMA, None),
    "experts": ("CausalLM", transformers.Qwen3MoeConfig(**MOE, num_experts_per_tok=2), None),
    "masked": ("MaskedLM", BERT, None),
    "seq2seq": ("Seq2SeqLM", transformers.T5Config(**T5, decoder_start_token_id=0), None),
    "tokens": ("TokenClassification", BERT, 5),
    "answers": ("QuestionAnswering", BERT, 2),
    "choices": ("MultipleChoice", BERT, None),
    "classes": ("SequenceClassification", BERT, 5),
    "classes_of_a_decoder": ("SequenceClassification", LLAMA, 5),
    "number": ("SequenceClassification", BERT, 1),
    "regression": ("SequenceClassification", LLAMA, 5),
    "multi_label": ("SequenceClassification", BERT, 5),
    "images": ("ImageClassification", transformers.ViTConfig(**VIT, num_attention_heads=2), 5),
    "images_regression": ("ImageClassification", transformers.ViTConfig(**VIT, num_attention_heads=2), 5),
    "images_multi_label": ("ImageClassification", transformers.ViTConfig(**VIT, num_attention_heads=2), 5),
}
TOKENS, CLASSES = (
    ("causal", "experts", "masked", "seq2seq", "tokens"),
    ("choices", "classes", "classes_of_a_decoder", "images"),
)
FACTORS = (
    "NO_WEIGHT_NUM_REAL_TARGET_TOKENS",
    "NUM_REAL_TARGET_TOKENS",
    "NUM_TOTAL_TARGET_TOKENS",
    "AVERAGE_PER_SEQUENCE",
)
WEIGHTS = "of the number of classes"
SETTINGS: list[dict[str, Any]] = [
    {}, {"ignore_index": 3}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0}, {"z_loss": 0.02},
    {"class_weights": WEIGHTS}, {"weight": WEIGHTS}, {"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "none"},
    {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(3.5)}, {"loss_normalizing_factor": 2.5},
    *({"loss_normalizing_factor": name} for name in FACTORS), {"divide_weight_sum": True}, {"shift_tokens": False},
    {"chunk_token_size": 3}, {"chunk_vocab_size": 7}, {"chunk_block_size": 9}, {"compute_dtype": "fp32"},
    {"break_on_nan": True}, {"router_aux_loss_coef": 0.3},
]  # fmt: skip
# setting: the heads that take it
_NUMBERS = ("number", "regression", "multi_label", "images_regression", "images_multi_label")
_ALL = (*TOKENS, *CLASSES, "answers", *_NUMBERS)
TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ignore_index", "loss_normalizing_factor", "divide_weight_sum"), (*TOKENS, *CLASSES)),
    **dict.fromkeys(("label_smoothing", "z_loss"), (*TOKENS, *CLASSES, "answers")),
    **dict.fromkeys(("class_weights", "weight"), (*TOKENS, *CLASSES, "multi_label", "images_multi_label")),
    **dict.fromkeys(("chunk_token_size", "chunk_vocab_size", "chunk_block_size"), TOKENS),
    **dict.fromkeys(("shift_tokens", "compute_dtype"), TOKENS),
    **dict.fromkeys(("reduction", "num_items_in_batch", "break_on_nan"), _ALL),
    "router_aux_loss_coef": ("experts",),
}  # fmt: skip
IDS = torch.tensor([[5, 9, 33, 3, 8, 2], [4, 4, 30, 12, 40, 3]])


@functools.cache
def models(head: str) -> tuple[Any, Any]:
    """The model, and the same in float64."""
    auto, config, labels = HEADS[head]
    config = copy.deepcopy(config)
    if labels is not None:
        config.num_labels = labels
    torch.manual_seed(0)
    model = getattr(easytorch, f"AutoModelFor{auto}").from_config(config).eval()
    with torch.no_grad():  # initial weights say much the same of every class
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, copy.deepcopy(model).double()


def batch_of(head: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(inputs, labels) of a call."""
    if head.startswith("images"):
        inputs: dict[str, Any] = {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
    else:
        inputs = {"input_ids": torch.stack([IDS, IDS.flip(-1)], 1) if head == "choices" else IDS}
    rows = 3 if head.startswith("images") else 2
    if head == "answers":
        return inputs, {"start_positions": torch.tensor([1, 9]), "end_positions": torch.tensor([3, 4])}
    if head == "tokens":
        return inputs, {"labels": (IDS % 5).masked_fill(IDS == 4, -100)}
    if head in TOKENS:
        return inputs, {"labels": IDS.masked_fill(IDS == 4, -100)}
    generator = torch.Generator().manual_seed(2)
    if head == "number":
        return inputs, {"labels": torch.randn(rows, generator=generator)}
    if head.endswith("regression"):
        return inputs, {"labels": torch.randn(rows, 5, generator=generator)}
    if head.endswith("multi_label"):
        return inputs, {"labels": torch.rand(rows, 5, generator=generator).round()}
    return inputs, {"labels": torch.tensor([1, 0] if head == "choices" else [3, 1, -100][:rows])}


def of_classes(logits: Tensor, labels: Tensor, given: dict[str, Any], ignored: int = -100) -> Tensor:
    """logits (..., V), labels (...) -> the loss that `LossConfig` documents, term by term."""
    z, flat = logits.flatten(0, -2), labels.flatten()
    ignored = given.get("ignore_index", ignored)
    counted = (flat != ignored).double()
    each_class = given.get("class_weights", given.get("weight"))
    each_class = torch.ones(z.shape[-1]) if each_class is None else each_class
    each_class = each_class.double()
    index = torch.where(flat == ignored, 0, flat)
    weight = each_class[index] * counted
    logarithm = z - z.exp().sum(-1, keepdim=True).log()
    epsilon = given.get("label_smoothing", 0.0)
    hit = -logarithm.gather(-1, index[:, None])[:, 0] * weight
    spread = -(logarithm * each_class).sum(-1) * counted / z.shape[-1]
    losses = (1 - epsilon) * hit + epsilon * spread
    losses = losses + given.get("z_loss", 0.0) * z.exp().sum(-1).log() ** 2 * weight
    if given.get("reduction") == "none":
        return losses.view(labels.shape)
    factor, total = given.get("loss_normalizing_factor"), losses.sum()
    if given.get("num_items_in_batch") is not None:
        loss = total / float(given["num_items_in_batch"])
    elif given.get("reduction") == "sum":
        loss = total
    elif factor == "AVERAGE_PER_SEQUENCE":
        rows = labels.shape[0]
        sums, counts = losses.view(rows, -1).sum(1), weight.view(rows, -1).sum(1)
        return (sums[counts > 0] / counts[counts > 0]).mean()
    elif factor == "NUM_TOTAL_TARGET_TOKENS":
        loss = total / flat.numel()
    elif factor == "NO_WEIGHT_NUM_REAL_TARGET_TOKENS":
        loss = total / counted.sum()
    else:
        loss = total / (factor if isinstance(factor, float) else weight.sum())
    return loss / weight.sum() if given.get("divide_weight_sum") else loss


def of_numbers(losses: Tensor, given: dict[str, Any]) -> Tensor:
    if given.get("reduction") == "none":
        return losses
    if given.get("num_items_in_batch") is not None:
        return losses.sum() / float(given["num_items_in_batch"])
    return losses.sum() if given.get("reduction") == "sum" else losses.mean()


def balance(router_logits: tuple[Tensor, ...]) -> Tensor:
    """The load balancing loss of the Switch Transformer (arXiv:2101.03961); two experts a token."""
    shares = torch.cat(router_logits).softmax(-1)
    chosen = torch.zeros_like(shares).scatter(-1, shares.topk(2, dim=-1).indices, 1.0)
    return shares.shape[-1] * (chosen.mean(0) * shares.mean(0)).sum()


def by_hand(head: str, model: Any, given: dict[str, Any], inputs: dict[str, Any], targets: dict[str, Any]) -> Tensor:
    inputs, labels = dict(inputs), targets.get("labels")
    if head.startswith("images"):
        inputs["pixel_values"] = inputs["pixel_values"].double()
    if head == "seq2seq":
        start = torch.zeros(2, 1, dtype=torch.long)
        ignored = given.get("ignore_index", -100)
        inputs["decoder_input_ids"] = torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == ignored, 0)], 1)
    if "router_aux_loss_coef" in given:
        inputs["output_router_logits"] = True
    output = model(**inputs)
    if head == "answers":
        parts = [
            of_classes(logits, torch.where(positions < 6, positions, 6), given, 6)
            for logits, positions in (
                (output.start_logits, targets["start_positions"]),
                (output.end_logits, targets["end_positions"]),
            )
        ]
        return (parts[0] + parts[1]) / 2
    if head == "number" or head.endswith("regression"):
        return of_numbers((output.logits - labels.double().reshape(output.logits.shape)) ** 2, given)
    if head.endswith("multi_label"):
        z, hot = output.logits, labels.double()
        losses = -(hot * (1 / (1 + (-z).exp())).log() + (1 - hot) * (1 / (1 + z.exp())).log())
        weights = given.get("class_weights", given.get("weight"))
        return of_numbers(losses if weights is None else losses * weights.double(), given)
    if head in ("causal", "experts") and given.get("shift_tokens", True):
        following = torch.full_like(labels[:, :1], given.get("ignore_index", -100))
        labels = torch.cat([labels[:, 1:], following], 1)
    loss = of_classes(output.logits, labels, given)
    if "router_aux_loss_coef" in given:
        loss = loss + given["router_aux_loss_coef"] * balance(output.router_logits)
    return loss


def problem_of(head: str) -> dict[str, Any]:
    if head.endswith("regression"):
        return {"problem_type": "regression"}
    if head.endswith("multi_label"):
        return {"classification_problem_type": "multi_label_classification", "num_classification_labels": 5}
    return {}


def filled(head: str, given: dict[str, Any]) -> dict[str, Any]:
    """Class weights of as many classes as the head has; some count nothing, but never class 0, which padding is."""
    classes = {"choices": 2, "answers": 6}.get(head, HEADS[head][2] or 41)
    weights = torch.linspace(2, 0.5, classes)
    weights[1::3] *= 0.25
    return {name: weights if value is WEIGHTS else value for name, value in given.items()}


def possible(given: dict[str, Any]) -> bool:
    """Whether `LossConfig` takes these together."""
    chunks = sum(name.startswith("chunk_") for name in given)
    divided = "num_items_in_batch" in given and not {"reduction", "loss_normalizing_factor"}.isdisjoint(given)
    two = {"reduction", "loss_normalizing_factor"} <= given.keys()
    alone = given.get("reduction") == "none" and not {"divide_weight_sum", "router_aux_loss_coef"}.isdisjoint(given)
    average = given.get("loss_normalizing_factor") == FACTORS[3] and "divide_weight_sum" in given
    return chunks < 2 and not (divided or two or alone or average or {"weight", "class_weights"} <= given.keys())


def differs(head: str, given: dict[str, Any]) -> str | None:
    """How the loss of `head` with the settings `given` fails its check; None if it passes."""
    given = filled(head, given)
    model, wide = models(head)
    inputs, targets = batch_of(head)
    targets = _in_range(head, given, targets)
    for one in (model, wide):
        one.zero_grad()
    refused = sorted(name for name in given if head not in TAKEN[name])
    try:
        _, metrics = compute_loss(model, **inputs, **targets, loss_config=LossConfig(**given, **problem_of(head)))
    except ValueError as error:
        return None if refused and any(_said(name) in str(error) for name in refused) else f"refused: {error}"
    if refused:
        return f"{refused[0]} should be refused"
    found, right = metrics.loss, by_hand(head, wide, given, inputs, targets)
    if found.shape != right.shape:
        return f"loss of {tuple(found.shape)}, not {tuple(right.shape)}"
    error = float((found - right).detach().norm() / right.detach().norm())
    if not error < 1e-5:
        return f"the loss is off by {error:.1e}"
    cotangent = torch.rand(right.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (found * cotangent.float()).sum().backward()
    (right * cotangent).sum().backward()
    whole = float(sum(one.grad.norm() ** 2 for one in wide.parameters() if one.grad is not None)) ** 0.5
    for (name, one), other in zip(model.named_parameters(), wide.parameters(), strict=True):
        if (one.grad is None) != (other.grad is None):
            return f"gradient of {name} is {'missing' if one.grad is None else 'there'}"
        if other.grad is None:
            continue
        error = float((one.grad.double() - other.grad).norm()) / max(float(other.grad.norm()), 0.05 * whole)
        if not error < 2e-5:
            return f"the gradient of {name} is off by {error:.1e}"
    return None


def _in_range(head: str, given: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    """Labels to be ignored by the number that is ignored now."""
    ignored = given.get("ignore_index")
    if ignored is None or "labels" not in targets or targets["labels"].is_floating_point():
        return targets
    return {"labels": targets["labels"].masked_fill(targets["labels"] == -100, ignored)}


def _said(name: str) -> str:
    return "class_weights" if name == "weight" else name


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--pairs", type=int, default=40, help="pairs of settings a head, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failed = 0
    for head in options.heads:
        generator = random.Random(options.seed)
        pairs = [one | other for one, other in itertools.combinations(SETTINGS[1:], 2) if not one.keys() & other.keys()]
        pairs = [one for one in pairs if possible(one)]
        cases = SETTINGS + generator.sample(pairs, min(options.pairs, len(pairs)))
        found = [(given, reason) for given in cases if (reason := differs(head, given)) is not None]
        for given, reason in found:
            print(f"{head}: {given}: {reason}")
        print(f"{head}: {len(cases)} settings, {len(found)} differ")
        failed += len(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
