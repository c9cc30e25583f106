# SPDX-License-Identifier: BSD-3-Clause
"""Reader of the trainer_state.json that the Trainer of Transformers writes into every checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..monitor.record import Event, Record
from ..monitor.sinks import LogError
from .merge_steps import StepMerger, repeated_steps_warning
from .parse_numbers import parse_number, parse_step, short_repr

NAME = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FIELDS = {"loss": "loss", "grad_norm": "total_norm", "learning_rate": "lr"}
# A training entry has one of these; an evaluation, and the last entry of a run, have neither.
_TRAINING = ("loss", "grad_norm")
_ZEROS = 3  # consecutive ones at the end
_HEADER = ("global_step", "max_steps", "logging_steps", "num_train_epochs", "train_batch_size", "epoch")


def state_file(directory: Path) -> Path | None:
    """Return the file in a directory or in its newest checkpoint, or None."""
    if (directory / NAME).is_file():
        return directory / NAME
    numbers = {
        int(match[1]): path / NAME
        for path in directory.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / NAME).is_file()
    }
    return numbers[max(numbers)] if numbers else None


def state_records(
    path: Path, state: dict[str, Any], warnings: list[str]
) -> tuple[list[Record], dict[str, Any]]:
    """Return the records of the training entries, and some numbers about the whole run.

    The loss is the mean since the previous entry, the gradient norm that of the entry's own step.

    Raises:
        LogError: an entry is malformed.
    """
    history = state["log_history"]
    if not isinstance(history, list):
        raise LogError(f"{path}: expected log_history to be a list, but got {short_repr(history)}")
    steps = StepMerger()
    for place, entry in enumerate(history):
        if not isinstance(entry, dict):
            raise LogError(f"{path}: log_history[{place}]: expected an object, but got {short_repr(entry)}")
        if not any(key in entry for key in _TRAINING):
            continue
        try:
            step = parse_step(entry.get("step"))
            values = {f: n for key, f in _FIELDS.items() if (n := parse_number(entry.get(key))) is not None}
        except ValueError as error:
            raise LogError(f"{path}: log_history[{place}]: {error}") from None
        if step is None:
            raise LogError(f"{path}: log_history[{place}]: expected a step, but got none")
        if "lr" in values:
            values["lr"] = [values["lr"]]  # type: ignore[assignment]
        steps.add(step, values)
    if steps.repeated:
        warnings.append(repeated_steps_warning(path, steps.repeated))
    return steps.records(), {key: state[key] for key in _HEADER if key in state}


def add_zero_loss_event(records: Sequence[Record]) -> None:
    """Add an event where the loss becomes 0 for good, which is how the Trainer logs a NaN loss.

    Its logging_nan_inf_filter does so. Finite gradient norms beside the loss show that it really is 0.
    """
    known = [r for r in records if r.loss is not None]
    first = next((i for i in range(len(known), 0, -1) if known[i - 1].loss), 0)
    zeros = known[first:]
    if not first or len(zeros) < _ZEROS or any(r.total_norm is not None for r in zeros):
        return
    text = (
        f"the loss is logged as 0 from here on, after {known[first - 1].loss:.4g}: the Trainer logs NaN as 0"
    )
    zeros[0].events.append(Event("nonfinite", zeros[0].step, "warning", text))
