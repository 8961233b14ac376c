"""What a run is: frozen dataclasses, written to JSON and read back strictly, changed by dotted overrides."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cachemuon_lab.models import GPT2Config, ModelConfig, ResNetConfig

MODELS: dict[str, type[GPT2Config] | type[ResNetConfig]] = {"gpt2": GPT2Config, "resnet18": ResNetConfig}
"""The tag that a model has in JSON, and its class."""

LABELS = {
    "polar": "PolarExpMuon",
    "gram": "GramMuon",
    "paper": "CacheMuon.paper",
    "cache": "CacheMuon",
    "jordan": "Muon (Jordan)",
    "adamw": "AdamW",
    "stale": "StaleMuon",
    "dion2": "Dion2",
    "dion3": "Dion3",
    "adamuon": "AdaMuon",
    "soap": "SOAP",
}

NORMUON = {"gram": "NorMuon", "jordan": "NorMuon (Jordan)"}
"""The names that these have with `normalize="rows"`."""

MOST = 2**53
"""The largest integer that a setting may be: the largest that a float is exact up to."""

CACHING = ("paper", "cache")
"""The kinds of optimizer that are a CacheMuon."""

SOLVING = ("polar", "gram", "jordan")
"""The kinds that are a Muon, which solves at every step."""

CACHE_SETTINGS = ("gamma", "vectors", "max_age", "clip", "max_norm", "gate", "cache_all", "min_rows")
"""CacheMuon's own settings, which have the same names in `OptimizerConfig`."""


