"""The lines of a record as TensorBoard's scalars, while the run writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"


class TensorBoard:
    """A listener of a `Record` that writes `<run>/tensorboard`. Needs the package tensorboard.

    `step` is the one a run goes on from: what stands there after it is hidden.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "tensorboard=True needs the package tensorboard: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(str(Path(folder) / FOLDER), purge_step=step + 1)

    def __call__(self, line: dict[str, Any]) -> None:
        """Write the numbers of one line, as `<kind>/<name>`; misses as `step/misses/<reason>`."""
        numbers = {key: value for key, value in line.items() if key not in ("kind", "step", "misses", "name")}
        numbers |= {f"misses/{reason}": count for reason, count in line.get("misses", {}).items()}
        prefix = f"{line['kind']}/{line['name']}" if "name" in line else line["kind"]
        for key, value in numbers.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{prefix}/{key}", value, line["step"])
        if line["kind"] in ("validation", "end"):
            self._writer.flush()
