"""What must hold in every case.

Each is run twice: by a subject, which is looked at, saved, loaded and copied as the case says, and by a
control, which only steps. They must end equal in every bit.
"""

import copy
import io
import math
import pickle
import warnings
from functools import cache, partial

import torch
from contract.variants import assert_same, exactly
from fuzz.cases import Case, Change, Grad, Group, Move, Param, Step
from torch import Tensor, nn

from cachemuon import GRAM, QUINTIC, CacheMuon, GramNS, Muon, StandardNS
from cachemuon.engine.plan import lr_ratio
from cachemuon.optim.cachemuon import cache_of
from cachemuon.report.counters import OUTCOMES
from cachemuon.routing.layout import layout_of

MAKE = {
    "Muon": Muon,
    "CacheMuon": CacheMuon,
    "exact": partial(CacheMuon, probe="exact", clip=0.0),
    "paper": CacheMuon.paper,
}


def check(case: Case) -> None:
    """Run a case; what does not hold is an AssertionError, or whatever was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "a gradient has a NaN or Inf", RuntimeWarning)
        warnings.filterwarnings("ignore", "all parameter groups have one learning rate", RuntimeWarning)
        _Run(case).all()


class _Run:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.groups = list(case.groups)
        self.subject, self.params = self.made()
        self.control, self.others = self.made()
        self.steps: list[int] = []  # of each parameter, in which it had a gradient
        self.spoiled: list[list[int]] = []  # of each of its matrices, where that was not finite
        self.flops = {"flops": 0, "flops_paper": 0}  # at the last look
        self.told = dict.fromkeys(OUTCOMES, 0)  # what the last metrics() had counted
        self.grown()

    def made(self):
        """The optimizer as it was in the beginning, with all groups that it has now."""
        groups, params = [], []
        for group in self.groups:
            own = [_parameter(one) for one in group.params]
            params += own
            groups.append({"params": own, **self.settings(group.settings)})
        return MAKE[self.case.make](groups, **self.settings(self.case.settings)), params

    def settings(self, named):
        solvers = {"gram": GramNS(), "quintic": (StandardNS if self.case.make == "Muon" else GramNS)(QUINTIC)}
        found = {}
        for key, value in named.items():
            found.update({"solver": solvers[value]} if key == "solver" else _values(key, value))
        return found

    def grown(self) -> None:
        """Begin to count for parameters that are new."""
        flat = [(group, param) for group in self.subject.param_groups for param in group["params"]]
        for group, param in flat[len(self.steps) :]:
            self.steps.append(0)
            self.spoiled.append([0] * (len(layout_of(group, param).views) if group["use_muon"] else 0))

    def all(self) -> None:
        self.look()
        for action in self.case.actions:
            if isinstance(action, Step):
                self.step(action)
            elif isinstance(action, Change):
                self.change(action)
            elif isinstance(action, Move):
                self.move(action.how)
            else:
                self.add(action)
        self.look()
        for group in self.subject.param_groups:
            group.pop("differentiable", None)  # torch's own, for groups that a copied optimizer gets
        assert_same(self.subject, self.control)

    def change(self, change: Change) -> None:
        for optimizer in (self.subject, self.control):
            optimizer.param_groups[change.group].update(_values(change.key, change.value))

    def add(self, group: Group) -> None:
        self.groups.append(group)
        for optimizer, params in ((self.subject, self.params), (self.control, self.others)):
            own = [_parameter(one) for one in group.params]
            params += own
            optimizer.add_param_group({"params": own, **self.settings(group.settings)})
        self.grown()

    def move(self, how: str) -> None:
        if how == "load":
            file = io.BytesIO()
            torch.save(self.subject.state_dict(), file)
            file.seek(0)
            before, (self.subject, params) = self.params, self.made()
            with torch.no_grad():
                for param, old in zip(params, before, strict=True):
                    param.copy_(old)
            self.subject.load_state_dict(torch.load(file, weights_only=True))
            self.params, self.told = params, self.counted()
        elif how == "clear":
            for optimizer in (self.subject, self.control):
                optimizer.state.clear()
            self.steps = [0] * len(self.steps)
            self.spoiled = [[0] * len(each) for each in self.spoiled]
            self.told, self.flops = dict.fromkeys(OUTCOMES, 0), dict.fromkeys(self.flops, 0)
        elif how == "replace":
            for entries in self.subject.state.values():
                entries.update({key: value.clone() for key, value in entries.items()})
        elif how == "deepcopy":
            self.subject, self.params = copy.deepcopy((self.subject, self.params))
        else:
            self.subject, self.params = pickle.loads(pickle.dumps((self.subject, self.params)))

    def step(self, step: Step) -> None:
        grads = [
            None if grad is None else _gradient(param, grad, index)
            for index, (param, grad) in enumerate(zip(self.params, step.grads, strict=True))
        ]
        kept = [None if grad is None else grad.clone() for grad in grads]
        before = [param.detach().clone() for param in self.params]
        momenta = [self.momentum(param) for param in self.params]
        for optimizer, params in ((self.control, self.others), (self.subject, self.params)):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
        for grad, copied in zip(grads, kept, strict=True):
            if grad is not None:
                exactly(grad, copied)
        events = self.subject.events() if step.look else None
        index = 0
        for number, group in enumerate(self.subject.param_groups):
            for place, param in enumerate(group["params"]):
                grad, old = grads[index], before[index]
                assert param.grad is grad
                assert param.isfinite().all(), f"parameter {index} is not finite any more"
                if grad is None or param.numel() == 0:
                    exactly(param.detach(), old)
                else:
                    self.steps[index] += 1
                    if group["use_muon"]:
                        name = f"group{number}.param{place}"
                        self.matrices(index, param, grad, old, momenta[index], group, name, events)
                index += 1
        if step.look:
            self.look()

    def momentum(self, param: Tensor) -> Tensor | None:
        momentum = self.subject.state.get(param, {}).get("momentum_buffer")
        return None if momentum is None else momentum.clone()

    def matrices(self, index, param, grad, old, momentum, group, name, events) -> None:
        """What a step did to the matrices of one parameter."""
        read, state = layout_of(group, param), self.subject.state[param]
        if momentum is None:
            momentum = torch.zeros_like(state["momentum_buffer"])
        assert all(value.isfinite().all() for key, value in state.items() if key != "residuals"), state
        tensors = (param.detach(), old, grad, state["momentum_buffer"], momentum)
        for i, (piece, *parts) in enumerate(zip(read.views, *map(read.split, tensors), strict=True)):
            new_w, old_w, g, new_m, old_m = parts
            own = name if len(read.views) == 1 else f"{name}[{i}]"
            if not g.isfinite().all():
                self.spoiled[index][i] += 1
                exactly(new_w, old_w)
                exactly(new_m, old_m)
                assert events is None or events[own].outcome == "non-finite"
                continue
            average = torch.lerp(old_m.double(), g.double(), 1 - group["momentum"])
            peak = max(old_m.abs().max(), g.abs().max()).double()
            # A rounding of the product, one of the sum; below the smallest normal number, in its steps.
            rounding = 2 * torch.finfo(g.dtype).eps * peak + 2 * torch.finfo(g.dtype).smallest_normal
            assert (new_m.double() - average).abs().max() <= rounding
            if events is not None:
                sides = piece.sides
                moved = (old_w.double() - new_w.double()).reshape(sides)
                _check_length(moved, old_w.double().reshape(sides), group, events[own], param.dtype)

    def counted(self) -> dict[str, int]:
        found = dict.fromkeys(OUTCOMES, 0)
        for entry in self.subject.cache_stats()["matrices"].values():
            for outcome, number in {"hit": entry["hits"], **entry["misses"]}.items():
                found[outcome] += number
        return found

    def look(self) -> None:
        """Everything that an optimizer tells of itself."""
        stats, events = self.subject.cache_stats(), self.subject.events()
        assert len(self.subject.explain().rows) == len(self.params) and str(self.subject.explain())
        matrices, index = stats["matrices"], 0
        for number, group in enumerate(self.subject.param_groups):
            for place in range(len(group["params"])):
                name = f"group{number}.param{place}"
                many = len(self.spoiled[index]) > 1
                for i, spoiled in enumerate(self.spoiled[index]):
                    entry = matrices.get(f"{name}[{i}]" if many else name)
                    if not self.steps[index]:
                        assert entry is None
                        continue
                    assert entry["calls"] == self.steps[index], (name, entry)
                    assert entry["hits"] + sum(entry["misses"].values()) == entry["calls"]
                    assert entry["misses"]["non-finite"] == spoiled, (name, entry)
                    assert min(entry["hits"], *entry["misses"].values()) >= 0
                index += 1
        for key in ("calls", "hits", "flops", "flops_here", "flops_paper"):
            assert stats[key] == sum(entry[key] for entry in matrices.values()) >= 0
        assert stats["misses"] == sum(sum(entry["misses"].values()) for entry in matrices.values())
        assert stats["hits"] + stats["misses"] == stats["calls"]
        for key, before in self.flops.items():  # what was done keeps its price, whatever is set later
            assert stats[key] >= before
            self.flops[key] = stats[key]
        assert events.keys() == matrices.keys()
        for name, event in events.items():
            entry = matrices[name]
            assert event.outcome == entry["last"]
            assert event.hit == (event.reason is None)
            assert event.age == (entry["age"] or 0)
            assert event.hit or event.outcome in ("rejected", "bounded") or math.isnan(event.residual)
        self.metrics(stats)

    def metrics(self, stats) -> None:
        told, before, now = self.subject.metrics(""), self.told, self.counted()
        new = {outcome: now[outcome] - before[outcome] for outcome in OUTCOMES}
        calls = sum(new.values())
        assert told["calls"] == calls
        for name, outcomes in {
            "hit_rate": ("hit",),
            "refreshed": ("first", "expired", "rejected"),
            "rejected": ("rejected",),
            "bounded": ("bounded",),
            "uncached": ("uncached",),
            "non_finite": ("non-finite",),
        }.items():
            share = sum(new[outcome] for outcome in outcomes) / calls if calls else math.nan
            assert told[name] == share or (math.isnan(told[name]) and math.isnan(share)), (name, told)
        if not any(before.values()):
            assert told["flops"] == stats["flops"]
        self.told = now


def _values(key, value):
    """The settings that a choice stands for."""
    if key == "lr" and value == "tensor":
        return {"lr": torch.tensor(0.01)}
    if key == "gate":
        return dict(zip(("gate", "max_age"), value, strict=True))
    if key == "cache_dtype" and value is not None:
        return {"cache_dtype": getattr(torch, value)}
    return {key: value}


def _laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values in another layout, where the shape allows it."""
    if layout == "transposed" and values.ndim >= 2:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and values.ndim >= 1:
        room = values.new_zeros((*values.shape[:-1], 2 * values.shape[-1]))
        room[..., ::2] = values
        return room[..., ::2]
    if layout == "channels_last" and values.ndim == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "expanded" and values.numel():
        return values.flatten()[:1].reshape((1,) * values.ndim).expand(values.shape)
    return values


