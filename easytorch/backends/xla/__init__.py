"""The backend `xla`: graphs written as StableHLO text, compiled and run by the PJRT client of jaxlib.

stablehlo.py    a graph -> the text of its module; emitter.py writes it, emitters/ has the operations by family
pjrt.py         the one file that knows jaxlib's private names
buffers.py, program.py, cache.py, backend.py     arrays, compiled programs, their cache on disk, the interface
export.py       the same modules through `jax.export`: the backend `xla:jit`, and programs for devices that are not here
"""
