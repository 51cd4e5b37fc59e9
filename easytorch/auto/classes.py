"""The auto classes: transformers' own, with native classes first in their mapping and our attention by default."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoBackboneClass

from easytorch.auto.plugging import AttentionChoice, attention_for, plug_attention, plug_bridge, settled
from easytorch.auto.report import ModuleClass, report_on
from easytorch.auto.specialising import specialise_modules
from easytorch.auto.switching import set_attention
from easytorch.bridge.core.json_files import read_json
from easytorch.protocol import conversion
from easytorch.protocol.bound_method import Bound
from easytorch.protocol.checkpoint_files import HUB_ARGUMENTS, check_config, inferred_config
from easytorch.protocol.gguf_loading import gguf_config
from easytorch.protocol.load_checks import check_loaded_foreign
from easytorch.protocol.loading import load_pretrained
from easytorch.protocol.mesh_loading import class_over_mesh
from easytorch.protocol.mesh_saving import save_foreign
from easytorch.protocol.native import NativeModel
from easytorch.protocol.native_classes import native_class
from easytorch.protocol.quantization_config import settings_of_name

if TYPE_CHECKING:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass as _Base
else:
    _Base = object

ModelClass = type[PreTrainedModel]

_REMOTE = "its code comes with the checkpoint"
_PEEK = (*HUB_ARGUMENTS, "gguf_file")


class NativeFirst:
    """transformers' mapping config class -> model class, with native classes instead of those of the same name.

    base: only native classes under it.
    """

    def __init__(self, transformers_mapping: Any, base: type = PreTrainedModel) -> None:
        self._theirs, self._base = transformers_mapping, base
        self._registered: dict[type[PreTrainedConfig], ModelClass] = {}

    def __contains__(self, config_class: object) -> bool:
        return config_class in self._registered or config_class in self._theirs

    def __getitem__(self, config_class: type[PreTrainedConfig]) -> ModelClass | tuple[ModelClass, ...]:
        if config_class in self._registered:
            return self._registered[config_class]
        found = self._theirs[config_class]
        return tuple(map(self._native, found)) if isinstance(found, list | tuple) else self._native(found)

    def get(self, config_class: type[PreTrainedConfig], default: Any = None) -> Any:
        if config_class not in self:
            return default
        return self[config_class]

    def _native(self, theirs: ModelClass) -> ModelClass:
        ours = native_class(theirs)
        return ours if issubclass(ours, self._base) else theirs

    def __iter__(self) -> Iterator[type[PreTrainedConfig]]:
        return iter({**dict.fromkeys(self._theirs), **self._registered})

    def register(self, config_class: type[PreTrainedConfig], model_class: ModelClass, exist_ok: bool = False) -> None:
        """Called by `AutoModel.register`; a taken config class is an error unless `exist_ok`."""
        if config_class in self and not exist_ok:
            raise ValueError(f"{config_class.__name__} has a model already; pass exist_ok=True to replace it")
        self._registered[config_class] = model_class


class EasyTorchAuto(_Base):
    """Mixin of the auto classes, before transformers' in the MRO: prepares its calls and finishes the loaded model."""

    _model_mapping: Any

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
        """A model with new weights, as `transformers.AutoModel.from_config`."""
        if _wants_remote_code(cls, config, kwargs):
            kwargs.pop("specialise", None)
            return _finished(_theirs(cls).from_config(config, **kwargs), AttentionChoice(reason=_REMOTE))
        config, choice = _choose_attention(_model_class(cls, config), config, kwargs)
        wanted = _module_wishes(config, kwargs)
        build: Callable[..., PreTrainedModel] = super().from_config
        return _finished(build(config, **kwargs), choice, wanted)

    @classmethod
    def from_flax(cls, config: PreTrainedConfig, params: Any, **kwargs: Any) -> Any:
        """A model of `config` with the weights of a tree of arrays; arguments as for `BridgeMixin.from_flax`."""
        model_class = _model_class(cls, config)
        config, choice = _choose_attention(model_class, config, kwargs)
        wanted = _module_wishes(config, kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = conversion.from_flax(model_class, config, params, output_loading_info=True, **kwargs)
        _finished(model, choice, wanted)
        return (model, info) if wants_info else model

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> Any:
        """A model with the weights of a folder or a name on the Hub, as `transformers.AutoModel.from_pretrained`.

        Further arguments: `from_flax` loads flax_model.msgpack or another tree of arrays, which is also the default
        where there are no torch weights; with `strict=False`, and by default where `output_loading_info` names them,
        missing and unexpected weights are only warned about.
        mesh, partition_rules: those of `shard_model`; each rank of the mesh calls this, and reads its own part alone.
        """
        mesh, rules = kwargs.pop("mesh", None), kwargs.pop("partition_rules", None)
        over_mesh = mesh is not None or rules is not None
        path = pretrained_model_name_or_path
        settings_of_name(kwargs)
        config = _peek(path, kwargs)
        if _wants_remote_code(cls, config, kwargs):
            if over_mesh:
                raise ValueError(f"mesh: {_REMOTE}; load the model without a mesh, and call shard_model")
            return _load_theirs(cls, _REMOTE, path, *model_args, **kwargs)
        model_class = _model_class(cls, config)
        reason = model_class.refusal(config, kwargs) if issubclass(model_class, NativeModel) else None
        if over_mesh and reason is None:
            model_class = class_over_mesh(model_class, path, mesh, rules, kwargs)
        elif over_mesh:
            raise ValueError(f"mesh: {reason}; load the model without a mesh, and call shard_model")
        if reason is not None:
            return _load_theirs(cls, reason, path, *model_args, **kwargs)
        config, choice = _choose_attention(model_class, config, kwargs)
        if isinstance(kwargs.get("config"), PreTrainedConfig):
            kwargs["config"] = config
        wanted = _module_wishes(config, kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        if kwargs.get("strict") is None:
            kwargs["strict"] = not wants_info
        load: Callable[..., Any] = cls._load
        if over_mesh:
            # a mesh cannot go through transformers' auto classes, which copy their arguments
            wanted, load = ModuleWishes(), model_class.from_pretrained
        if issubclass(model_class, NativeModel):
            model, info = load(path, *model_args, output_loading_info=True, **kwargs)
        else:
            model, info = load_pretrained(
                model_class,
                path,
                model_args,
                kwargs,
                from_torch=load,
                from_state_dict=model_class.from_pretrained,
                check=check_loaded_foreign,
            )
        _finished(model, choice, wanted)
        if over_mesh and not isinstance(model, NativeModel):
            model.save_pretrained = Bound(save_foreign, model)
        return (model, info) if wants_info else model

    @classmethod
    def _load(cls, path: Any, *model_args: Any, **kwargs: Any) -> Any:
        return super().from_pretrained(path, *model_args, **kwargs)


class EasyTorchBackbone(EasyTorchAuto):
    """`AutoBackbone`: the same, with timm's backbones under their own names, which have no "/"."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> Any:
        """As `EasyTorchAuto.from_pretrained`; with `use_timm_backbone`, or a name of timm's, as transformers' own."""
        path = pretrained_model_name_or_path
        if kwargs.pop("use_timm_backbone", False) or not (_is_local(path) or "/" in os.fspath(path)):
            return _theirs(cls).from_pretrained(path, *model_args, **kwargs)
        return super().from_pretrained(path, *model_args, **kwargs)

    @classmethod
    def _load(cls, path: Any, *model_args: Any, **kwargs: Any) -> Any:
        # AutoBackbone's own `from_pretrained` asks the Hub even about a folder, and takes it for a timm name.
        return super(_BaseAutoBackboneClass, cls).from_pretrained(path, *model_args, **kwargs)  # type: ignore[misc]


def _theirs(auto: type) -> Any:
    """transformers' auto class of one of ours, which runs remote code where the checkpoint has its own."""
    return next(base for base in auto.__mro__ if base.__module__.startswith("transformers."))


def _load_theirs(auto: type, reason: str, path: Any, *model_args: Any, **kwargs: Any) -> Any:
    """`from_pretrained` of transformers' own auto class; `reason` goes into the model's report."""
    for name in ("strict", "specialise"):
        kwargs.pop(name, None)
    loaded = _theirs(auto).from_pretrained(path, *model_args, **kwargs)
    _finished(loaded[0] if isinstance(loaded, tuple) else loaded, AttentionChoice(reason=reason))
    return loaded


def _choose_attention(
    model_class: ModelClass, config: PreTrainedConfig, kwargs: dict[str, Any]
) -> tuple[PreTrainedConfig, AttentionChoice]:
    """The config to build from, and the attention the model gets; `kwargs` receives the argument for transformers."""
    asked = kwargs.pop("attn_implementation", None)
    if not issubclass(model_class, NativeModel):
        config, of_config = settled(config)
        asked = of_config if asked is None else asked
    wants_weights = bool(kwargs.get("output_attentions", config.output_attentions))
    choice = attention_for(model_class, config, asked, wants_weights)
    if choice.passed is not None:
        kwargs["attn_implementation"] = choice.passed
    # Our names of attention and experts go into it, and from_config would share it with its caller and other models.
    return copy.deepcopy(config), choice


@dataclass(frozen=True)
class ModuleWishes:
    """The caller's arguments for modules other than attention. specialise: whether ours may replace them; experts: the
    experts implementation that was named."""

    specialise: bool = False
    experts: str | dict[str, str] | None = None


def _module_wishes(config: PreTrainedConfig, kwargs: dict[str, Any]) -> ModuleWishes:
    """`ModuleWishes` of the arguments, of which `specialise` is popped."""
    specialise = kwargs.pop("specialise", True)
    if not isinstance(specialise, bool):
        raise TypeError(f"specialise must be True or False, got {specialise!r}")
    asked = kwargs.get("experts_implementation")
    return ModuleWishes(specialise, config._experts_implementation if asked is None else asked)


def _finished(
    model: PreTrainedModel, choice: AttentionChoice, wishes: ModuleWishes = ModuleWishes()
) -> PreTrainedModel:
    """The loaded `model` with its chosen attention and specialised modules, and its report."""
    plug_attention(model, choice)
    modules: tuple[ModuleClass, ...] = ()
    if not isinstance(model, NativeModel):
        model.set_attn_implementation = Bound(set_attention, model)  # type: ignore[method-assign]
        modules = specialise_modules(model, wishes.experts) if wishes.specialise else ()
    return report_on(plug_bridge(model), choice.reason, modules)


def _peek(path: Any, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """The config, read only to find the model class; for an adapter, that of its base model."""
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return config
    where = {name: kwargs[name] for name in (*_PEEK, "trust_remote_code", "code_revision") if name in kwargs}
    if config is None and _is_local(path):
        folder = Path(path) / (kwargs.get("subfolder") or "")
        adapter = folder / "adapter_config.json"
        if adapter.is_file() and not (folder / "config.json").is_file():
            return _config_at(_base_of_adapter(adapter), where)
        if kwargs.get("gguf_file") is None:
            inferred: PreTrainedConfig | None = inferred_config(folder)
            if inferred is not None:
                kwargs["config"] = inferred
                return inferred
            check_config(folder)
    if config is None and (stated := gguf_config(path, kwargs)) is not None:
        kwargs["config"] = stated
        return stated
    return _config_at(path if config is None else config, where)


def _config_at(path: Any, where: dict[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, **where)
    return config


def _is_local(path: Any) -> bool:
    """True for a folder, False for a name on the Hub; `FileNotFoundError` for what can only be meant as a folder."""
    if Path(path).is_dir():
        return True
    text = os.fspath(path)
    if isinstance(path, os.PathLike) or text.startswith((".", "~")) or os.path.isabs(text) or text.count("/") > 1:
        raise FileNotFoundError(f"{text}: there is no such folder; give a checkpoint's folder or a name on the Hub")
    return False


def _base_of_adapter(adapter: Path) -> str:
    base: str = read_json(adapter, limit=1 << 24)["base_model_name_or_path"]
    return base


def _model_class(auto: Any, config: PreTrainedConfig) -> ModelClass:
    """The class transformers would take for `config`, native where there is one."""
    if type(config) not in auto._model_mapping:
        families = ", ".join(sorted({c.model_type for c in auto._model_mapping if c.model_type}))
        raise ValueError(
            f"{auto.__name__} has no class for the architecture {config.model_type!r} ({type(config).__name__}); use "
            f"the auto class of another task, or one of: {families}"
        )
    found: ModelClass | tuple[ModelClass, ...] = auto._model_mapping[type(config)]
    if not isinstance(found, tuple):
        return found
    by_name = {model_class.__name__: model_class for model_class in found}
    return next((by_name[name] for name in config.architectures or () if name in by_name), found[0])


def _wants_remote_code(auto: Any, config: PreTrainedConfig, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("trust_remote_code")) and auto.__name__ in getattr(config, "auto_map", {})


def __getattr__(name: str) -> Any:
    """transformers' auto class `name` with ours as first base, created on first use."""
    theirs = getattr(transformers, name, None) if _IS_AUTO(name) else None
    if theirs is None:
        of = f"transformers {transformers.__version__}" if _IS_AUTO(name) else f"module {__name__!r}"
        raise AttributeError(f"{of} has no {name!r}")
    ours = EasyTorchBackbone if name == "AutoBackbone" else EasyTorchAuto
    body = {"__module__": __name__, "__doc__": ours.__doc__, "_model_mapping": NativeFirst(theirs._model_mapping)}
    return globals().setdefault(name, type(name, (ours, theirs), body))


_IS_AUTO = re.compile(r"AutoModel(For\w+)?|AutoBackbone").fullmatch
