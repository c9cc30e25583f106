# SPDX-License-Identifier: BSD-3-Clause
"""A training under the monitor with one poisoned batch: its log, and an incident that can be replayed."""

from __future__ import annotations

import logging
import textwrap
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from .. import Monitor
from ..monitor import IncidentSaved
from ..monitor.incidents.incident import list_incidents
from .character_model import FULL, QUICK, CharacterModel, Corpus, Size
from .comparison import MAX_NORM
from .poisoning import nan_counts

MONITORED = """
3. The monitor, {steps} steps of a new training
  monitor = fastclip.Monitor(model, optimizer, max_norm={max_norm})
  and in the loop: monitor.batch(tokens=tokens, ..., sample_ids=passages); monitor.loss(loss)
  Step {step} gets a poisoned batch as above.
"""
NEXT = """
The log and the poisoned step are in {directory}. Read them with
  fastclip lint {directory}
  fastclip report {directory} -o report.html
  fastclip diagnose {directory}
  fastclip incidents {directory}
and run the step again with
  fastclip replay {incident} fastclip.demo.monitored_training:{build}"""

BuiltTraining = tuple[CharacterModel, Optimizer, Callable[[CharacterModel, Mapping[str, Tensor]], Tensor]]


def build() -> BuiltTraining:
    """Return what `fastclip replay` needs for an incident of the demo."""
    return _build_for(FULL)


def build_quick() -> BuiltTraining:
    """Return what `fastclip replay` needs for an incident of `fastclip demo --quick`."""
    return _build_for(QUICK)


def _build_for(size: Size) -> BuiltTraining:
    model, optimizer = _model_and_optimizer(Corpus(size, seed=0), seed=0)

    def loss_function(model: CharacterModel, batch: Mapping[str, Tensor]) -> Tensor:
        return model.loss((batch["tokens"], batch["targets"], batch["features"]))

    return model, optimizer, loss_function


def _model_and_optimizer(corpus: Corpus, seed: int) -> tuple[CharacterModel, AdamW]:
    torch.manual_seed(seed)
    model = CharacterModel(corpus.size, corpus.padding)
    return model, AdamW(model.parameters(), lr=7e-4, fused=True)


def train_under_monitor(corpus: Corpus, seed: int, steps: int, directory: str | None = None) -> list[str]:
    """Train under the monitor with one poisoned batch; return what went wrong.

    Args:
        directory: where the log and the incident are saved; None saves neither.
    """
    model, optimizer = _model_and_optimizer(corpus, seed)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    poisoned = steps * 2 // 3
    print(MONITORED.format(steps=steps, max_norm=MAX_NORM, step=poisoned))
    logger = logging.getLogger("fastclip.monitor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the summary below reports the same
    saving: dict[str, Any] = {} if directory is None else {"log_dir": directory, "incidents": directory}
    monitor = Monitor(model, optimizer, max_norm=MAX_NORM, scheduler=warmup, **saving)
    with closing(monitor), warnings.catch_warnings():
        warnings.simplefilter("ignore", IncidentSaved)  # reported at the end
        for step in range(steps):
            batch = corpus.batch(missing=step == poisoned)
            passages = range(step * corpus.size.batch, (step + 1) * corpus.size.batch)
            tokens, targets, features = batch
            monitor.batch(tokens=tokens, targets=targets, features=features, sample_ids=passages)
            loss = model.loss(batch)
            monitor.loss(loss)
            loss.backward()
            optimizer.step()  # clips, and skips the poisoned step
            warmup.step()
            optimizer.zero_grad()
        diagnosis = monitor.diagnose()
        print(textwrap.indent(monitor.summary(), "  "))
    logger.setLevel(level)
    print("\n  monitor.diagnose()")
    for line in str(diagnosis).splitlines():
        print(textwrap.fill(line, 100, initial_indent="  ", subsequent_indent=" " * 13))
    failures = [] if diagnosis.cause == "nonfinite_batch" else [f"the diagnosis is {diagnosis.cause}"]
    if monitor.handle.skipped_steps != 1 or nan_counts(model.named_parameters()):
        failures.append("the poisoned step should have been skipped")
    return failures


def show_next_commands(directory: str, size: Size) -> list[str]:
    """Print the commands that read the log and the incident; return what went wrong."""
    found = list_incidents(directory)
    if len(found) != 1 or found[0].damage is not None:
        names = ", ".join(summary.path.name for summary in found) or "none"
        return [f"expected one undamaged incident in {directory}, but got {names}"]
    name = build_quick.__name__ if size is QUICK else build.__name__
    print(NEXT.format(directory=directory, incident=found[0].path, build=name))
    return []