def _parameter(param: Param) -> nn.Parameter:
    generator = torch.Generator().manual_seed(param.seed)
    values = param.scale * torch.randn(param.shape, generator=generator)
    return nn.Parameter(_laid_out(values.to(getattr(torch, param.dtype)), param.layout))


def _gradient(param: Tensor, grad: Grad, index: int) -> Tensor:
    def normal(shape, seed):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    values = normal(param.shape, grad.seed)
    if grad.kind == "drift":
        values = normal(param.shape, 5000 + index) + 0.1 * values
    elif grad.kind == "zero":
        values.zero_()
    elif grad.kind == "rank one" and param.ndim >= 2:
        side = (len(values), *(1,) * (param.ndim - 1))
        values = normal(side, grad.seed) * normal((1, *param.shape[1:]), grad.seed + 1)
    elif grad.kind == "ill-conditioned" and param.ndim >= 2:
        values *= torch.logspace(0, -12, len(values), dtype=torch.float64).view(-1, *(1,) * (param.ndim - 1))
    values = values * grad.scale
    if grad.kind.startswith(("one ", "all ")) and values.numel():
        bad = float(grad.kind.split()[1])
        if grad.kind.startswith("all"):
            values.fill_(bad)
        else:
            values.view(-1)[grad.seed % values.numel()] = bad
    return _laid_out(values.to(param.dtype), grad.layout)


