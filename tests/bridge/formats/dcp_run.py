"""Run by torchrun on two processes: an FSDP2 step of a small BERT, and its state saved by torch in its ways."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.processes import leave_group


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.BertForSequenceClassification(config)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.arange(5)[None], labels=torch.tensor([1])).loss.backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": moments}, "step": 3}, checkpoint_id=folder / "dcp")
    dcp.save(weights, storage_writer=HuggingFaceStorageWriter(str(folder / "safetensors"), save_distributed=True))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
