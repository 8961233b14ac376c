"""Named runs: the paper's experiments with its numbers, and twins of them that a laptop's CPU can do.

Every number of the paper's setup stands in this file and nowhere else; its results are in `reported`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from cachemuon_lab.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from cachemuon_lab.models import GPT2_LARGE, GPT2_SMALL, RESNET18, GPT2Config, ResNetConfig

SEARCH_GRID: dict[str, tuple[float, ...]] = {
    "optimizer.lr": (1e-4, 1e-3, 1e-2, 2e-2),
    "optimizer.momentum": (0.9, 0.95, 0.99),
    "optimizer.adam_lr": (1e-4, 1e-3, 2e-3),
}
"""The paper's 36 candidates; everything else was fixed at `OptimizerConfig`'s defaults."""

LARGE_GAMMAS = (2.0, 5.0, 10.0, 15.0)
PLATEAU_LINEAR = ScheduleConfig("plateau_linear", constant_lr_ratio=0.4, min_lr_ratio=0.05)
COSINE = ScheduleConfig("cosine")
OPENWEBTEXT = DataConfig("tokens")
CIFAR10_EPOCH = 391  # steps: 50,000 images by 128


@dataclass(frozen=True)
class Recipe:
    """A run without its optimizer settled (`base` has the first), and the optimizers to compare on it."""

    name: str
    description: str
    base: RunConfig
    variants: tuple[OptimizerConfig, ...]

    def run(self, optimizer: OptimizerConfig) -> RunConfig:
        """The run with one of the variants, or another optimizer, named after both.

        >>> recipe("gpt2-nano").run(OptimizerConfig("paper", gamma=2.0)).name
        'gpt2-nano-paper-gamma2'
        """
        return replace(self.base, name=f"{self.name}-{optimizer.slug}", optimizer=optimizer)

    def runs(self) -> tuple[RunConfig, ...]:
        """One run for each variant."""
        return tuple(self.run(optimizer) for optimizer in self.variants)


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]


def _recipe(name: str, description: str, base: RunConfig, variants: tuple[OptimizerConfig, ...]) -> Recipe:
    return Recipe(name, description, replace(base, name=name, optimizer=variants[0]), variants)


def gpt2_optimizers(*gammas: float, lr: float = 1e-3) -> tuple[OptimizerConfig, ...]:
    """What both GPT-2 use: one setting for all, found for PolarExpMuon and not tuned again."""
    shared = OptimizerConfig("polar", lr=lr, momentum=0.95, adam_lr=2e-3)
    cached = (replace(shared, kind="paper", gamma=gamma) for gamma in gammas)
    return (shared, replace(shared, kind="gram"), *cached)


def resnet_optimizers() -> tuple[OptimizerConfig, ...]:
    """ResNet-18's, tuned one by one; all matrices are Muon's, the last layer too."""
    return (
        OptimizerConfig("polar", lr=0.01, momentum=0.9, head="muon"),
        OptimizerConfig("gram", lr=0.02, momentum=0.95, head="muon"),
        OptimizerConfig("paper", lr=0.01, momentum=0.9, gamma=20.0, head="muon"),
    )


def _gpt2_large_run() -> RunConfig:
    return RunConfig(
        name="gpt2-large-owt",
        model=GPT2_LARGE,
        data=OPENWEBTEXT,
        optimizer=OptimizerConfig("polar"),
        schedule=PLATEAU_LINEAR,
        steps=3_814,
        batch_size=4,
        accumulation=8,
        replicas=8,  # 256 sequences of 1,024 tokens in a step
        autocast="bfloat16",
    )


def gpt2_large_owt() -> Recipe:
    """The quality against FLOPs frontier, figure 1."""
    text = "GPT-2 Large on 1B tokens of OpenWebText, gamma 2, 5, 10, 15 (8 GPUs)"
    return _recipe("gpt2-large-owt", text, _gpt2_large_run(), gpt2_optimizers(*LARGE_GAMMAS))


def gpt2_large_owt_long() -> Recipe:
    """The longer run; the paper names its tokens, not its steps: 4.8e9 / 262,144, rounded down as for 1B.

    It continues the run of 1B tokens. How the learning rate goes on the paper does not say: here as if all
    18,310 steps had had one schedule.
    """
    short = _gpt2_large_run()
    base = replace(short, steps=18_310, continues=(short.steps,), checkpoint_every=250)
    text = "GPT-2 Large on 4.8B tokens of OpenWebText, the run of 1B continued, gamma 2 (8 GPUs)"
    return _recipe("gpt2-large-owt-4.8b", text, base, gpt2_optimizers(2.0))


def gpt2_large_owt_proxy() -> Recipe:
    """What the hyper-parameters were selected on."""
    base = replace(_gpt2_large_run(), steps=382, validate_every=25)
    text = "GPT-2 Large on 100M tokens of OpenWebText: the run that PolarExpMuon was tuned on"
    return _recipe("gpt2-large-owt-proxy", text, base, gpt2_optimizers()[:1])


def gpt2_large_owt_diagnostics() -> Recipe:
    """The residual-gate diagnostics."""
    base = replace(_gpt2_large_run(), steps=382, validate_every=25)
    text = "GPT-2 Large on 100M tokens of OpenWebText, gamma 5, every probe measured"
    return _diagnosed("gpt2-large-owt-diagnostics", text, base, gpt2_optimizers(5.0)[2], "gate")


def _gpt2_small_run() -> RunConfig:
    return RunConfig(
        name="gpt2-small-owt",
        model=GPT2_SMALL,
        data=OPENWEBTEXT,
        optimizer=OptimizerConfig("polar"),
        schedule=PLATEAU_LINEAR,
        steps=30_520,
        batch_size=8,
        accumulation=4,
        autocast="bfloat16",
        checkpoint_every=500,
    )


def gpt2_small_owt() -> Recipe:
    """GPT-2 Small, on one GPU."""
    text = "GPT-2 Small on 1B tokens of OpenWebText, gamma 5 (1 GPU)"
    return _recipe("gpt2-small-owt", text, _gpt2_small_run(), gpt2_optimizers(5.0))


def gpt2_small_owt_proxy() -> Recipe:
    """What the hyper-parameters were selected on."""
    base = replace(_gpt2_small_run(), steps=3_052)
    text = "GPT-2 Small on 100M tokens of OpenWebText: the run that all three were tuned on"
    return _recipe("gpt2-small-owt-proxy", text, base, gpt2_optimizers(5.0))


def _resnet18_run() -> RunConfig:
    return RunConfig(
        name="resnet18-cifar10",
        model=RESNET18,
        data=DataConfig("cifar10"),
        optimizer=OptimizerConfig("polar"),
        schedule=COSINE,
        steps=100 * CIFAR10_EPOCH,
        batch_size=128,
        validate_every=CIFAR10_EPOCH,
        validation_batches=None,
        seed=42,
        checkpoint_every=CIFAR10_EPOCH,
    )


def resnet18_cifar10() -> Recipe:
    """ResNet-18, on one GPU."""
    text = "ResNet-18 on CIFAR-10, 100 epochs, gamma 20 (1 GPU)"
    return _recipe("resnet18-cifar10", text, _resnet18_run(), resnet_optimizers())


def resnet18_cifar10_diagnostics() -> Recipe:
    """The age diagnostic, in all and by layer. How often the paper measured it does not say."""
    text = "ResNet-18 on CIFAR-10, GramMuon, cosine of transforms 1 to 21 steps old, every 100 steps"
    base = replace(_resnet18_run(), diagnose_every=100)
    return _diagnosed("resnet18-cifar10-diagnostics", text, base, resnet_optimizers()[1], "age")


def _gpt2_nano_run() -> RunConfig:
    return RunConfig(
        name="gpt2-nano",
        model=GPT2Config(layers=4, heads=4, width=128, context=128, vocabulary=256, bias=False),
        data=DataConfig("python"),
        optimizer=OptimizerConfig("polar"),
        schedule=PLATEAU_LINEAR,
        steps=400,
        batch_size=16,
        validate_every=25,
        validation_batches=10,
    )


PAPERS, TODAYS = "the paper's settings", "today's settings"
"""The two families of the small text: optimizers are compared with those of their own."""

NANO_LR = 2e-2
"""PolarExpMuon's best on gpt2-nano: validation loss 1.84, against 1.98 at 1e-2 and 2.29 at 1e-3 (seed 0)."""

