# SPDX-License-Identifier: BSD-3-Clause
"""A training under the monitor that meets a poisoned batch; its log, and an incident that can be replayed."""

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
  Step {step} is given a poisoned batch as above.
"""
NEXT = """
Its log and the poisoned step are in {directory}. See them with
  fastclip lint {directory}
  fastclip report {directory} -o report.html
  fastclip diagnose {directory}
  fastclip incidents {directory}
and run that step again with
  fastclip replay {incident} fastclip.demo.monitoring:{build}"""

Training = tuple[CharacterModel, Optimizer, Callable[[CharacterModel, Mapping[str, Tensor]], Tensor]]


def build() -> Training:
    """What `fastclip replay` needs for an incident of the demo."""
    return _built(FULL)


def build_quick() -> Training:
    """The same for one of `fastclip demo --quick`."""
    return _built(QUICK)


def _built(size: Size) -> Training:
    model, optimizer = _model_and_optimizer(Corpus(size, seed=0), seed=0)

    def loss_function(model: CharacterModel, batch: Mapping[str, Tensor]) -> Tensor:
        return model.loss((batch["tokens"], batch["targets"], batch["features"]))

    return model, optimizer, loss_function


def _model_and_optimizer(corpus: Corpus, seed: int) -> tuple[CharacterModel, AdamW]:
    torch.manual_seed(seed)
    model = CharacterModel(corpus.size, corpus.padding)
    return model, AdamW(model.parameters(), lr=7e-4, fused=True)


def monitored(corpus: Corpus, seed: int, steps: int, directory: str | None = None) -> list[str]:
    """A training under the monitor, with one poisoned batch. Returns what went wrong.

    Args:
        directory: for the log and the incident; None for neither.
    """
    model, optimizer = _model_and_optimizer(corpus, seed)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    poisoned = steps * 2 // 3
    print(MONITORED.format(steps=steps, max_norm=MAX_NORM, step=poisoned))
    logger = logging.getLogger("fastclip.monitor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the summary tells the same below
    kept: dict[str, Any] = {} if directory is None else {"log_dir": directory, "incidents": directory}
    monitor = Monitor(model, optimizer, max_norm=MAX_NORM, scheduler=warmup, **kept)
    with closing(monitor), warnings.catch_warnings():
        warnings.simplefilter("ignore", IncidentSaved)  # told at the end
        for step in range(steps):
            batch = corpus.batch(missing=step == poisoned)
            passages = range(step * corpus.size.batch, (step + 1) * corpus.size.batch)
            tokens, targets, features = batch
            monitor.batch(tokens=tokens, targets=targets, features=features, sample_ids=passages)
            loss = model.loss(batch)
            monitor.loss(loss)
            loss.backward()
            optimizer.step()  # clips, and leaves the poisoned step out
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
        failures.append("the poisoned step should have been left out")
    return failures


def tell_next(directory: str, size: Size) -> list[str]:
    """Print the commands that show what was written. Returns what went wrong."""
    found = list_incidents(directory)
    if len(found) != 1 or found[0].damage is not None:
        names = ", ".join(summary.path.name for summary in found) or "none"
        return [f"there should be one whole incident in {directory}, but there is {names}"]
    name = build_quick.__name__ if size is QUICK else build.__name__
    print(NEXT.format(directory=directory, incident=found[0].path, build=name))
    return []
