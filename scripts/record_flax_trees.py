"""Records what HF's own Flax classes have and compute, for tests/bridge/data/flax.

    python scripts/record_flax_trees.py [ARCHITECTURE ...] [--check]

Needs transformers 4.57 (the last line with Flax), flax and jax; EasyTorch is not imported. Each record holds the
config as `save_pretrained` writes it, the tree of shapes, the recipe of the inputs and some numbers of each output.
Weights are not stored: tests/bridge/data/flax/fill.py makes them from the paths. `--check` also runs the torch class
of the same release on the weights as that release carries them over, and prints how far apart the two are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict

sys.path.insert(0, str(Path(__file__).resolve().parent))

from oracles.flax_cases import Case, cases

DATA = Path(__file__).resolve().parents[1] / "tests" / "bridge" / "data" / "flax"
OUTPUTS = (
    *("logits", "prediction_logits", "seq_relationship_logits", "sop_logits", "start_logits", "end_logits"),
    *("last_hidden_state", "pooler_output", "encoder_last_hidden_state", "text_embeds", "image_embeds"),
    *("logits_per_image", "projected_states", "projected_quantized_states", "extract_features"),
)
# Flax has one name for a causal head; torch's BERT calls it differently.
TORCH_CLASSES = {"BertForCausalLM": "BertLMHeadModel"}

spec = importlib.util.spec_from_file_location("fill", DATA / "fill.py")
assert spec is not None and spec.loader is not None
fill = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fill)


def clip(array: Any, a_min: Any = None, a_max: Any = None, **bounds: Any) -> Any:
    """`jax.numpy.clip` with the argument names that T5's classes use, which jax 0.10 dropped."""
    return CLIP(
        array, a_min if a_min is not None else bounds.get("min"), a_max if a_max is not None else bounds.get("max")
    )


CLIP = jax.numpy.clip
jax.numpy.clip = clip


def config_of(case: Case) -> Any:
    """The case's config, composed of its members' where it has any."""
    flax_class = getattr(transformers, f"Flax{case.model_class}")
    config_class = flax_class.config_class
    if not case.members:
        return config_class(**case.settings)
    members = [transformers.CONFIG_MAPPING[kind](**settings) for kind, settings in case.members.values()]
    if "vision" in case.members:
        return config_class.from_vision_text_configs(*members, **case.settings)
    return config_class.from_encoder_decoder_configs(*members, **case.settings)


def record(case: Case, check: bool) -> dict[str, Any]:
    """Builds, fills and runs one Flax class."""
    flax_class = getattr(transformers, f"Flax{case.model_class}")
    config = config_of(case)
    # The composite classes insist on making their own weights.
    model = flax_class(config, _do_init=bool(case.members), **options(case, config))
    shapes = {"/".join(path): leaf for path, leaf in flatten_dict(model.params_shape_tree).items()}
    assert all(leaf.dtype == np.float32 for leaf in shapes.values())
    tree = unflatten_dict({tuple(path.split("/")): list(leaf.shape) for path, leaf in shapes.items()})
    params = unflatten_dict({tuple(path.split("/")): leaf for path, leaf in fill.weights(tree)})
    arguments = fill.inputs(case.inputs)
    given = {name: jax.numpy.asarray(array) for name, array in arguments.items()}
    found = flatten(model(**given, params=params))
    config.architectures = [case.model_class]
    outputs = {}
    for name, output in found.items():
        assert np.isfinite(output).all(), (case, name)
        numbers = fill.sample(name, output, arguments)
        outputs[name] = {
            "shape": list(output.shape),
            "scale": rounded(np.abs(output).max()),
            "numbers": [rounded(number) for number in numbers],
        }
    if check:
        compare(case, config, params, arguments, found)
    return {
        "flax_class": flax_class.__name__,
        "torch_class": TORCH_CLASSES.get(case.model_class, case.model_class),
        "variant": case.variant,
        "config": json.loads(config.to_json_string(use_diff=True)),
        "inputs": case.inputs,
        "outputs": outputs,
        "tree": tree,
    }


def options(case: Case, config: Any) -> dict[str, Any]:
    """The arguments with which a Flax class is built without weights: most know the shape of their inputs."""
    shapes = {name: tuple(entry["shape"]) for name, entry in case.inputs.items()}
    if case.model_class == "VisionTextDualEncoderModel":
        size = config.vision_config.image_size
        return {"input_shape": (shapes["input_ids"], (1, size, size, config.vision_config.num_channels))}
    if case.model_class == "SpeechEncoderDecoderModel":
        return {"input_shape": (shapes["inputs"], shapes["decoder_input_ids"])}
    if case.architecture in ("resnet", "regnet"):
        size = shapes["pixel_values"][-1]
        return {"input_shape": (1, size, size, config.num_channels)}
    return {}


def flatten(output: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(output[name]) for name in OUTPUTS if output.get(name) is not None}


def rounded(number: float) -> float:
    return float(f"{number:.7g}")


def compare(case: Case, config: Any, params: Any, arguments: dict[str, np.ndarray], expected: Any) -> None:
    """Prints the largest difference to the torch class of this release, relative to each output's scale."""
    import torch
    from transformers.modeling_flax_pytorch_utils import load_flax_weights_in_pytorch_model

    torch_class = getattr(transformers, TORCH_CLASSES.get(case.model_class, case.model_class))
    model = torch_class(config).eval()
    model = load_flax_weights_in_pytorch_model(model, params)
    with torch.no_grad():
        found = model(**{name: torch.from_numpy(array) for name, array in arguments.items()})
    worst = {}
    for name, output in expected.items():
        other = found.get(name)
        if other is None:
            worst[name] = "absent"
            continue
        want, got = fill.sample(name, output, arguments), fill.sample(name, other.numpy(), arguments)
        worst[name] = float(f"{np.abs(want - got).max() / np.abs(output).max():.1e}")
    print("   ", case.model_class, case.variant, worst)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    by_architecture = defaultdict(list)
    for case in cases():
        by_architecture[case.architecture].append(case)
    for architecture in args.architectures or by_architecture:
        records = [record(case, args.check) for case in by_architecture[architecture]]
        lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in records)
        file = DATA / f"{architecture.replace('-', '_')}.json"
        file.write_text(f"[\n{lines}\n]\n")
        print(f"{architecture}: {len(records)} classes, {file.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
