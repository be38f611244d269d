"""Reads a workload YAML and a system YAML, merges layers of settings (base, preset, overrides), and checks the result.

Messages name the layer that set a key.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from dlbench.errors import UserError, close_names, nearest
from dlbench.specs.base import ActsIf, Ranks, Spec, size_in_bytes
from dlbench.specs.engine import EngineSpec, key_for_name
from dlbench.specs.files import find, read_yaml
from dlbench.specs.plan import AxisValue, CheckpointSpec, LadderStep, LaunchPlan
from dlbench.specs.problems import Problem, keys_of, models_in, problem_of, tags_of
from dlbench.specs.sync import SyncSpec, read_fusion
from dlbench.specs.system import SystemSpec, with_image
from dlbench.specs.training import MeasureSpec
from dlbench.specs.watch import FaultSpec, WatchSpec
from dlbench.specs.workload import BROKEN, FAMILIES, Model, Workload

ModelT = TypeVar("ModelT", bound=BaseModel)
_DEPTH = "model.stage_blocks, e.g. [3, 4, 23, 3] for 101 layers"
_PATHS = (
    *("data.source", "data.validation", "data.vocabulary", "checkpoint.resume_from", "checkpoint.initialize_from"),
    *("sync.network", "model.layers_from", "engine.emulated.steps_from"),
)
DEFAULT = "default"  # Origin of values that no file or option sets.
GPU_PRESET = "gpu"  # Default preset for nodes with GPUs; the default of the workload file is strict fp32.
FILE_KEYS = ("format", "version", "presets", "default_preset", "ladder")
Overrides = Mapping[str, tuple[AxisValue, str]]  # Values by dotted key, each with the option that set it.


class SettingLayers:
    """Nested settings that are merged layer by layer. `values` is the result; `origin(path)` names who set a key."""

    def __init__(self, base: str, prefix: str = "") -> None:
        """`base` is the origin of keys that no layer set; `prefix` is what options write before a key."""
        self.values: dict[str, Any] = {}
        self.prefix = prefix
        self._base = base
        self._origins: dict[tuple[str, ...], str] = {}

    def add(self, layer: Mapping[str, Any], origin: str) -> None:
        """Merges a nested mapping into the settings; mappings are merged, all other values are replaced."""
        self._merge(self.values, layer, origin, ())

    def set(self, dotted: str, value: Any, origin: str) -> None:
        """Sets one key given as ``train.batch_per_rank``."""
        nested: Any = value
        for part in reversed(dotted.split(".")):
            nested = {part: nested}
        self.add(nested, origin)

    def value(self, path: Sequence[str]) -> Any:
        """Returns the value of a key; None if no layer set it."""
        value: Any = self.values
        for key in path:
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value

    def origin(self, path: tuple[str, ...]) -> str:
        """Returns the origin of a key, or of the nearest key above it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return self._base

    def _merge(self, target: dict[str, Any], layer: Mapping[str, Any], origin: str, path: tuple[str, ...]) -> None:
        for key, value in layer.items():
            key_path = (*path, str(key))
            self._origins[key_path] = origin
            if isinstance(value, Mapping):
                below = target.get(key)
                if not isinstance(below, dict):
                    below = target[key] = {}
                self._merge(below, value, origin, key_path)
            else:
                target[key] = value


def validate(model: type[ModelT], layers: SettingLayers, elsewhere: Iterable[str] = ()) -> ModelT:
    """Returns the merged settings, checked; `elsewhere`: further keys that a wrong one may resemble."""
    try:
        return model.model_validate(layers.values)
    except ValidationError as error:
        problem = problem_of(model, error)
        path, origin = problem.path, layers.origin(problem.path)
        prefix = ""
        if origin.startswith("--"):
            prefix = layers.prefix
        else:
            # A file cannot set keys of the other files.
            elsewhere = ()
        if problem.known:
            setting_key = None
            if path[-1] == "depth" and "stage_blocks" in problem.known:
                setting_key = _DEPTH
            elif len(path) == 1 or path[0] in ("engine", "sync"):
                setting_key = key_for_name(path[-1])
            remedy = f"use {setting_key}" if setting_key else _suggestion(model, problem, layers, prefix, elsewhere)
            problem = replace(problem, what=f"unknown key; {remedy}")
        if not path:
            prefix = ""
        raise UserError(f"{origin}: {prefix}{problem}") from None


def _suggestion(
    model: type[BaseModel], problem: Problem, layers: SettingLayers, prefix: str, elsewhere: Iterable[str]
) -> str:
    """Returns the valid keys nearest to an unknown one: the same name in another section, or a similar name."""
    *section, wrong_name = problem.path
    all_keys = [prefix + key.name for key in keys_of(model, layers.values)] + [*elsewhere]
    same_name = list(dict.fromkeys(key for key in all_keys if key.rpartition(".")[2] == wrong_name))[:3]
    similar = [prefix + ".".join((*section, name)) for name in close_names(wrong_name, problem.known)]
    suggestions = same_name
    if section:
        suggestions = [*same_name, *similar][:3]
    suggestions = suggestions or similar or close_names(wrong_name, all_keys)
    if suggestions:
        return f"did you mean {' or '.join(suggestions)}?"
    return f"known: {', '.join(problem.known)}"


