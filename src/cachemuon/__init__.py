"""CacheMuon: a Muon optimizer that reuses its orthogonalization from step to step."""

from . import flops, theory
from .cache import CacheGNS
from .cachemuon import CacheMuon
from .groups import param_groups
from .muon import Muon
from .polar import AutoNS, ExactPolar, GramNS, Solver, StandardNS, normalize, polar
from .probe import exact_residual, sketched_residual
from .routing import routes
from .schedules import (
    CANS,
    CUBIC5,
    DEEPSEEK_V4,
    GRAM,
    POLAR_EXPRESS,
    QUINTIC,
    Schedule,
    polar_express,
    quintic,
)
from .stats import Event

__all__ = [
    "CANS",
    "CUBIC5",
    "DEEPSEEK_V4",
    "GRAM",
    "POLAR_EXPRESS",
    "QUINTIC",
    "AutoNS",
    "CacheGNS",
    "CacheMuon",
    "Event",
    "ExactPolar",
    "GramNS",
    "Muon",
    "Schedule",
    "Solver",
    "StandardNS",
    "exact_residual",
    "flops",
    "normalize",
    "param_groups",
    "polar",
    "polar_express",
    "quintic",
    "routes",
    "sketched_residual",
    "theory",
]
__version__ = "0.1.0"
