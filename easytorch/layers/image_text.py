"""Models of images and text: a vision tower, a projector, and a decoder that reads the features of an image as tokens.

Legend: B batch, T tokens, I images, N features of an image, D hidden size of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.utils import output_capturing, torch_compilable_check
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import cache_keyword, cache_of, takes_cache
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.basics import check_one_input
from easytorch.layers.heads import CausalLMHead, text_config_of
from easytorch.layers.masks import Masks
from easytorch.layers.tower_outputs import asked_of_towers, tower_fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` comes after it among the bases


def is_token(token: int, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor, embedding: Any) -> torch.Tensor:
    """(B, T): True where input_ids (B, T) is `token`; without them, where inputs_embeds (B, T, D) is its embedding."""
    if input_ids is not None:
        return input_ids == token
    embedded = embedding(torch.tensor(token, device=inputs_embeds.device))
    return (inputs_embeds == embedded).all(-1)


def with_hidden_states(kwargs: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The arguments of a tower whose output is to have the hidden states of `layers`, or all, if they are asked for."""
    # older versions of transformers have no choice of some
    all_of_them = kwargs.get("output_hidden_states") or not hasattr(output_capturing, "select_hidden_states")
    return {**kwargs, "return_dict": True, "output_hidden_states": all_of_them or layers}


def record_hidden_states(tower: nn.Module) -> None:
    """Installs the hooks by which transformers records a tower's hidden states, where its models have such.

    Else the first call installs them, under a lock, which `torch.compile(fullgraph=True)` refuses.
    """
    if isinstance(tower, PreTrainedModel) and tower._can_record_outputs:
        output_capturing.maybe_install_capturing_hooks(tower)


def check_count(kind: str, token: int, tokens: torch.Tensor, features: int) -> None:
    """`ValueError` unless there are as many placeholder `tokens` of a kind of input ("image", "video") as features."""
    torch_compilable_check(
        tokens == features,
        lambda: (
            f"{kind.capitalize()} features and {kind} tokens do not match, tokens: {tokens}, features: {features}; "
            f"input_ids must have the {kind} token {token} once for each feature of each {kind}"
        ),
    )


