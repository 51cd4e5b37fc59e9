"""One tensor as a file declares it."""

from __future__ import annotations

from dataclasses import dataclass, field

from easytorch.bridge.dtypes import numpy_dtype

# numpy 1's limit; a longer shape is never a weight.
MAX_RANK = 32


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the file declares it; `dtype` is a name of `bridge.dtypes`, `file` is where its data stands.

    `packed` is the format's name for quantized elements, which are unpacked to `dtype` when read, and `packed_bytes`
    their size in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str = field(default="", compare=False)
    packed: str = field(default="", compare=False)
    packed_bytes: int = field(default=0, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, which every reader has checked against the file."""
        count = 1
        for size in self.shape:
            count *= size
        return count * numpy_dtype(self.dtype).itemsize

    @property
    def stored_bytes(self) -> int:
        """The number of bytes the elements take in the file."""
        return self.packed_bytes if self.packed else self.nbytes
