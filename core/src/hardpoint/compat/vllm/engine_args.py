"""`EngineArgs`, and the parser that fills it from a command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from hardpoint import EngineConfig
from hardpoint.compat.vllm.arguments import KNOWN, SETTINGS
from hardpoint.compat.vllm.requests import check_attribute
from hardpoint.interfaces.errors import ConfigError
from hardpoint.validation import did_you_mean


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser of command lines that takes `_` for `-` in names of options, and more than `argparse` reads.

    `--config FILE.yaml` stands for the options that the file holds; those of the command line come after them. `--name.part VALUE` is a
    part of a JSON object that is the value of `--name`.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the namespace and the arguments that nobody knows; see `argparse`."""
        given = [str(one) for one in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(self._with_objects(self._with_names(self._with_file(given))), namespace)

    def _with_file(self, given: list[str]) -> list[str]:
        if "--config" in self._option_string_actions:  # the script's own
            return given
        for place, one in enumerate(given):
            name, equals, value = one.partition("=")
            if name == "--config":
                rest = given[place + 1 :] if equals else given[place + 2 :]
                if not equals and place + 1 == len(given):
                    self.error("--config needs a file")
                file = value if equals else given[place + 1]
                return [*self._read(file), *given[:place], *rest]
        return given

    def _read(self, file: str) -> list[str]:
        """Return the options that a YAML file holds."""
        import yaml  # type: ignore[import-untyped]  # which transformers brings

        try:
            with open(file, encoding="utf-8") as opened:
                options = yaml.safe_load(opened) or {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            self.error(f"--config {file} cannot be read: {error}")
        if not isinstance(options, dict):
            self.error(f"--config {file} must hold names and values of options")
        words: list[str] = []
        for name, value in options.items():
            if value is True:
                words.append(f"--{name}")
            elif isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            elif value is not None and value is not False:
                words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return words

    def _with_names(self, given: list[str]) -> list[str]:
        words = []
        for one in given:
            name, equals, value = one.partition("=")
            stem, dot, part = name.partition(".")
            if stem.startswith("--") and stem not in self._option_string_actions:
                stem = next(
                    (
                        known
                        for known in self._option_string_actions
                        if known.startswith("--") and known.replace("_", "-") == stem.replace("_", "-")
                    ),
                    stem,
                )
            words.append(stem + dot + part + equals + value)
        return words

    def _with_objects(self, given: list[str]) -> list[str]:
        words: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        rest = iter(given)
        for one in rest:
            name, equals, value = one.partition("=")
            stem, dot, path = name.partition(".")
            if not dot or stem not in self._option_string_actions:
                words.append(one)
                continue
            if not equals and (value := next(rest, None) or "") == "":
                self.error(f"{name} needs a value")
            place = objects.setdefault(stem, {})
            *outer, last = path.split(".")
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = _value(value)
        return words + [word for stem, made in objects.items() for word in (stem, json.dumps(made))]


def _value(text: str) -> Any:
    """Return what a word of a command line means: JSON where it is some, the text otherwise."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _new(cls: Any, *_: Any, **given: Any) -> Any:
    for name in given:
        if name not in _DEFAULTS:
            raise ConfigError(f"{name!r} is not an argument of the engine", hint=did_you_mean(name, _DEFAULTS))
    return object.__new__(cls)


def _not_here(engine_args: Any, name: str) -> Any:
    check_attribute(name)
    raise AttributeError(f"{type(engine_args).__name__!r} object has no attribute {name!r}")


def _add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
    """Give a parser an option for each argument."""
    for name, default in _DEFAULTS.items():
        option = f"--{name.replace('_', '-')}"
        if option in parser._option_string_actions:
            continue
        options = [short, option] if (short := _SHORT.get(name)) else [option]
        if isinstance(default, bool) or name.startswith(("async_", "disable_", "enable_")):
            parser.add_argument(*options, action=argparse.BooleanOptionalAction, default=default)
        elif name in _LISTS:
            parser.add_argument(*options, type=_value, nargs="+", default=default, metavar="VALUE")
        else:
            kind = str if name in _TEXTS else _value
            parser.add_argument(*options, type=kind, nargs="?", const=True, default=default, metavar="VALUE")
    return parser


def _from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
    """Return the arguments that a parser found; what it has beside them is the script's."""
    return cls(**{name: getattr(args, name) for name in _DEFAULTS if hasattr(args, name)})


_DEFAULTS: Mapping[str, Any] = {
    "model": "demo",
    **{name: one.default for name, one in SETTINGS.items() if name != "model"},
    **dict.fromkeys(sorted(KNOWN)),
}
"""By vLLM's names; None for what is as the engine has it."""
_SHORT: Mapping[str, str] = {
    "compilation_config": "-cc",
    "data_parallel_size": "-dp",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
}
_LISTS = ("cudagraph_capture_sizes", "served_model_name")
_HINTS = get_type_hints(EngineConfig)
_TEXTS = {name for name, one in SETTINGS.items() if str in (_HINTS[one.name], *get_args(_HINTS[one.name]))}


def _make(name: str) -> Any:
    return dataclasses.make_dataclass(
        name,
        [(one, Any, dataclasses.field(default=default)) for one, default in _DEFAULTS.items()],
        namespace={
            "__doc__": "Arguments of an engine by vLLM's names; raises ConfigError for a name that is none.",
            "__new__": _new,
            "__getattr__": _not_here,
            "add_cli_args": staticmethod(_add_cli_args),
            "from_cli_args": classmethod(_from_cli_args),
        },
    )


EngineArgs: Any = _make("EngineArgs")
AsyncEngineArgs: Any = _make("AsyncEngineArgs")


def arguments_of(engine_args: Any) -> Mapping[str, Any]:
    """Return arguments by name; raises ConfigError for what is no `EngineArgs`."""
    if not dataclasses.is_dataclass(engine_args) or isinstance(engine_args, type):
        raise ConfigError("engines are made of EngineArgs", found=f"a {type(engine_args).__name__}")
    return {one.name: getattr(engine_args, one.name) for one in dataclasses.fields(engine_args)}
