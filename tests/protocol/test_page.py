"""docs/protocol.md: its samples run in order, and its table says what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from easytorch import protocol
from easytorch.models.llama import LlamaForCausalLM

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
TABLE = re.findall(r"^\| `(\w+)` \| .+? \| `(.+)` \| (.+) \|$", PAGE, re.MULTILINE)
ROWS = [(name, status) for name, _, status in TABLE]
# The names of EasyDeL's easydel.infra.mixins.protocol, and the properties its models have beside them.
NAMES = """
apply_lora_to_layers base_model_prefix can_generate compute_loss config config_class create_cache_metadata
create_paged_metadata float from_pretrained gather_model generate get_module_repr get_static_arguments
get_torch_loader graphdef graphother graphstate half init_cache init_ragged_pages lazy_init merge_lora_params
merge_params merge_params_dict mesh params_sharding prepare_inputs_for_call prepare_inputs_for_generation
prettify_nnx printify_nnx pure_transform_fn push_to_hub quantize return_type_adjuster save_pretrained
shard_model split_lora_params split_params split_params_dict to_dtype to_state to_torch transform_fn
unwrap_lora_to_layers update_inputs_for_generation
""".split()  # noqa: SIM905 - a page of names
# Methods under these names are functions under others.
FUNCTIONS = {"from_pretrained": None}
OF_MODULES = ("get_module_repr", "prettify_nnx", "printify_nnx", "return_type_adjuster")


def test_samples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        exec(block, namespace)
    assert namespace["step"] == 100
    for name, example, _ in TABLE:
        assert name in example, f"the example of {name} does not use it"
        eval(example, namespace)


def test_every_name_has_a_row():
    assert [name for name, _ in ROWS] == NAMES


@pytest.mark.parametrize(("name", "status"), ROWS, ids=[name for name, _ in ROWS])
def test_the_status_is_so(name, status):
    there = next((one for one in LlamaForCausalLM.__mro__ if name in vars(one)), None)
    theirs = name in ("config", "config_class") or (there is not None and there.__module__.startswith("transformers."))
    if status.startswith("not yet"):
        assert not hasattr(LlamaForCausalLM, name) and not hasattr(protocol, name), "it is there: say so"
    elif status == "there, transformers'":
        assert theirs or name == "base_model_prefix"
    else:
        assert status == "there"
        assert name in OF_MODULES or (there is not None and not theirs)
        function = FUNCTIONS.get(name, name)
        assert function is None or callable(getattr(protocol, function))
