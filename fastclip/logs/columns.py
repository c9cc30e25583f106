# SPDX-License-Identifier: BSD-3-Clause
"""The columns of a table that hold the fields of a record, by the names that trainers and loggers use."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Normalized names, the preferred one first. The loss of a step is preferred to that of an epoch.
COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "step": (
        *("global_step", "step", "trainer_global_step", "train_global_step", "iteration", "iter", "it"),
        *("num_updates", "update", "optimizer_step", "train_step", "training_step", "current_steps", "steps"),
        *("iterations", "_step"),
    ),
    "loss": (
        *("loss", "train_loss", "training_loss", "loss_train", "train_loss_step", "loss_step", "step_loss"),
        *("batch_loss", "train_step_loss", "train_train_loss", "lm_loss", "train_lm_loss"),
        *("lm_loss_training_lm_loss", "train_total_loss", "total_loss", "train_ce_loss", "ce_loss"),
        *("nll_loss", "train_samples_train_loss", "losses_train", "train_loss_epoch", "loss_epoch"),
        "train_epoch_loss",
    ),
    "total_norm": (
        *("grad_norm", "gnorm", "gradient_norm", "total_norm", "total_grad_norm", "global_grad_norm"),
        *("train_grad_norm", "train_gnorm", "train_gradient_norm", "train_total_norm", "gradient_total_norm"),
        *("train_total_grad_norm", "train_global_grad_norm", "grad_norm_grad_norm", "optim_total_grad_norm"),
        *("grad_2_0_norm_total", "grad_norm_total", "grad_total_norm", "gradnorm", "global_norm"),
        *("optim_grad_norm", "grads_norm", "grad_norm_step", "norm"),
    ),
    "lr": (
        *("lr", "learning_rate", "train_lr", "train_learning_rate", "optim_lr", "optim_learning_rate"),
        *("train_samples_lr", "learning_rate_learning_rate", "optimizer_lr", "learningrate", "lr_step"),
    ),
    "loss_scale": (
        *("loss_scale", "amp_loss_scale", "train_loss_scale", "grad_scale", "amp_scale", "scaler_scale"),
        *("grad_scaler_scale", "train_samples_loss_scale", "loss_scale_loss_scale", "scale"),
    ),
    "max_norm": (
        *("max_norm", "gradient_max_norm", "max_grad_norm", "clip_norm", "grad_clip", "clip_grad"),
        *("gradient_clip_val", "grad_clip_norm", "clip_grad_norm", "train_max_norm"),
    ),
    "clip_coef": ("clip_coef", "gradient_clip_coef", "clip_coefficient"),
    "nan_count": ("nan_count", "gradient_nan_count"),
    "inf_count": ("inf_count", "gradient_inf_count"),
    "param_norm": (
        *("param_norm", "parameter_norm", "params_norm", "params_norm_params_norm", "train_param_norm"),
        "weight_norm",
    ),
    "tokens_per_second": ("tokens_per_second", "tokens_per_sec", "throughput_tokens_per_second"),
    "samples_per_second": ("samples_per_second", "samples_per_sec", "throughput_samples_per_second"),
    "time": ("time", "_timestamp", "timestamp", "wall_time"),
}

# Fields of which a log must have at least one.
USABLE = ("loss", "total_norm", "loss_scale")

# Learning rates of parameter groups; Lightning's LearningRateMonitor names them by the optimizer's class.
_GROUPED = re.compile(r"(?:train_|optim_)?(?:lr|learning_rate)_(?:(?:param_)?group_?|pg_?)?\d+")
_LIGHTNING = re.compile(r"lr-[a-z]\w*(?:-\d+)?(?:/pg\d+)?", re.IGNORECASE)
_NOT_A_RATE = ("momentum", "weight_decay")

_FIELD = {name: field for field, names in COLUMN_NAMES.items() for name in names}


def normalized(column: str) -> str:
    """Return a name as COLUMN_NAMES spells it: "Train/Loss" and "train loss" become "train_loss"."""
    return re.sub(r"[\s/.:\-]+", "_", column.strip().lower()).removeprefix("fastclip_")


def field_of(column: str) -> str | None:
    """Return the field of a record that a column may hold, or None."""
    name = normalized(column)
    if (field := _FIELD.get(name)) is not None:
        return field
    if name.endswith(_NOT_A_RATE):
        return None
    return "lr" if _GROUPED.fullmatch(name) or _LIGHTNING.fullmatch(column.strip()) else None


def choose_columns(columns: Iterable[str]) -> dict[str, list[str]]:
    """Return the column to read for each field; for "lr" possibly one for each parameter group.

    Args:
        columns: the columns that have a number in any row.
    """
    found: dict[str, list[str]] = {}
    for column in columns:
        if (field := field_of(column)) is not None:
            found.setdefault(field, []).append(column)
    return {field: _preferred(field, its) for field, its in found.items()}


def _preferred(field: str, columns: list[str]) -> list[str]:
    names = COLUMN_NAMES[field]
    known = [column for column in columns if normalized(column) in names]
    if known:
        return [min(known, key=lambda column: names.index(normalized(column)))]
    return sorted(columns, key=_natural)


def _natural(column: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", column)]


def no_usable_column(columns: Iterable[str], most: int = 12) -> str:
    """Return the error message for a file whose columns hold no usable field."""
    its = [column if len(column) <= 40 else column[:37] + "..." for column in columns]
    got = ", ".join(map(repr, its[:most])) + (f" and {len(its) - most} more" if len(its) > most else "")
    expected = ", ".join(name for field in USABLE for name in COLUMN_NAMES[field][:3])
    return f"expected a column such as {expected}, but got {got or 'none'}"
