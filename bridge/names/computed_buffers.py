"""Persistent buffers that a class of transformers computes anew from its config, and those that hold data."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Of transformers 5.23, those of floating point numbers and then the indices, counters and masks.
_COMPUTED = re.compile(
    r"(inv_freq|inv_timescales|slope_rate|(query|key|diagonal)_decay|pos_idx_to_embed|n(um)?_points_scale|"
    r"attn_mask_probs|empty_weight|norm_mean|norm_std|act_fn\.(beta|eps)|dft_mat_(hidden|seq)|"
    r"position_ids|token_type_ids|relative_position_index|num_batches_tracked|latent_stats_num_updates|"
    r"summary_idxs|layer_multipliers|ngram_heads_(vocab_sizes|offsets)|af2_to_esm)$"
)
# A causal mask, as Bark's; a bias of numbers holds data.
_MASK = re.compile(r"attn\.bias$")


def is_computed(name: str, buffer: torch.Tensor) -> bool:
    """Whether nothing is lost with `buffer`: unlike statistics of norms, a router's biases or tables of experts."""
    import torch

    if buffer.dtype == torch.bool and _MASK.search(name):
        return True
    return _COMPUTED.search(name) is not None