TODAYS_LR = {"gram": 4e-2, "normuon": 4e-2, "cache": 6e-2}
"""The best with Nesterov's momentum on this text, seed 0. GramMuon in 300 steps at 0.02, 0.04, 0.06: 1.964,
1.872, 1.924. In 250 steps NorMuon at 0.04: 1.956; CacheMuon at 0.02, 0.04, 0.06: 1.989, 1.981, 1.931."""


def papers_optimizers(*gammas: float) -> tuple[OptimizerConfig, ...]:
    """PolarExpMuon, GramMuon and CacheMuon.paper with one setting for all, and no Nesterov's momentum."""
    return tuple(replace(one, family=PAPERS) for one in gpt2_optimizers(*gammas, lr=NANO_LR))


def todays_optimizers() -> tuple[OptimizerConfig, ...]:
    """Fresh Muons and CacheMuon with Nesterov's momentum, each with its own best learning rate."""
    shared = OptimizerConfig("gram", nesterov=True, family=TODAYS)
    return (
        replace(shared, lr=TODAYS_LR["gram"]),
        replace(shared, lr=TODAYS_LR["normuon"], normalize="rows"),
        replace(shared, kind="cache", lr=TODAYS_LR["cache"]),
    )


def nano_optimizers() -> tuple[OptimizerConfig, ...]:
    """Both families: the paper's frontier with reuse without any check, and what is best today."""
    papers = papers_optimizers(*LARGE_GAMMAS)
    return (*papers, replace(papers[1], kind="stale"), *todays_optimizers())


