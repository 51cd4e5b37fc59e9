"""Which leaf a torch parameter is by the HF Flax convention, told by the kind of module that holds it.

HF's converter (transformers 4.57, modeling_flax_pytorch_utils.py) keeps every module's name and changes the last one:

- what flax.linen has a module for is named and laid out as flax.linen does: `kernel` of Dense, Conv and ConvTranspose
  (with `transpose_kernel=True`, which computes what torch does), `embedding` of Embed, `scale` of LayerNorm, GroupNorm
  and BatchNorm; a BatchNorm's `mean` and `var` stand under "batch_stats/" and then all other leaves under "params/";
- a matrix called `weight` in any other module (a router, an expert on disk, GPT-2's Conv1D) is a `kernel`, transposed;
- everything else keeps its name and layout: hand-written norms (Llama's, Gemma's, T5's and every RMSNorm of
  transformers hold `weight`, also in families that never had a Flax class), `cls_token`, `weight_g` and `weight_v`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Dimensions of a convolution's kernel -> transform.
_CONVOLUTIONS = {3: "conv1d", 4: "conv2d", 5: "conv3d"}
_STATISTICS = {"running_mean": "mean", "running_var": "var"}
# torch.nn.utils.parametrizations.weight_norm keeps them as lists of originals; older checkpoints by these names.
_WEIGHT_NORM = {"original0": "weight_g", "original1": "weight_v"}


def is_statistic(name: str) -> bool:
    """Whether the tensor is a running mean or variance, a "batch_stats" leaf."""
    return name.rpartition(".")[2] in _STATISTICS


def leaf_of(name: str, module: torch.nn.Module | None, rank: int) -> tuple[str, str]:
    """(Flax path, transform) of the weight with the torch name `name` and that many dimensions.

    module: what holds it in memory, None where it is held by several or cut out of one.
    """
    from torch import nn

    *path, last = name.split(".")
    leaf, transform = last, "identity"
    if last in _STATISTICS:
        leaf = _STATISTICS[last]
    elif last in _WEIGHT_NORM and path[-2:] == ["parametrizations", "weight"]:
        path, leaf = path[:-2], _WEIGHT_NORM[last]
    elif last == "weight":
        convolution = isinstance(module, nn.modules.conv._ConvNd) or (module is None and rank in _CONVOLUTIONS)
        if isinstance(module, nn.Embedding):
            leaf = "embedding"
        elif _is_linen_norm(module):
            leaf = "scale"
        elif convolution:
            leaf, transform = "kernel", _CONVOLUTIONS[rank]
        elif rank == 2:
            leaf, transform = "kernel", "linear"
    return "/".join((*path, leaf)), transform


def _is_linen_norm(module: torch.nn.Module | None) -> bool:
    from torch import nn

    linen = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
    # A frozen BatchNorm is no subclass of torch's.
    return isinstance(module, linen) or hasattr(module, "running_mean")