@dataclass(frozen=True)
class DataConfig:
    """Where batches come from.

    "python": the standard library's own sources as bytes (or those of the folder `path`); "tokens":
    `train.bin` and `val.bin` in the folder `path`; "cifar10": CIFAR-10's files in the folder `path`.
    `context` is the length of a window of tokens, the model's where it is None. `part` of the validation
    tokens or test images validates: all of them; the first half, to "tune" on; the second, to "report".
    """

    kind: Literal["python", "tokens", "cifar10"]
    path: str | None = None
    context: int | None = None
    part: Literal["all", "tune", "report"] = "all"

    def __post_init__(self) -> None:
        _check_choices(self, "data.")
        if self.context is not None:
            _at_least("data.context", self.context, 1)
            if self.kind == "cifar10":
                raise ValueError(f"data.context must be None for kind 'cifar10', got {self.context!r}")


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name, with the paper's defaults, and CacheMuon's own.

    "polar", "gram", "jordan": Muon that solves at every step; "paper": CacheMuon.paper, of which only `gamma`
    is a setting; "cache": CacheMuon, whose settings are those from `gamma` to `min_rows`; "stale": GramMuon
    that solves at every `period`-th step and takes the same direction until the next; "dion2", "dion3":
    `fraction` of the rows is solved; "adamuon", "soap": with second moments of the decay `beta2`, as "dion3";
    "adamw": Adam for everything, by the `adam_` settings. `normalize` is that of `Muon` and `CacheMuon`, with
    their defaults; `precision` the dtype in which they iterate, on a CPU emulated. `head` says whose the
    output layer is.
    Optimizers of one `family` are compared with one another; a recipe with several families names them.

    >>> OptimizerConfig("paper", gamma=2.0).label
    'CacheMuon.paper gamma=2'
    >>> OptimizerConfig("cache", gamma=2.0, gate="residual").slug
    'cache-gamma2-gateresidual'
    >>> OptimizerConfig("gram", normalize="rows").label
    'NorMuon'
    """

    kind: Literal[
        "polar", "gram", "paper", "cache", "jordan", "adamw", "stale", "dion2", "dion3", "adamuon", "soap"
    ]
    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = False
    weight_decay: float = 1e-4
    adjust_lr_fn: Literal["none", "original", "match_rms_adamw"] = "none"
    gamma: float = 20.0
    vectors: int = 8
    max_age: int | None = 10
    clip: float | None = None
    max_norm: float | None = 2.0
    gate: Literal["schedule", "residual"] = "schedule"
    cache_all: bool = False
    min_rows: int = 0
    period: int = 2
    normalize: Literal["default", "rows", "factored"] | None = "default"
    precision: Literal["float16", "bfloat16"] | None = None
    fraction: float = 0.25
    beta2: float = 0.95
    adam_lr: float = 2e-3
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_weight_decay: float = 1e-4
    head: Literal["adam", "muon"] = "adam"
    family: str = ""

    def __post_init__(self) -> None:
        _check_choices(self, "optimizer.")
        for name in ("lr", "weight_decay", "gamma", "adam_lr", "adam_weight_decay"):
            _non_negative(f"optimizer.{name}", getattr(self, name))
        if self.clip is not None and not 0 <= self.clip <= 1:
            raise ValueError(f"optimizer.clip must be a fraction, from 0 to 1, or none, got {self.clip!r}")
        if not 0 < self.fraction <= 1:
            got = repr(self.fraction)
            raise ValueError(f"optimizer.fraction must be greater than 0 and at most 1, got {got}")
        for name in ("normalize", "precision"):
            value, default = getattr(self, name), getattr(OptimizerConfig, name)
            if value != default and self.kind not in (*SOLVING, "cache"):
                got = f"{'none' if default is None else default} for kind {self.kind!r}, got {value!r}"
                raise ValueError(f"optimizer.{name} must be {got}")
        decays = {"momentum": (self.momentum,), "beta2": (self.beta2,), "adam_betas": self.adam_betas}
        for name, values in decays.items():
            if not all(0 <= value < 1 for value in values):
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)!r}")
        for name in ("vectors", "period"):
            _at_least(f"optimizer.{name}", getattr(self, name), 1)
        if self.max_age is not None:
            _at_least("optimizer.max_age", self.max_age, 0)
        elif self.kind == "cache" and self.gate == "schedule":
            raise ValueError("optimizer.max_age must be an integer with gate='schedule', got None")
        _at_least("optimizer.min_rows", self.min_rows, 0)
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"optimizer.max_norm must be a number > 0 or none, got {self.max_norm!r}")

    @property
    def label(self) -> str:
        """The name for people: what tells this optimizer from the others of a comparison."""
        told = [f"{name}={_short(getattr(self, name))}" for name in self._telling()]
        name = LABELS[self.kind]
        if self.normalize == "rows" and self.kind in NORMUON:
            name, told = NORMUON[self.kind], [one for one in told if one != "normalize=rows"]
        return " ".join([name, ", ".join(told)]).strip()

    def _telling(self) -> list[str]:
        """The settings that the name has: gamma or fraction, and those that are not the defaults."""
        own: dict[str, tuple[str, ...]] = {
            "adamw": (),
            "cache": ("nesterov", *CACHE_SETTINGS, "normalize", "precision"),
            "stale": ("nesterov", "period"),
            "paper": ("nesterov",),
            "dion2": (),
            "dion3": ("beta2",),
            "adamuon": ("nesterov", "beta2"),
            "soap": ("beta2",),
        }
        names = own.get(self.kind, ("nesterov", "normalize", "precision"))
        told = [name for name in names if getattr(self, name) != getattr(OptimizerConfig, name)]
        always = {"paper": ["gamma"], "dion2": ["fraction"], "dion3": ["fraction"]}
        return [*always.get(self.kind, []), *told]

    @property
    def slug(self) -> str:
        """The same, for the name of a folder."""
        told = [f"{name}{_short(getattr(self, name))}" for name in self._telling()]
        return "-".join([self.kind, *told]).replace("max_age", "age")


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate goes: a factor on every group's own, as a pure function of the step.

    "plateau_linear": 1 for the first `constant_lr_ratio` of the steps, then linearly to `min_lr_ratio` at
    the last. "cosine": `(1 + cos(pi e / E)) / 2` in epoch e = 0, 1, ... of E, as torch's
    CosineAnnealingLR stepped once per epoch.

    >>> ScheduleConfig("plateau_linear").factor(70, steps=100)
    0.525
    >>> round(ScheduleConfig("cosine").factor(51, steps=100, epoch=10), 6)
    0.5
    """

    kind: Literal["plateau_linear", "cosine", "constant"]
    constant_lr_ratio: float = 0.4
    min_lr_ratio: float = 0.05

    def __post_init__(self) -> None:
        _check_choices(self, "schedule.")
        if not 0 <= self.constant_lr_ratio < 1:
            got = repr(self.constant_lr_ratio)
            raise ValueError(f"schedule.constant_lr_ratio must be at least 0 and less than 1, got {got}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"schedule.min_lr_ratio must be from 0 to 1, got {self.min_lr_ratio!r}")

    def factor(self, step: int, steps: int, epoch: int = 1) -> float:
        """The factor of step `step`, from 1 to `steps`; an epoch is `epoch` steps long."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "cosine":
            return (1 + math.cos(math.pi * ((step - 1) // epoch) / math.ceil(steps / epoch))) / 2
        plateau = self.constant_lr_ratio * steps
        if step <= plateau:
            return 1.0
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (steps - step) / (steps - plateau)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    A step has `batch_size` examples in each of `accumulation * replicas` micro-batches, dealt to however
    many processes there are. `replicas` is the number of devices of the experiment, each of which
    orthogonalizes everything: it multiplies the FLOPs of the paper's model. `validation_batches=None`
    validates on all there are. `diagnostics="gate"` measures every probe of a CacheMuon run, "age" the
    transforms of `ages` steps ago in a GramMuon run, at every step that `diagnose_every` divides.

    `continues` has the last steps of earlier, shorter schedules that this run continues: up to the first of
    them the learning rate is that of a run which ends there, then that of a run of all `steps`.
    """

    name: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    steps: int
    batch_size: int
    accumulation: int = 1
    validate_every: int = 100
    validation_batches: int | None = 25
    seed: int = 0
    autocast: Literal["bfloat16"] | None = None
    checkpoint_every: int = 100
    replicas: int = 1
    diagnostics: Literal["off", "gate", "age"] = "off"
    diagnose_every: int = 1
    ages: tuple[int, ...] = field(default=(1, 2, 3, 5, 8, 13, 21))
    continues: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_choices(self, "")
        if not self.name:
            raise ValueError(f"name must not be empty, got {self.name!r}")
        if abs(self.seed) > MOST:
            raise ValueError(f"seed must be from {-MOST} to {MOST}, got {self.seed!r}")
        counts = ("steps", "batch_size", "accumulation", "validate_every", "checkpoint_every", "replicas")
        for name in (*counts, "diagnose_every"):
            _at_least(name, getattr(self, name), 1)
        if self.validation_batches is not None:
            _at_least("validation_batches", self.validation_batches, 1)
        if not self.ages or list(self.ages) != sorted(set(self.ages)) or min(self.ages) < 1:
            raise ValueError(f"ages must be increasing integers of at least 1, got {self.ages!r}")
        ends = (0, *self.continues, self.steps)
        if list(ends) != sorted(set(ends)):
            allowed = f"increasing steps from 1 to less than steps={self.steps}"
            raise ValueError(f"continues must be {allowed}, got {self.continues!r}")
        needed = {"gate": CACHING, "age": ("gram",)}.get(self.diagnostics)
        if needed is not None and self.optimizer.kind not in needed:
            allowed, got = " or ".join(map(repr, needed)), repr(self.optimizer.kind)
            raise ValueError(
                f"optimizer.kind must be {allowed} for diagnostics={self.diagnostics!r}, got {got}"
            )
        kinds = ("python", "tokens") if isinstance(self.model, GPT2Config) else ("cifar10",)
        if self.data.kind not in kinds:
            allowed = " or ".join(map(repr, kinds))
            raise ValueError(f"data.kind must be {allowed} for this model, got {self.data.kind!r}")
        if isinstance(self.model, GPT2Config) and (self.data.context or 1) > self.model.context:
            raise ValueError(
                f"data.context must be at most model.context={self.model.context}, got {self.data.context!r}"
            )

    def lr_factor(self, step: int, epoch: int = 1) -> float:
        """The factor on every learning rate at a step, from 1 to `steps`; an epoch is `epoch` steps long."""
        end = next(end for end in (*self.continues, self.steps) if step <= end)
        return self.schedule.factor(step, end, epoch)

    def to_json(self) -> str:
        """The run as JSON text; `from_json` reads it back to an equal run."""
        return json.dumps(_plain(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """The run that `to_json` wrote; an unknown or missing key is an error."""
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"a run's configuration must be JSON, got {text[:60]!r}: {error}") from error
        run: RunConfig = typed(cls, values, "")
        return run


def with_overrides(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """The run with settings changed: "key=value" each, dotted for what lies deeper, None as "none".

    All are applied before the result is checked, so their order does not matter. A list is written with
    commas: "ages=1,2,4".

    >>> from cachemuon_lab.models import ResNetConfig
    >>> gram, cosine = OptimizerConfig("gram"), ScheduleConfig("cosine")
    >>> run = RunConfig("r", ResNetConfig(), DataConfig("cifar10"), gram, cosine, steps=10, batch_size=4)
    >>> with_overrides(run, ["optimizer.lr=0.02", "steps=100"]).optimizer.lr
    0.02
    """
    values = _plain(config)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"an override must be key=value, got {override!r}")
        *path, last = key.strip().split(".")
        owner: dict[str, Any] = values
        hint: Any = RunConfig
        for part in path:
            owner, hint = owner.get(part, {}), _member(hint, part, owner, key)
        hint = _member(hint, last, owner, key)
        if dataclasses.is_dataclass(hint):
            inner = ", ".join(f"{key}.{name}" for name in get_type_hints(hint))
            raise ValueError(f"{key!r} is no single value; set one of {inner}")
        owner[last] = _parsed(hint, text.strip(), key)
    changed: RunConfig = typed(RunConfig, values, "")
    return changed


def differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two runs differ, with both values."""
    first, second = _flat(_plain(one)), _flat(_plain(other))
    keys = [*first, *(key for key in second if key not in first)]
    return {
        key: (first.get(key), second.get(key))
        for key in keys
        if first.get(key, keys) != second.get(key, keys)
    }


def _member(cls: Any, name: str, values: dict[str, Any], key: str) -> Any:
    """The type of the field `name` of a class whose values are given; of a model, the one that it is."""
    hints = get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    if name not in hints:
        raise ValueError(f"unknown key {key!r}; known in place of {name!r}: {', '.join(hints) or 'nothing'}")
    return MODELS[values[name]["kind"]] if hints[name] == ModelConfig else hints[name]


def _plain(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        values[item.name] = _plain(value) if dataclasses.is_dataclass(value) else value
        if isinstance(value, tuple):
            values[item.name] = list(value)
    tags = [kind for kind, cls in MODELS.items() if type(config) is cls]
    return {"kind": tags[0], **values} if tags else values


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def typed(hint: Any, value: Any, key: str) -> Any:
    """`value`, as JSON has it, in the type that `hint` asks for."""
    if hint == ModelConfig:
        kind = value.get("kind") if isinstance(value, dict) else value
        if not isinstance(kind, str) or kind not in MODELS:
            raise ValueError(f"{key}.kind must be one of {', '.join(map(repr, MODELS))}, got {kind!r}")
        return typed(MODELS[kind], {k: v for k, v in value.items() if k != "kind"}, key)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        if not isinstance(value, dict):
            raise ValueError(f"{key or 'a run'} must be an object, got {value!r}")
        hints, prefix = get_type_hints(hint), f"{key}." if key else ""
        required = {f.name for f in dataclasses.fields(hint) if f.default is dataclasses.MISSING}
        if wrong := sorted(value.keys() - hints.keys()):
            raise ValueError(f"unknown key {prefix + wrong[0]!r}: {key or 'a run'} has {', '.join(hints)}")
        if missing := sorted(required - value.keys()):
            raise ValueError(f"{prefix + missing[0]} is missing")
        return hint(**{name: typed(hints[name], item, prefix + name) for name, item in value.items()})
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{key} must be a list, got {value!r}")
        parts = get_args(hint)
        inner = [parts[0]] * len(value) if parts[-1] is Ellipsis else list(parts)
        if len(inner) != len(value):
            raise ValueError(f"{key} must have {len(inner)} values, got {value!r}")
        return tuple(typed(part, item, key) for part, item in zip(inner, value, strict=True))
    choices = _alternatives(hint)
    if value is None and NoneType in choices:
        return None
    if any(get_origin(choice) is Literal for choice in choices):
        return value  # checked by its owner
    if float in choices and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) not in choices:
        raise ValueError(f"{key} must be {_described(hint)}, got {value!r}")
    return value


def _parsed(hint: Any, text: str, key: str) -> Any:
    """The text of an override as JSON would have it, in the type that `hint` asks for."""
    choices = _alternatives(hint)
    if NoneType in choices and text.lower() in ("none", "null"):
        return None
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return [_parsed(inner, part.strip(), key) for part in text.strip("()[]").split(",") if part.strip()]
    if bool in choices and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in choices:
            try:
                return number(text)
            except ValueError:
                raise ValueError(f"{key} must be {_described(hint)}, got {text!r}") from None
    if bool in choices:
        raise ValueError(f"{key} must be true or false, got {text!r}")
    return text


def _alternatives(hint: Any) -> tuple[Any, ...]:
    origin = get_origin(hint)
    return (hint,) if origin in (None, Literal, tuple) else get_args(hint)


def _described(hint: Any) -> str:
    words = {int: "an integer", float: "a number", str: "a text", bool: "true or false", NoneType: "none"}
    return " or ".join(words.get(choice, str(choice)) for choice in _alternatives(hint))


def _check_choices(config: Any, prefix: str) -> None:
    for name, hint in get_type_hints(type(config)).items():
        options: list[Any] = []
        for choice in _alternatives(hint):
            options += get_args(choice) if get_origin(choice) is Literal else [None] * (choice is NoneType)
        if any(option is not None for option in options) and getattr(config, name) not in options:
            allowed = ", ".join(map(repr, options))
            raise ValueError(f"{prefix}{name} must be one of {allowed}, got {getattr(config, name)!r}")


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _at_least(name: str, value: object, least: int) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value!r}")


def _non_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")
