"""Image encoders whose intermediate tokens are feature maps too: DINO's models, and their backbones for detectors.

Legend: B batch, N patches, T tokens (class token, registers, patches), D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_outputs import BackboneOutput, BaseModelOutput, BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.norm import LayerNorm
from easytorch.layers.patches import pair
from easytorch.layers.tower import LayerScale, TowerLayer, through

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` stands behind it in the bases


class DinoEncoder(_Base):
    """The layers, a model of their own as in transformers: the `base_model` of DINOv3, which is saved and loaded."""

    layer_class: ClassVar[type[TowerLayer]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.post_init()

    @can_return_tuple  # and captures nothing, which would take it from the model around it
    def forward(
        self, hidden_states: torch.Tensor, states: list[torch.Tensor] | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """hidden_states (B, T, D) -> last_hidden_state (B, T, D); each layer's output is appended to states."""
        return BaseModelOutput(last_hidden_state=through(self.layer, hidden_states, states=states, **kwargs))


@torch.no_grad()
def init_dino(module: nn.Module, config: Any) -> None:
    """The initial weights that DINO's models have in common."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        init.trunc_normal_(module.weight, mean=0.0, std=config.initializer_range)
        if module.bias is not None:
            init.zeros_(module.bias)
    if isinstance(module, LayerScale):
        init.constant_(module.lambda1, config.layerscale_value)


class DinoBackbone(_Base):
    """Embeddings, layers and the final norm.

    encoder_name, norm_name: what the family calls the layers and the norm. A family overrides `positions`, where the
    layers are given some.
    """

    embeddings_class: ClassVar[type[Any]]
    encoder_class: ClassVar[type[DinoEncoder]]
    encoder_name: ClassVar[str] = "encoder"
    norm_name: ClassVar[str] = "layernorm"
    has_pooler: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.add_modules(config)
        self.post_init()

    def add_modules(self, config: Any) -> None:
        """The submodules, in transformers' order, which optimizer states depend on."""
        self.embeddings = self.embeddings_class(config)
        setattr(self, self.encoder_name, self.encoder_class(config))
        setattr(self, self.norm_name, LayerNorm(config.hidden_size, eps=config.layer_norm_eps))

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.patch_embeddings = value

    def context(
        self, hidden_states: torch.Tensor, pixel_values: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> dict[str, Any]:
        """The arguments of every layer besides hidden_states (B, T, D): its mask and positions."""
        return {}

    def run(
        self,
        pixel_values: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        states: list[torch.Tensor] | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """pixel_values (B, C, height, width) -> the last layer's output (B, T, D); states receives each layer's too."""
        hidden_states = self.embeddings(pixel_values, bool_masked_pos)
        assert pixel_values is not None
        kwargs |= self.context(hidden_states, pixel_values, attention_mask)
        if states is not None:
            states.append(hidden_states)
        encoded = getattr(self, self.encoder_name)(hidden_states, states=states, **kwargs | {"return_dict": True})
        output: torch.Tensor = encoded.last_hidden_state
        return output

    def normalized(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D) by the final norm."""
        return getattr(self, self.norm_name)(hidden_states)


class DinoModel(DinoBackbone):
    """Tokens, and the class token of the last layer."""

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """pixel_values (B, C, height, width) -> last_hidden_state (B, T, D), pooler_output (B, D).

        bool_masked_pos (B, N): the patches that the mask token stands for. attention_mask: what is attended to.
        """
        hidden_states = self.run(pixel_values, attention_mask, bool_masked_pos=bool_masked_pos, **kwargs)
        tokens = self.normalized(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=tokens[:, 0])


class DinoFeatures(BackboneMixin, DinoBackbone):
    """The feature maps of the stages in `config.out_features`: (B, D, rows, columns), or tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # after transformers' BackboneMixin, which sets it to None
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)

    def stage_tokens(self, index: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """The tokens (B, T, D) that become a feature map, from the output of a stage; index 0: from the embeddings."""
        return self.normalized(hidden_states) if self.config.apply_layernorm else hidden_states

    def prefix(self) -> int:
        """The number of tokens before those of patches, which no feature map includes."""
        raise NotImplementedError

    def output(self, maps: Any, tokens: dict[int, torch.Tensor]) -> BackboneOutput:
        """maps: a tuple of tensors. tokens: of each stage that has a map, and of the last one."""
        return BackboneOutput(feature_maps=maps)

    @can_return_tuple
    @filter_output_hidden_states
    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BackboneOutput:
        """pixel_values (B, C, height, width) -> feature_maps, one for each stage asked for."""
        states: list[torch.Tensor] = []
        self.run(pixel_values, attention_mask, states=states, **kwargs)
        height, width = (
            size // patch for size, patch in zip(pixel_values.shape[-2:], pair(self.config.patch_size), strict=True)
        )
        wanted = [index for index, stage in enumerate(self.stage_names) if stage in self.out_features]
        tokens = {index: self.stage_tokens(index, states[index]) for index in {*wanted, len(states) - 1}}
        maps = []
        for index in wanted:
            patches = tokens[index][:, self.prefix() :]
            if self.config.reshape_hidden_states:
                patches = patches.unflatten(1, (height, width)).permute(0, 3, 1, 2).contiguous()
            maps.append(patches)
        return self.output(tuple(maps), tokens)
