"""The order in which transformers' classes take the arguments of a call by position."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Base
else:
    _Base = object  # the family's `PreTrainedModel` comes after it among the bases


def in_order(
    forward: Callable[..., Any], names: tuple[str, ...], by_keyword: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """`forward` with the arguments `names`, in the order in which transformers' class takes them by position.

    by_keyword: others that its signature states, for callers who look there, and which are not taken by position.
    """

    @functools.wraps(forward)
    def ordered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names):
            raise TypeError(
                f"{type(self).__name__} takes at most {len(names)} arguments by position ({', '.join(names)}), "
                f"{len(args)} were given"
            )
        return forward(self, **dict(zip(names, args, strict=False)), **kwargs)

    own = inspect.signature(forward).parameters
    kinds: dict[str, Any] = dict.fromkeys(names, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds |= dict.fromkeys(by_keyword, inspect.Parameter.KEYWORD_ONLY)
    parameters = [
        inspect.Parameter(name, kind, default=None, annotation=_annotation(own, name)) for name, kind in kinds.items()
    ]
    ordered.__signature__ = inspect.Signature([own["self"], *parameters, own["kwargs"]])  # type: ignore[attr-defined]
    return ordered


def _annotation(parameters: Any, name: str) -> Any:
    return parameters[name].annotation if name in parameters else "torch.Tensor | None"


class ArgumentsInOrder(_Base):
    """A mixin: `forward` takes `arguments`, which a family names, in the order of transformers, and `by_keyword`."""

    arguments: ClassVar[tuple[str, ...]]
    by_keyword: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        family: Any = cls
        if "arguments" in vars(cls):
            family.forward = in_order(cls.forward, cls.arguments, cls.by_keyword)
