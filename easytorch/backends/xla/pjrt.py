"""The PJRT client of jaxlib: the one file that knows its private names, which differ between versions (0.7 to 0.10).

The client is jax's own, so that arrays are jax arrays and its configuration (platforms, number of devices) holds here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.backends.errors import BackendError

if TYPE_CHECKING:
    import jax

try:
    import jax
    from jaxlib import _jax, version, xla_client
    from jaxlib.mlir.dialects import stablehlo
except ImportError as error:
    raise ImportError("the backend 'xla' needs jax: pip install jax", name="jax") from error

# Runs a program; arrays are given and returned device by device.
Caller = Callable[[list[Any]], list[Any]]
# A conversion to a narrow float and back rounds, instead of being optimized away.
_OPTIONS = [("xla_allow_excess_precision", "False")]
_NO_FOLDING = ("xla_disable_hlo_passes", "constant_folding")
VERSION: str = version.__version__
# The errors of PJRT about a program: RuntimeError is their base in every version.
RuntimeErrors = (RuntimeError, ValueError)


def devices(platform: str) -> list[Any]:
    """jax's devices of a platform, its default one for ""; `BackendError` for one that is not there."""
    try:
        found: list[Any] = jax.local_devices(backend=platform or None)
    except RuntimeError as error:
        raise BackendError(f"XLA has no platform {platform!r} here: {error}") from error
    return found


def platform_version(device: Any) -> str:
    """The client's version string, a part of the key of a compiled program."""
    return f"{device.client.platform} {device.client.platform_version} {device.device_kind}"


def _compile_options(device_ids: Sequence[int], folding: bool = True) -> Any:
    options = xla_client.CompileOptions()
    options.num_replicas = len(device_ids)
    options.num_partitions = 1
    options.env_option_overrides = _OPTIONS if folding else [*_OPTIONS, _NO_FOLDING]
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = len(device_ids), 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[number] for number in device_ids]))
    return options


def options_key(folding: bool = True) -> str:
    """The options that programs are compiled with."""
    return repr(_OPTIONS if folding else [*_OPTIONS, _NO_FOLDING])


def compile_module(text: str, targets: Sequence[Any], folding: bool = True) -> Any:
    """The loaded program of a StableHLO module for the devices `targets`, one replica each.

    folding: operations on constants may be computed while it compiles.
    """
    options = _compile_options([device.id for device in targets], folding)
    try:
        return targets[0].client.compile_and_load(text, xla_client.DeviceList(tuple(targets)), options)
    except RuntimeErrors as error:
        raise BackendError(f"XLA does not compile the computation: {error}") from error


def portable_artifact(text: str) -> bytes:
    """A module as `jax.export` stores it: bytes that older and newer versions of XLA read."""
    window = stablehlo.StablehloCompatibilityRequirement.WEEK_4
    version = stablehlo.get_version_from_compatibility_requirement(window)
    return bytes(_jax.mlir.serialize_portable_artifact(text, version, False))


def serialize(executable: Any, targets: Sequence[Any]) -> bytes:
    """A loaded program as bytes."""
    return bytes(targets[0].client.serialize_executable(executable))


def deserialize(data: bytes, targets: Sequence[Any]) -> Any:
    """Loads what `serialize` returned; one of `RuntimeErrors` for anything else."""
    options = _compile_options([device.id for device in targets])
    return targets[0].client.deserialize_executable(data, xla_client.DeviceList(tuple(targets)), options)


@functools.cache
def sharding(device: Any) -> Any:
    """The sharding of arrays on one device."""
    return jax.sharding.SingleDeviceSharding(device)


def x64() -> AbstractContextManager[None]:
    """A context in which jax does not narrow 64-bit types."""
    # A public name since jax 0.8.
    context = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # type: ignore[attr-defined]
    found: AbstractContextManager[None] = context(True)
    return found


# jax 0.7.1 has no such argument: its configuration decides about 64-bit types.
_TAKES_X64 = "enable_x64" in (xla_client.batched_device_put.__doc__ or "")


def put(array: np.ndarray, device: Any, *, copy: bool = False) -> jax.Array:
    """An array on the device: on a CPU it shares memory that is aligned to 64 bytes, unless `copy`."""
    semantics = xla_client.HostBufferSemantics
    place: Callable[..., jax.Array] = functools.partial(
        xla_client.batched_device_put,
        jax.core.ShapedArray(array.shape, array.dtype),
        sharding(device),
        [array],
        [device],
        force_copy=copy,
        host_buffer_semantics=semantics.IMMUTABLE_ONLY_DURING_CALL if copy else semantics.ZERO_COPY,
    )
    if _TAKES_X64:
        return place(enable_x64=True)
    with x64():
        return place()


def from_dlpack(exporter: Any, device: Any) -> jax.Array:
    """An array that shares the GPU memory of another library's array."""
    with x64():
        array: jax.Array = jax.dlpack.from_dlpack(exporter, device=device)
    return array


def caller(executable: Any, outputs: Sequence[tuple[tuple[int, ...], np.dtype]], device: Any) -> Caller:
    """A function of the arrays of one device that runs the program on them; `outputs`: sizes and types."""
    execute = executable.execute_sharded
    # Shapes and shardings are prepared once: describing each result anew would take longer than a small program runs.
    handlers = [
        xla_client.array_result_handler(
            jax.core.ShapedArray(*output), sharding(device), committed=True, _skip_checks=True
        )
        for output in outputs
    ]

    def call(arrays: list[Any]) -> list[Any]:
        results: list[Any] = execute(arrays).consume_with_handlers(handlers)
        return results

    return call


def call_replicated(executable: Any, arrays: Sequence[Sequence[Any]], mesh: Any) -> list[list[Any]]:
    """Runs on all devices: `arrays` and the results list for each argument the arrays of all devices.

    mesh: `replica_mesh` of the devices. PJRT takes an argument as one array of several buffers; that the buffers differ
    is not its concern.
    """
    arguments = [jax.make_array_from_single_device_arrays(shards[0].shape, mesh, list(shards)) for shards in arrays]
    results: list[list[Any]] = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
    return results


def replica_mesh(targets: Sequence[Any]) -> Any:
    """The mesh that describes arguments present on all of `targets`."""
    mesh = jax.sharding.Mesh(np.array(targets), ("replica",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
