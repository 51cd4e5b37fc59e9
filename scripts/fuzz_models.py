"""Random configs of every native family of text, and of images and text, against transformers' class and weights.

    python scripts/fuzz_models.py                              400 cases over all families
    python scripts/fuzz_models.py qwen3 phi --cases 200 --seed 7
    python scripts/fuzz_models.py --case qwen3:7031            one case again, as its line says

A case draws a config (sizes, biases, heads, windows, rope parameters, activations, scales, everything boolean), a head
and inputs (padding on either side, embeddings, labels, packed positions), and then compares logits, loss and gradients,
steps through a cache, generated tokens, bfloat16 and files. "bad" makes one entry of the config wrong. A config that
our class refuses must be refused with a `ValueError` that names an entry of it, and one that transformers' class cannot
run is counted, not compared. Of encoders, encoder-decoders, and models of images and text (scripts/model_fuzzing) it
compares numbers, tokens, bfloat16 and files. The exit code is 1 where a case differs. CI runs
tests/scripts/test_fuzz_models.py.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import itertools
import logging
import random
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

from easytorch.cache_names import CACHE  # noqa: E402
from scripts.model_fuzzing import other_families as others  # noqa: E402
from scripts.model_fuzzing import special_settings  # noqa: E402
from tests.models.families import CAUSAL, DECODERS, EXPERTS, FAMILIES, LANGUAGE, RECURRENT  # noqa: E402
from tests.models.stock_classes import stock  # noqa: E402

VOCABULARY, LONGEST = 61, 48
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_pytorch_tanh",
    "gelu_new",
    "relu",
    "relu2",
    "tanh",
    "quick_gelu",
    "sigmoid",
    "mish",
)
# Booleans that are no matter of the model's numbers, or that a test of its own holds.
NOT_DRAWN = {
    *vars(transformers.PreTrainedConfig()), "use_cache", "add_cross_attention", "is_decoder", "output_router_logits",
    "use_bidirectional_attention", "summary_use_proj", "summary_proj_to_labels", "use_qk_norm", "tie_word_embeddings",
}  # fmt: skip
# float32 sums in another order: transformers' distance from float64 is as large for logits of some units.
SCALE_TOLERANCE = 2e-5


class Different(Exception):
    """A difference that a case found."""


class Case(NamedTuple):
    family: str
    seed: int

    def __str__(self) -> str:
        return f"{self.family}:{self.seed}"


def draw_rope(rng: random.Random, family: str, dim: int, longest: int) -> dict[str, Any]:
    """`rope_parameters` for heads of `dim`; of lengths that the inputs stay within and go beyond."""
    kind = rng.choice(("default", "default", "linear", "dynamic", "yarn", "llama3", "longrope"))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice((100.0, 1e4, 5e5))}
    if family == "ministral3":  # which needs both
        kind = rng.choice(("yarn", "llama3"))
        rope |= {"rope_type": kind, "llama_4_scaling_beta": rng.choice((0.1, 0.5))}
    if "partial_rotary_factor" in (FAMILIES[family].config().rope_parameters or {}):
        shares = [share for share in (0.25, 0.5, 0.75, 1.0) if int(dim * share) % 2 == 0 or rng.random() < 0.05]
        rope["partial_rotary_factor"] = rng.choice(shares)
    trained = rng.choice((6, 12, longest))
    if kind != "default":
        rope["factor"] = rng.choice((1.0, 2.0, 4.0, 1.5))
    if kind == "yarn":
        rope["original_max_position_embeddings"] = trained
        for name, values in (
            ("beta_fast", (32, 16)), ("beta_slow", (1, 2)), ("mscale", (1.0, 0.7)), ("mscale_all_dim", (1.0, 0.5)),
            ("attention_factor", (0.8, 1.3)), ("truncate", (True, False)),
        ):  # fmt: skip
            if rng.random() < 0.3:
                rope[name] = rng.choice(values)
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice((2.0, 4.0))}
        rope["original_max_position_embeddings"] = trained
    if kind == "longrope":
        pairs = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            rope[name] = [round(rng.uniform(1.0, 4.0), 2) for _ in range(pairs)]
        rope["original_max_position_embeddings"] = trained
    return rope


def draw_changes(rng: random.Random, family: str) -> dict[str, Any]:
    """Keywords of the family's config."""
    row = FAMILIES[family]
    names = vars(row.config())
    layers, heads = rng.randint(1, 3), rng.choice((1, 2, 3, 4, 6))
    dim = rng.choice((4, 6, 8, 10, 16))
    hidden = heads * dim if "head_dim" not in names or rng.random() < 0.4 else rng.choice((20, 32, 36))
    changes: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": rng.choice((0, 0, 60, None))}
    if family == "gpt2":
        changes |= {"n_layer": layers, "n_head": heads, "n_embd": heads * dim, "n_inner": rng.choice((None, 17, 40))}
        changes |= {"n_positions": LONGEST}
    else:
        changes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden}
        changes |= {"max_position_embeddings": LONGEST}
    if "intermediate_size" in names:
        changes["intermediate_size"] = rng.choice((17, 24, 40))
    if "ffn_dim" in names:
        changes["ffn_dim"] = rng.choice((17, 40))
        changes["word_embed_proj_dim"] = rng.choice((hidden, 12))
    if "head_dim" in names and "qk_rope_head_dim" not in names:
        changes["head_dim"] = None if hidden % heads == 0 and hidden // heads % 2 == 0 and rng.random() < 0.1 else dim
        if changes["head_dim"] is None:
            dim = hidden // heads
    if "num_key_value_heads" in names:
        divisors = [count for count in range(1, heads + 1) if heads % count == 0]
        changes["num_key_value_heads"] = rng.choice(divisors)
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        if name in names and rng.random() < 0.5:
            changes[name] = rng.choice(ACTIVATIONS)
    for name, value in names.items():
        if isinstance(value, bool) and name not in NOT_DRAWN and rng.random() < 0.4:
            changes[name] = rng.random() < 0.5
    for name in ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if name in names and rng.random() < 0.4:
            changes[name] = rng.choice((1e-5, 1e-2))
    changes["tie_word_embeddings"] = rng.random() < 0.5
    if rng.random() < 0.6 and "rope_parameters" in names:
        changes["rope_parameters"] = draw_rope(rng, family, dim, LONGEST)
        if family == "phi3" and changes["rope_parameters"]["rope_type"] == "longrope":
            changes["original_max_position_embeddings"] = rng.choice((6, LONGEST))
    draw_windows(rng, names, layers, changes)
    draw_scales(rng, names, changes)
    draw_experts(rng, names, layers, changes)
    special_settings.amend(rng, family, changes)
    return row.sizes | changes


