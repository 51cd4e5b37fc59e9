"""`OperationImpl`: an operation with settings, which selects its implementation by `supports` and says why."""

from __future__ import annotations

import copy
import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from easytorch.distributed.mesh import mesh_axis_sizes
from easytorch.distributed.specs import PartitionSpec, stable_spec
from easytorch.kernels.interop.arguments import check_dense, check_flag, described
from easytorch.kernels.interop.torch_func import FORWARD_REFUSAL, forward_mode
from easytorch.kernels.interop.triton_devices import interpreted
from easytorch.operations.dispatch.base import BaseOperation
from easytorch.operations.dispatch.check import compare_with_definition
from easytorch.operations.dispatch.environment import checking, forced_by_environment, untouched
from easytorch.operations.dispatch.metadata import OF_EVERY_OPERATION, OperationMetadata
from easytorch.operations.dispatch.overrides import (
    depth,
    has_own_path,
    has_shortcuts,
    offers_cpp,
    own_paths_first,
    runs_unchecked,
    takes_every_call,
)
from easytorch.operations.dispatch.paths import path
from easytorch.operations.dispatch.platform import PLATFORMS, platform_of
from easytorch.operations.dispatch.shortcuts import PLAIN, Shortcuts, forget_all, recording, same, same_values
from easytorch.operations.dispatch.shorten import shorten
from easytorch.operations.dispatch.signature import flags_of, keywords_of, signature_of

logger = logging.getLogger(__name__)


# The backends whose kernels torch differentiates in forward mode; where one is an operator, its `supports` says so.
PLAIN_TORCH = ("native", "aten")


class UnsupportedOperationError(ValueError, NotImplementedError):
    """The requested implementation does not support this call; the message says which part and what to do."""


class Choice(NamedTuple):
    """The implementation that a call runs, `getattr(operation, method)`, and why."""

    operation: OperationImpl
    method: str
    platform: str
    backend: str
    reason: str
    unconditional: bool = False  # whether it supports every call that it is a candidate of: `supports` is not asked

    @property
    def runs(self) -> str:
        """The method that is called: of what `prefers_cpp` has looked at, `run_cpp`, which may leave that out."""
        return "run_cpp" if self.method == "forward_cpp" and self.unconditional else self.method

    @property
    def implementation(self) -> str:
        return self.operation.primary_name()

    def label(self, chooser: OperationImpl) -> str:
        """The backend, as "aten"; "flash:aten" where `chooser` is another operation."""
        return self.backend if self.operation is chooser else f"{self.implementation}:{self.backend}"


