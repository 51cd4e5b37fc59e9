"""One of two processes: joint products with adapters on some of their layers, over meshes; prints "rank r ok"."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from easytorch.distributed import make_mesh
from easytorch.distributed.sharding import data_place
from easytorch.kernels.linear import recorded
from easytorch.layers.fused_linear import FusedProjections
from easytorch.models.llama import LlamaForCausalLM
from tests.processes import leave_group

# large enough for query, key and value, and gate and up, to be one product each
CONFIG = {
    "vocab_size": 64, "hidden_size": 160, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
IDS = torch.arange(4 * 32).view(4, 32) * 7 % 64
ADAPTED = [None, "q_proj|up_proj", "q_proj|k_proj|v_proj|gate_proj|up_proj|o_proj"]


def made(pattern: str | None) -> Any:
    torch.manual_seed(2)
    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG)).train()
    if pattern is not None:
        model.apply_lora_to_layers(4, pattern, rngs=0)
        values = model.split_lora_params()
        model.merge_lora_params({name: 0.1 * torch.randn_like(one) for name, one in values.items()})
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def joint_products() -> list[int]:
    """How many joint products have run, a number that counts on."""
    ran, original = [0], FusedProjections._recorded

    def counted(self: Any, x: torch.Tensor) -> Any:
        outputs = original(self, x)
        ran[0] += outputs is not None
        return outputs

    FusedProjections._recorded = counted  # type: ignore[method-assign]
    return ran


def main() -> None:
    recorded.prefers_onednn = lambda elements: True  # as on processors of AMD
    ran = joint_products()
    for pattern in ADAPTED:
        start = made(pattern)
        alone = copy.deepcopy(start)
        before = ran[0]
        wanted = alone(input_ids=IDS, labels=IDS, use_cache=False).loss
        wanted.backward()
        assert (ran[0] - before > 0) == (pattern is None), (pattern, ran)
        expected = {name: one.grad for name, one in alone.named_parameters() if one.requires_grad}
        assert len(expected) == sum(one.requires_grad for one in start.parameters()) > 7
        for axes in ("dp=2", "fsdp=2", "tp=2"):
            mesh = make_mesh(axes)
            model = copy.deepcopy(start)
            if axes == "tp=2" and pattern is not None:
                try:
                    model.shard_model(mesh=mesh)
                except NotImplementedError as error:
                    assert "q_proj has an adapter" in str(error), error
                    continue
                raise AssertionError("an adapter was divided over tp")
            model.shard_model(mesh=mesh)
            place, places = data_place(mesh)
            rows = IDS.chunk(places)[place]
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            case = (pattern, axes)
            assert abs(float(mean / 2 / wanted.detach()) - 1) < 1e-5, (case, mean / 2, wanted)
            found = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
            assert found.keys() == expected.keys(), case
            for name, grad in expected.items():
                error = (full(found[name]) - grad).norm() / grad.norm()
                assert error < 1e-5, (case, name, float(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    print(f"rank {dist.get_rank()} ok\n", end="", flush=True)
    leave_group()
