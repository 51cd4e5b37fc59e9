"""What a run starts from: tokenizer, blocks of text, and the model, new, pretrained or out of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import easytorch
from easytorch.bridge.errors import nearest
from easytorch.training.checkpoint import latest_checkpoint
from easytorch.training.config import TrainingConfig
from easytorch.training.data import Blocks, read_texts, tokenize
from easytorch.training.processes import Processes
from easytorch.training.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_inputs(config: TrainingConfig, processes: int) -> None:
    """What can be seen to be wrong before anything is started: `ValueError` or `OSError`."""
    config.share(processes)
    find_checkpoint(config)
    read_texts(config.text)
    _check_model(config.model)


def _check_model(model: dict[str, Any] | str) -> None:
    """Refuses what is no causal language model transformers knows, by its config alone."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model)
    elif model["model_type"] not in CONFIG_MAPPING:
        raise ValueError(
            f"model: unknown architecture {model['model_type']!r}{nearest(model['model_type'], CONFIG_MAPPING)}"
        )
    else:
        try:
            config = AutoConfig.for_model(**model)
        except StrictDataclassError as error:
            raise ValueError(f"model: {' '.join(str(error).split())}") from error
    if type(config) not in easytorch.AutoModelForCausalLM._model_mapping:
        raise ValueError(f"model: {config.model_type!r} has no causal language model; give another architecture")


def find_checkpoint(config: TrainingConfig) -> Path | None:
    """The checkpoint to resume from, if any; `FileExistsError` where a new run would mix with an old one."""
    checkpoint = latest_checkpoint(config.output)
    if checkpoint is not None and not config.resume:
        raise FileExistsError(
            f"{config.output} already has {checkpoint.name}; resume it, or give another output folder"
        )
    return checkpoint


def prepare_text(
    config: TrainingConfig, processes: Processes, checkpoint: Path | None
) -> tuple[PreTrainedTokenizerBase, Blocks]:
    """The tokenizer and the blocks; the first process makes them, the others read what it wrote."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    # transformers draws a bar for each save and load; this run has one of its own.
    logging.disable_progress_bar()
    folder = Path(config.output) / "data"
    source = checkpoint or (config.model if isinstance(config.model, str) else None)
    if processes.first:
        folder.mkdir(parents=True, exist_ok=True)
        texts = read_texts(config.text)
        tokenizer = (
            train_tokenizer(texts, config.vocab_size) if source is None else AutoTokenizer.from_pretrained(source)
        )
        tokenizer.save_pretrained(folder)
        tokenize(texts, tokenizer, folder / "tokens.npy")
    processes.barrier()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, Blocks(folder / "tokens.npy", config.block_size, config.eval_fraction)


def make_model(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, checkpoint: Path | None, device: torch.device
) -> PreTrainedModel:
    """The model on `device` in float32: the same parameters in every process."""
    auto = easytorch.AutoModelForCausalLM
    chosen: dict[str, Any] = {"dtype": torch.float32}
    if config.attn_implementation is not None:
        chosen["attn_implementation"] = config.attn_implementation
    torch.manual_seed(config.seed)
    if checkpoint is not None or isinstance(config.model, str):
        model: torch.nn.Module = auto.from_pretrained(str(checkpoint or config.model), **chosen)
    else:
        model = auto.from_config(_architecture(config, tokenizer), **chosen)
    return cast("PreTrainedModel", model.to(device))


def _architecture(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    from transformers import AutoConfig

    assert isinstance(config.model, dict)
    settings = {"max_position_embeddings": config.block_size, **config.model}
    if settings["max_position_embeddings"] < config.block_size:
        raise ValueError(
            f"block_size {config.block_size} is longer than the model's max_position_embeddings "
            f"{settings['max_position_embeddings']}"
        )
    return AutoConfig.for_model(
        settings.pop("model_type"),
        **{
            **settings,
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
    )
