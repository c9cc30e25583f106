# SPDX-License-Identifier: BSD-3-Clause
"""The same training twice, clipped by torch and by fastclip: losses and times of both."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import mean, median

import torch
from torch import Tensor

from .character_model import Batch, CharacterModel, Corpus, Size

try:
    from plotext import figure
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f'the demo needs plotext 6 and tqdm: pip install "torch-fastclip[demo]" ({error})'
    ) from error

MAX_NORM = 1.5  # the gradients of this training exceed it in about half of the steps
TIME_LIMIT = 110.0  # seconds; both trainings have made the same steps whenever they stop
# The largest difference of the losses up to a step. fastclip sums squares in float64, so a norm may differ
# from torch's in its last bits; training is chaotic and can amplify that. Five seeds reached 1e-6 and 4e-6.
TOLERANCES = {100: 1e-5, 600: 1e-2}
TRAINING = """\
1. The same training twice
  A transformer of {:,} parameters in {} tensors learns to write from the {:,}
  characters of Python's documentation topics: AdamW, max_norm {}, {} steps or
  {:.0f} seconds, CPU threads: {}. Two copies see the same batches, one step of each in
  turn, and which comes first alternates. One is clipped by
  torch.nn.utils.clip_grad_norm_, the other by fastclip.clip_grad_norm_.
"""


class TimedTraining:
    """A model, its optimizer, the function that clips, and the losses, norms and times of each step."""

    def __init__(self, clip: Callable[..., Tensor], size: Size, padding: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = CharacterModel(size, padding)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=7e-4)
        self.warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.02, total_iters=50)
        self.clip = clip
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.clip_seconds: list[float] = []
        self.step_seconds: list[float] = []

    def step(self, batch: Batch) -> None:
        """Make one step and record its loss, norm and times."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model.loss(batch)
        loss.backward()
        before_clip = time.perf_counter()
        total_norm = self.clip(self.model.parameters(), MAX_NORM)
        after_clip = time.perf_counter()
        self.optimizer.step()
        self.warmup.step()
        self.step_seconds.append(time.perf_counter() - begin)
        self.clip_seconds.append(after_clip - before_clip)
        self.losses.append(loss.item())
        self.norms.append(total_norm.item())

    @property
    def clipped(self) -> int:
        """The number of steps whose gradients were clipped."""
        return sum(norm > MAX_NORM for norm in self.norms)


def train(theirs: TimedTraining, ours: TimedTraining, corpus: Corpus) -> None:
    """Train both in lock-step, so that other load on the machine affects both alike."""
    plain = not sys.stderr.isatty()  # a progress bar would fill a log with lines
    deadline, steps = time.perf_counter() + TIME_LIMIT, corpus.size.steps
    bar = tqdm(range(1, steps + 1), desc="  training both", unit=" steps", disable=plain)
    for step in bar:
        batch = corpus.batch()
        for training in (theirs, ours) if step % 2 else (ours, theirs):
            training.step(batch)
        status = f"loss {ours.losses[-1]:.3f}, gradient norm {ours.norms[-1]:.2f}"
        bar.set_postfix_str(status, refresh=False)
        if plain and step % (steps // 6) == 0:
            print(f"  step {step} of {steps}: {status}", file=sys.stderr, flush=True)
        if time.perf_counter() > deadline:
            break


def show_losses(theirs: TimedTraining, ours: TimedTraining) -> None:
    """Print a chart of both losses."""
    steps = list(range(1, len(ours.losses) + 1))
    apart, tick = len(steps) // 20 or 1, len(steps) // 6 or 1
    figure.clear().theme("simple").plot_size(height=18).title("loss at each step")
    figure.draw(figure.signal(steps, theirs.losses, marker="braille").lines(True))
    figure.draw(figure.signal(steps[::apart], ours.losses[::apart], marker="o"))
    figure.ruler("x").ticks([1, *steps[tick - 1 :: tick]])
    print(figure.build().string(colorless=not sys.stdout.isatty()))
    print(f"  line: torch.nn.utils.clip_grad_norm_    o: fastclip.clip_grad_norm_ (one step in {apart})\n")


def loss_differences(theirs: TimedTraining, ours: TimedTraining) -> list[float]:
    """Return the largest difference of the losses up to each step of TOLERANCES."""
    each = (torch.tensor(theirs.losses) - torch.tensor(ours.losses)).abs()
    return [each[:steps].max().item() for steps in TOLERANCES]


def show_table(theirs: TimedTraining, ours: TimedTraining) -> None:
    """Print the final losses, the clipped steps, the times, and how far the losses differ."""

    def row(label: str, value: Callable[[TimedTraining], str]) -> None:
        print(f"  {label:<46}{value(theirs):>13}{value(ours):>13}")

    steps = len(ours.losses)
    print(f"  {'':<46}{'torch':>13}{'fastclip':>13}\n  {'-' * 72}")
    row("final loss (mean of the last 20 steps)", lambda t: f"{mean(t.losses[-20:]):.4f}")
    row("steps whose gradients were clipped", lambda t: f"{t.clipped} of {steps}")
    row("time of a whole step (median)", lambda t: f"{median(t.step_seconds) * 1e3:.1f} ms")
    row("time in clipping (median)", lambda t: f"{median(t.clip_seconds) * 1e3:.3f} ms")
    row("its share of a whole step", lambda t: f"{median(t.clip_seconds) / median(t.step_seconds):.2%}")
    row("time in clipping, all steps together", lambda t: f"{sum(t.clip_seconds) * 1e3:.1f} ms")
    medians, sums = (f(theirs.clip_seconds) / f(ours.clip_seconds) for f in (median, sum))
    print(f"\n  Time in clipping, torch / fastclip: {medians:.2f} (median), {sums:.2f} (all steps).")
    for (first, limit), found in zip(TOLERANCES.items(), loss_differences(theirs, ours), strict=True):
        print(
            f"  Losses of the first {min(first, steps)} steps differ by {found:.1e} at most (limit {limit})."
        )


def training_failures(theirs: TimedTraining, ours: TimedTraining) -> list[str]:
    """Return what is wrong with the two trainings, one line each."""
    if not theirs.clipped:
        return ["no gradients were clipped, so nothing was compared"]
    found = zip(TOLERANCES.items(), loss_differences(theirs, ours), strict=True)
    return [f"the losses differ by {d:.1e} within {n} steps" for (n, limit), d in found if not d <= limit]
