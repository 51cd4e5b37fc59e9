"""`BaseOperation`: one definition, and a faster path for each platform that has one.

The names are those of EasyDeL's `layers.ops._base_operation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from easytorch.operations.dispatch.patches import OperationType
from easytorch.operations.dispatch.platform import PLATFORMS, platform_of

_F = TypeVar("_F", bound=Callable[..., Any])

# Where each path goes when a class does not override it.
_DEFAULT = {
    "forward_cuda": "forward_gpu",
    "forward_rocm": "forward_gpu",
    "forward_gpu": "forward_native",
    "forward_tpu": "forward_native",
    "forward_cpu": "forward_native",
}


def backend(name: str) -> Callable[[_F], _F]:
    """Name the library behind a `forward_*` method: `"aten"`, `"xla"`, `"triton"`, `"pallas"`, ..."""

    def mark(method: _F) -> _F:
        method.backend = name  # type: ignore[attr-defined]
        return method

    return mark


class BaseOperation(ABC, metaclass=OperationType):
    """An operation: `forward_native` defines it, `forward_{cpu,gpu,cuda,rocm,tpu}` may compute it faster.

    Calling it runs the path of the platform of its first tensor. `forward_cuda` and `forward_rocm` default to
    `forward_gpu`; `forward_gpu`, `forward_tpu` and `forward_cpu` default to `forward_native`.
    """

    _paths: ClassVar[dict[str, tuple[str, str]]]  # platform -> (method, backend), derived once for each class

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        methods = {platform: cls._follow(f"forward_{platform}") for platform in (*PLATFORMS, "native")}
        cls._paths = {platform: (method, cls.backend_of(method)) for platform, method in methods.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, "forward_" + platform_of(args, kwargs))(*args, **kwargs)

    @abstractmethod
    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The definition, in plain torch, on any device."""

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_gpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_gpu(*args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_gpu(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    @classmethod
    def _follow(cls, method: str) -> str:
        """The method that does the work of `method` once the defaults are followed."""
        while method in _DEFAULT and getattr(cls, method) is getattr(BaseOperation, method):
            method = _DEFAULT[method]
        return method

    @classmethod
    def path(cls, platform: str) -> tuple[str, str]:
        """The method that does the work on `platform` and the backend (library) behind it."""
        return cls._paths[platform]

    @classmethod
    def backend_of(cls, method: str) -> str:
        """The library behind one of the `forward_*` methods; `"native"` for the definition."""
        return getattr(getattr(cls, method), "backend", method.removeprefix("forward_"))

    @classmethod
    def backends(cls) -> dict[str, str]:
        """Every backend of this operation and the method that runs it: the definition, the platforms' paths, and then
        those an operation chooses by itself, `forward_*` methods of no platform."""
        found = {cls.backend_of("forward_native"): "forward_native"}
        for method, name in cls._paths.values():
            found.setdefault(name, method)
        for method in dir(cls):
            if method.startswith("forward_") and hasattr(getattr(cls, method), "backend"):
                found.setdefault(cls.backend_of(method), method)
        return found
