"""A case: an optimizer, its parameters, and what happens to it. A pure function of a number, or of whatever
plays the part of a `random.Random`, such as hypothesis, which then shrinks it.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

DTYPES = ("float32", "float32", "float64", "bfloat16", "float16")
LAYOUTS = ("plain", "plain", "transposed", "strided", "channels_last")
SCALES = {
    "float16": (1e-7, 1e-3, 1.0, 1e4),
    "default": (1e-30, 1e-12, 1e-3, 1.0, 1.0, 1e6, 1e30),
}
USUAL = ("drift", "drift", "drift", "drift", "normal", "zero", "rank one", "ill-conditioned")
BAD = ("one nan", "one inf", "one -inf", "all nan", "all inf")
CACHE_SETTINGS: dict[str, tuple[Any, ...]] = {
    "gamma": (0.0, 0.5, 2.0, 5.0, 20.0, 1e9),
    "vectors": (2, 8, 8),
    "gate": (("schedule", 10), ("schedule", 3), ("schedule", 0), ("residual", None), ("residual", 3)),
    "max_age": (0, 1, 3, 10),
    "clip": (None, 0.0, 0.25, 1.0),
    "max_norm": (2.0, 2.0, 0.5, None),
    "seed": (0, 7),
    "cache_all": (True, True, True, False),
    "min_rows": (0, 0, 0, 8),
    "cache_dtype": (None, None, "float16"),
}
"""`gate` comes with a `max_age` that goes with it."""

SETTINGS: dict[str, tuple[Any, ...]] = {
    "lr": (1e-3, 0.02, 1.0, 0.0, "tensor"),
    "momentum": (0.95, 0.9, 0.5, 0.0, 0.999),
    "weight_decay": (0.1, 0.0, 1e-4),
    "nesterov": (True, False),
    "eps": (0.0, 1e-3),
    "adjust_lr_fn": (None, "none", "match_rms_adamw"),
    "solver": ("gram", "quintic"),
    "max_workspace_bytes": (None, None, 1, 20_000),
    "normalize": (None, None, "factored", "factored", "rows"),
}
LATER = (
    "lr",
    "momentum",
    "weight_decay",
    "nesterov",
    "gamma",
    "max_age",
    "max_norm",
    "gate",
    "cache_all",
    "min_rows",
    "normalize",
)
"""What may be changed in mid-run."""


@dataclass(frozen=True)
class Param:
    shape: tuple[int, ...]
    dtype: str
    layout: str
    scale: float
    seed: int


@dataclass(frozen=True)
class Group:
    params: tuple[Param, ...]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Grad:
    kind: str
    scale: float
    layout: str
    seed: int


@dataclass(frozen=True)
class Step:
    """A gradient, or none, for each parameter of all groups; and whether what was done is looked at."""

    grads: tuple[Grad | None, ...]
    look: bool


@dataclass(frozen=True)
class Change:
    group: int
    key: str
    value: Any


@dataclass(frozen=True)
class Move:
    """The optimizer goes on as another one: loaded from a file, a deepcopy, or unpickled. Or its state is
    cleared, or all tensors of it are replaced by copies.
    """

    how: str


Action = Step | Change | Move | Group


@dataclass(frozen=True)
class Case:
    make: str
    settings: dict[str, Any]
    groups: tuple[Group, ...]
    actions: tuple[Action, ...]


def case(random: Random | int) -> Case:
    """The case of that number, or of these choices."""
    random = Random(random) if isinstance(random, int) else random
    make = random.choice(("CacheMuon", "CacheMuon", "CacheMuon", "exact", "paper", "Muon"))
    settings = _settings(random, make, chance=0.3)
    groups = [_group(random, make) for _ in range(random.randint(1, 3))]
    here, actions = list(groups), []
    for _ in range(random.randint(2, 9)):
        chance = random.random()
        if chance < 0.72:
            actions.append(_step(random, here))
            if random.random() < 0.02:  # a suspended cache begins again
                actions += [_step(random, here) for _ in range(40)]
        elif chance < 0.82:
            actions.append(Move(random.choice(("load", "load", "deepcopy", "pickle", "replace", "clear"))))
        elif chance < 0.97:
            actions.append(_change(random, make, here))
        else:
            actions.append(_group(random, make))
            here.append(actions[-1])
    return Case(make, settings, tuple(groups), (_step(random, groups), *actions))


def _settings(random: Random, make: str, chance: float) -> dict[str, Any]:
    allowed = SETTINGS | (CACHE_SETTINGS if make in ("CacheMuon", "exact") else {})
    if make == "exact":
        del allowed["clip"]
    if make == "paper":
        del allowed["normalize"]
    found = {key: random.choice(values) for key, values in allowed.items() if random.random() < chance}
    if make == "paper" and random.random() < chance:
        found["gamma"] = random.choice(CACHE_SETTINGS["gamma"])
    if "cache_all" in allowed and random.random() < 0.7:
        found["cache_all"] = True  # or a case as small as these is never cached
    return found


def _group(random: Random, make: str) -> Group:
    if random.random() < 0.15:
        shapes = [random.choice(((), (3,), (4, 5))) for _ in range(random.randint(1, 2))]
        return Group(tuple(_param(random, shape) for shape in shapes), {"use_muon": False})
    settings = _settings(random, make, chance=0.1)
    split, side, shape = random.choice((1, 1, 1, 2, 3)), random.randint(1, 8), _shape(random)
    if random.random() < 0.2:
        settings["view"] = random.choice(("flatten", "batch"))
    if random.random() < 0.2:
        settings["transposed"] = True
    if split > 1:  # so that it fits whatever is read as the outputs
        shape = tuple(split * max(size, 1) for size in shape[:3]) if max(shape) < 100 else shape
        settings["split"] = split if max(shape) < 100 else 1
        if settings["split"] > 1 and len(shape) == 2 and random.random() < 0.3:
            outputs = shape[1] if settings.get("transposed") else shape[0]
            settings["split"] = (outputs - 1, 1)
    alike = [_param(random, shape) for _ in range(random.randint(1, 3))]
    if split == 1 and random.random() < 0.4:
        alike.append(_param(random, (side, random.randint(1, 8))))
    return Group(tuple(alike), settings)


def _shape(random: Random) -> tuple[int, ...]:
    kind, side = random.random(), random.randint(1, 12)
    if kind < 0.04:
        long = random.choice((1_000, 10_000, 100_000))
        return random.choice(((1, long), (long, 1)))
    if kind < 0.05:
        return random.choice(((208, 208), (256, 224)))  # large enough to be cached by default
    if kind < 0.06:
        return random.choice(((0, 4), (3, 0)))
    if kind < 0.2:
        return (random.randint(1, 3), side, random.randint(1, 12))
    if kind < 0.35:
        return (side, random.randint(1, 6), random.randint(1, 3), random.randint(1, 3))
    if kind < 0.5:
        return (side, side)
    return (side, random.choice((1, 2, 8, 24, 40))) if kind < 0.75 else (random.choice((1, 16, 48)), side)


def _param(random: Random, shape: tuple[int, ...]) -> Param:
    scale = random.choice((0.0, 1e-4, 1.0, 1.0, 1e3))
    layout = random.choice(LAYOUTS)
    return Param(shape, random.choice(DTYPES), layout, scale, random.randint(0, 999))


def _step(random: Random, groups: list[Group]) -> Step:
    grads: list[Grad | None] = []
    mood = random.random()  # most steps are good ones
    for group in groups:
        for param in group.params:
            chance = random.random()
            if mood < 0.4 and chance < 0.2:
                grads.append(None)
                continue
            muon = group.settings.get("use_muon", True)
            kind = random.choice(BAD if muon and mood < 0.2 and chance > 0.6 else USUAL)
            scales = SCALES.get(param.dtype, SCALES["default"]) if muon and mood > 0.7 else (1.0,)
            layout = random.choice((*LAYOUTS, "expanded"))
            grads.append(Grad(kind, random.choice(scales), layout, random.randint(0, 999)))
    return Step(tuple(grads), random.random() < 0.6)


def _change(random: Random, make: str, groups: list[Group]) -> Change:
    group = random.randrange(len(groups))
    if not groups[group].settings.get("use_muon", True):
        return Change(group, "lr", random.choice((0.0, 1e-3)))
    keys = LATER if make in ("CacheMuon", "exact") else ("lr", "momentum", "weight_decay", "nesterov")
    key = random.choice(keys)
    return Change(group, key, random.choice((SETTINGS | CACHE_SETTINGS)[key]))
