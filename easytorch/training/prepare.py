"""The inputs of a run: tokenizer, blocks of text, and the model, new, pretrained or from a checkpoint."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

import easytorch
from easytorch.auto import causal
from easytorch.auto.tokenizer import load_tokenizer
from easytorch.distributed import xla_spmd
from easytorch.distributed.refusals import check_sharding
from easytorch.training import adapter, architecture, memory
from easytorch.training.chat import set_template
from easytorch.training.checkpoint import PROGRESS, latest_checkpoint, load_state
from easytorch.training.config import TrainingConfig, flag
from easytorch.training.data import TokenBlocks, read_texts, split_blocks, tokenize
from easytorch.training.disk import named_os_errors
from easytorch.training.examples import Examples
from easytorch.training.finite import nonfinite_parameter
from easytorch.training.float8 import check_float8
from easytorch.training.optimizers import check_installed
from easytorch.training.output_lock import only_run
from easytorch.training.processes import find_device
from easytorch.training.report import check_tensorboard
from easytorch.training.resume import check_same, fingerprint, stored_settings
from easytorch.training.rows import Rows, write_rows
from easytorch.training.sources import Source, StoredRows, StreamedRows
from easytorch.training.task import Task, TextTask
from easytorch.training.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Inputs:
    """The inputs, checked before anything is created.

    texts: the documents, of files. settings: what a checkpoint will store of them. notes: what the user is told.
    """

    texts: list[str]
    settings: dict[str, Any]
    notes: list[str]


def check_inputs(config: TrainingConfig, processes: int) -> Inputs:
    """Checks what can be checked before anything is created: `ValueError` or `OSError`."""
    config.share(processes)
    check_installed(config.optimizer)
    device = find_device(config.device)
    if config.dtype == "float8":
        check_float8(device)
    checkpoint = find_checkpoint(config)
    check_tensorboard(config)
    texts = read_texts(config.text) if config.dataset is None else []
    digest = fingerprint(texts) if config.dataset is None else Examples(config).fingerprint()
    settings, notes = stored_settings(config, processes, digest), list[str]()
    if checkpoint is not None:
        stored = load_state(checkpoint).get("settings")
        if stored is None:
            notes.append(f"{checkpoint} does not store its settings: they are not compared")
        else:
            changed = check_same(stored, settings, config.change, str(checkpoint))
            notes += [f"changed for the rest of this run: {words}" for words in changed]
    elif config.resume:
        notes.append(f"{config.output} has no checkpoint to resume: this run starts from the beginning")
    model = architecture.check_architecture(config.model)
    _check_trainable(model, config, processes)
    if config.lora is not None:
        notes.append(adapter.describe(config))
    if isinstance(config.model, dict):
        if "vocab_size" in config.model:
            notes.append("the model's vocab_size is not used: the tokenizer's is, set by --vocab-size")
        model.vocab_size = config.vocab_size  # the most that the tokenizer can have
    notes.append(memory.describe(model, processes, device, memory.held_by(config, processes)))
    return Inputs(texts, settings, notes)


def _check_trainable(model: PreTrainedConfig, config: TrainingConfig, processes: int) -> None:
    """`ValueError` for an attention that the architecture does not have, for a mesh that its models do not divide over,
    and for models that are not causal: what training would refuse once the data is written."""
    if not isinstance(config.model, dict) or "max_position_embeddings" in {
        model.attribute_map.get(name, name) for name in config.model
    }:
        architecture.check_positions(model, config.block_size)
    axes = config.axes(processes)
    chosen = {} if config.attn_implementation is None else {"attn_implementation": config.attn_implementation}
    divided = any(size > 1 for name, size in axes.items() if name != "dp")
    if chosen or divided:
        made = copy.deepcopy(model)
        if isinstance(config.model, dict):  # the vocabulary is the tokenizer's, which is not known yet
            made.vocab_size = 256 * math.prod(axes.values())
        try:
            with torch.device("meta"):
                outline = easytorch.AutoModelForCausalLM.from_config(made, **chosen)
        except architecture.REFUSALS as error:
            raise ValueError(f"{flag('attn_implementation' if chosen else 'model')}: {error}") from error
        try:
            if config.device == "xla":
                xla_spmd.check_axes(axes)
            check_sharding(outline, axes, replicate=config.uneven == "replicate")
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"{flag('mesh')} {config.mesh}: {error}") from error
    if (why := causal.refusal(model)) is not None:
        raise ValueError(f"{flag('model')}: {why}")


def find_checkpoint(config: TrainingConfig) -> Path | None:
    """The checkpoint to resume from, if any; `FileExistsError` where a new run would mix with an old one."""
    output = Path(config.output)
    beside = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not beside.is_dir():
        raise NotADirectoryError(f"{flag('output')} {config.output}: {beside} is a file; give another folder")
    checkpoint = latest_checkpoint(output)
    if checkpoint is not None and not config.resume:
        raise FileExistsError(
            f"{config.output} already has {checkpoint.name}: --resume it, or give another folder with --output"
        )
    return checkpoint


def write_data(config: TrainingConfig, texts: list[str], checkpoint: Path | None) -> None:
    """The tokenizer and the tokenized text, in the folder of `made_data`; one process makes them."""
    folder = data_folder(config)
    source = checkpoint or (config.model if isinstance(config.model, str) else config.tokenizer)
    if source is None and config.dataset is not None:
        texts = list(_strings(list(Examples(config))))
    tokenizer = train_tokenizer(texts, config.vocab_size) if source is None else load_tokenizer(source)
    set_template(tokenizer, config)
    if config.dataset is None:
        tokens = tokenize(texts, tokenizer)
        split_blocks(len(tokens), config.block_size, config.eval_fraction)  # refuses too little text
    with named_os_errors(folder):
        tokenizer.save_pretrained(folder)
        if config.dataset is None:
            np.save(folder / "tokens.npy", tokens)
        elif not config.streaming:
            _write_rows(folder / "rows", tokenizer, config)


def data_folder(config: TrainingConfig) -> Path:
    return Path(config.output) / "data"


@contextmanager
def made_data(config: TrainingConfig, held: ExitStack) -> Iterator[None]:
    """Makes the folder `data` of the output, around the preparation of a run: an error removes it, and those above that
    were made for it, where they were not there before. held: keeps other runs out of the output until it is closed."""
    folder = data_folder(config)
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    with named_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    held.enter_context(only_run(folder.parent))
    try:
        with named_os_errors(folder):
            folder.mkdir(exist_ok=True)
        yield
    except BaseException:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # something else came into it
            for one in made[1:]:
                one.rmdir()
        raise


def _write_rows(folder: Path, tokenizer: PreTrainedTokenizerBase, config: TrainingConfig) -> None:
    made = Rows(config, tokenizer)
    count = write_rows(folder, (row for row, _ in made.of(Examples(config))))
    if note := made.counts.note():
        print(note, flush=True)
    if not count:
        raise ValueError(f"{flag('dataset')} {config.dataset} makes no row to train on")


def _strings(value: Any) -> Iterator[str]:
    """Every string inside of examples, to train a tokenizer on."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(one)


