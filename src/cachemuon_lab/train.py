"""The training loop: one for every model, data set and optimizer, on one process or on many.

A run can end at any moment, by kill -9 too, and be resumed: batches are functions of the step, and all else
is in the checkpoint. On the CPU the resumed run ends with the same weights, bit for bit.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from cachemuon.distributed import whole_state_dict
from cachemuon_lab import checkpoint
from cachemuon_lab.config import RunConfig, differences, typed
from cachemuon_lab.data import Batches
from cachemuon_lab.data.corpus import python_corpus
from cachemuon_lab.data.images import ImageBatches
from cachemuon_lab.data.tokens import TokenBatches, TokenFile
from cachemuon_lab.diagnostics import make_observer
from cachemuon_lab.models import GPT2Config, Model, build
from cachemuon_lab.optimizers import Meter, StaleMuon, make_optimizer
from cachemuon_lab.ranks import Ranks, load_optimizer, whole_model
from cachemuon_lab.record import CHECKPOINT, CONFIG, RECORD, Record, Run, describe_environment, held
from cachemuon_lab.rivals import Rival
from cachemuon_lab.tensorboard import TensorBoard

Progress = Callable[[dict[str, Any]], None]


class Interrupted(Exception):
    """The run was asked to stop, and did after a whole step: `folder` can be resumed from `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; resume the run in {folder} to go on")
        self.folder, self.step = folder, step


@dataclass(frozen=True)
class Standing:
    """How far a run has come: what its checkpoint holds beside weights, optimizer and generators."""

    step: int
    tokens: int  # or images
    seconds: float
    best_loss: float | None = None
    best_step: int | None = None
    best_accuracy: float | None = None

    def __post_init__(self) -> None:
        for name in ("step", "tokens", "seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")

    def with_validation(self, validation: dict[str, Any]) -> Standing:
        """Renewed by a validation at this step, if that is better than all before it."""
        loss, accuracy = validation["loss"], validation["accuracy"]
        new = self
        if loss < (math.inf if self.best_loss is None else self.best_loss):
            new = replace(new, best_loss=loss, best_step=self.step)
        if accuracy is not None and accuracy > (self.best_accuracy or 0.0):
            new = replace(new, best_accuracy=accuracy)
        return new

    def best(self) -> dict[str, Any]:
        """What the record's last line says of the validations."""
        return {"best_loss": self.best_loss, "best_step": self.best_step, "best_accuracy": self.best_accuracy}


def train(
    config: RunConfig,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str | torch.device | None = None,
    on_progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    timing: bool = True,
    tensorboard: bool = False,
    strategy: str = "ddp",
) -> Run:
    """Train, and return the finished run.

    `resume` goes on from the folder's checkpoint, or begins if there is none; a finished run is returned
    as it is. `overwrite` begins anew in a folder that holds a run. After each step `on_progress` gets a
    dict: step, steps, loss, validation, hit_rate, saved_flops (the fraction of GramMuon's, by the
    paper's model), seconds_per_step. Ctrl-C, or `stop` returning True, ends the run after its current
    step with a checkpoint and `Interrupted`. `timing` waits for a GPU around the optimizer and its
    orthogonalization; without it their seconds are the host's. `tensorboard` also writes the record's
    numbers for TensorBoard.

    With torch.distributed initialized every rank calls this, and rank 0 writes; the folder must be one
    that all ranks see. `strategy` is how they share the model: "ddp", a copy each, or "fsdp", shards. A
    checkpoint is that of one process: a run may go on with other ranks and the other strategy.
    """
    folder, ranks, device = Path(folder), Ranks.current(strategy), _device(device)
    micros = ranks.share(config.accumulation * config.replicas)
    if (finished := _finished(folder, config, resume, overwrite)) is not None:
        return finished
    torch.manual_seed(config.seed)
    data = open_data(config)
    model = build(config.model).to(device)
    wishes: dict[str, Any] = {
        "on_progress": on_progress,
        "stop": stop,
        "timing": timing,
        "tensorboard": tensorboard,
    }
    with alone(folder, ranks):
        # The process that had the folder until now may have done all.
        if (finished := _finished(folder, config, resume, overwrite)) is not None:
            return finished
        ranks.barrier()  # rank 0 may write only when all have looked
        saved = _saved(folder) if resume else None
        return _trained(config, folder, data, model, device, ranks, saved, micros, **wishes)


def _trained(
    config: RunConfig,
    folder: Path,
    data: Batches,
    model: Model,
    device: torch.device,
    ranks: Ranks,
    saved: dict[str, Any] | None,
    micros: int,
    *,
    on_progress: Progress | None,
    stop: Callable[[], bool] | None,
    timing: bool,
    tensorboard: bool,
) -> Run:
    if saved is not None:
        _load_model(folder, model, saved)
    ranks.shard(model)
    optimizer = make_optimizer(config.optimizer, model, ranks.copies)
    rates = [group["lr"] for group in optimizer.param_groups]
    if ranks.rank > 0:
        torch.manual_seed(config.seed + ranks.rank)  # for a dropout of its own
    standing = Standing(step=0, tokens=0, seconds=0.0)
    if saved is not None:
        standing = _restored(folder, saved, optimizer, device, ranks)
    if ranks.sharded and config.diagnostics != "off":
        raise ValueError(f"strategy must be 'ddp' for diagnostics of whole matrices, got {ranks.strategy!r}")
    observer = make_observer(config, optimizer) if ranks.main else None
    meter = Meter(optimizer, device, synchronize=timing)
    autocast = _autocast(config, device)
    forward = ranks.joined(model)
    epoch = data.steps_per_epoch if isinstance(data, ImageBatches) else 1
    validation: dict[str, Any] = {}
    first, began, seconds_before = standing.step, time.perf_counter(), standing.seconds

    with _open_record(folder, config, data, device, standing, ranks) as record, interrupts() as pressed:
        if tensorboard and ranks.main:
            record.listeners.append(TensorBoard(folder, standing.step))
        for step in range(first + 1, config.steps + 1):
            step_began = meter.now()
            factor = config.lr_factor(step, epoch)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            loss, tokens = torch.zeros((), device=device), 0
            for micro in range(micros):
                batch = data.train(step - 1, micro, ranks.rank, ranks.world)
                inputs, targets = (tensor.to(device) for tensor in batch)
                with ranks.apart(forward, micro < micros - 1):
                    with autocast():
                        part = forward(inputs, targets) / micros
                    part.backward()
                loss += part.detach()
                tokens += targets.numel()
            if observer is not None:
                observer.before(step)
            meter.step()
            optimizer.zero_grad(set_to_none=True)
            loss_sum, tokens = ranks.sum(loss.item(), tokens)
            line = {"loss": loss_sum / ranks.world, "lr": optimizer.param_groups[0]["lr"]}
            line |= {"tokens": standing.tokens + tokens, "step_seconds": meter.now() - step_began}
            line |= meter.read()
            if isinstance(optimizer, StaleMuon | Rival):
                line["flops"] *= ranks.world  # each process does all matrices,
            line["flops_paper"] *= config.replicas  # as each of the paper's devices did
            record.write("step", step, **line)
            seconds = seconds_before + time.perf_counter() - began
            standing = replace(standing, step=step, tokens=line["tokens"], seconds=seconds)
            for diagnostic in observer.after(step) if observer is not None else ():
                record.write(step=step, **diagnostic)
            last = step == config.steps
            if (ranks.main or ranks.sharded) and (last or step % config.validate_every == 0):
                ranks.synchronize_buffers(model)
                validation = validate(model, data, config.validation_batches, device, autocast)
                record.write("validation", step, **validation)
                standing = standing.with_validation(validation)
            (asked,) = ranks.sum(pressed() or (stop is not None and stop()))
            if last or asked or step % config.checkpoint_every == 0:
                record.sync()
                _save(folder, model, optimizer, standing, device, ranks)
            if on_progress is not None:
                on_progress(
                    {
                        "step": step,
                        "steps": config.steps,
                        "loss": line["loss"],
                        "validation": validation.get("loss"),
                        "hit_rate": meter.hit_rate(),
                        "saved_flops": meter.saved_flops(step),
                        "seconds_per_step": (time.perf_counter() - began) / (step - first),
                    }
                )
            if asked and not last:
                raise Interrupted(folder, step)
        record.write("end", config.steps, seconds=standing.seconds, **standing.best())
    ranks.barrier()
    return Run.open(folder)


def open_data(config: RunConfig) -> Batches:
    """The batches of a run; those of a step are the same on any number of processes."""
    path, part = config.data.path, config.data.part
    if isinstance(config.model, GPT2Config):
        context, size = config.data.context or config.model.context, config.batch_size
        if config.data.kind == "python":
            if config.model.vocabulary < 256:
                got = config.model.vocabulary
                raise ValueError(f"model.vocabulary must be at least 256 for bytes, got {got}")
            return python_corpus(path).batches(context, size, config.seed, part)
        folder = _required(path, "with train.bin and val.bin, as `cachemuon prepare` makes")
        train, validation = (
            TokenFile(folder / f"{name}.bin", config.model.vocabulary) for name in ("train", "val")
        )
        return TokenBatches(train, validation.part(part), context, size, config.seed)
    folder = _required(path, "with CIFAR-10's files, data_batch_1 to data_batch_5 and test_batch")
    calls = config.accumulation * config.replicas
    return ImageBatches(folder, config.batch_size, config.seed, calls, part)


def _required(path: str | None, what: str) -> Path:
    if path is None:
        raise ValueError(f"data.path must be a folder {what}, got None")
    return Path(path)


def validate(
    model: Model,
    data: Batches,
    batches: int | None,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """Mean loss, and for images accuracy, over the first `batches` validation batches, or all."""
    number = min(limit for limit in (batches, data.validation_batches) if limit is not None)
    loss, correct, examples = torch.zeros((), device=device), torch.zeros((), device=device), 0
    was_training = model.training
    model.eval()
    for index in range(number):
        inputs, targets = (part.to(device) for part in data.validation(index))
        with autocast():
            metrics = model.metrics(inputs, targets)
        loss += metrics["loss"] * len(targets)
        correct += metrics.get("correct", math.nan)
        examples += len(targets)
    model.train(was_training)
    accuracy = (correct / examples).item()
    return {"loss": (loss / examples).item(), "accuracy": None if math.isnan(accuracy) else accuracy}


@contextmanager
def alone(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Within it nobody else writes into the folder: rank 0 holds it, and all ranks hear if it cannot."""
    with ExitStack() as stack:
        refusal: Exception | None = None
        try:
            if ranks.main:
                stack.enter_context(held(folder))
        except (ValueError, OSError) as error:
            refusal = error
        refusal = ranks.gather(refusal)[0]
        if refusal is not None:
            raise refusal
        yield


def _finished(folder: Path, config: RunConfig, resume: bool, overwrite: bool) -> Run | None:
    """The run in the folder, if it is to be resumed and is complete; refuses what would spoil one."""
    if resume and overwrite:
        raise ValueError("resume and overwrite exclude each other, got True for both")
    if overwrite:
        return None
    if not (folder / CONFIG).exists():
        files = [name for name in (RECORD, CHECKPOINT) if (folder / name).exists()]
        if there := [str(name) for name in files if (folder / name).stat().st_size]:
            raise ValueError(f"{folder} has {' and '.join(there)}, but no {CONFIG}: overwrite begins anew")
        return None
    run = Run.open(folder)
    if not resume:
        held = "a finished run" if run.complete else "an unfinished run"
        raise ValueError(f"{folder} holds {held}: resume goes on with it, overwrite begins anew")
    if differing := differences(run.config, config):
        listed = "; ".join(
            f"{key} is {there!r} there, not {here!r}" for key, (there, here) in differing.items()
        )
        raise ValueError(f"{folder} holds another run: {listed}")
    return run if run.complete else None


def _open_record(
    folder: Path, config: RunConfig, data: Batches, device: torch.device, standing: Standing, ranks: Ranks
) -> Record:
    if not ranks.main:
        return Record.nowhere()
    described = json.loads(json.dumps(data.describe()))
    before = described
    if standing.step:
        run = Run.open(folder)
        if not run.steps or run.steps[-1]["step"] < standing.step:
            raise ValueError(f"{folder / RECORD} is damaged: the checkpoint is of step {standing.step}")
        before = run.environment.get("data", described)
    if before != described:
        raise ValueError(f"the data is not what the run in {folder} began with: {before}, now {described}")
    used = config.autocast if _autocast(config, device) is not nullcontext else None
    environment = describe_environment(device, described, autocast=used, processes=ranks.world)
    if standing.step == 0:
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return Record(folder, config, environment, standing.step)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def _autocast(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    # A CPU only imitates bfloat16, slowly.
    if config.autocast is None or device.type != "cuda" or not torch.cuda.is_bf16_supported(False):
        return nullcontext
    return partial(torch.autocast, device.type, dtype=getattr(torch, config.autocast))


def _save(
    folder: Path, model: Model, optimizer: Optimizer, standing: Standing, device: torch.device, ranks: Ranks
) -> None:
    generators = ranks.gather(checkpoint.generators(device))
    # Copies of a model may each keep only the transforms they own: every rank must take part.
    optimizer_state = whole_state_dict(optimizer)
    if ranks.main or ranks.sharded:
        ranks.synchronize_buffers(model)
        weights = whole_model(model)
        if ranks.main:
            parts = {"generators": generators, "model": weights, "optimizer": optimizer_state}
            checkpoint.save(folder / CHECKPOINT, {"standing": asdict(standing), **parts})


def _saved(folder: Path) -> dict[str, Any] | None:
    """What the folder's checkpoint holds, if it has one."""
    if not (folder / CHECKPOINT).exists():
        return None
    state = checkpoint.load(folder / CHECKPOINT)
    parts = {"standing": dict, "generators": list, "model": dict, "optimizer": dict}
    if missing := parts.keys() - state.keys():
        raise ValueError(f"{folder / CHECKPOINT} is damaged: it lacks {', '.join(sorted(missing))}")
    for name, kind in parts.items():
        if not isinstance(state[name], kind):
            got = type(state[name]).__name__
            raise ValueError(f"{folder / CHECKPOINT} is damaged: {name} must be a {kind.__name__}, got {got}")
    return state


def _load_model(folder: Path, model: Model, state: dict[str, Any]) -> None:
    try:
        model.load_state_dict(state["model"])
        for name, tensor in model.state_dict().items():
            if (found := state["model"][name].dtype) != tensor.dtype:  # torch casts without a word
                raise RuntimeError(f"{name} must be {tensor.dtype}, got {found}")
    except RuntimeError as error:
        raise ValueError(f"{folder / CHECKPOINT} is of another model: {error}") from error


def _restored(
    folder: Path, state: dict[str, Any], optimizer: Optimizer, device: torch.device, ranks: Ranks
) -> Standing:
    try:
        standing: Standing = typed(Standing, state["standing"], "standing")
        if standing.step == 0 or not state["generators"]:
            raise ValueError("it must be of a step, with that step's generators")
        load_optimizer(optimizer, state["optimizer"])
        if ranks.rank < len(state["generators"]):
            checkpoint.restore_generators(state["generators"][ranks.rank], device)
    except Exception as error:  # torch's optimizers and generators may raise anything at a state that is none
        raise ValueError(f"{folder / CHECKPOINT} is damaged: {error}") from error
    return standing


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Within it a first Ctrl-C is only noted; a second ends the process as it always does."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set  # only the main thread may handle signals
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
