"""The tokenizer beside a model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a name; `ValueError` that names it where there is none, or a broken one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (ValueError, OSError, LookupError, TypeError) as error:
        raise ValueError(
            f"{source}: no tokenizer can be loaded there ({error}); save the model's own beside the weights"
        ) from error