def gpt2_nano() -> Recipe:
    """GPT-2's twin: no download, a minute or two for each optimizer on two cores."""
    text = "a 0.8M-parameter GPT-2 on the bytes of Python's standard library (CPU, minutes)"
    return _recipe("gpt2-nano", text, _gpt2_nano_run(), nano_optimizers())


def gpt2_nano_diagnostics() -> Recipe:
    """The residual-gate diagnostics' twin."""
    text = "gpt2-nano with gamma 5, every probe measured (CPU, minutes)"
    return _diagnosed("gpt2-nano-diagnostics", text, _gpt2_nano_run(), nano_optimizers()[3], "gate")


def gpt2_nano_ages() -> Recipe:
    """The age diagnostic on text."""
    text = "gpt2-nano with GramMuon, cosine of transforms 1 to 21 steps old, every 5 steps (CPU, minutes)"
    base = replace(_gpt2_nano_run(), diagnose_every=5)
    return _diagnosed("gpt2-nano-ages", text, base, nano_optimizers()[1], "age")


def smooth_optimizers(*gammas: float) -> tuple[OptimizerConfig, ...]:
    """The paper's, with the momentum and learning rate at which a small model's momentum is as smooth."""
    return tuple(replace(one, momentum=0.98) for one in gpt2_optimizers(*gammas, lr=5e-3))


def _gpt2_nano_smooth_run() -> RunConfig:
    # Many tokens for matrices of 64 rows; a context of 64 makes them cheap.
    return replace(
        _gpt2_nano_run(),
        model=GPT2Config(layers=2, heads=4, width=64, context=64, vocabulary=256, bias=False),
        batch_size=64,
        steps=300,
        validation_batches=4,
    )


def gpt2_nano_smooth() -> Recipe:
    """The twin in the paper's regime: hit rates near its own."""
    text = "two blocks of width 64 whose momentum is as smooth as the paper's (CPU, minutes)"
    optimizers = smooth_optimizers(*LARGE_GAMMAS)
    return _recipe("gpt2-nano-smooth", text, _gpt2_nano_smooth_run(), optimizers)


def gpt2_nano_smooth_diagnostics() -> Recipe:
    """Its residual-gate diagnostics."""
    text = "gpt2-nano-smooth with gamma 5, every probe measured (CPU, minutes)"
    base, optimizer = _gpt2_nano_smooth_run(), smooth_optimizers(5.0)[2]
    return _diagnosed("gpt2-nano-smooth-diagnostics", text, base, optimizer, "gate")


def demonstration() -> Recipe:
    """What `cachemuon demo` trains: both families, in fewer steps; up to seven runs in 200 s on two cores."""
    base = replace(_gpt2_nano_run(), steps=220, validate_every=44)
    _, *papers = papers_optimizers(2.0, 5.0, 15.0)
    text = "the demonstration: gpt2-nano in 220 steps, both families (CPU, minutes)"
    return _recipe("demo", text, base, (*papers, *todays_optimizers()))


