"""CacheMuon: a Muon optimizer that reuses its orthogonalization from step to step."""

from . import flops, theory
from .cache.gns import CacheGNS
from .cache.reuse import exact_residual, sketched_residual
from .newton_schulz.normalize import normalize
from .newton_schulz.schedules import GRAM, POLAR_EXPRESS, QUINTIC, Schedule, polar_express
from .newton_schulz.solvers import AutoNS, ExactPolar, GramNS, Solver, StandardNS, polar
from .optim.cachemuon import CacheMuon
from .optim.muon import Muon
from .report.counters import Event
from .routing.groups import param_groups
from .routing.rules import routes

__all__ = [
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
    "routes",
    "sketched_residual",
    "theory",
]
__version__ = "0.1.0"
