"""Every entry of every native family's config, changed to what it may not be, or to what another family has.

    python scripts/check_configs.py                     every family of tests/models/families.py
    python scripts/check_configs.py phi3 cohere2        some
    python scripts/check_configs.py phi3 --entry hidden_act --all

A config is written as a dict, one entry of it (or of a config or dict inside) is changed, and both classes are made of
it. Names become nonsense and every other name that transformers knows for the entry; flags are turned round; counts
become 0, -1, one more and twice as many; lists lose an entry and gain one. Then one of these has to be so:

    equal      the outputs are those of transformers' class with the same weights
    refused    our constructor raises a `ValueError` that names an entry of the config, or the forward one of its inputs
    theirs     transformers refuses the config itself, or its own class cannot be made or run, and ours is not asked

and each of these is a finding: "different" outputs; "unnamed", a constructor's error that names no entry or is no
`ValueError`; "late", a model that is made and whose forward fails where transformers' class runs; "careless", a model
that is made of a name that nobody knows, where transformers' class fails. --all prints what is refused too.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.configuration_utils import ALLOWED_LAYER_TYPES  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from tests.models import stock_classes  # noqa: E402
from tests.models.families import FAMILIES, LANGUAGE  # noqa: E402
from tests.models.test_parity import inputs_for, seen  # noqa: E402

NONSENSE = "nosuch"
# Names that an entry may have somewhere in transformers.
NAMES: dict[str, tuple[str, ...]] = {
    "rope_type": tuple(ROPE_INIT_FUNCTIONS),
    "layer_types": tuple(ALLOWED_LAYER_TYPES),
    "layers_block_type": ("mamba", "attention", "moe", "mlp", "linear_attention", "full_attention"),
    "mlp_layer_types": ("dense", "sparse"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "position_embedding_type": ("absolute", "relative_key", "relative_key_query", "alibi", "rotary"),
    "feed_forward_proj": ("relu", "gated-gelu", "gated-silu", "gelu", "gated-relu"),
    "norm_rel_ebd": ("none", "layer_norm"),
    "pos_att_type": ("c2p", "p2c", "p2p", "c2p|p2c"),
    "vision_feature_select_strategy": ("default", "full"),
    "classifier_pooling": ("cls", "mean"),
    "time_step_init_scheme": ("random", "constant"),
    "use_bidirectional_attention": ("all", "vision"),
    "summary_type": ("last", "first", "mean", "cls_index", "attn"),
    "problem_type": (),
}
ACTS = ("gelu", "gelu_new", "silu", "relu2", "gelu_10", "laplace", "leaky_relu", "xielu", "swish")
# What no class of a model reads, or what is no matter of what a forward computes.
NOT_READ = {
    *vars(transformers.PreTrainedConfig()), "model_type", "transformers_version", "architectures", "dtype", "use_cache",
    "initializer_range", "initializer_factor", "bos_token_id", "eos_token_id", "decoder_start_token_id", "id2label",
    "label2id", "problem_type", "_name_or_path", "tie_word_embeddings", "is_encoder_decoder", "return_dict",
    "max_length", "forced_eos_token_id", "begin_suppress_tokens", "suppress_tokens", "median_filter_width",
    "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
NOT_READ -= {"layer_types", "rope_parameters", "hidden_act", "pad_token_id"}


class Broken(Exception):
    """A class that cannot be made or run."""


def entries(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of a config written as a dict, and of the configs and dicts in it."""
    for name, value in config.items():
        if name in NOT_READ or (path and path[-1].endswith(("label", "per_layer_config"))):
            continue
        if isinstance(value, dict):
            yield from entries(value, (*path, name))
        else:
            yield (*path, name), value


def others(path: tuple[str, ...], value: Any) -> list[Any]:
    """What the entry is changed to."""
    name = path[-1]
    known = NAMES.get(name, ())
    if "act" in name.split("_") or name in ("hidden_activation", "activation", "activation_function"):
        known = tuple(one for one in ACTS if one in ACT2FN)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str) or (value is None and known):
        return [one for one in (NONSENSE, *known) if one != value]
    if isinstance(value, int):
        return [one for one in dict.fromkeys((0, -1, value + 1, 2 * value, 3)) if one != value]
    if isinstance(value, list) and value:
        changed: list[Any] = [value[:-1], [*value, value[-1]]]
        if isinstance(value[0], str):
            changed += [[*value[:-1], one] for one in (NONSENSE, *known) if one != value[-1]]
        elif isinstance(value[0], int):
            changed += [[*value[:-1], value[-1] + 1], [-1, *value[1:]]]
        return changed
    return []


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inside = config
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    return config


