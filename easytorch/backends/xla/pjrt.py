"""The PJRT client of jaxlib: the one file that knows its private names, which differ between versions (0.7 to 0.10).

The client is jax's own, so that arrays are jax arrays and its configuration (platforms, number of devices) holds here.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.backends.errors import BackendError
from easytorch.backends.partitioning import Mesh, Sharding

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


def _compile_options(device_ids: Sequence[int], folding: bool = True, partitioned: bool = False) -> Any:
    """partitioned: the devices share one computation, instead of each having a replica of it."""
    assignment = np.array(device_ids).reshape((1, -1) if partitioned else (-1, 1))
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = assignment.shape
    options.env_option_overrides = _OPTIONS if folding else [*_OPTIONS, _NO_FOLDING]
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = assignment.shape
    if partitioned:
        build.use_spmd_partitioning = build.use_shardy_partitioner = True
    options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    return options


def options_key(folding: bool = True) -> str:
    """The options that programs are compiled with."""
    return repr(_OPTIONS if folding else [*_OPTIONS, _NO_FOLDING])


def compile_module(text: str, targets: Sequence[Any], folding: bool = True, partitioned: bool = False) -> Any:
    """The loaded program of a StableHLO module for the devices `targets`: one replica each, or one computation divided
    over them.

    folding: operations on constants may be computed while it compiles.
    """
    options = _compile_options([device.id for device in targets], folding, partitioned)
    try:
        return targets[0].client.compile_and_load(text, xla_client.DeviceList(tuple(targets)), options)
    except RuntimeErrors as error:
        raise BackendError(f"XLA does not compile the computation: {error}") from error


def compile_only(
    text: str, targets: Sequence[Any], folding: bool = True, partitioned: bool = False, *, quickly: bool = False
) -> Any:
    """`compile_module` for devices that may not be here (`tpu_devices`): the program cannot run then.

    quickly: with the least effort for the speed of the program.
    """
    options = _compile_options([device.id for device in targets], folding, partitioned)
    if quickly and hasattr(options.executable_build_options, "exec_time_optimization_effort"):
        options.executable_build_options.exec_time_optimization_effort = -1.0
    client = targets[0].client
    if not isinstance(client, _jax.CompileOnlyPyClient):
        return compile_module(text, targets, folding, partitioned)
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    if targets[0].platform == "tpu":
        options.env_option_overrides = []
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        try:
            return client.compile(
                module, executable_devices=xla_client.DeviceList(tuple(targets)), compile_options=options
            )
        except RuntimeErrors as error:
            raise BackendError(f"the compiler of {targets[0].device_kind} refuses the computation: {error}") from error


def tpu_devices(topology: str) -> list[Any]:
    """The devices of a TPU topology, "v5e:2x2", as libtpu describes it, on any host.

    The process is started with `easytorch.kernels.interop.tpu_compile.ENVIRONMENT` set, or libtpu looks for a TPU.
    `BackendError` where libtpu is missing or does not know it.
    """
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise BackendError("compiling for a TPU needs libtpu: pip install libtpu")
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except RuntimeErrors as error:
        raise BackendError(f"libtpu has no topology {topology!r}: {error}") from error


def portable_artifact(text: str) -> bytes:
    """A module as `jax.export` stores it: bytes that older and newer versions of XLA read."""
    window = stablehlo.StablehloCompatibilityRequirement.WEEK_4
    version = stablehlo.get_version_from_compatibility_requirement(window)
    return bytes(_jax.mlir.serialize_portable_artifact(text, version, False))


def serialize(executable: Any, targets: Sequence[Any]) -> bytes:
    """A loaded program as bytes."""
    return bytes(targets[0].client.serialize_executable(executable))


def deserialize(data: bytes, targets: Sequence[Any], partitioned: bool = False) -> Any:
    """Loads what `serialize` returned; one of `RuntimeErrors` for anything else."""
    options = _compile_options([device.id for device in targets], partitioned=partitioned)
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


def call_on_all(
    executable: Any, arrays: Sequence[Sequence[Any]], shapes: Sequence[tuple[int, ...]], shardings: Sequence[Any]
) -> list[list[Any]]:
    """Runs on all devices: `arrays` and the results list for each argument the arrays of all devices.

    shapes, shardings: of the arguments. PJRT takes an argument as one array of several buffers; that the buffers of a
    replicated one differ is not its concern.
    """
    arguments = list(map(jax.make_array_from_single_device_arrays, shapes, shardings, map(list, arrays)))
    results: list[list[Any]] = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
    return results


def mesh_sharding(targets: Sequence[Any], mesh: Mesh, sharding: Sharding) -> Any:
    """How an array lies on the devices of a mesh."""
    return jax.sharding.NamedSharding(_mesh(tuple(targets), mesh), jax.sharding.PartitionSpec(*sharding))


@functools.cache
def _mesh(targets: tuple[Any, ...], mesh: Mesh) -> Any:
    return jax.sharding.Mesh(np.array(targets).reshape(mesh.sizes), mesh.names)
