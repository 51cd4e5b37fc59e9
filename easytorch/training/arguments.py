"""`TrainingConfig` from the command line: a flag for each field, which overrides a YAML or JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from easytorch.bridge.errors import nearest
from easytorch.missing_packages import what_to_install
from easytorch.output_encoding import escape_unencodable
from easytorch.switches import switch
from easytorch.training.config import TrainingConfig, flag


def parse(arguments: Sequence[str], prog: str) -> TrainingConfig:
    """The settings of the flags, and of a file given first or by its flag; `ValueError` or `OSError` for wrong ones."""
    # not a positional argument of the parser, which would take the value of a misspelt flag for one
    path = arguments[0] if arguments and arguments[0].endswith(_ENDINGS) else None
    flags = vars(_parser(prog).parse_args(arguments if path is None else arguments[1:]))
    named = flags.pop("config", None)
    if named is not None and path is not None:
        raise ValueError(f"two files of settings, {path!r} and {flag('config')} {named!r}: give one")
    path = named if path is None else path
    values = {} if path is None else _read(path)
    return TrainingConfig.from_dict({**values, **flags})


def run(arguments: Sequence[str], prog: str) -> int:
    """Train in this process; the exit code: 0 done, 1 failed, 2 wrong input, 130 stopped by a signal (with a
    checkpoint). Under torchrun all processes end with an error, and one of them says which."""
    from easytorch.training.loop import train_among
    from easytorch.training.processes import find_device, joined

    escape_unencodable()
    config: TrainingConfig | None = None
    wrong: Exception | None = None
    device = find_device("cpu")
    try:
        config = parse(arguments, prog)
        device = find_device(config.device)
    except (ValueError, OSError) as error:
        wrong = error
    with joined(device, TrainingConfig.timeout if config is None else config.timeout) as processes:
        try:
            with processes.together():
                if wrong is not None:
                    raise wrong
            assert config is not None
            result = train_among(processes, config)
        except Exception as error:  # the boundary of the process: report the error before torchrun ends the process
            code = _report(error)
            if processes.failed:
                processes.barrier()
            return code
    return 130 if result.interrupted else 0


def _report(error: Exception) -> int:
    """Print the error, on one line if it is a user error; returns the exit code."""
    from easytorch.training.finite import NonFiniteError
    from easytorch.training.processes import OtherProcessError, SilentProcessError

    if isinstance(error, OtherProcessError):
        return 2 if error.wrong_input else 1
    if (missing := what_to_install(error)) is not None and not switch("EASYTORCH_TRACEBACK"):
        print(f"error: {missing}", file=sys.stderr, flush=True)
        return 2
    code = 2 if isinstance(error, (ValueError, OSError)) else 1
    if isinstance(error, (ValueError, OSError, NonFiniteError, SilentProcessError)) and not switch(
        "EASYTORCH_TRACEBACK"
    ):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    return code


class _Parser(argparse.ArgumentParser):
    """A wrong flag is a `ValueError` like any other wrong setting: one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            known = [flag for action in self._actions for flag in action.option_strings]
            message = f"unknown flag {unknown}{nearest(unknown.split()[0].partition('=')[0], known)}"
        raise ValueError(f"{message}; {self.prog} --help lists the flags")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog, argument_default=argparse.SUPPRESS, description=TrainingConfig.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    help_ = "a YAML or JSON file with any of the settings, which may also come first; flags override it"
    parser.add_argument("--config", metavar="FILE", help=help_)
    for item in dataclasses.fields(TrainingConfig):
        option, default = "--" + item.name.replace("_", "-"), item.default
        if item.name in ("text", "change"):
            parser.add_argument(option, nargs="+", metavar="FILE" if item.name == "text" else "SETTING")
        elif item.name in ("model", "lora"):
            parser.add_argument(option, type=_model, metavar="JSON|FOLDER|ID" if item.name == "model" else "JSON")
        elif isinstance(default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction)
        else:
            kind = {"int": int, "float": float, "int | None": int}.get(str(item.type), str)
            hint = "" if default is dataclasses.MISSING else f"default {default}"
            parser.add_argument(option, type=kind, metavar=item.name.upper(), help=hint)
    return parser


def _model(text: str) -> dict[str, Any] | str:
    try:
        return json.loads(text) if text.lstrip().startswith("{") else text
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"this is not JSON: {error}: {text}") from error


def _read(path: str) -> dict[str, Any]:
    if not path or Path(path).is_dir() or not Path(path).exists():
        raise FileNotFoundError(f"{flag('config')}: there is no file {path!r}")
    is_yaml = Path(path).suffix.lower() in (".yaml", ".yml")
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = _from_yaml(text) if is_yaml else json.loads(text, object_pairs_hook=_once)
    except _GivenTwiceError as error:
        raise ValueError(f"{flag('config')}: {path}: {error}: give it once") from error
    except (ValueError, yaml.YAMLError) as error:
        what = "YAML" if is_yaml else "JSON (a YAML file ends in .yaml)"
        raise ValueError(f"{flag('config')}: {path} is not {what}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        kind = "keys that are not strings" if isinstance(values, dict) else f"a {type(values).__name__}"
        what = "a mapping" if is_yaml else "a JSON object"
        raise ValueError(f"{flag('config')}: {path} must hold {what} of training settings, got {kind}")
    return values


_ENDINGS = (".yaml", ".yml", ".json")


class _GivenTwiceError(ValueError):
    """A name stands twice in a mapping."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as JSON and Python read its numbers: `1e-3` is one, where YAML 1.1 takes it for text. A name given twice,
    of which PyYAML takes the last, is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        _once([(key.value, None) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"])
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$"), list("-+.0123456789")
)


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The pairs as a mapping. `_GivenTwiceError` for a name that is given twice."""
    found: dict[Any, Any] = {}
    for name, value in pairs:
        if isinstance(name, str) and name in found:
            raise _GivenTwiceError(f"{name} is given twice")
        if isinstance(name, str):
            found[name] = value
    return found


def _from_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)
