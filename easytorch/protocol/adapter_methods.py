"""transformers' methods for adapters, with every PEFT that has what they call.

Each of them first asks for a version of PEFT: 0.20 in transformers 5.23, 0.22 in 5.24, which was released before that
PEFT was; what they call is the same. Ours ask for the lower one: they are methods of native classes, and attributes of
the instances of transformers' own classes that are loaded here or get an adapter here.
"""

from __future__ import annotations

from typing import Any

from packaging.version import Version
from transformers import PreTrainedModel
from transformers.integrations import PeftAdapterMixin
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from easytorch.function_globals import global_of, with_global
from easytorch.protocol.bound_method import Bound

LOWEST = "0.20.0"
_CHECK = "check_peft_version"


def _check(min_version: str) -> None:
    check_peft_version(min(min_version, LOWEST, key=Version))


AdapterMethods: Any = type(
    "AdapterMethods",
    (),
    {
        name: with_global(method, _CHECK, _check)
        for name, method in vars(PeftAdapterMixin).items()
        if global_of(method, _CHECK) is not None
    },
)


class AdapterMethod(Bound):
    """The method `name` for one model. Found by its name when it is read from a file, for transformers' has it too."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        super().__init__(getattr(AdapterMethods, name), model)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return AdapterMethod, (self.name, self._alive())


def adapter_methods_of(model: PreTrainedModel) -> dict[str, AdapterMethod]:
    """Attributes for a model of a class of transformers, by name: none where its own methods ask for no more."""
    if isinstance(model, AdapterMethods) or Version(MIN_PEFT_VERSION) <= Version(LOWEST):
        return {}
    names = (name for name in vars(AdapterMethods) if not name.startswith("__"))
    return {name: AdapterMethod(name, model) for name in names}


def give_adapter_methods(model: PreTrainedModel) -> None:
    """`adapter_methods_of` as attributes of `model`, where it has them not yet."""
    for name, method in adapter_methods_of(model).items():
        vars(model).setdefault(name, method)


def take_adapter_methods(model: PreTrainedModel) -> None:
    """Undoes `give_adapter_methods`, but for a model that our auto classes loaded, which has them from then on."""
    if not hasattr(model, "easytorch_report"):
        for name in [name for name, one in vars(model).items() if isinstance(one, AdapterMethod)]:
            delattr(model, name)