class LayoutChoice(Spec):
    """Settings of cores that do not depend on the rank count."""

    cores_per_rank: Ranks | None = Field(None, description="Cores per rank; none: the node's cores divided evenly.")


class Choices(Workload):
    """A workload YAML with one preset and all overrides applied; its keys are those of ``--set``."""

    acting = (
        ActsIf("sync", "exchanges_by", why="one rank, or engine single, exchanges nothing"),
        ActsIf("quality", "measure.until", "quality", why="only measure.until quality reads it"),
    )

    measure: MeasureSpec
    engine: EngineSpec = EngineSpec()
    sync: SyncSpec = SyncSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    watch: WatchSpec = WatchSpec()
    fault: FaultSpec | None = None
    layout: LayoutChoice = LayoutChoice()

    def workload(self) -> Workload:
        return Workload.model_construct(**{name: getattr(self, name) for name in Workload.model_fields})


class Ladder(Spec):
    """A list of optimisations that are added one after the other; the first step is the baseline."""

    ladder: tuple[LadderStep, ...] = Field(min_length=2, description="Steps; each adds its settings to those before.")


class WorkloadFile:
    """A workload YAML with its base settings and presets, not yet validated as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_yaml(path)
        if content.get("format") != "dlbench.workload" or content.get("version") != 1:
            raise UserError(f"{path}: format: must be 'dlbench.workload' with version 1")
        presets = content.get("presets")
        if not isinstance(presets, Mapping) or not presets:
            raise UserError(f"{path}: presets: must contain at least one, e.g. `presets: {{full: {{}}}}`")
        self.presets: dict[str, Mapping[str, Any]] = {}
        self._ladders: dict[str, object] = {}
        for name, preset in presets.items():
            if preset is None:
                preset = {}
            if not isinstance(preset, Mapping):
                raise UserError(f"{path}: presets.{name}: must be keys and values, or empty, got {preset!r}")
            self.presets[str(name)] = {key: value for key, value in preset.items() if key != "ladder"}
            self._ladders[str(name)] = preset.get("ladder", content.get("ladder"))
            for key in ("name", "preset"):
                if key in self.presets[str(name)]:
                    raise UserError(f"{path}: presets.{name}.{key}: a preset cannot set this key")
        self.base = {key: value for key, value in content.items() if key not in FILE_KEYS}
        self.default_preset = str(content.get("default_preset", next(iter(self.presets))))

    def preset_on(self, system: SystemSpec) -> str:
        """Returns the preset to use without --preset, which depends on the GPUs of the system's nodes."""
        if system.node.gpus and GPU_PRESET in self.presets:
            return GPU_PRESET
        return self.default_preset

    def ladder(self, preset: str) -> tuple[LadderStep, ...]:
        """Returns the ladder steps of a preset. Raises `UserError`: there are none, or one is invalid."""
        content = self._ladders.get(preset)
        if content is None:
            raise UserError(f"{self.path}: ladder: is missing: a list of steps, each with a name and keys to set")
        layers = SettingLayers(str(self.path))
        layers.add({"ladder": content}, f"{self.path} (preset {preset})")
        steps = validate(Ladder, layers).ladder
        if len({step.name for step in steps}) < len(steps):
            raise UserError(f"{self.path}: ladder: two steps have the same name")
        return tuple(step.model_copy(update={"set": read_sizes(step.set, self.origin(step.name))}) for step in steps)

    def origin(self, step: str) -> str:
        """Returns the origin of a ladder step's settings, for messages."""
        return f"{self.path} (ladder, step {step})"

    def is_meant_for_gpus(self, preset: str) -> bool:
        return bool(self.presets[preset].get("meant_for", self.base.get("meant_for")) == "gpu")

    def layers(self, preset: str | None) -> SettingLayers:
        """Returns base and preset, merged. Raises `UserError`: there is no such preset."""
        name = preset or self.default_preset
        if name not in self.presets:
            raise UserError(f"{self.path}: unknown preset {name!r}: {nearest(name, self.presets)}")
        layers = SettingLayers(str(self.path))
        workload_name = str(self.base.get("name", self.path.stem))
        layers.add({"name": workload_name, "title": workload_name, "notice": "", "about": ""}, DEFAULT)
        layers.add(self.base, str(self.path))
        layers.add(self.presets[name], f"{self.path} (preset {name})")
        layers.add({"preset": name}, str(self.path))
        model = layers.values.get("model")
        if "sample_unit" not in layers.values:
            family = model.get("family") if isinstance(model, Mapping) else None
            units = [cls.sample_unit for cls in FAMILIES if family in tags_of(cls)]
            layers.add({"sample_unit": next(iter(units), Model.sample_unit)}, DEFAULT)
        return layers