class OperationImpl(BaseOperation):
    """A registered operation: `get_impl_name`, `forward_native` and, where faster, `forward_<platform>`.

    `supports(backend, *args, **kwargs)` returns None, or the reason why that backend does not support the call. The
    automatic choice falls back to the definition and logs why, once; a forced one is obeyed or refused.
    """

    __slots__ = ("_shortcuts",)  # which C++ reads as it lies (repeated.py)

    falls_back = True  # to the definition; False where the operation's name names a library
    # fields of the metadata that it and its subclasses read, beside those of every operation
    settings: ClassVar[tuple[str, ...]] = ()
    paths: ClassVar[Mapping[str, str]] = {}  # platform -> the backend whose kernel `run` is given there
    folder: ClassVar[str | None] = None  # of kernels/, where it is not the operation's name
    functions: ClassVar[Mapping[str, str]] = {}  # backend -> "file.function" there, where it has another name
    takes_sparse: ClassVar[bool] = False  # whether some backend multiplies sparse tensors
    unconditional: ClassVar[frozenset[str]] = frozenset()  # the backends that support every call
    cpp_reason: ClassVar[str] = "few numbers: one call, and memory is read once"  # why `prefers_cpp` chooses it
    _tensors: ClassVar[tuple[tuple[int, str, bool], ...]]  # place and name of each tensor, and whether it may be None
    _positional: ClassVar[tuple[str, ...] | None]  # the names of positional arguments; None: any number of them
    _leading: ClassVar[int]  # how many tensors stand first
    _no_tensor_before: ClassVar[int]  # the place of the first tensor after those, else the number of places
    _required: ClassVar[int]  # how many tensors may not be left out
    _tensor_names: ClassVar[frozenset[str]]
    _keywords: ClassVar[frozenset[str] | None]  # every name that a call may give; None: any
    _flags: ClassVar[tuple[tuple[int, str], ...]]  # place and name of what is True or False; one without a place: last
    _names_before: ClassVar[tuple[frozenset[str], ...]]  # of n positional arguments, by n
    _cpp: ClassVar[bool] = False  # whether `prefers_cpp` is asked

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own = cls.__dict__
        for platform, library in own.get("paths", {}).items():
            if f"forward_{platform}" not in own:
                name = cls.primary_name()
                setattr(cls, f"forward_{platform}", path(platform, library, cls.folder or name, name, cls.functions))
        super().__init_subclass__(**kwargs)
        cls._cpp = offers_cpp(cls)
        if not runs_unchecked(cls):
            cls.run_cpp = OperationImpl.run_cpp  # type: ignore[method-assign]
        own_paths = frozenset(one for one in PLATFORMS if has_own_path(cls, cls._paths[one][0]))
        if own_paths and cls.candidates is not OperationImpl.candidates:
            cls.candidates = own_paths_first(own_paths, cls.candidates)  # type: ignore[method-assign]
        cls._tensors, cls._positional = signature_of(cls.forward_native)
        names = keywords_of(cls.forward_native)
        cls._keywords = None if names is None else frozenset(names)
        positional = cls._positional or ()
        cls._names_before = tuple(frozenset(positional[:count]) for count in range(len(positional) + 1))
        cls._leading = sum(place == number for number, (place, _, _) in enumerate(cls._tensors))
        later = [place for place, _, _ in cls._tensors[cls._leading :]]
        cls._no_tensor_before = later[0] if later else len(cls._positional or ())
        cls._required = sum(not optional for _, _, optional in cls._tensors)
        cls._tensor_names = frozenset(name for _, name, _ in cls._tensors)
        cls._flags = flags_of(cls.forward_native)

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        if not isinstance(metadata, OperationMetadata | None):
            raise TypeError(
                f"{self.primary_name()}: metadata must be OperationMetadata or None, got {described(metadata)}"
            )
        self.metadata = OperationMetadata() if metadata is None else metadata
        self._name = self.primary_name()
        if metadata is not None:
            self._check_metadata(metadata)
        cls = type(self)
        # nothing forces a backend here: unless the environment does, `choose_freely` is called directly
        self._free = self.metadata.backend is None and type(self).choose_on is OperationImpl.choose_on
        self._own: dict[str, tuple[Choice, ...]] = {  # platform -> its path, which most operations have one of
            platform: (
                Choice(self, method, platform, backend, _reason_of(method), takes_every_call(cls, method, backend)),
            )
            for platform, (method, backend) in self._paths.items()
        }
        self.cpp_choices: tuple[Choice, ...] = self._choices_of_cpp() if self._cpp else ()
        self._shortcuts = Shortcuts() if self._free and has_shortcuts(cls) and not self.metadata.given() else None

    def _choices_of_cpp(self) -> tuple[Choice, ...]:
        """The operator in C++, and behind it the path for the CPU where a subclass may refuse what is preferred."""
        cls = type(self)
        asked = depth(cls, "supports", "supports_features", "refusal") < depth(cls, "prefers_cpp", "forward_cpp")
        cpp = Choice(self, "forward_cpp", "cpu", "cpu", self.cpp_reason, unconditional=not asked)
        return (cpp, *self._own["cpu"]) if asked else (cpp,)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "metadata" and name in self.__dict__:
            raise AttributeError(
                f"{self.primary_name()}: the metadata of an operation is fixed; make another one, "
                f"OperationRegistry.create(name, metadata)"
            )
        super().__setattr__(name, value)
        if name in type(self)._made:  # a method, which is replaced for this one
            forget_all()

    def __copy__(self) -> OperationImpl:
        return copy.deepcopy(self, {id(self.metadata): self.metadata})  # its choices name the operation itself

    @classmethod
    @abstractmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """The name it is registered under; of a tuple, the first is the name and the rest are aliases."""

    @classmethod
    def primary_name(cls) -> str:
        return cls.all_names()[0]

    @classmethod
    def all_names(cls) -> tuple[str, ...]:
        names = cls.get_impl_name()
        return (names,) if isinstance(names, str) else names

    @classmethod
    def metadata_fields(cls) -> tuple[str, ...]:
        """The fields of `OperationMetadata` that this operation reads; one that it does not read may not be set."""
        own = (vars(base).get("settings", ()) for base in reversed(cls.__mro__))
        return tuple(dict.fromkeys((*OF_EVERY_OPERATION, *itertools.chain(*own))))

    def _check_metadata(self, metadata: OperationMetadata) -> None:
        """`UnsupportedOperationError` for a setting that the operation would ignore."""
        read = self.metadata_fields()
        for name, value in metadata.given().items():
            if name not in read:
                raise UnsupportedOperationError(
                    f"{self._name} does not use OperationMetadata.{name}, got {value!r}; it uses {', '.join(read)}: "
                    f"give it metadata of its own, as by dataclasses.replace"
                )

    def get_impl_metadata(self) -> OperationMetadata:
        return self.metadata

    def run(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `kernel`, whose arguments are the operation's: what a path made of `paths` does."""
        return kernel(*args, **kwargs)

    def supports(self, backend: str, *args: Any, **kwargs: Any) -> str | None:
        """None when `backend` supports this call, else the reason why not. The arguments are those of the call."""
        return None

    def emulates(self, backend: str, platform: str) -> bool:
        """True when `backend` can run on `platform` although its path is another: Triton in its interpreter, and the
        operators in C++, which an operation chooses beside ATen."""
        return platform == "cpu" and (backend == "cpu" or (backend == "triton" and interpreted()))

    def cast(self, tensor: Tensor) -> Tensor:
        """The tensor in `metadata.runtime_dtype`, where there is one."""
        return tensor if self.metadata.runtime_dtype is None else tensor.to(self.metadata.runtime_dtype)

    def definition(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the definition, which `EASYTORCH_CHECK=1` compares with."""
        return self.forward_native(*args, **kwargs)

    def reproducible(self, backend: str, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The keyword arguments with every random choice pinned; None where `backend` draws what cannot be repeated."""
        return kwargs

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of a typical call, on the meta device; `table.choices` reports what they would run."""
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shortcuts, key = self._shortcuts, None
        # written out here: a call of a method takes a tenth of a product of a few numbers
        if shortcuts is not None and args and type(args[0]) in PLAIN and not is_compiling():
            if shortcuts.resting > 0:
                shortcuts.resting -= 1
            else:
                second = args[1].numel() if len(args) > 1 and type(args[1]) in PLAIN else -1
                key = (recording(), args[0].numel(), second)
                for count, tensors, values, named, check, run in shortcuts.known.get(key, ()):
                    if len(args) != count or not ((not kwargs and not named) or same(kwargs, named)):
                        continue
                    given = args
                    if values:
                        if not same_values(args[tensors:], values):
                            continue
                        given = args[:tensors]
                    if (
                        check(*given)
                        and forward_ad._current_level < 0
                        and untouched()
                    ):  # fmt: skip
                        shortcuts.missed = 0
                        return run(*given)
        self.check_call(args, kwargs)
        if self._free and untouched():
            choice = self.choose_freely(platform_of(args, kwargs), args, kwargs)
            if key is not None and shortcuts is not None and (tensors := shortcuts.wants(key, args, kwargs)):
                return shorten(self, shortcuts, key, tensors, choice, args, kwargs)
            if choice.method != "forward_cpp":  # `choice.runs`, of which this is the common case
                return getattr(choice.operation, choice.method)(*args, **kwargs)
        else:
            choice = self.choose_on(platform_of(args, kwargs), args, kwargs)
            if checking() and not torch.compiler.is_compiling():
                return self._checked(choice, args, kwargs)
        return getattr(choice.operation, choice.runs)(*args, **kwargs)

    def shortcut(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What computes this call of `choice`, as `run(*args)`, without checks, for tensors of the same dtypes, sizes
        and strides and the same settings; None where nothing is shorter than the call, or numbers are looked at.

        args: the tensors, on the CPU, few numbers; kwargs: the settings by name, numbers, strings, True, False or None,
        however they were given. No setting of the metadata is given.
        """
        return None

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`TypeError` for too many positional arguments and for what must be a tensor and is not.

        It runs before anything reads a tensor; everything else is checked by the contracts of the kernels.
        """
        given, most = len(args), self._positional
        if kwargs and self._keywords is not None and not kwargs.keys() <= self._keywords:
            raise self._unknown_keyword(kwargs)
        if kwargs and given < len(self._names_before) and not self._names_before[given].isdisjoint(kwargs):
            name = next(one for one in kwargs if one in self._names_before[given])
            raise TypeError(f"{self.primary_name()}() got multiple values for argument {name!r}")
        if self._required <= given <= self._no_tensor_before and (not kwargs or self._tensor_names.isdisjoint(kwargs)):
            # the common case, all tensors first and positional: a fifth of the time of looking each up by name
            leading = self._leading
            for value in args[:leading]:
                # the type first: `isinstance` of a parameter takes three times as long
                if (type(value) not in PLAIN and not isinstance(value, Tensor)) or value.layout is not _STRIDED:
                    break
            else:
                if self._flags and (kwargs or given > leading):
                    self._check_flags(args, kwargs)
                return
        if most is not None and given > len(most):
            raise TypeError(
                f"{self.primary_name()} takes {len(most)} positional arguments ({', '.join(most)}), got {given}; give "
                f"the others by name"
            )
        for place, name, optional in self._tensors:
            if place < given:
                value = args[place]
            elif optional and name not in kwargs:
                continue
            else:
                value = kwargs.get(name, _ABSENT)
            if not (isinstance(value, Tensor) or (optional and value is None)):
                what = "is missing" if value is _ABSENT else f"must be a torch.Tensor, got {described(value)}"
                raise TypeError(f"{self.primary_name()}: {name} {what}")
            if value is not None and value.layout is not _STRIDED and not self.takes_sparse:
                check_dense(self.primary_name(), **{name: value})
        self._check_flags(args, kwargs)

    def _unknown_keyword(self, kwargs: dict[str, Any]) -> TypeError:
        name, known = self.primary_name(), keywords_of(type(self).forward_native) or ()
        unknown = next(given for given in kwargs if given not in known)
        return TypeError(f"{name}() got an unexpected keyword argument {unknown!r}; it takes {', '.join(known)}")

    def _check_flags(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place, name in self._flags:
            value = args[place] if place < len(args) else kwargs.get(name)
            if value is not None and value is not True and value is not False:
                check_flag(self.primary_name(), name, value)

    def _checked(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `choice`, compared with the definition where both can be given the same randomness."""
        run = getattr(choice.operation, choice.runs)
        pinned = choice.operation.reproducible(choice.backend, kwargs)
        if pinned is None:
            return run(*args, **kwargs)
        result = run(*args, **pinned)
        with torch.no_grad():
            compare_with_definition(choice, result, self.definition(*args, **pinned))
        return result

    def choose(self, *args: Any, **kwargs: Any) -> Choice:
        """The implementation a call would run and why, without running it. `UnsupportedOperationError` if none can."""
        self.check_call(args, kwargs)
        return self.choose_on(platform_of(args, kwargs), args, kwargs)

    def choose_on(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """`choose` for a platform that need not be present: only shapes and dtypes of the tensors are read."""
        forced = self.metadata.backend or forced_by_environment(self._name)
        if forced is not None:
            return self.choose_forced(forced, platform, args, kwargs)
        return self.choose_freely(platform, args, kwargs)

    def candidates(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Choice]:
        """The implementations of this call on `platform`, in the order of preference; the definition comes after them.

        The operator in C++ alone where it is preferred, since that is asked only of calls that it supports.
        """
        if self.cpp_choices and platform == "cpu" and self.prefers_cpp(args, kwargs):
            return self.cpp_choices
        return self._own[platform]

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `forward_cpp`, the operator in C++ that `paths` names ("cpp": "cpu"), is to run this call on the CPU.

        True only where it supports the call: nothing asks again.
        """
        return False

    def run_cpp(self, *args: Any, **kwargs: Any) -> Any:
        """`forward_cpp` of a call that `prefers_cpp` accepted; an operation may leave out what was asked there."""
        return getattr(self, "forward_cpp")(*args, **kwargs)  # noqa: B009 - a class without the path has no such method

    def refusal_of(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """None where the candidate supports the call, else the reason."""
        if choice.backend not in PLAIN_TORCH and forward_mode():
            return FORWARD_REFUSAL
        return choice.operation.supports(choice.backend, *args, **kwargs)

    def definition_of(self, kwargs: dict[str, Any]) -> OperationImpl:
        """The operation whose `forward_native` defines this call."""
        return self

    def choose_freely(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """The first of the candidates that supports the call, or the definition where none does."""
        refusals: list[str] = []
        for choice in self.candidates(platform, args, kwargs):
            refusal = None if choice.unconditional else self.refusal_of(choice, args, kwargs)
            if refusal is None:
                if not refusals:
                    return choice
                fallen_back = self._fall_back(platform, args, kwargs, refusals, choice.label(self), logging.INFO)
                return choice._replace(reason=f"{fallen_back}; {choice.reason}")
            refusals.append(f"{choice.label(self)}: {refusal}")
            if choice.method == "forward_native":  # it was the definition: nothing comes after it
                raise UnsupportedOperationError(f"{self.primary_name()} on {platform}: {'; '.join(refusals)}")
        return self._choose_definition(platform, args, kwargs, refusals)

    def _choose_definition(
        self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any], refusals: list[str]
    ) -> Choice:
        defining, reason = self.definition_of(kwargs), "; ".join(refusals)
        if not self.falls_back:
            raise UnsupportedOperationError(f"{self.primary_name()} on {platform}: {reason}")
        lacking = defining.supports("native", *args, **kwargs)
        if lacking is not None:
            raise UnsupportedOperationError(f"{self.primary_name()} on {platform}: {reason}; native: {lacking}")
        if refusals:
            choice = Choice(defining, "forward_native", platform, "native", reason)
            self._fall_back(platform, args, kwargs, refusals, choice.label(self), logging.WARNING)
            return choice
        return Choice(defining, "forward_native", platform, "native", "the definition, on a device without kernels")

    def _fall_back(
        self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any], refusals: list[str], to: str, level: int
    ) -> str:
        """The refusals as one reason, logged once, unless the tensors are on another platform."""
        reason = "; ".join(refusals)
        if platform == platform_of(args, kwargs):
            log_fallback(self._name, platform, reason, to, level)
        return reason

    def choose_by_name(self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """The choice where this operation was forced and the path it takes was not."""
        choice = self.choose_freely(platform, args, kwargs)
        kept = choice.method == self.path(platform)[0]
        return choice._replace(reason="forced" if kept else f"forced; {choice.reason}")

    def choose_forced(self, forced: str, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """The choice `forced`, or `UnsupportedOperationError` with the reason why it cannot run.

        A backend ("aten"), this operation with a backend ("flash:triton"), or its own name: any path it has.
        """
        name, methods = self.primary_name(), self.backends()
        own, _, backend = forced.rpartition(":") if ":" in forced else ("", "", forced)
        if backend in self.all_names() and not own:
            return self.choose_by_name(platform, args, kwargs)
        if backend not in methods or (own and own not in self.all_names()):
            raise UnsupportedOperationError(
                f"{name} has no backend {forced!r}; it has {', '.join(methods)} (forced by metadata.backend, "
                f"attn_implementation or EASYTORCH_OPS)"
            )
        method, here = self.path(platform)
        if backend != here:
            method = methods[backend]
            if backend != "native" and not self.emulates(backend, platform):
                homes = ", ".join(p for p in PLATFORMS if self.path(p)[1] == backend or self.emulates(backend, p))
                raise UnsupportedOperationError(
                    f"{name}: backend {backend!r} runs on {homes}, the tensors are on {platform}; move them or force "
                    f"another"
                )
        refusal = FORWARD_REFUSAL if backend not in PLAIN_TORCH and forward_mode() else None
        if refusal is None and not takes_every_call(type(self), method, backend):
            refusal = self.supports(backend, *args, **kwargs)
        if refusal is not None:
            raise UnsupportedOperationError(f"{name}: the forced backend {backend!r} cannot run this call: {refusal}")
        return Choice(self, method, platform, backend, "forced")

    def get_mode(self, query: Tensor, BTHD: bool = True) -> str:
        """The runtime mode read off the query (B, T, H, D), or (B, H, T, D) when `BTHD` is False.

        One query token is `__autoregressive__`; more are `__train__` while autograd records and `__prefill__` while it
        does not. `__insert__` (writing a prompt into a running batch) cannot be seen in a shape: set `metadata.mode`.
        """
        if self.metadata.mode is not None:
            return self.metadata.mode
        if query.shape[1 if BTHD else 2] == 1:
            return "__autoregressive__"
        return "__train__" if torch.is_grad_enabled() else "__prefill__"

    @staticmethod
    def repeat_kv_heads(k: Tensor, v: Tensor, num_reps: int) -> tuple[Tensor, Tensor]:
        """(B, S, K, D), (B, S, K, Dv) -> the same with K * num_reps heads, each `num_reps` times."""
        if num_reps < 1:
            raise ValueError(f"num_reps must be at least 1, got {num_reps}")
        if num_reps == 1:
            return k, v
        return k.repeat_interleave(num_reps, dim=2), v.repeat_interleave(num_reps, dim=2)

    # its former name
    repeat_kv = repeat_kv_heads

    def create_stable_sharding(
        self,
        state_ps: PartitionSpec | None = None,
        preserved_indices: list[int] | None = None,
        clone_ps: PartitionSpec | None = None,
        dep: PartitionSpec | bool | None = True,
        tensor: Tensor | None = None,
    ) -> PartitionSpec | None:
        """`stable_spec` over the mesh of the metadata."""
        sizes = mesh_axis_sizes(self.metadata.mesh)
        return stable_spec(state_ps, preserved_indices, clone_ps, dep, tensor, sizes)


def _reason_of(method: str) -> str:
    return "the definition: it has no other path here" if method == "forward_native" else "its path here"


_ABSENT = object()
_STRIDED = torch.strided


_logged: set[tuple[str, str, str]] = set()


def log_fallback(operation: str, platform: str, reason: str, instead: str, level: int = logging.WARNING) -> None:
    """Log, once for each reason, that the automatic choice is not the first one; silent while a graph is traced."""
    if torch.compiler.is_compiling() or (operation, platform, reason) in _logged:
        return
    _logged.add((operation, platform, reason))
    logger.log(level, "%s on %s: %s; using %s", operation, platform, reason, instead)
