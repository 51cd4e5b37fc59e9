"""Compiling jax functions for a TPU that is not attached: libtpu contains the compiler and runs on a CPU host.

Memory use, and whether compilation succeeds, is known without a device; speed is not.
Start the process with `ENVIRONMENT` set, or libtpu looks for a TPU and its host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from easytorch.kernels.interop.lowering import lower_for_export

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no question to the cloud's metadata server
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes at once: none of them holds a device
    }
)

# The smallest topology of each generation that kernels are compiled for; its memories are what a kernel must fit into.
CHIPS: Mapping[str, str] = MappingProxyType({"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"})


def compile_for_tpu(
    fn: Callable[..., Any], *args: Any, topology: str = CHIPS["v5e"], **static: Any
) -> jax.stages.Compiled:
    """`fn(*args, **static)` compiled for one chip of `topology`; `.memory_analysis()` and `.as_text()` tell about it.

    args: pytrees of arrays or `jax.ShapeDtypeStruct`s, whose values are not read; None where the function takes it.
    """
    chip = SingleDeviceSharding(_devices(topology)[0])
    structs = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=chip), args)
    return lower_for_export(jax.jit(functools.partial(fn, **static)).trace(*structs)).compile()


@functools.cache
def _devices(topology: str) -> Any:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
