"""What of the vLLM plugin can be tested without vLLM: the entry point, and a model under an attention like vLLM's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# As vLLM's backend "transformers" does it: AutoModel on the meta device, the attention "vllm", `attention_instances`
# that go through the model's forward, one row of tokens, no cache.
BUILD = """
import torch, transformers
from transformers import AttentionInterface, AutoModel
from easytorch.generation.vllm_plugin import register

assert register() and register()
seen = []

def vllm(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    instance = attention_instances[module.layer_idx]
    seen.append(module.layer_idx)
    query, key, value = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    return instance(query, key, value, scaling), None

class Instance:
    def __call__(self, query, key, value, scaling):
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, 1).transpose(0, 1) for one in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1), key, value, is_causal=True, scale=scaling)
        return out.transpose(0, 1).flatten(1)

AttentionInterface.register("vllm", vllm)
config = transformers.CONFIG_MAPPING[{model_type!r}](
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0)
config.layer_types = None if not hasattr(config, "layer_types") else ["full_attention"] * 2
config._attn_implementation = "vllm"
with torch.device("meta"):
    model = AutoModel.from_config(config)
print(type(model).__module__, bool(model.tp_plan))
torch.manual_seed(0)
model = AutoModel.from_config(config).eval()
tokens = torch.randint(97, (1, 7))
instances = {{0: Instance(), 1: Instance()}}
with torch.inference_mode():
    output = model(input_ids=tokens, use_cache=False, position_ids=torch.arange(7)[None], attention_instances=instances,
                   return_dict=False)[0]
config._attn_implementation = "sdpa"
theirs = getattr(transformers, type(model).__name__)(config).eval()
theirs.load_state_dict(model.state_dict())
with torch.inference_mode():
    right = theirs(input_ids=tokens, use_cache=False)[0]
assert seen == [0, 1], seen
torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-5)
"""


def run(code: str, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | more, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("model_type", ["qwen3"])
def test_autoconfigured_models_are_native_under_vllm_s_attention(model_type):
    module, planned = run(BUILD.format(model_type=model_type), EASYTORCH_VLLM="1").split()
    assert module == f"easytorch.models.{model_type}" and planned == "True"


def test_nothing_is_registered_unless_it_is_asked_for():
    code = (
        "from easytorch.generation.vllm_plugin import register\nassert not register()\n"
        "import sys; assert 'transformers' not in sys.modules"
    )
    run(code, EASYTORCH_VLLM="0")


def test_the_entry_point_names_it():
    import tomllib

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["vllm.general_plugins"] == {"easytorch": "easytorch.generation.vllm_plugin:register"}
