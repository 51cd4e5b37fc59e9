"""Whether a model can be divided over a mesh, by its sizes and plans alone: asked before anything is divided.

`shard_model` asks it of the whole model in each process, so that all of them refuse alike; the trainer asks it before
it writes anything, and a plan of a mesh that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from easytorch.distributed.specs import PartitionSpec, axis_names
from easytorch.distributed.staged_call import check_stages


def check_sharding(
    model: Any, axes: Mapping[str, int], rules: Mapping[str, PartitionSpec] | None = None, *, replicate: bool = False
) -> None:
    """`ValueError` for a size, or a rule, that does not divide over the axes, `NotImplementedError` for a model that
    cannot be divided over one of them.

    model: as it is before it is divided; on the meta device too. axes: of the mesh, with their sizes. rules: parameter
    -> the spec that a partition rule gives it. replicate: what does not divide over "tp" or "ep" is replicated.
    """
    rules = {} if rules is None else rules
    if axes.get("sp", 1) > 1:
        _check_sequence(model)
    if axes.get("pp", 1) > 1:
        check_stages(model, axes["pp"], axes)
        for name, spec in rules.items():
            if any("pp" in axis_names(one) for one in spec):
                raise ValueError(f"{name}: a partition rule shards it over pp, which divides the layers alone")
    if axes.get("tp", 1) > 1:
        from easytorch.distributed.tensor_parallel import checked_plan

        checked_plan(model, axes["tp"], rules, replicate=replicate)
    if axes.get("ep", 1) > 1:
        from easytorch.distributed.expert_parallel import check_experts

        check_experts(model, axes["ep"], rules, replicate=replicate)
    if axes.get("fsdp", 1) > 1:
        from easytorch.distributed.fully_sharded import shard_dimensions

        shard_dimensions(model, rules, axes)


def _check_sequence(model: Any) -> None:
    kind = type(model).__name__
    if not hasattr(model, "sequence_refusal"):
        raise NotImplementedError(f"{kind} cannot divide sequences over sp: native causal language models do")
    if (why := model.sequence_refusal()) is not None:
        raise NotImplementedError(f"{kind} cannot divide sequences over sp: {why}")