class TokenTypesOfPrompt:
    """A mixin of heads whose masks depend on the types of the prompt's tokens. token_types: the argument's name.

    masks_of_types: (config of the text, inputs_embeds, attention_mask, cache, position_ids, types) -> masks.
    """

    token_types: ClassVar[str] = "token_type_ids"
    masks_of_types: ClassVar[Callable[..., Masks]]

    @classmethod
    @takes_cache
    def create_masks_for_generate(
        cls,
        config: PreTrainedConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        position_ids: torch.Tensor | None,
        **kwargs: Any,
    ) -> Masks:
        """The masks of a static cache, for `generate`, which passes the types by their name."""
        text, types = config.get_text_config(), kwargs.get(cls.token_types)
        return cls.masks_of_types(text, inputs_embeds, attention_mask, cache, position_ids, types)

    def prepare_inputs_for_generation(
        self, input_ids: Any, use_cache: bool = True, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """The types are of the prompt, which without a cache every step reads again."""
        prepare: Any = super().prepare_inputs_for_generation  # type: ignore[misc]
        inputs: dict[str, Any] = prepare(
            input_ids, use_cache=use_cache, is_first_iteration=is_first_iteration, **kwargs
        )
        inputs[self.token_types] = kwargs.get(self.token_types) if is_first_iteration or not use_cache else None
        return inputs


class ImageTextModel(ArgumentsInOrder):
    """The decoder over embeddings in which the features of the images stand in place of the image tokens.

    The family's `PreTrainedModel` says how the tower and the decoder are made, `new_part`, or the family makes them
    itself, in `add_parts`. image_arguments, mask_arguments: those that go to `get_image_features` and to `make_masks`.
    """

    projector_class: ClassVar[type[nn.Module]]
    output_class: ClassVar[type[Any]]
    image_arguments: ClassVar[tuple[str, ...]] = ()
    mask_arguments: ClassVar[tuple[str, ...]] = ()
    asks_tower: ClassVar[bool] = False  # for the attentions and hidden states that it is asked for itself

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.add_parts(config)
        self.post_init()

    def add_parts(self, config: Any) -> None:
        """The tower, the projector and the decoder, in transformers' order, which optimizer states depend on."""
        family: Any = self
        self.vision_tower = family.new_part(config.vision_config)
        self.multi_modal_projector = self.projector_class(config)
        self.language_model: Any = family.new_part(config.text_config)

    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        """The tower's output; its pooler_output is what the image tokens become, (I, N, D), or (N, D) of each image."""
        raise NotImplementedError

    def make_masks(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: Any,
        cache: Cache | None,
        position_ids: torch.Tensor | None,
    ) -> Any:
        """The attention_mask for the decoder."""
        return attention_mask

    def embed_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids (B, T) -> (B, T, D); the token of an image need not be in the vocabulary."""
        image_token = self.config.image_token_id
        if image_token >= text_config_of(self.config).vocab_size:
            input_ids = input_ids.masked_fill(input_ids == image_token, 0)
        return self.get_input_embeddings()(input_ids)

    def get_placeholder_mask(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor, image_features: torch.Tensor
    ) -> torch.Tensor:
        """(B, T, 1): True for the tokens of images. `ValueError` unless there are as many as image_features (..., D).

        Without input_ids they are those with the embedding of the image token.
        """
        image_token = self.config.image_token_id
        is_image = is_token(image_token, input_ids, inputs_embeds, self.get_input_embeddings())
        check_count("image", image_token, is_image.sum(), image_features.shape[:-1].numel())
        return is_image[..., None].to(inputs_embeds.device)

    def put_images(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor, image_features: torch.Tensor
    ) -> torch.Tensor:
        """inputs_embeds (B, T, D) with image_features (..., D) in place of the image tokens, in their order."""
        is_image = self.get_placeholder_mask(input_ids, inputs_embeds, image_features)
        return inputs_embeds.masked_scatter(is_image, image_features)

    def embed(
        self,
        input_ids: torch.Tensor | None,
        pixel_values: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        mm_encoder_outputs: dict[str, Any] | None,
        **of_images: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """What the decoder reads, (B, T, D), the features of the images in it, and what `get_image_features` gave.

        of_images: see `image_arguments`.
        """
        check_one_input(input_ids, inputs_embeds)
        if pixel_values is not None and mm_encoder_outputs is not None:
            raise ValueError("You cannot specify both pixel_values and mm_encoder_outputs at the same time")
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_text(input_ids)
        images = (mm_encoder_outputs or {}).get("image")
        if pixel_values is not None:
            images = self.get_image_features(pixel_values, return_dict=True, **of_images)
        if images is None:
            return inputs_embeds, None, None
        features = images.pooler_output
        features = torch.cat(tuple(features)) if isinstance(features, list | tuple) else features
        features = features.to(inputs_embeds.device, inputs_embeds.dtype)
        return self.put_images(input_ids, inputs_embeds, features), features, images

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
        **kwargs: Any,
    ) -> Any:
        """As the decoder's, and pixel_values (I, C, height, width) of the images whose tokens are in input_ids (B, T).

        mm_encoder_outputs: {"image": what `get_image_features` gave} in place of pixel_values.
        """
        kwargs.pop("labels", None)  # those of the head, which some of transformers' classes pass on
        of_images, of_masks = (
            {name: kwargs.pop(name) for name in names if name in kwargs}
            for names in (self.image_arguments, self.mask_arguments)
        )
        if self.asks_tower:
            of_images |= asked_of_towers(self.output_class, kwargs)
        inputs_embeds, features, images = self.embed(
            input_ids, pixel_values, inputs_embeds, mm_encoder_outputs, **of_images
        )
        outputs = self.language_model(
            attention_mask=self.make_masks(inputs_embeds, attention_mask, cache, position_ids, **of_masks),
            position_ids=position_ids,
            **cache_keyword(cache),
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        return self.output_class(
            last_hidden_state=outputs.last_hidden_state,
            **cache_keyword(cache_of(outputs)),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **tower_fields(self.output_class, {"image": images}, {"image": features}),
        )


class ImageTextHead(ArgumentsInOrder, CausalLMHead):
    """`CausalLMHead` of an `ImageTextModel`."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012
    _pp_plan = None
    _fsdp_plan = None

    def get_image_features(self, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the backbone's."""
        backbone: Any = self.base_model
        return backbone.get_image_features(pixel_values, *args, **kwargs)