def stock(name: str, config: Any, reference: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = stock_classes.stock(name)._from_config(copy.deepcopy(config), attn_implementation=reference)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others want sizes that are multiples of 16 bytes
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


@torch.no_grad()
def outputs(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return model(**inputs)


def same(given: Any, expected: Any, rows: torch.Tensor | None) -> str | None:
    """What differs first."""
    for key, value in expected.items():
        if not isinstance(value, torch.Tensor):
            continue
        other = given[key]
        if other.shape != value.shape:
            return f"{key} {tuple(other.shape)} for {tuple(value.shape)}"
        if rows is not None and value.shape[: rows.dim()] == rows.shape:
            other, value = other[rows], value[rows]
        if not value.numel():
            continue
        if not value.is_floating_point():
            if not torch.equal(other, value):
                return f"{key} differs"
            continue
        if not value.isfinite().all():
            if torch.equal(value.isfinite(), other.isfinite()):
                continue
            return f"{key}: infinite in other places"
        if not torch.allclose(other, value, rtol=1e-4, atol=2e-5 * max(1.0, float(value.abs().max()))):
            return f"{key}: {float((other - value).abs().max()):.1e} of {float(value.abs().max()):.1e}"
    return None


def outcome(family: str, name: str, config: Any, entry: str, value: Any, batch: dict[str, Any]) -> tuple[str, str]:
    row = FAMILIES[family]
    inputs = inputs_for(name, batch)
    ours_class = getattr(importlib.import_module(f"easytorch.models.{family}"), name)
    refusal = ours = theirs = None
    try:
        ours = ours_class._from_config(copy.deepcopy(config)).eval()
    except Exception as error:  # a refusal by name, or a defect, which the report has
        refusal = error
    try:
        theirs = stock(name, config, row.reference)
        expected = outputs(theirs, inputs)
    except Exception as error:  # of transformers, whatever it is
        if refusal is None and (value == NONSENSE or (isinstance(value, list) and NONSENSE in value)):
            return "careless", f"theirs: {type(error).__name__}: {str(error).strip()[:90]!r}"
        theirs = None
    if refusal is not None:
        words = str(refusal).strip().replace("\n", " ")[:160]
        known = {entry, *vars(config), *config.attribute_map, "head_dim"}
        for sub in vars(config).values():
            known |= {*vars(sub), *sub.attribute_map} if isinstance(sub, transformers.PreTrainedConfig) else set()
        named = "rope type" in words or "activation" in words or any(one.lstrip("_") in words for one in known)
        if type(refusal) is ValueError and named:
            return "refused", ("where theirs runs: " if theirs is not None else "") + words
        return "unnamed", f"{type(refusal).__name__}: {words}"
    if theirs is None:
        return "theirs", "cannot be made or run"
    assert ours is not None
    try:
        ours.load_state_dict(theirs.state_dict())
        given = outputs(ours, inputs)
    except ValueError as error:  # as for images that are not of the config's size, which transformers lets through
        return "refused", f"by the forward: {str(error)[:160]!r}"
    except Exception as error:  # a defect
        return "late", f"{type(error).__name__}: {str(error).strip()[:160]!r}"
    difference = same(given, expected, seen(family, batch))
    return ("different", difference) if difference else ("equal", "")


def batch_of_two() -> dict[str, torch.Tensor]:
    """As in tests/models/conftest.py: padded on the left, and on the right."""
    torch.manual_seed(1)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, 9:] = 0
    return {"input_ids": torch.randint(3, 97, (2, 11)) * mask, "attention_mask": mask}


FINDINGS = ("different", "unnamed", "late", "careless")


def check(family: str, only: str | None, every: bool) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    row, name, batch = FAMILIES[family], LANGUAGE.get(family, FAMILIES[family].heads[0]), batch_of_two()
    plain = row.config().to_dict()
    for path, value in entries(plain):
        if only and only not in path:
            continue
        for other in others(path, value):
            try:
                config = row.config_class.from_dict(changed(plain, path, other))
            except Exception:  # transformers' own validation, of whatever class its errors are
                counts["theirs"] += 1
                continue
            kind, words = outcome(family, name, config, path[-1], other, batch)
            counts[kind] += 1
            if kind in FINDINGS or every:
                print(f"{kind:9} {family} {'.'.join(path)}={other!r} {words}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=tuple(FAMILIES), metavar="FAMILY")
    parser.add_argument("--entry", help="this entry alone")
    parser.add_argument("--all", action="store_true", help="print every change, not the findings alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    total: collections.Counter[str] = collections.Counter()
    for family in arguments.families:
        counts = check(family, arguments.entry, arguments.all)
        total += counts
        print(f"{family}: {dict(counts)}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in total.most_common()))
    return int(any(total[kind] for kind in FINDINGS))


if __name__ == "__main__":
    sys.exit(main())