@cache
def _highest(schedule) -> float:
    """What the iteration makes of singular values in [0, 1], at most."""
    x = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    for a, b, c in schedule.triples:
        x = x * (a + b * x**2 + c * x**4)
    return float(x.abs().max())


def _check_length(moved, old, group, event, dtype) -> None:
    """The spectral norm of the direction that a step took, by what a matrix and its decay say."""
    rows, cols = moved.shape
    outputs, inputs = (cols, rows) if group["transposed"] else (rows, cols)
    lr = float(group["lr"])
    length = lr * lr_ratio(group["adjust_lr_fn"], outputs, inputs)
    if lr == 0:
        assert not moved.any()
        return
    direction = (moved - lr * group["weight_decay"] * old) / length
    # Two roundings of the parameter, by half of its precision each at most, and one of the decay.
    size = torch.linalg.matrix_norm(old) + torch.linalg.matrix_norm(moved)
    rounding = 2 * torch.finfo(dtype).eps * size / length + torch.finfo(dtype).smallest_normal / length
    norm = float(torch.linalg.matrix_norm(direction, 2))
    bound = _bound(group, event, min(rows, cols))
    if group["normalize"] is not None and event.outcome != "bounded":
        # Its Frobenius norm is that of a solved direction; or, where none was solved yet, its own.
        norm = float(torch.linalg.matrix_norm(direction))
        bound = (max(bound, 2.0) if event.hit else bound) * math.sqrt(min(rows, cols))
    assert norm <= bound + rounding, f"{event} has a norm of {norm}, above {bound} + {rounding}"


