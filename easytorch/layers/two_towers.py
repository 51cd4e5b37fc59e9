"""Contrastive models of text and images in one embedding space, shared by CLIP and SigLIP.

Legend: B texts, I images, T tokens, D hidden size, E size of the common space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils.generic import can_return_tuple

from easytorch.layers.arguments import in_order

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` stands behind it in the bases


class TextEmbeddings(nn.Module):
    """Tokens and learned positions: input_ids (B, T) -> (B, T, D)."""

    position_ids: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.register_buffer("position_ids", torch.arange(config.max_position_embeddings)[None], persistent=False)

    def init_buffers(self) -> None:
        """Fill the buffer after a load on the meta device."""
        init.copy_(self.position_ids, torch.arange(self.position_ids.shape[-1])[None])

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        embeddings = self.token_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        length, longest = embeddings.shape[-2], self.position_embedding.weight.shape[0]
        if length > longest:
            raise ValueError(
                f"Sequence length must be less than max_position_embeddings (got `sequence length`: {length} and "
                f"max_position_embeddings: {longest})"
            )
        if position_ids is None:
            position_ids = torch.arange(length, device=embeddings.device)  # the module is called: adapters see it
        return embeddings + self.position_embedding(position_ids)


def token_rows(input_ids: torch.Tensor | None) -> torch.Tensor:
    """input_ids of any shape (..., T) -> (B, T)."""
    if input_ids is None:
        raise ValueError("You have to specify input_ids")
    return input_ids.reshape(-1, input_ids.shape[-1])


class TwoTowers(_Base):
    """Contrastive model of texts and images: logits are the scaled cosine similarities of their embeddings.

    A family names its towers and says how logits and the loss are made. arguments: those of `forward`, in the order of
    transformers.
    """

    text_class: ClassVar[type[Any]]
    vision_class: ClassVar[type[Any]]
    output_class: ClassVar[type[Any]]
    arguments: ClassVar[tuple[str, ...]] = (
        "input_ids",
        "pixel_values",
        "attention_mask",
        "position_ids",
        "return_loss",
        "interpolate_pos_encoding",
    )
    of_images: ClassVar[tuple[str, ...]] = ("interpolate_pos_encoding",)  # those that go to the vision tower

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        family: Any = cls
        if "text_class" in vars(cls):
            family.forward = in_order(cls.forward, cls.arguments)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.text_model = self.text_class._from_config(config.text_config)
        self.vision_model = self.vision_class._from_config(config.vision_config)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: Any) -> None:
        """Adds projections and scale parameters, under the names of transformers."""
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Module:
        return self.text_model.embeddings.token_embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.text_model.embeddings.token_embedding = value

    def text_embeds(self, pooled: torch.Tensor) -> torch.Tensor:
        """The pooled output of the text tower (B, D) -> (B, E)."""
        return pooled

    def image_embeds(self, pooled: torch.Tensor) -> torch.Tensor:
        """The pooled output of the vision tower (I, D) -> (I, E)."""
        return pooled

    def logits(self, similarity: torch.Tensor) -> torch.Tensor:
        """Cosines (B, I) -> logits_per_text (B, I)"""
        raise NotImplementedError

    def loss_of(self, logits_per_text: torch.Tensor) -> torch.Tensor:
        """The contrastive loss; text i belongs to image i."""
        raise NotImplementedError

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The text tower's output, whose pooler_output (B, E) is in the common space."""
        outputs = self.text_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        outputs["pooler_output"] = self.text_embeds(outputs.pooler_output)
        return outputs

    @can_return_tuple
    def get_image_features(self, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The vision tower's output, whose pooler_output (I, E) is in the common space; arguments: the tower's."""
        outputs = self.vision_model(pixel_values, *args, return_dict=True, **kwargs)
        outputs["pooler_output"] = self.image_embeds(outputs.pooler_output)
        return outputs

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_loss: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """input_ids (B, T), pixel_values of I images -> logits_per_text (B, I), logits_per_image (I, B) and embeddings.

        return_loss: compute the contrastive loss, in which text i belongs to image i.
        """
        given = {name: kwargs.pop(name) for name in self.of_images if name in kwargs}
        images = self.get_image_features(pixel_values, return_dict=True, **given, **kwargs)
        texts = self.get_text_features(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        image_embeds, text_embeds = (
            one.pooler_output / one.pooler_output.norm(p=2, dim=-1, keepdim=True) for one in (images, texts)
        )
        logits_per_text = self.logits(text_embeds @ image_embeds.t().to(text_embeds.device))
        return self.output_class(
            loss=self.loss_of(logits_per_text) if return_loss else None,
            logits_per_image=logits_per_text.t(),
            logits_per_text=logits_per_text,
            text_embeds=text_embeds,
            image_embeds=image_embeds,
            text_model_output=texts,
            vision_model_output=images,
        )
