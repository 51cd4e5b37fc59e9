"""`convert`: a checkpoint from one format and naming scheme to another, streamed and atomic."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from os import PathLike

from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.core.callable_module import call_as
from easytorch.bridge.core.sizes import parse_size
from easytorch.bridge.formats.registry import Kind
from easytorch.bridge.jobs import targets
from easytorch.bridge.jobs.locations import is_remote, local_destination, local_source
from easytorch.bridge.jobs.pipeline import Conversion, stored_as
from easytorch.bridge.jobs.report import ConversionReport
from easytorch.bridge.jobs.sources import Progress
from easytorch.bridge.rules.table import Rules
from easytorch.bridge.rules.user_file import given_rules
from easytorch.bridge.storage.atomic import refuse_existing


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    to: str,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    verify: bool = False,
    resume: bool = False,
    scheme: str | None = None,
    config: str | PathLike[str] | None = None,
    step: int | None = None,
    params_key: str | None = None,
    rules: Rules | str | PathLike[str] | None = None,
    drop: Collection[str] = (),
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes the checkpoint `src` as `dst` in the format `to` (`jobs.targets.TARGETS`).

    Both are paths, names on the Hub or URLs (`bridge.jobs.locations`). `dst` is a new folder, or one file where its
    name ends as such a file's does (`out.safetensors`). Floating point weights are cast to `dtype` when it is given and
    bit-exact otherwise. `verify` reads the result back, compares every tensor, and, where a jax forward exists, runs
    both models on the same inputs. Everything beside the weights (config, tokenizer) is copied into a folder. `scheme`
    names the source's naming scheme where its names do not tell it, `config` is the config.json of a source that has
    none. `step` is which step of a run to read instead of its last, `params_key` which tree of a training state instead
    of its parameters (`ema_params`). `rules` are the table of a model of your own, or the Python file that sets `RULES`
    to it (`bridge.layouts`): it needs no config then. `drop` are names of tensors to leave out, with `*` for anything.
    `resume` continues from the files that a killed run of the same conversion had finished.
    Raises `CheckpointError` for a checkpoint that cannot be converted and `ValueError` for an invalid argument; `dst`
    then does not exist.
    """
    begun = time.perf_counter()
    table = given_rules(rules)
    target, shard_size = targets.target(to), parse_size(max_shard_size)
    stored_as(target.format, dtype)  # an invalid dtype is refused before anything is fetched
    if resume and is_remote(dst):
        raise ValueError(f"a conversion to {dst} cannot be resumed; convert to a folder here and copy that")
    prefer: Kind = "tree" if to == "torch" else "torch"
    with local_source(src, prefer=prefer) as source, local_destination(dst) as destination:
        if not resume:
            refuse_existing(destination)
        with open_checkpoint(
            source, prefer=prefer, scheme=scheme, config=config, step=step, params_key=params_key, drop=drop
        ) as checkpoint:
            conversion = Conversion(
                checkpoint,
                target,
                dtype=dtype,
                shard_size=shard_size,
                source=source,
                destination=destination,
                rules=table,
                drop=drop,
            )
            if resume and os.path.lexists(destination):
                conversion.accept_existing()
            else:
                conversion.run(resume=resume, verify=verify, progress=progress)
            return conversion.report(str(src), str(dst), verified=verify, seconds=time.perf_counter() - begun)


call_as(convert)
