"""`TrainingConfig`: everything a training run depends on, as plain data for JSON and flags."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easytorch.bridge.errors import nearest
from easytorch.distributed.mesh import DATA, parse_axes
from easytorch.tpu_platform import device_count

DTYPES = ("float32", "bfloat16", "float8")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion", "muon": "Muon", "adafactor": "Adafactor"}
TASKS = ("pretrain", "sft", "dpo")
QUANTIZATIONS = ("nf4", "int8", "int4")
CHECKPOINTING = ("none", "full", "selective")
DEVICES = ("auto", "cpu", "cuda", "xla")
ON_NONFINITE = ("stop", "skip")
RESHARDING = ("auto", "always", "never")
UNEVEN = ("error", "replicate")
CHECKPOINT_FORMATS = ("auto", "full", "sharded")
MESH_AXES = (*DATA, "pp", "sp", "tp")

# Output and logging settings: a resumed run may change them without affecting training.
NOT_COMPARED = (
    "output", "resume", "change", "device", "eval_every", "log_every", "save_every", "keep_checkpoints", "on_nonfinite",
    "checkpoint_format", "async_checkpoint", "activation_checkpointing", "activation_checkpointing_every",
    "reshard_after_forward", "tensorboard", "timeout", "uneven",
)  # fmt: skip

# Above what any run has; numbers of elements, bytes and seconds are made of them.
LARGEST_COUNT = 2**31 - 1
LARGEST_SEED = 2**63 - 1

# A resumed run takes these out of its checkpoint.
_STORED = ("model", "vocab_size")


def default_model() -> dict[str, Any]:
    """A Llama that two CPU cores train in minutes: 4 M parameters with the default vocabulary."""
    return {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }


def flag(name: str) -> str:
    """The setting `name` as messages call it, and the flag of the command line that sets it."""
    return f"{name} (--{name.replace('_', '-')})"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A causal language model trained on text files, conversations or preferences.

    text: UTF-8 files, each one document.
    dataset: instead of text, JSON lines (a file ending in .jsonl or .json), or what the package `datasets` loads: a
        folder or a name on the hub, of which `dataset_split` is taken.
    task: "pretrain" on the column "text"; "sft" on "messages", or "prompt" and "completion", with a loss on the answers
        alone; "dpo" on "chosen" and "rejected", with "prompt" or a beginning that they share.
    chat_template: a file with the Jinja template of conversations, where the tokenizer has none.
    packing: of "sft", several examples in a row, which do not attend to each other; otherwise each has its own row.
    streaming: read the dataset as training goes on, shuffled in a buffer of `shuffle_buffer` examples (0: in order).
        Nothing is held out then.
    beta, label_smoothing: of "dpo", how near the model stays to the reference, the model before training, and the share
        of pairs that are taken to be the wrong way round.
    output: folder that receives `checkpoint-<step>/`, `metrics.jsonl`, `loss.png` and the tokenized text.
    model: the architecture, as its transformers config (`{"model_type": "llama", "hidden_size": 256, ...}`; vocabulary
        and special tokens come from the tokenizer; what is left out is transformers' default, which may be large), or
        the folder or hub id of a pretrained model to train further. The default is a Llama of 4 M parameters.
    tokenizer: the folder or hub id of one for a new model; None trains one on the text.
    lora: train a low-rank adapter alone, of a pretrained model: {"rank": 8, "pattern": "q_proj|v_proj", "alpha": 16,
        "dropout": 0.0, "merge": false}, of which rank must be given. Checkpoints hold the adapter, as PEFT writes it;
        with "merge" the folder `model` of the output receives the model with the adapter in its weights.
    quantize: with lora, the frozen weights in few bits: "nf4" (QLoRA), "int8" or "int4".
    vocab_size: of the byte-level BPE tokenizer trained on the text; 257 means plain bytes (256 and end-of-text). It is
        not used when `model` is pretrained and so has a tokenizer.
    block_size: tokens in a training sequence; documents are packed into blocks without padding.
    batch_size: sequences in one optimizer step, over all processes. It is divided among the
        processes, so their number does not change the training.
    micro_batch_size: sequences per forward and backward of a process (of a device, with xla); gradients are accumulated
        over its share of the batch. None means all at once.
    steps: optimizer steps of the run.
    learning_rate, min_learning_rate: peak and final learning rate of `schedule` ("cosine", "linear", "constant", or
        "wsd": warm-up, stable, decay, arXiv:2404.06395), after `warmup_steps` of linear warm-up.
    decay_steps: of "wsd", the last steps of the run, over which the learning rate falls as 1 - sqrt(share done); None
        means a tenth of the run.
    optimizer: "adamw", "lion", "muon" (of the matrices of layers; the rest is AdamW's) or "adafactor".
    weight_decay, beta1, beta2: of the optimizer (Adafactor has no betas, and Muon those of its AdamW); weight decay
        applies to matrices, not to norms and biases.
    grad_clip: maximum global norm of the gradients; 0 disables clipping.
    seed: of the initial weights, the order of the blocks and dropout.
    dtype: "bfloat16" runs forward and backward under autocast; weights and optimizer stay float32. "float8" does so
        too, with the products of linear layers in float8 (torchao), on GPUs that have them (H100, MI300 and later).
    activation_checkpointing: "full" keeps the inputs of layers alone and computes each layer again in the backward
        pass, "selective" keeps the results of matrix products and attention too; both in every
        `activation_checkpointing_every`-th layer.
    compile: run each layer compiled by torch.compile.
    attn_implementation: forces an attention implementation ("flash", "sdpa", ...); None chooses automatically.
    eval_fraction: share of the blocks held out, evaluated every `eval_every` steps and at the end.
    log_every: steps between log lines where the output is not a terminal.
    save_every: steps between checkpoints, 0 for only the last; the newest `keep_checkpoints` are kept.
    checkpoint_format: "full" is gathered and written by the first process, as transformers does; of "sharded" each
        process writes its own part; "auto" is sharded where the mesh shards the weights. Any mesh resumes both.
    async_checkpoint: a sharded checkpoint is copied to the CPU's memory and written while training goes on.
    tensorboard: write the metrics for TensorBoard too, in the folder `tensorboard` of the output.
    mesh: axes of the processes and their sizes, as "fsdp=-1,tp=2": "dp" replicates the model, "fsdp" shards weights,
        gradients and optimizer state (FSDP2), "tp" is tensor parallelism, "ep" divides the experts of each layer, and
        "pp" the layers into stages; one size may be -1, the rest. None means "dp=-1".
    uneven: sizes that do not divide over "tp" or "ep" are an error ("error"), or each process has them in full
        ("replicate").
    reshard_after_forward: of "fsdp", whether each layer's full weights are freed after its forward and gathered again
        for its backward ("always"), or kept in between ("never"), for memory of all layers' weights. "auto" is "never"
        on a CPU, where gathering takes the processor from the computation, else "always".
    timeout: seconds that processes wait for one that does not answer before the run ends and names it.
    on_nonfinite: a loss or gradient that is NaN or infinite ends the run ("stop"), or its step is skipped and the run
        continues ("skip"), up to ten in a row. A checkpoint is written only if the weights give a finite loss.
    resume: continue from the newest checkpoint of `output`, to exactly what an uninterrupted run would give.
    change: names of settings that may differ from the checkpoint's in a resumed run; any other difference is refused.
        "processes" stands for their number.
    device: "auto" (CUDA or ROCm if there is one, else CPU), "cpu", "cuda", or "xla": the devices of torch_xla, over all
        of which one process trains; its mesh has the axes dp, fsdp and tp.
    """

    text: tuple[str, ...] = ()
    output: str
    dataset: str | None = None
    dataset_split: str = "train"
    task: str = "pretrain"
    chat_template: str | None = None
    packing: bool = True
    streaming: bool = False
    shuffle_buffer: int = 1000
    beta: float = 0.1
    label_smoothing: float = 0.0
    model: dict[str, Any] | str = field(default_factory=default_model)
    tokenizer: str | None = None
    lora: dict[str, Any] | None = None
    quantize: str | None = None
    vocab_size: int = 4096
    block_size: int = 256
    batch_size: int = 16
    micro_batch_size: int | None = None
    steps: int = 1000
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.0
    schedule: str = "cosine"
    warmup_steps: int = 50
    decay_steps: int | None = None
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    activation_checkpointing: str = "none"
    activation_checkpointing_every: int = 1
    compile: bool = False
    attn_implementation: str | None = None
    eval_fraction: float = 0.05
    eval_every: int = 100
    log_every: int = 10
    save_every: int = 500
    keep_checkpoints: int = 2
    checkpoint_format: str = "auto"
    async_checkpoint: bool = False
    tensorboard: bool = False
    mesh: str | None = None
    uneven: str = "error"
    reshard_after_forward: str = "auto"
    timeout: int = 1800
    on_nonfinite: str = "stop"
    resume: bool = False
    change: tuple[str, ...] = ()
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("text", "change"):  # JSON has lists, and one name may stand alone
            given = getattr(self, name)
            object.__setattr__(
                self, name, (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given
            )
        for item in dataclasses.fields(self):
            self._require_type(item.name, str(item.type))
        check_data(self)
        check_adapter(self)
        check_xla(self)
        for name in (
            "text", "output", "model", "attn_implementation", "mesh", "dataset", "dataset_split", "tokenizer",
            "chat_template",
        ):  # fmt: skip
            value = getattr(self, name)
            for path in value if isinstance(value, tuple) else (value,):
                if isinstance(path, str) and (not path or "\0" in path):
                    raise ValueError(f"{flag(name)} must be a name, got {path!r}")
        self._require_count("vocab_size", 257, " (the bytes and end-of-text)")
        self._require_count("block_size", 2, " (a token and the one it predicts)")
        for name in (
            "batch_size",
            "micro_batch_size",
            "steps",
            "eval_every",
            "log_every",
            "keep_checkpoints",
            "decay_steps",
            "activation_checkpointing_every",
            "timeout",
        ):
            self._require_count(name, 1)
        for name in ("warmup_steps", "save_every", "shuffle_buffer"):
            self._require_count(name, 0)
        for name in ("learning_rate", "min_learning_rate", "weight_decay", "grad_clip", "beta"):
            self._require(name, 0 <= getattr(self, name) <= sys.float_info.max, "0 or more, and finite")
        for name in ("beta1", "beta2", "eval_fraction"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("label_smoothing", 0 <= self.label_smoothing < 0.5, "at least 0 and below 0.5")
        known = f"one of {', '.join(CHECKPOINTING)}"
        self._require("activation_checkpointing", self.activation_checkpointing in CHECKPOINTING, known)
        self._require("seed", 0 <= self.seed <= LARGEST_SEED, f"from 0 to {LARGEST_SEED}")
        self._require("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._require("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        if self.optimizer == "lion":
            self._require("learning_rate", self.learning_rate > 0, "above 0 with Lion")
        self._require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._require("on_nonfinite", self.on_nonfinite in ON_NONFINITE, f"one of {', '.join(ON_NONFINITE)}")
        known = f"one of {', '.join(CHECKPOINT_FORMATS)}"
        self._require("checkpoint_format", self.checkpoint_format in CHECKPOINT_FORMATS, known)
        if self.async_checkpoint and self.checkpoint_format == "full":
            raise ValueError(f"{flag('async_checkpoint')} requires {flag('checkpoint_format')} sharded or auto")
        known = f"one of {', '.join(RESHARDING)}"
        self._require("reshard_after_forward", self.reshard_after_forward in RESHARDING, known)
        self._require("uneven", self.uneven in UNEVEN, f"one of {', '.join(UNEVEN)}")
        self._require("device", self.device in DEVICES, f"one of {', '.join(DEVICES)}")
        if self.dtype == "float8" and self.lora is not None:
            raise ValueError(f"{flag('dtype')} float8 is for training all weights: with {flag('lora')} take bfloat16")
        if self.schedule != "constant" and self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"{flag('min_learning_rate')} {self.min_learning_rate} is above {flag('learning_rate')} "
                f"{self.learning_rate}"
            )
        if self.decay_steps is not None:
            if self.schedule != "wsd":
                raise ValueError(f"{flag('decay_steps')} requires {flag('schedule')} wsd, and it is {self.schedule}")
            stable = self.steps - self.warmup_steps
            self._require("decay_steps", self.decay_steps <= stable, f"at most the {stable} steps after the warm-up")
        changeable = [name for name in (*self.settings(), "processes") if name not in _STORED]
        for name in self.change:
            if name not in changeable:
                raise ValueError(
                    f"{flag('change')} names {name!r}, which is not one of the settings that are compared"
                    f"{nearest(name, changeable)}: {', '.join(changeable)}"
                )
        if isinstance(self.model, dict) and "model_type" not in self.model:
            raise ValueError(
                f'{flag("model")} needs a "model_type", as in {{"model_type": "llama"}}; it has {sorted(self.model)}'
            )

    def _require(self, name: str, holds: bool, accepted: str) -> None:
        if not holds:
            raise ValueError(f"{flag(name)} must be {accepted}, got {getattr(self, name)!r}")

    def _require_count(self, name: str, least: int, why: str = "") -> None:
        value = getattr(self, name)
        if value is not None:
            self._require(name, value >= least, f"at least {least}{why}")
            self._require(name, value <= LARGEST_COUNT, f"at most {LARGEST_COUNT}")

    def _require_type(self, name: str, declared: str) -> None:
        """`ValueError` for a value of another type: "10" and 10.5 are not a number of steps."""
        value = getattr(self, name)
        accepted, words = _TYPES[declared]
        if not isinstance(value, accepted) or (isinstance(value, bool) and declared != "bool"):
            raise ValueError(f"{flag(name)} must be {words}, got {value!r}")
        if isinstance(value, tuple) and not all(isinstance(one, str) for one in value):
            raise ValueError(f"{flag(name)} must be {words}, got {list(value)!r}")

    def axes(self, processes: int) -> dict[str, int]:
        """The axes of the mesh and their sizes; `ValueError` where their product is not the number of devices: one a
        process, or with torch_xla all for one process."""
        if self.device == "xla" and processes != 1:
            raise ValueError(f"{flag('device')} xla: one process trains on all devices, and there are {processes}")
        try:
            axes = parse_axes(self.mesh or "dp=-1", processes if self.device != "xla" else device_count("xla"))
        except ValueError as error:
            raise ValueError(f"{flag('mesh')}: {error}") from error
        if self.lora is not None and axes.get("tp", 1) > 1:
            raise ValueError(
                f"{flag('mesh')} {self.mesh}: {flag('lora')}'s matrices are not divided over tp; adapters are trained "
                f"over dp, fsdp, ep, pp and sp"
            )
        if self.dtype == "float8" and axes.get("tp", 1) > 1:
            raise ValueError(
                f"{flag('mesh')} {self.mesh}: layers over tp do not compute in {flag('dtype')} float8; take bfloat16, "
                f"or the axes dp, fsdp, ep, pp and sp"
            )
        for name, size in axes.items():
            self._require("mesh", name in MESH_AXES or size == 1, f"axes of {', '.join(MESH_AXES)}")
        for name in ("sp", "pp"):
            if axes.get(name, 1) > 1 and self.task == "dpo":
                raise ValueError(
                    f"{flag('mesh')} {self.mesh}: {flag('task')} dpo compares the logits of two models of each "
                    f"answer, and over {name} no process has all of them"
                )
            if axes.get(name, 1) > 1 and self.task == "sft" and not self.packing:
                raise ValueError(
                    f"{flag('mesh')} {self.mesh}: {name} takes rows of one length, and without {flag('packing')} each "
                    f"has that of its conversation"
                )
        if self.block_size % axes.get("sp", 1):
            raise ValueError(
                f"{flag('block_size')} {self.block_size} does not divide over the {axes['sp']} processes of sp in the "
                f"mesh {self.mesh}"
            )
        if axes.get("pp", 1) > 1 and axes.get("sp", 1) > 1:
            raise ValueError(f"{flag('mesh')} {self.mesh}: pp and sp do not go together")
        return axes

    def share(self, processes: int) -> tuple[int, int]:
        """(sequences a process takes of a batch, sequences it holds at a time); `ValueError` if they do not divide."""
        axes = self.axes(processes)
        takers = math.prod(axes.get(name, 1) for name in DATA)
        if self.batch_size % takers:
            of = f" that have data of their own in the mesh {self.mesh}" if takers != processes else ""
            raise ValueError(f"{flag('batch_size')} {self.batch_size} does not divide over {takers} processes{of}")
        share = self.batch_size // takers
        micro = share if self.micro_batch_size is None else self.micro_batch_size
        if share % micro:
            raise ValueError(
                f"{flag('micro_batch_size')} {micro} does not divide the {share} sequences a process takes of a batch"
            )
        taken = max(1, takers // processes)  # with torch_xla a process computes for several devices
        return share * taken, micro * taken

    def settings(self) -> dict[str, Any]:
        """The settings that affect training, as plain data: stored in a checkpoint, and compared when resuming."""
        every = dataclasses.asdict(self)
        return {name: value for name, value in every.items() if name not in NOT_COMPARED}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingConfig:
        """From the names above; an unknown one is an error."""
        known = [item.name for item in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            names = ", ".join(name + nearest(name, known) for name in unknown)
            raise ValueError(f"unknown training settings {names}; known: {', '.join(known)}")
        missing = [flag("text")] if "text" not in values and values.get("dataset") is None else []
        missing += [flag("output")] if "output" not in values else []
        if missing:
            raise ValueError(f"training needs {' and '.join(missing)}")
        return cls(**values)


def check_data(config: TrainingConfig) -> None:
    """`ValueError` for settings of the data that do not fit together."""
    config._require("task", config.task in TASKS, f"one of {', '.join(TASKS)}")
    if config.dataset is not None and config.text:
        raise ValueError(f"{flag('text')} and {flag('dataset')} are two sources: give one")
    if config.dataset is None:
        if not config.text:
            raise ValueError(f"{flag('text')} names no file to train on")
        if config.task != "pretrain":
            raise ValueError(f"{flag('task')} {config.task} needs a {flag('dataset')}, not text files")
        if config.streaming:
            raise ValueError(f"{flag('streaming')} needs a {flag('dataset')}, not text files")
    if config.streaming and config.eval_fraction:
        raise ValueError(f"{flag('streaming')} holds nothing out: give {flag('eval_fraction')} 0")
    if config.streaming and isinstance(config.model, dict) and config.tokenizer is None:
        raise ValueError(f"{flag('streaming')} trains no tokenizer: give a {flag('tokenizer')}, or a pretrained model")
    if config.tokenizer is not None and isinstance(config.model, str):
        raise ValueError(f"{flag('tokenizer')} is for a new model, and {config.model!r} has its own")


def check_xla(config: TrainingConfig) -> None:
    """`ValueError` for settings that training on torch_xla's devices does not support."""
    if config.device != "xla":
        return
    for name, given, why in (
        ("compile", config.compile, "torch_xla compiles each step already"),
        ("activation_checkpointing", config.activation_checkpointing == "selective", "torch_xla has full alone"),
        ("async_checkpoint", config.async_checkpoint, "its checkpoints are written while the devices wait"),
        ("lora", config.lora is not None, "adapters are trained on the CPU or on GPUs"),
        ("dtype", config.dtype == "float8", "its products are of 16 bits at least"),
    ):
        if given:
            raise ValueError(f"{flag(name)} {getattr(config, name)} is not for {flag('device')} xla: {why}")


# Settings of `lora` and what each must be.
LORA: dict[str, tuple[Any, str]] = {
    "rank": (int, "an integer"),
    "pattern": ((str, type(None)), "a regular expression or null"),
    "alpha": ((int, float, type(None)), "a number or null"),
    "dropout": ((int, float), "a number"),
    "merge": (bool, "true or false"),
}


def check_adapter(config: TrainingConfig) -> None:
    """`ValueError` for settings of the adapter that do not fit together."""
    if config.quantize is not None:
        config._require("quantize", config.quantize in QUANTIZATIONS, f"one of {', '.join(QUANTIZATIONS)}")
        if config.lora is None:
            raise ValueError(f"{flag('quantize')} freezes the weights: give {flag('lora')} too, which trains")
    if config.lora is None:
        return
    for name, value in config.lora.items():
        if name not in LORA:
            raise ValueError(f"{flag('lora')} has no setting {name!r}{nearest(name, LORA)}: {', '.join(LORA)}")
        accepted, words = LORA[name]
        if not isinstance(value, accepted) or (isinstance(value, bool) and name != "merge"):
            raise ValueError(f"{flag('lora')}: {name} must be {words}, got {value!r}")
    if config.lora.get("rank", 0) < 1:
        raise ValueError(f"{flag('lora')} needs a rank of at least 1, got {config.lora}")
    if isinstance(config.model, dict):
        raise ValueError(f"{flag('lora')} adapts a pretrained {flag('model')}: give its folder or id")
    if config.lora.get("merge") and config.quantize is not None:
        raise ValueError(f"{flag('lora')}: an adapter is not merged into weights that are quantized: leave merge out")
    if config.checkpoint_format == "sharded":
        raise ValueError(f"{flag('lora')} writes PEFT's files: give {flag('checkpoint_format')} full or auto")


# The annotations above -> what a value must be an instance of, and how a message says so.
_TYPES: dict[str, tuple[Any, str]] = {
    "tuple[str, ...]": (tuple, "a list of strings"),
    "str": (str, "a string"),
    "str | None": ((str, type(None)), "a string or null"),
    "dict[str, Any] | None": ((dict, type(None)), "a JSON object or null"),
    "dict[str, Any] | str": ((dict, str), "a JSON object, or the folder or id of a model"),
    "int": (int, "an integer"),
    "int | None": ((int, type(None)), "an integer or null"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
}
