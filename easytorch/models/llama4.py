"""Llama 4 with images: patches with rotary rows and columns, squares of them merged, before its text model."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, GenerationMixin, Llama4Config, Llama4VisionConfig
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.llama4.modeling_llama4 import Llama4CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.cache_names import CACHE, cache_keyword, takes_cache
from easytorch.layers.deferred_logits import DeferredLogits, deferring
from easytorch.layers.image_text import ImageTextModel
from easytorch.layers.linear import linear
from easytorch.layers.mlp import PlainMLP
from easytorch.layers.norm import LayerNorm
from easytorch.layers.patches import grid_of, pair
from easytorch.layers.rotary import RotaryTables
from easytorch.layers.stock_names import given_by, same_as
from easytorch.layers.tower import TowerAttention, TowerEncoder, TowerLayer
from easytorch.layers.tower_outputs import tower_fields
from easytorch.models.llama4_text import Llama4ForCausalLM
from easytorch.protocol.native import NativeMoeDecoder


class Llama4VisionAttention(TowerAttention):
    interleaved = True
    output_name = "o_proj"


class Llama4VisionMLP(PlainMLP):
    up_name, down_name, act_name = "fc1", "fc2", "activation_fn"

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, nn.GELU(), bias=True)


class Llama4VisionEncoderLayer(TowerLayer):
    hidden_size = given_by("config.hidden_size")
    attention_name = "self_attn"
    norms = ("input_layernorm", "post_attention_layernorm")

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.self_attn = Llama4VisionAttention(config, layer_idx)
        self.mlp = Llama4VisionMLP(config)
        self.input_layernorm = LayerNorm(config.hidden_size)
        self.post_attention_layernorm = LayerNorm(config.hidden_size)


class Llama4VisionEncoder(TowerEncoder):
    pass


class Llama4UnfoldConvolution(nn.Module):
    """The patch embedding: (I, C, height, width) -> (I, N, D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.unfold = nn.Unfold(pair(config.patch_size), stride=pair(config.patch_size))
        self.linear = nn.Linear(
            config.num_channels * math.prod(pair(config.patch_size)), config.hidden_size, bias=False
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return linear(self.linear, self.unfold(pixel_values).transpose(1, 2))


class Llama4VisionRotaryEmbedding(RotaryTables):
    """cos and sin of the patches, whose columns turn the first half of a head and whose rows the second, and of the
    class token after them, which does not turn."""

    inv_freq: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.rope: dict[str, Any] = config.rope_parameters or {}
        if self.rope.get("rope_type", "default") not in ("default", "axial"):
            raise ValueError(
                f"{config.model_type}: config.rope_parameters has rope type {self.rope['rope_type']!r}; its tower has "
                f"'default', axial frequencies of rope_theta"
            )
        if self.head_dim % 4:
            raise ValueError(
                f"{config.model_type}: config.num_attention_heads={config.num_attention_heads} gives heads of "
                f"{self.head_dim}, which must be a multiple of 4: rows and columns each rotate pairs within half a head"
            )
        self.grid = grid_of(config)
        self.register_buffer("inv_freq", self._inverse(), persistent=False)

    def _inverse(self) -> torch.Tensor:
        half = self.head_dim // 2
        return 1.0 / self.rope["rope_theta"] ** (torch.arange(0, half, 2, dtype=torch.float32) / half)

    def init_buffers(self) -> None:
        init.copy_(self.inv_freq, self._inverse())

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (1, N + 1, head_dim), float32."""
        rows, columns = (torch.arange(1, size + 1, device=x.device) for size in self.grid)
        places = torch.cartesian_prod(rows, columns).flip(1)
        angles = (places[..., None] * self.inv_freq.to(x.device, torch.float32)).flatten(1)
        angles = F.pad(angles, (0, 0, 0, 1))
        angles = torch.cat((angles, angles), dim=-1)[None]
        return angles.cos(), angles.sin()


class Llama4VisionMLP2(nn.Module):
    """act(fc2(act(fc1(x)))), without biases."""

    hidden_size = given_by("config.hidden_size")
    intermediate_size = given_by("config.intermediate_size")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.intermediate_size, config.projector_input_dim, bias=False)
        self.fc2 = nn.Linear(config.projector_output_dim, config.projector_output_dim, bias=False)
        self.activation_fn = nn.GELU()
        self.dropout = config.projector_dropout

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.activation_fn(linear(self.fc1, hidden_states))
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        return self.activation_fn(linear(self.fc2, hidden_states))


class Llama4VisionPixelShuffleMLP(nn.Module):
    """A token of each square of patches: (I, N, D) -> (I, N * pixel_shuffle_ratio ** 2, projector_output_dim)."""

    pixel_shuffle_ratio = same_as("ratio")
    output_dim = given_by("config.projector_output_dim")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.ratio = config.pixel_shuffle_ratio
        self.inner_dim = int(config.projector_input_dim // self.ratio**2)
        self.mlp = Llama4VisionMLP2(config)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        images, count, width = patches.shape
        side, ratio = math.isqrt(count), self.ratio
        fewer, wider, widest = int(side * ratio), int(width / ratio), int(width / ratio**2)
        if side**2 != count or side * wider * fewer != count * width or widest != self.mlp.fc1.in_features:
            raise ValueError(
                f"{self.config.model_type}: config.pixel_shuffle_ratio={ratio} makes {fewer} x {fewer} tokens of "
                f"{widest} from {count} patches of {width}: the patches must be a square that it divides, and "
                f"config.intermediate_size={self.mlp.fc1.in_features} the width of a token"
            )
        rows = patches.view(images, side, fewer, wider).transpose(1, 2)
        squares = rows.reshape(images, fewer, fewer, widest).transpose(1, 2)
        return self.mlp(squares.flatten(1, 2))


class Llama4PreTrainedModel(NativeMoeDecoder):
    config: Llama4Config
    config_class = Llama4Config
    other_experts = False
    input_modalities: Any = ("image", "text")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Llama4VisionModel):
            init.normal_(module.class_embedding, std=module.scale)
            init.normal_(module.positional_embedding_vlm, std=module.scale)


class Llama4VisionModel(Llama4PreTrainedModel):
    image_size = given_by("config.image_size")
    patch_size = given_by("config.patch_size")
    hidden_size = given_by("config.hidden_size")
    num_channels = given_by("config.num_channels")
    config: Llama4VisionConfig
    config_class = Llama4VisionConfig
    base_model_prefix = "vision_model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["Llama4VisionEncoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Llama4VisionEncoderLayer,
        "attentions": Llama4VisionAttention,
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        rows, columns = grid_of(config)
        self.scale = config.hidden_size**-0.5
        self.patch_embedding = Llama4UnfoldConvolution(config)
        self.class_embedding = nn.Parameter(self.scale * torch.randn(config.hidden_size))
        self.num_patches = rows * columns + 1  # and the class token
        positions = self.scale * torch.randn(self.num_patches, config.hidden_size)
        self.positional_embedding_vlm = nn.Parameter(positions)
        self.rotary_embedding = Llama4VisionRotaryEmbedding(config)
        self.layernorm_pre = LayerNorm(config.hidden_size)
        self.layernorm_post = LayerNorm(config.hidden_size)
        self.model = Llama4VisionEncoder(config, Llama4VisionEncoderLayer)
        self.vision_adapter = Llama4VisionPixelShuffleMLP(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.patch_embedding

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """pixel_values (I, C, height, width) -> last_hidden_state (I, N, projector_output_dim).

        attention_mask is not used, as in transformers: every patch attends to all of its image.
        """
        patches = self.patch_embedding(pixel_values.to(self.patch_embedding.linear.weight.dtype))
        tokens = torch.cat((patches, self.class_embedding.expand(len(patches), 1, -1)), dim=1)
        tokens = self.layernorm_pre(tokens + self.positional_embedding_vlm.to(tokens.dtype))
        tokens = self.model(tokens, None, self.rotary_embedding(tokens), **kwargs)
        return BaseModelOutputWithPooling(last_hidden_state=self.vision_adapter(self.layernorm_post(tokens)[:, :-1]))


class Llama4MultiModalProjector(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.vision_config.vision_output_dim
        self.linear_1 = nn.Linear(width, config.text_config.hidden_size, bias=False)

    def forward(self, image_features: torch.Tensor) -> torch.Tensor:
        return linear(self.linear_1, image_features)


class Llama4ForConditionalGeneration(ImageTextModel, Llama4PreTrainedModel, GenerationMixin):
    """The decoder has its head in it: `language_model` is a `Llama4ForCausalLM`."""

    projector_class = Llama4MultiModalProjector
    output_class = Llama4CausalLMOutputWithPast
    base_model_prefix = "model"
    arguments = (
        "input_ids",
        "pixel_values",
        "attention_mask",
        "position_ids",
        CACHE,
        "inputs_embeds",
        "vision_feature_select_strategy",
        "labels",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "logits_to_keep",
        "mm_encoder_outputs",
    )
    _no_split_modules = ["Llama4TextDecoderLayer", "Llama4VisionEncoderLayer"]  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def add_parts(self, config: Any) -> None:
        self.vision_model = Llama4VisionModel._from_config(config.vision_config)
        self.multi_modal_projector = self.projector_class(config)
        self.language_model = Llama4ForCausalLM._from_config(config.text_config)
        self.vocab_size = config.text_config.vocab_size
        self.pad_token_id = getattr(config, "pad_token_id", config.text_config.pad_token_id or -1)

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.language_model.set_output_embeddings(new_embeddings)

    def get_decoder(self) -> Any:
        """The decoder without its head."""
        return self.language_model.get_decoder()

    def set_decoder(self, decoder: nn.Module) -> None:
        self.language_model.set_decoder(decoder)

    @can_return_tuple
    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        """pixel_values (I, C, height, width) -> the tower's output, and the features (I, N, D) as its pooler_output.

        transformers' class leaves them out, and then its beams find no image to repeat.
        """
        outputs = self.vision_model(pixel_values, **kwargs | {"return_dict": True})
        outputs.pooler_output = self.multi_modal_projector(outputs.last_hidden_state)
        return outputs

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        vision_feature_select_strategy: str | None = None,
        **kwargs: Any,
    ) -> Llama4CausalLMOutputWithPast:
        """As the decoder's, and pixel_values (I, C, height, width) of the images whose tokens are in input_ids (B, T).

        mm_encoder_outputs: {"image": what `get_image_features` gave} in place of pixel_values.
        vision_feature_select_strategy is not used, as in transformers.
        """
        inputs_embeds, _, images = self.embed(input_ids, pixel_values, inputs_embeds, mm_encoder_outputs)
        outputs = self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_keyword(cache),
            inputs_embeds=inputs_embeds,
            **kwargs | {"return_dict": True},
        )
        given = dict(outputs.items())
        deferred = isinstance(given["logits"], DeferredLogits)  # which stay so
        output_class: Any = deferring(self.output_class) if deferred else self.output_class
        features = None if images is None else images.last_hidden_state
        return output_class(**given, **tower_fields(output_class, {"image": images}, {"image": features}))
