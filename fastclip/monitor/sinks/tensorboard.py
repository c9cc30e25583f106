# SPDX-License-Identifier: BSD-3-Clause
"""A sink for TensorBoard.

The tags are public and do not change:

| tag | of the record |
|---|---|
| loss | loss |
| loss/<name> | losses |
| lr/<group> | lr of a parameter group, by its number |
| gradient/total_norm | total_norm, before clipping |
| gradient/max_norm | max_norm |
| gradient/clip_coef | clip_coef |
| gradient/nan_count | nan_count |
| gradient/inf_count | inf_count |
| gradient/group_norm/<group> | group_norms |
| gradient/tensor_norms | histogram of the finite tensor_norms, at most 1e19 each |
| parameter/norm | param_norm |
| update_ratio/<parameter> | update_ratio |
| amp/loss_scale | loss_scale |
| amp/overflows | overflows |
| amp/skipped_steps | skipped_steps |
| step/applied | applied, 1 or 0 |
| step/held | held, 1 or 0 |
| activation_<statistic>/<module> | activations, such as activation_rms/layer |
| batch/<input>/<statistic> | the numbers of batch |
| token_ids/<embedding>/<statistic> | token_ids |
| throughput/step_time | step_time, in seconds |
| throughput/samples_per_second | samples_per_second |
| throughput/tokens_per_second | tokens_per_second |
| memory/<kind> | memory, in bytes |
| events/<kind> | how many events of the kind since the sink was made, at steps that had one |
| events | text: a step's events |

TensorBoard keeps scalars in float32: NaN and Inf as such, which its charts do not draw (see nan_count and
inf_count), and numbers beyond 3.4e38 as Inf.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import torch

from .scalars import count_events, scalars_of

# TensorBoard's default bins end at 1e20, and it raises where none holds a value.
_LARGEST_NORM = 1e19


class TensorBoardSink:
    """Writes records with torch's SummaryWriter, which needs ``pip install "torch-fastclip[tensorboard]"``.

    Args:
        log_dir_or_writer: directory of the event files, made if missing; or a writer with ``add_scalar`` and
            perhaps ``add_histogram`` and ``add_text``, which the caller closes: close() only flushes it.
        every: steps between two records whose numbers are written: each number costs torch's writer about
            0.1 ms. Events are written at every step.
        histogram_every: steps between two histograms of gradient norms; None for no histograms.
        purge_step: the first step of a resumed run: TensorBoard hides this and later steps of older files.

    Raises:
        ImportError: no writer is given and tensorboard is not installed.
        TypeError: the argument is neither a path nor a writer.
        ValueError: every or histogram_every is not positive; purge_step is given together with a writer.
    """

    def __init__(
        self,
        log_dir_or_writer: Any,
        *,
        every: int = 1,
        histogram_every: int | None = 100,
        purge_step: int | None = None,
    ) -> None:
        if every <= 0:
            raise ValueError(f"expected every to be positive, but got {every}")
        if histogram_every is not None and histogram_every <= 0:
            raise ValueError(f"expected histogram_every to be positive or None, but got {histogram_every}")
        self._owned = isinstance(log_dir_or_writer, (str, os.PathLike))
        if self._owned:
            self._writer = _summary_writer(os.fspath(log_dir_or_writer), purge_step)
        else:
            if not callable(getattr(log_dir_or_writer, "add_scalar", None)):
                got = type(log_dir_or_writer).__qualname__
                raise TypeError(f"expected a directory or a writer with add_scalar, but got {got}")
            if purge_step is not None:
                raise ValueError("expected purge_step together with a directory, but got a writer")
            self._writer = log_dir_or_writer
        self._every = every
        self._last: int | None = None
        self._histogram_every = histogram_every
        self._last_histogram: int | None = None
        self._events: Counter[str] = Counter()
        self._closed = False

    def write(self, record: dict[str, Any]) -> None:
        step = record.get("step")
        numbers = count_events(record, self._events)
        if _is_due(step, self._last, self._every):
            self._last = step
            numbers |= scalars_of(record)
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, step)
        self._write_text(record, step)
        self._write_histogram(record, step)

    def flush(self) -> None:
        """Pass the events to the operating system, if the writer can."""
        if not self._closed and callable(flush := getattr(self._writer, "flush", None)):
            flush()

    def close(self) -> None:
        if self._closed:
            return
        self.flush()
        self._closed = True
        if self._owned:
            self._writer.close()

    def _write_text(self, record: dict[str, Any], step: int | None) -> None:
        events = record.get("events")
        if events and callable(add_text := getattr(self._writer, "add_text", None)):
            lines = [f"- {e.get('severity', '')} {e['kind']}: {e.get('message', '')}" for e in events]
            add_text("events", "\n".join(lines), step)

    def _write_histogram(self, record: dict[str, Any], step: int | None) -> None:
        every = self._histogram_every
        if every is None or not record.get("tensor_norms"):
            return
        if not _is_due(step, self._last_histogram, every):
            return
        norms = [min(norm, _LARGEST_NORM) for norm in record["tensor_norms"] if math.isfinite(norm)]
        if norms and callable(add_histogram := getattr(self._writer, "add_histogram", None)):
            self._last_histogram = step
            add_histogram("gradient/tensor_norms", torch.tensor(norms, dtype=torch.float64), step)


def _is_due(step: int | None, last: int | None, every: int) -> bool:
    """Return whether step is `every` steps after the last one, or before it, as when a run was resumed."""
    return step is None or last is None or not last <= step < last + every


def _summary_writer(log_dir: str, purge_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "writing to TensorBoard needs tensorboard, which is not installed: "
            'pip install "torch-fastclip[tensorboard]"'
        ) from error
    return SummaryWriter(log_dir, purge_step=purge_step)
