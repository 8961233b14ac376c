"""A run's state in one file that is always whole: model, optimizer, generators, and how far it came."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, tensors and plain values, in place of the file before; whole or not at all.

    Whatever goes wrong, a full disk included, the file before stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch turns some failed writes into a RuntimeError
        partial.unlink(missing_ok=True)
        before = "the one before it is intact" if path.exists() else "there was none before it"
        raise OSError(f"the checkpoint {path} could not be written, {before}: {error}") from error
    _sync_folder(path.parent)


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote, to the CPU. Runs no code from the file."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no checkpoint {path}") from None
    except Exception as error:  # a damaged zip file or pickle may raise anything
        raise ValueError(f"{path} is no readable checkpoint: {error}") from error
    got = state.get("format") if isinstance(state, dict) else type(state).__name__
    if not (isinstance(got, int) and got == FORMAT):
        raise ValueError(f"{path} must be a checkpoint of format {FORMAT}, got {got!r}")
    return state


def generators(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's global generators, which dropout draws from: the CPU's and the device's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put torch's global generators into the states that `generators` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _sync_folder(folder: Path) -> None:
    # Without this a power cut may undo the replacement, though not damage either file.
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
