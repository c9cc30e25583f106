# SPDX-License-Identifier: BSD-3-Clause
"""The trainer_state.json that the Trainer of Transformers writes, at its end and into every checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..monitor.record import Event, Record
from ..monitor.sinks import LogError
from .merge_steps import Steps, repeats_told
from .parse_numbers import number_of, shown, step_of

NAME = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FIELDS = {"loss": "loss", "grad_norm": "total_norm", "learning_rate": "lr"}
# An entry of training has one of these; that of an evaluation, and the last one of a run, have neither.
_TRAINING = ("loss", "grad_norm")
_ZEROS = 3  # at the end, one after the other
_HEADER = ("global_step", "max_steps", "logging_steps", "num_train_epochs", "train_batch_size", "epoch")


def state_file(directory: Path) -> Path | None:
    """The file of a directory, or that of its newest checkpoint."""
    if (directory / NAME).is_file():
        return directory / NAME
    numbers = {
        int(match[1]): path / NAME
        for path in directory.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / NAME).is_file()
    }
    return numbers[max(numbers)] if numbers else None


def records_of(path: Path, state: dict[str, Any], warnings: list[str]) -> tuple[list[Record], dict[str, Any]]:
    """The records of the entries of training, and what the file tells of the run.

    The loss is the mean since the entry before, the gradient norm that of the entry's own step.

    Raises:
        LogError: an entry is no such entry, or holds something else than numbers.
    """
    history = state["log_history"]
    if not isinstance(history, list):
        raise LogError(f"{path}: expected log_history to be a list, but got {shown(history)}")
    steps = Steps()
    for place, entry in enumerate(history):
        if not isinstance(entry, dict):
            raise LogError(f"{path}: log_history[{place}]: expected an object, but got {shown(entry)}")
        if not any(key in entry for key in _TRAINING):
            continue
        try:
            step = step_of(entry.get("step"))
            values = {f: n for key, f in _FIELDS.items() if (n := number_of(entry.get(key))) is not None}
        except ValueError as error:
            raise LogError(f"{path}: log_history[{place}]: {error}") from None
        if step is None:
            raise LogError(f"{path}: log_history[{place}]: expected a step, but got none")
        if "lr" in values:
            values["lr"] = [values["lr"]]  # type: ignore[assignment]
        steps.add(step, values)
    if steps.repeated:
        warnings.append(repeats_told(path, steps.repeated))
    return steps.records(), {key: state[key] for key in _HEADER if key in state}


def tell_zeros(records: Sequence[Record]) -> None:
    """Add an event where the loss turns into 0 for good: for a loss that is NaN the Trainer logs 0, by its
    logging_nan_inf_filter. Finite gradient norms beside it show that it is 0 indeed.
    """
    known = [r for r in records if r.loss is not None]
    first = next((i for i in range(len(known), 0, -1) if known[i - 1].loss), 0)
    zeros = known[first:]
    if not first or len(zeros) < _ZEROS or any(r.total_norm is not None for r in zeros):
        return
    text = f"the loss is logged as 0 from here on, after {known[first - 1].loss:.4g}: so the Trainer logs NaN"
    zeros[0].events.append(Event("nonfinite", zeros[0].step, "warning", text))