def draw_windows(rng: random.Random, names: dict[str, Any], layers: int, changes: dict[str, Any]) -> None:
    if "sliding_window" in names:
        changes["sliding_window"] = rng.choice((1, 2, 3, 5, 11, 40))
        if "layer_types" not in names and rng.random() < 0.2:
            changes["sliding_window"] = None
    if "layer_types" in names:
        own = names["layer_types"] if "linear_attention" in (names["layer_types"] or ()) else ("sliding_attention",)
        kinds = sorted({"full_attention", *own})
        changes["layer_types"] = [rng.choice(kinds) for _ in range(layers)] if rng.random() < 0.7 else None
    if "max_window_layers" in names:
        changes["max_window_layers"] = rng.randint(0, layers)
    if "no_rope_layers" in names:
        changes["no_rope_layers"] = [rng.randint(0, 1) for _ in range(layers)] if rng.random() < 0.7 else None
        changes["no_rope_layer_interval"] = rng.randint(1, 3)


def draw_scales(rng: random.Random, names: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, values in (
        ("query_pre_attn_scalar", (5, 13, 256)), ("final_logit_softcapping", (None, 0.7, 30.0)),
        ("attn_logit_softcapping", (None, 0.5, 50.0)), ("clip_qkv", (None, 0.2, 3.0)),
        ("embedding_multiplier", (1.0, 3.0)), ("logits_scaling", (1.0, 4.0)), ("residual_multiplier", (1.0, 0.4)),
        ("attention_multiplier", (1.0, 0.2)), ("logit_scale", (1.0, 0.0625)), ("swiglu_alpha", (1.0, 1.702)),
        ("swiglu_limit", (0.02, 7.0)), ("rotary_pct", (0.25, 0.5, 1.0)), ("attention_dropout", (0.0, 0.3)),
        ("pretraining_tp", (1, 2)), ("use_qk_norm", (True, False)), ("attn_pdrop", (0.0, 0.3)),
    ):  # fmt: skip
        if name in names and rng.random() < 0.6:
            changes[name] = rng.choice(values)


def draw_experts(rng: random.Random, names: dict[str, Any], layers: int, changes: dict[str, Any]) -> None:
    total = next((name for name in ("num_local_experts", "num_experts") if name in names), None)
    if "num_experts_per_tok" not in names:
        return
    experts = rng.choice((2, 4, 7))
    changes["num_experts_per_tok"] = rng.randint(1, experts)
    if "n_routed_experts" in names:
        groups = rng.choice((1, 2, 4))
        changes |= {"n_routed_experts": 8, "n_group": groups, "topk_group": rng.randint(1, groups)}
        changes["num_experts_per_tok"] = rng.randint(1, 8 // groups * changes["topk_group"])
        changes["routed_scaling_factor"] = rng.choice((1.0, 2.5))
        changes["n_shared_experts"] = rng.choice((1, 2))
        changes["first_k_dense_replace"] = rng.randint(0, layers)
    elif total is None:  # whose attribute has another name than its keyword
        changes["num_experts"] = experts
    else:
        changes[total] = experts
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if name in names:
            changes[name] = rng.choice((9, 24))
    if "decoder_sparse_step" in names:
        changes["decoder_sparse_step"] = rng.randint(1, 2)
        changes["mlp_only_layers"] = [index for index in range(layers) if rng.random() < 0.3]


def draw_inputs(rng: random.Random, family: str, head: str, padding: int | None) -> dict[str, Any]:
    """A batch of 1 to 3 rows with a mask, and the labels of `head`."""
    batch, length = rng.randint(1, 3), rng.choice((1, 2, 5, 9, 14, 21))
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    ids = torch.randint(1, VOCABULARY - 1, (batch, length), generator=generator)
    inputs: dict[str, Any] = {"input_ids": ids}
    mask = torch.ones_like(ids)
    side = rng.choice(("none", "left", "right", "ones"))
    for row in range(batch):
        padded = rng.randint(0, length // 2)
        if side == "left":
            mask[row, :padded] = 0
        elif side == "right":
            mask[row, length - padded :] = 0
    if side != "none":
        inputs["attention_mask"] = mask
        inputs["input_ids"] = ids.masked_fill(mask == 0, padding or 0)
    if head.endswith("QuestionAnswering"):
        for name in ("start_positions", "end_positions"):
            inputs[name] = torch.randint(0, length, (batch,), generator=generator)
    elif head.endswith("SequenceClassification"):
        inputs["labels"] = torch.randint(0, 2, (batch,), generator=generator)
    elif head.endswith("TokenClassification"):
        inputs["labels"] = torch.randint(0, 2, (batch, length), generator=generator).masked_fill(mask == 0, -100)
    elif head == CAUSAL[family]:
        labels = inputs["input_ids"].masked_fill(mask == 0, -100)
        inputs["labels"] = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.2, -100)
        if side in ("left", "right"):  # predictions at padding are ignored
            inputs["labels"][:, 1:][mask[:, :-1] == 0] = -100
        if rng.random() < 0.4:
            inputs["num_items_in_batch"] = rng.choice((7, torch.tensor(7)))
        if family in EXPERTS:
            inputs["output_router_logits"] = rng.random() < 0.5 and family != "glm4_moe"
    return inputs


def pair(family: str, head: str, config: Any) -> tuple[Any, Any]:
    """Our model and transformers', no weight of them 0 or 1. Raises what the constructors raise, ours first."""
    reference = FAMILIES[family].reference
    torch.manual_seed(0)
    ours_class = getattr(importlib.import_module(f"easytorch.models.{family}"), head)
    ours = ours_class._from_config(copy.deepcopy(config))
    try:
        theirs = stock(head)._from_config(copy.deepcopy(config), attn_implementation=reference)
    except Exception as error:  # as in `run`
        raise NotRun(f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}, where ours is made") from error
    if theirs._can_set_experts_implementation():
        theirs.set_experts_implementation("eager")  # the others want sizes that are multiples of 16 bytes
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    if family == "helium" and config.head_dim * config.num_attention_heads != config.hidden_size:
        raise NotRun("helium's output projection is square")
    shapes = [{name: weight.shape for name, weight in model.state_dict().items()} for model in (ours, theirs)]
    if shapes[0] != shapes[1]:
        run(theirs, {"input_ids": torch.ones(1, 2, dtype=torch.long)})  # a config that theirs cannot run either
        raise Different(f"{head}: weights {sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[:2]}")
    ours.load_state_dict(theirs.state_dict())
    return ours.eval(), theirs.eval()


def same(name: str, given: Any, expected: Any, rows: torch.Tensor | None = None, rtol: float = SCALE_TOLERANCE) -> None:
    """`Different` unless every tensor of the two is equal to within rtol of its scale."""
    if isinstance(expected, (tuple, list)):
        for index, (one, other) in enumerate(zip(given, expected, strict=True)):
            same(f"{name}[{index}]", one, other, rows, rtol)
        return
    if not isinstance(expected, torch.Tensor):
        return
    if given.shape != expected.shape or given.dtype != expected.dtype:
        raise Different(f"{name}: {tuple(given.shape)} {given.dtype} for {tuple(expected.shape)} {expected.dtype}")
    if rows is not None and expected.dim() > 1 and expected.shape[: rows.dim()] == rows.shape:
        given, expected = given[rows], expected[rows]
    if not expected.isfinite().all():
        if torch.equal(given.isfinite(), expected.isfinite()):
            return
        raise Different(f"{name}: {(~given.isfinite()).sum()} not finite for {(~expected.isfinite()).sum()}")
    error = (given - expected).abs().max().item() if given.numel() else 0.0
    scale = max(expected.abs().max().item() if given.numel() else 0.0, 1e-2)
    if not error <= rtol * scale:
        raise Different(f"{name}: {error:.2e} off, of {scale:.2e}")


def seen(inputs: dict[str, Any], reference: str) -> torch.Tensor | None:
    """The positions that are compared: those of padding see nothing, and each attention gives them what it will."""
    mask = inputs.get("attention_mask")
    return None if mask is None else mask.bool()


def check_numbers(rng: random.Random, family: str, config: Any) -> None:
    """Outputs, loss and gradients of a head."""
    head = rng.choice(FAMILIES[family].heads)
    if head == "GPT2DoubleHeadsModel":
        head = "GPT2LMHeadModel"
    ours, theirs = pair(family, head, config)
    inputs = draw_inputs(rng, family, head, config.pad_token_id)
    embeds = rng.random() < 0.15 and not head.endswith("SequenceClassification")
    if embeds:
        with torch.no_grad():
            inputs["inputs_embeds"] = theirs.get_input_embeddings()(inputs.pop("input_ids"))
    rows = seen(inputs, FAMILIES[family].reference)
    expected = run(theirs, inputs | {"output_hidden_states": rng.random() < 0.3})
    given = ours(**inputs, output_hidden_states="hidden_states" in expected)
    if set(given) != set(expected):
        raise Different(f"{head}: {sorted(given)} for {sorted(expected)}")
    for name, value in expected.items():
        if name in ("router_logits",) and rows is not None:
            same(name, given[name], value, rows.reshape(-1))
        elif name != CACHE:
            same(f"{head} {name}", given[name], value, rows)
    losses = [
        output["loss"]
        if "loss" in output
        else output["last_hidden_state"][... if rows is None else rows].square().mean()
        for output in (given, expected)
    ]
    if losses[1].requires_grad and losses[1].isfinite():
        for loss in losses:
            loss.backward()
        compare_gradients(head, ours, theirs)


def compare_gradients(head: str, ours: Any, theirs: Any) -> None:
    gradients = [
        {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        for model in (ours, theirs)
    ]
    if gradients[0].keys() != gradients[1].keys():
        raise Different(f"{head}: gradients of {sorted(gradients[0].keys() ^ gradients[1].keys())}")
    if any(not gradient.isfinite().all() for gradient in gradients[1].values()):
        return
    scale = max(gradient.abs().max().item() for gradient in gradients[1].values())
    for name, gradient in gradients[1].items():
        error = (gradients[0][name] - gradient).abs().max().item()
        if error > 5 * SCALE_TOLERANCE * max(scale, 1e-3):
            raise Different(f"{head} gradient of {name}: {error:.2e} off, of {scale:.2e}")


class NotRun(Exception):
    """transformers' class raises for these inputs."""


def run(model: Any, inputs: dict[str, Any]) -> Any:
    try:
        return model(**inputs)
    except Exception as error:  # whatever transformers' own code raises: the case is not compared
        raise NotRun(f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}") from error


def _causal(rng: random.Random, family: str, config: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """The language models, and a batch padded on the left."""
    ours, theirs = pair(family, CAUSAL[family], config)
    batch, length = rng.randint(1, 3), rng.randint(2, 15)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    ids = torch.randint(1, VOCABULARY - 1, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : rng.choice((0, 0, length // 2))] = 0
    return ours, theirs, ids * mask, mask


@torch.no_grad()
def check_cache(rng: random.Random, family: str, config: Any) -> None:
    """Chunks of random sizes through a dynamic and a static cache."""
    ours, theirs, ids, mask = _causal(rng, family, config)
    length = ids.shape[1]
    cuts = sorted({0, length, *(rng.randint(1, length) for _ in range(rng.randint(0, 3)))})
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    held = [
        transformers.StaticCache(config=model.config, max_cache_len=length + 2)
        if static
        else transformers.DynamicCache(config=model.config)
        for static in [rng.random() < 0.5]
        for model in (ours, theirs)
    ]
    for start, stop in itertools.pairwise(cuts):
        steps = [
            {
                "input_ids": ids[:, start:stop],
                "attention_mask": mask[:, :stop],
                "position_ids": positions[:, start:stop],
                CACHE: cache,
            }
            for cache in held
        ]
        expected = run(theirs, steps[1]).logits
        kind = type(held[0]).__name__
        same(f"{kind} {start}:{stop}", ours(**steps[0]).logits, expected, mask[:, start:stop].bool())


_GENERATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 3},
    {"do_sample": True, "top_k": 15},
    {"cache_implementation": "static", "disable_compile": True},
    {"use_cache": False},
    {"repetition_penalty": 1.3},
    {"do_sample": True, "num_beams": 2},
)


@torch.no_grad()
def check_generate(rng: random.Random, family: str, config: Any) -> None:
    """The same tokens, greedy, by beams, by sampling, with a static cache, with prompt lookup."""
    ours, theirs, ids, mask = _causal(rng, family, config)
    settings = rng.choice(_GENERATIONS)
    settings = {"max_new_tokens": 8, "eos_token_id": -1, "pad_token_id": 0, "do_sample": False} | settings
    tokens = []
    for model in (theirs, ours):
        torch.manual_seed(11)
        kwargs = {"attention_mask": mask, **settings}
        try:
            tokens.append(model.generate(ids, **kwargs))
        except Exception as error:  # as in `run`
            if model is ours:
                raise
            raise NotRun(f"generate: {type(error).__name__}") from error
    if not torch.equal(*tokens):
        raise Different(f"generate {settings}: {tokens[1].tolist()} for {tokens[0].tolist()}")


@torch.no_grad()
def check_packed(rng: random.Random, family: str, config: Any) -> None:
    """Sequences side by side in a row give what each gives alone."""
    ours, theirs, _, _ = _causal(rng, family, config)
    lengths = [rng.randint(1, 7) for _ in range(rng.randint(1, 4))]
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    ids = torch.randint(1, VOCABULARY - 1, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    # the states of linear attention are kept apart by `seq_idx` alone, here as in transformers
    numbers = {"seq_idx": (positions == 0).cumsum(-1).int()} if family in RECURRENT else {}
    packed = ours(ids, position_ids=positions, use_cache=False, **numbers).logits
    rope = str(getattr(config, "rope_parameters", None))
    if "dynamic" in rope or "longrope" in rope or family in ("llama4_text", "deepseek_v32"):
        # Llama 4's queries are scaled by their places; scores of an indexer tie at zero
        expected = run(theirs, {"input_ids": ids, "position_ids": positions, "use_cache": False}).logits
    elif family == "opt" or getattr(config, "use_bidirectional_attention", None) == "all":
        return  # OPT's positions are counted from the mask; transformers' masks of both directions pass over positions
    else:
        expected = torch.cat([run(theirs, {"input_ids": part}).logits for part in ids.split(lengths, 1)], 1)
    same("packed", packed, expected)


@torch.no_grad()
def check_bfloat16(rng: random.Random, family: str, config: Any) -> None:
    """No further from float64 than transformers' class, but for a third."""
    ours, theirs, ids, mask = _causal(rng, family, config)
    if family in EXPERTS:
        return  # a token that goes to another expert is another token
    exact = run(copy.deepcopy(theirs).double(), {"input_ids": ids, "attention_mask": mask}).logits[mask.bool()]
    errors = [
        (run(model.bfloat16(), {"input_ids": ids, "attention_mask": mask}).logits[mask.bool()] - exact).square().mean()
        for model in (ours, theirs)
    ]
    if errors[0].sqrt() > 1.5 * errors[1].sqrt() + 1e-3 * exact.square().mean().sqrt():
        raise Different(f"bfloat16: {errors[0].sqrt():.2e} off where transformers is {errors[1].sqrt():.2e}")


@torch.no_grad()
def check_files(rng: random.Random, family: str, config: Any) -> None:
    """Our class loads what transformers saved, and transformers what ours saved, with the same logits."""
    ours, theirs, ids, mask = _causal(rng, family, config)
    for saved, other in ((ours, theirs), (theirs, ours)):
        with tempfile.TemporaryDirectory() as folder:
            saved.save_pretrained(folder)
            reference = FAMILIES[family].reference if other is theirs else None
            loaded = type(other).from_pretrained(folder, attn_implementation=reference)
            if other is theirs and loaded._can_set_experts_implementation():
                loaded.set_experts_implementation("eager")
            expected = run(other, {"input_ids": ids, "attention_mask": mask}).logits
            same("loaded", loaded(ids, attention_mask=mask).logits, expected, mask.bool(), rtol=1e-6)


# A number of a config made wrong: what the family cannot carry is refused at construction, by name.
BAD = (0, -1, 3, 5, 1.5, None, "4", 10**9)
_COUNTS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size", "num_hidden_layers",
    "vocab_size", "sliding_window", "num_experts_per_tok", "num_local_experts", "num_experts", "moe_intermediate_size",
    "n_routed_experts", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "decoder_sparse_step",
    "shared_expert_intermediate_size", "max_window_layers", "n_head", "n_embd", "n_inner", "n_layer", "ffn_dim",
    "word_embed_proj_dim", "rms_norm_eps", "query_pre_attn_scalar", "partial_rotary_factor", "layer_types",
    "pad_token_id", "hidden_act", "hidden_activation", "activation_function",
)  # fmt: skip


def check_bad_config(rng: random.Random, family: str, config: Any) -> None:
    """One entry set to what may not fit: refused by its name, or computed as transformers does."""
    pair(family, CAUSAL[family], config)  # which raises `NotRun` for a config that is no good already
    names = [name for name in _COUNTS if name in vars(config)]
    name, value = rng.choice(names), rng.choice(BAD)
    if value == 10**9 and name not in ("num_key_value_heads", "sliding_window", "max_window_layers", "pad_token_id"):
        value = 2
    try:
        setattr(config, name, value)
    except Exception as error:  # transformers' own validation
        raise NotRun(f"config: {type(error).__name__}") from error
    try:
        ours, theirs = pair(family, CAUSAL[family], config)
        inputs = {"input_ids": torch.tensor([[5, 9, 7, 3, 22, 41]]) % config.vocab_size}
        expected = run(theirs, inputs).logits
    except NotRun as reason:
        if value is None:  # which ours takes for the default of that entry
            raise
        raise Different(f"{name}={value!r} is taken; transformers: {reason}") from None
    except Different as found:
        raise Different(f"{name}={value!r}: {found}") from None
    except Exception as error:
        words = (str(error).splitlines() or [""])[0]
        if type(error) is ValueError and any(one in words for one in (name, repr(value), "head_dim")):
            return
        raise Different(f"{name}={value!r}: {type(error).__name__}: {words}") from None
    same(f"{name}={value!r}", ours(**inputs).logits, expected)


def _other(rng: random.Random, family: str, config: Any, head: str) -> tuple[Any, Any, dict[str, Any], Any]:
    """Our model and transformers', inputs, and the positions that are compared: none of padding before a text."""
    ours, theirs = pair(family, head, config)
    inputs = others.draw_inputs(rng, family, head, config)
    rows = inputs["attention_mask"].bool() if family in others.IMAGE_TEXT else None
    return ours, theirs, inputs, rows


def check_other_numbers(rng: random.Random, family: str, config: Any) -> None:
    """Outputs, loss and gradients of a head."""
    head = rng.choice(others.heads_of(family))
    ours, theirs, inputs, rows = _other(rng, family, config, head)
    inputs["output_hidden_states"] = rng.random() < 0.3
    expected, given = run(theirs, inputs), ours(**inputs)
    if set(given) != set(expected):
        raise Different(f"{head}: {sorted(given)} for {sorted(expected)}")
    for name, value in expected.items():
        if name != CACHE:
            same(f"{head} {name}", given[name], value, rows)
    if "loss" in expected and expected["loss"].requires_grad and expected["loss"].isfinite():
        for output in (given, expected):
            output["loss"].backward()
        compare_gradients(head, ours, theirs)


@torch.no_grad()
def check_other_generate(rng: random.Random, family: str, config: Any) -> None:
    """The same tokens after a text, or after images and text; encoders, which generate none, are compared as above."""
    if family in others.ENCODERS:
        with torch.enable_grad():
            return check_other_numbers(rng, family, config)
    ours, theirs, inputs, _ = _other(rng, family, config, LANGUAGE[family])
    inputs.pop("labels", None)
    settings = {"max_new_tokens": 8, "eos_token_id": -1, "do_sample": False} | rng.choice(_GENERATIONS)
    settings |= {"pad_token_id": 0, "suppress_tokens": [others.IMAGE, others.VIDEO]}
    tokens = []
    for model in (theirs, ours):
        torch.manual_seed(11)
        try:
            tokens.append(model.generate(**inputs, **settings))
        except Exception as error:  # as in `run`
            if model is ours:
                raise
            raise NotRun(f"generate: {type(error).__name__}") from error
    if not torch.equal(*tokens):
        raise Different(f"generate {settings}: {tokens[1].tolist()} for {tokens[0].tolist()}")


@torch.no_grad()
def check_other_bfloat16(rng: random.Random, family: str, config: Any) -> None:
    """No further from float64 than transformers' class, but for a half."""
    ours, theirs, inputs, rows = _other(rng, family, config, LANGUAGE[family])
    kept = ... if rows is None else rows
    exact = run(copy.deepcopy(theirs).double(), inputs).logits[kept]
    errors = [(run(model.bfloat16(), inputs).logits[kept] - exact).square().mean().sqrt() for model in (ours, theirs)]
    if errors[0] > 1.5 * errors[1] + 1e-3 * exact.square().mean().sqrt():
        raise Different(f"bfloat16: {errors[0]:.2e} off where transformers is {errors[1]:.2e}")


@torch.no_grad()
def check_other_files(rng: random.Random, family: str, config: Any) -> None:
    """Our class loads what transformers saved, and transformers what ours saved, with the same logits."""
    ours, theirs, inputs, rows = _other(rng, family, config, LANGUAGE[family])
    for saved, other in ((ours, theirs), (theirs, ours)):
        with tempfile.TemporaryDirectory() as folder:
            saved.save_pretrained(folder)
            reference = FAMILIES[family].reference if other is theirs else None
            loaded = type(other).from_pretrained(folder, attn_implementation=reference)
            if other is theirs and loaded._can_set_experts_implementation():
                loaded.set_experts_implementation("eager")
            expected = run(other, inputs).logits  # which may be `NotRun`
            same("loaded", loaded(**inputs).logits, expected, rows, rtol=1e-6)


OTHER_CHECKS: dict[str, tuple[int, Callable[[random.Random, str, Any], None]]] = {
    "numbers": (5, check_other_numbers),
    "generate": (2, check_other_generate),
    "bfloat16": (1, check_other_bfloat16),
    "files": (1, check_other_files),
}
CHECKS: dict[str, tuple[int, Callable[[random.Random, str, Any], None]]] = {
    "numbers": (5, check_numbers),
    "cache": (2, check_cache),
    "generate": (2, check_generate),
    "packed": (1, check_packed),
    "bfloat16": (1, check_bfloat16),
    "files": (1, check_files),
    "bad": (2, check_bad_config),
}


def draw_case(rng: random.Random, family: str) -> dict[str, Any]:
    """Keywords of the config of a family of any kind."""
    return draw_changes(rng, family) if family in DECODERS else others.draw_config(rng, family, draw_changes)


def run_case(case: Case, only: str | None = None) -> tuple[str, str]:
    """(outcome, words): "equal", "refused", "not run" by transformers, or "different"."""
    rng = random.Random(zlib.crc32(str(case).encode()))
    changes = draw_case(rng, case.family)
    checks = CHECKS if case.family in DECODERS else OTHER_CHECKS
    name = only or rng.choice([name for name, (weight, _) in checks.items() for _ in range(weight)])
    if name not in checks:
        return "not run", f"{name} is of decoders"
    try:
        config = FAMILIES[case.family].config_class(**changes)
    except Exception as error:  # transformers' own validation
        return "not run", f"config: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    try:
        checks[name][1](rng, case.family, config)
    except NotRun as reason:
        return "not run", str(reason)
    except Different as found:
        return "different", f"{name}: {found}"
    except Exception as error:  # a refusal by name, or a defect: the report has the line
        first = (str(error).strip().splitlines() or [""])[0]
        known = (*vars(config), "head_dim", "short_factor", "long_factor")  # the last are of its rope parameters
        fields = [field for field in known if field.lstrip("_") in first]
        named = first.startswith("rope type") or any(name in first for name in (case.family, config.model_type))
        if type(error) is ValueError and named and fields:
            return "refused", first
        return "different", f"{name}: {type(error).__name__}: {first}"
    return "equal", name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--only", choices=CHECKS)
    parser.add_argument("--case", help="FAMILY:SEED of one case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("easytorch").setLevel(logging.ERROR)
    families = arguments.families or [*DECODERS, *others.OTHERS]
    cases = [Case(families[i % len(families)], arguments.seed * 100_000 + i) for i in range(arguments.cases)]
    if arguments.case:
        family, seed = arguments.case.split(":")
        cases = [Case(family, int(seed))]
        print(draw_case(random.Random(zlib.crc32(str(cases[0]).encode())), family))
    outcomes: collections.Counter[str] = collections.Counter()
    for case in cases:
        outcome, words = run_case(case, arguments.only)
        outcomes[outcome] += 1
        if outcome != "equal":
            print(f"{outcome:9} {case} {words}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return int(outcomes["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