def _gpt2_nano_english_run() -> RunConfig:
    model = GPT2Config(layers=4, heads=4, width=128, context=128, bias=False)
    return replace(_gpt2_nano_run(), model=model, data=DataConfig("tokens"), batch_size=4)


def gpt2_nano_english() -> Recipe:
    """The twin on English: needs a folder of tokens, as data.path."""
    text = "the same blocks on English in GPT-2's own tokens, from data.path (CPU, minutes)"
    return _recipe("gpt2-nano-english", text, _gpt2_nano_english_run(), nano_optimizers())


def gpt2_nano_english_diagnostics() -> Recipe:
    """Its residual-gate diagnostics."""
    text = "gpt2-nano-english with gamma 5, every probe measured (CPU, minutes)"
    base, optimizer = _gpt2_nano_english_run(), nano_optimizers()[3]
    return _diagnosed("gpt2-nano-english-diagnostics", text, base, optimizer, "gate")


def _resnet_nano_run() -> RunConfig:
    # One epoch, in which a cosine by epochs would never move.
    few = replace(_resnet18_run(), model=ResNetConfig(width=16), steps=CIFAR10_EPOCH, schedule=PLATEAU_LINEAR)
    return replace(few, validate_every=50, validation_batches=20, checkpoint_every=100)


def resnet_nano() -> Recipe:
    """ResNet-18's twin: needs CIFAR-10's folder, as data.path."""
    text = "a ResNet-18 of width 16 on CIFAR-10 for one epoch (CPU, minutes)"
    return _recipe("resnet-nano", text, _resnet_nano_run(), resnet_optimizers())


def resnet_nano_diagnostics() -> Recipe:
    """The age diagnostic's twin."""
    text = "resnet-nano with GramMuon, cosine of transforms 1 to 21 steps old, every 25 steps (CPU, minutes)"
    base = replace(_resnet_nano_run(), diagnose_every=25)
    return _diagnosed("resnet-nano-diagnostics", text, base, resnet_optimizers()[1], "age")


def gpt2_mini() -> Recipe:
    """What goes beyond the paper is studied on this text: bytes, or tokens below 256, as data.path."""
    base = replace(
        _gpt2_nano_run(),
        model=GPT2Config(layers=4, heads=4, width=256, context=128, vocabulary=256, bias=False),
        data=DataConfig("tokens"),
        steps=300,
        batch_size=8,
        validate_every=100,
        validation_batches=40,
    )
    text = "four blocks of width 256 on the bytes of a text, from data.path (CPU, minutes)"
    return _recipe("gpt2-mini", text, base, gpt2_optimizers(5.0, lr=NANO_LR))


def resnet_mini() -> Recipe:
    """And on these images, for about three epochs where data.path has one of CIFAR-10's files."""
    base = replace(_resnet_nano_run(), steps=234, validate_every=234, validation_batches=None, seed=0)
    text = "a ResNet-18 of width 16 on 234 batches of CIFAR-10, tested on all of it (CPU, minutes)"
    return _recipe("resnet-mini", text, base, resnet_optimizers())


def _diagnosed(
    name: str, text: str, base: RunConfig, optimizer: OptimizerConfig, diagnostics: Literal["gate", "age"]
) -> Recipe:
    return _recipe(name, text, replace(base, optimizer=optimizer, diagnostics=diagnostics), (optimizer,))


_ALL: tuple[Callable[[], Recipe], ...] = (
    gpt2_large_owt,
    gpt2_large_owt_long,
    gpt2_large_owt_proxy,
    gpt2_large_owt_diagnostics,
    gpt2_small_owt,
    gpt2_small_owt_proxy,
    resnet18_cifar10,
    resnet18_cifar10_diagnostics,
    gpt2_nano,
    gpt2_nano_diagnostics,
    gpt2_nano_ages,
    gpt2_nano_smooth,
    gpt2_nano_smooth_diagnostics,
    demonstration,
    gpt2_nano_english,
    gpt2_nano_english_diagnostics,
    resnet_nano,
    resnet_nano_diagnostics,
    gpt2_mini,
    resnet_mini,
)

RECIPES: dict[str, Recipe] = {made.name: made for made in (make() for make in _ALL)}
"""Every recipe by its name."""