def read_task(config: TrainingConfig) -> tuple[PreTrainedTokenizerBase, Task]:
    """The files of `write_data`, read in every process."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    # transformers draws a bar for each save and load of each process; this run has one of its own.
    logging.disable_progress_bar()

    folder = data_folder(config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if config.dataset is None:
        return tokenizer, TextTask(TokenBlocks(folder / "tokens.npy", config.block_size, config.eval_fraction))
    from easytorch.training.dataset_tasks import DatasetTask, PreferenceTask

    source: Source = (
        StreamedRows(config, tokenizer, Examples(config)) if config.streaming else StoredRows(folder / "rows", config)
    )
    return tokenizer, (PreferenceTask if config.task == "dpo" else DatasetTask)(source, config)


def make_model(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, checkpoint: Path | None, device: torch.device
) -> PreTrainedModel:
    """The model on `device` in float32: the same parameters in every process."""
    from transformers import AutoConfig, GenerationConfig

    auto = easytorch.AutoModelForCausalLM
    chosen: dict[str, Any] = {"dtype": torch.float32}
    if config.attn_implementation is not None:
        chosen["attn_implementation"] = config.attn_implementation
    torch.manual_seed(config.seed)
    if config.lora is not None:
        return adapter.load_adapted(config, checkpoint, device, chosen)
    if checkpoint is not None and (checkpoint / PROGRESS).is_file():
        # its weights are read once the model is sharded
        model: torch.nn.Module = auto.from_config(AutoConfig.from_pretrained(checkpoint), **chosen)
        if (checkpoint / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(checkpoint)  # type: ignore[assignment]
    elif checkpoint is not None or isinstance(config.model, str):
        model = auto.from_pretrained(str(checkpoint or config.model), **chosen)
    else:
        fitted = architecture.with_tokenizer(config, tokenizer)
        try:
            model = auto.from_config(fitted, **chosen)
        except ValueError as error:
            raise ValueError(f"{flag('model')}: {error}") from error
    return cast("PreTrainedModel", model.to(device))


def make_reference(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> PreTrainedModel | None:
    """The model that preferences are measured against: as it is before the first step, in a resumed run too."""
    if config.task != "dpo" or config.lora is not None:
        return None
    return make_model(config, tokenizer, None, device)


def check_model(model: PreTrainedModel, task: Task, config: TrainingConfig) -> None:
    """Run the model once, on a few tokens: `ValueError` for a text or sizes that it cannot take."""
    architecture.check_positions(model.config, config.block_size)
    rows, largest = len(cast("torch.Tensor", model.get_input_embeddings().weight)), task.largest_token()
    if largest >= rows:
        raise ValueError(
            f"{flag('model')}: its tokenizer gives the token {largest}, and it has embeddings for {rows}: "
            f"the tokenizer is another model's"
        )
    if (bad := nonfinite_parameter(model)) is not None:
        raise ValueError(f"the model cannot be trained from here: {bad}")
    try:
        future = causal.sees_future(model)
    except architecture.REFUSALS as error:
        raise ValueError(
            f"{flag('model')}: it does not run with these sizes: {type(error).__name__}: {error}"
        ) from error
    if future:
        raise ValueError(f"{flag('model')}: {causal.why_future(model)}")