def choose(file: WorkloadFile, preset: str | None, overrides: Overrides) -> Choices:
    """Returns the choices of a workload; `overrides` maps dotted keys to a value and the option that set it."""
    return choose_with_origins(file, preset, overrides)[0]


def choose_with_origins(file: WorkloadFile, preset: str | None, overrides: Overrides) -> tuple[Choices, SettingLayers]:
    """Returns the choices of a workload, and the layers, which know the origin of each key."""
    if file.path in BROKEN:
        raise UserError(BROKEN[file.path])
    layers = file.layers(preset)
    for key, (value, origin) in overrides.items():
        layers.set(key, value, origin)
    _make_paths_absolute(layers, file.path)
    choices = validate(Choices, layers, (f"system.{key.name}" for key in keys_of(SystemSpec, {})))
    return choices, layers


def _make_paths_absolute(layers: SettingLayers, file: Path) -> None:
    """Makes paths absolute, because ranks start in another folder; those in the YAML are relative to the YAML file."""
    for path_key in _PATHS:
        path_of_key = tuple(path_key.split("."))
        key = path_of_key[-1]
        value = layers.value(path_of_key)
        is_name = (key == "source" and value == "synthetic") or (
            key == "vocabulary" and "/" not in str(value) and not str(value).endswith(".txt")
        )
        if isinstance(value, str) and value and not is_name:
            origin = layers.origin(path_of_key)
            base = file.parent if origin.startswith(str(file)) else Path.cwd()
            try:
                path = base.absolute() / Path(value).expanduser()
            except RuntimeError as error:  # ~name of an unknown user
                raise UserError(f"{origin}: {path_key}: {value!r}: {str(error).lower().rstrip('.')}") from None
            layers.set(path_key, str(path), origin)


def choose_system(name: str, overrides: Overrides) -> SystemSpec:
    """Returns a system to run on, by name or path; keys of `overrides` have no ``system.`` prefix."""
    system = choose_system_with_origins(name, overrides)[0]
    if system.modelled:
        raise UserError(
            f"system {system.name}: modelled is true: it is only described by a data sheet; use another one, or "
            f"dlbench project spec WORKLOAD --system {name}"
        )
    return system


def choose_system_with_origins(name: str, overrides: Overrides) -> tuple[SystemSpec, SettingLayers]:
    """Returns a system, which may be modelled, and the layers, which know the origin of each key."""
    path = find("systems", name)
    content = read_yaml(path)
    if content.pop("format", None) != "dlbench.system" or content.pop("version", None) != 1:
        raise UserError(f"{path}: format: must be 'dlbench.system' with version 1")
    layers = SettingLayers(str(path), prefix="system.")
    layers.add(content, str(path))
    for key, (value, origin) in overrides.items():
        layers.set(key, value, origin)
    system = validate(SystemSpec, layers, (key.name for key in keys_of(Choices, {})))
    return system.model_copy(update={"container": with_image(system.container)}), layers


def read_sizes(settings: Mapping[str, AxisValue], option: str) -> dict[str, AxisValue]:
    """Returns settings with every size in bytes, so that ``64MiB`` and ``67108864`` are the same setting."""
    in_bytes: dict[str, Any] = dict(settings)
    readers: dict[str, Callable[[object], object]] = dict.fromkeys(_size_keys(), size_in_bytes)
    readers["sync.fusion"] = lambda value: str(read_fusion(value))
    for key in readers.keys() & settings.keys():
        try:
            in_bytes[key] = readers[key](settings[key])
        except ValueError as error:
            raise UserError(f"{option}: {key}: {error}") from None
    return in_bytes


@functools.cache
def _size_keys() -> frozenset[str]:
    names = {key.name for key in keys_of(Choices, {}) if key.is_size}
    names.update(f"system.{key.name}" for key in keys_of(SystemSpec, {}) if key.is_size)
    return frozenset(names)


@functools.cache
def conditions_of(key: str) -> tuple[ActsIf, ...]:
    """Returns the conditions under which a key of ``--set`` has an effect, those of its sections first."""
    models: list[Any] = [SystemSpec if key.startswith("system.") else Choices]
    conditions: list[ActsIf] = []
    for name in key.removeprefix("system.").split("."):
        models = [model for model in models if name in model.model_fields]
        for model in models:
            conditions += [condition for condition in model.acting if name in condition.fields]
        sections = (models_in(model.model_fields[name].annotation) for model in models)
        models = list(itertools.chain.from_iterable(sections))
    return tuple(dict.fromkeys(conditions))


def why_inert(key: str, *plans: LaunchPlan) -> str:
    """Returns why a key has no effect in any of these plans; empty if it has one."""
    for condition in conditions_of(key):
        if not any(map(condition.holds, plans)):
            return condition.why
    return ""


def refuse_inert(keys_with_options: Iterable[tuple[str, str]], plans: Sequence[LaunchPlan]) -> None:
    """Raises `UserError` for a key that has no effect in any run; keys come with the options that set them."""
    for key, option in keys_with_options:
        if why := why_inert(key, *plans):
            raise UserError(f"{option} {key}: has no effect in any run of this request: {why}")