def _bound(group, event, n: int) -> float:
    # In float32 an iteration is up to 1% off on ill-conditioned matrices (docs/notebook/restarts.md).
    fresh = 1.02 * _highest(getattr(group["solver"], "schedule", GRAM)) + 1e-3
    if event.outcome == "bounded":
        # To a Frobenius norm of 1, which a sketch of 8 vectors underestimates by a factor of 10 at most.
        return 1.001 if group["probe"] == "exact" else 10.0 if group["vectors"] >= 8 else math.inf
    if not event.hit:
        return fresh
    # `residual` says |C C^T - I|_F = residual sqrt(n); a sketch of 8 vectors says so by a factor of 10.
    slack = 1.001 if group["probe"] == "exact" else 10.0 if group["vectors"] >= 8 else math.inf
    bound = max(fresh, math.sqrt(1 + slack * event.residual * math.sqrt(n)))
    if group["clip"] != 0 and group["max_norm"] is not None:
        # The estimate is one of as many vectors as are clipped with, and these cases are unkind to it. Seen:
        # 2.4 times max_norm with one vector, twice with two, 0.86 times with four and more.
        slack = {1: 6.0, 2: 3.0, 3: 3.0}.get(cache_of(group).rank(n), 1.5)
        bound = min(bound, slack * group["max_norm"])
    return bound
