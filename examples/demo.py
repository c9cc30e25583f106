# SPDX-License-Identifier: BSD-3-Clause
"""Train a small language model with torch's clipping and with fastclip's, then catch a poisoned batch.

The text is the standard library's own (pydoc_data.topics). It runs on the CPU, in about a minute on two
cores; with --quick in seconds. The exit code is 1 if the two trainings differ by more than rounding or if
fastclip does not name exactly the gradients that hold NaN.
"""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from statistics import mean, median

import torch
from plotext import figure
from torch import Tensor
from tqdm import tqdm

import fastclip
from character_model import FULL, QUICK, Batch, CharacterModel, Corpus, Size

MAX_NORM = 1.5  # the gradients of this training exceed it in about half of the steps
TIME_LIMIT = 110.0  # seconds; the two trainings have made the same steps whenever they stop
# How far the losses may differ up to a step. fastclip sums squares in float64, so a norm may differ from
# torch's in its last bits; training is chaotic and can amplify that. Five seeds reached 1e-6 and 4e-6.
TOLERANCES = {100: 1e-5, 600: 1e-2}
TRAINING = """\
1. The same training twice
  A transformer of {:,} parameters in {} tensors learns to write from the {:,}
  characters of Python's documentation topics: AdamW, max_norm {}, {} steps or
  {:.0f} seconds, CPU threads: {}. Two copies see the same batches, one step of each in
  turn, and which comes first alternates. One is clipped by
  torch.nn.utils.clip_grad_norm_, the other by fastclip.clip_grad_norm_.
"""
POISON = """
2. One poisoned batch, made on purpose
  The text ended one passage early, so padding fills up the batch. It is left out
  of the loss, which looks healthy: {loss:.4f}. But the model also gets the mean
  word length of the text before each passage, and before padding there is none:
  0 characters / 0 spaces = NaN. The backward pass multiplies that with the
  gradient of the padding, which is 0, and 0 * NaN = NaN.
"""


MONITORED = """
3. The monitor, {steps} steps of a new training
  monitor = fastclip.Monitor(model, optimizer, max_norm={max_norm})
  and in the loop: monitor.batch(tokens=tokens, ..., sample_ids=passages); monitor.loss(loss)
  Step {step} is given a poisoned batch as above.
"""


class Run:
    """One training: a model, its optimizer, the function that clips, and what was measured at each step."""

    def __init__(self, clip: Callable[..., Tensor], size: Size, padding: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = CharacterModel(size, padding)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=7e-4)
        self.warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.02, total_iters=50)
        self.clip = clip
        self.losses, self.norms, self.clip_seconds, self.step_seconds = ([] for _ in range(4))

    def step(self, batch: Batch) -> None:
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
        return sum(norm > MAX_NORM for norm in self.norms)


def train(theirs: Run, ours: Run, corpus: Corpus) -> None:
    """Both runs in lock-step, so that whatever disturbs the machine disturbs both alike."""
    plain = not sys.stderr.isatty()  # where a bar that redraws itself would fill a log with lines
    deadline, steps = time.perf_counter() + TIME_LIMIT, corpus.size.steps
    bar = tqdm(range(1, steps + 1), desc="  training both", unit=" steps", disable=plain)
    for step in bar:
        batch = corpus.batch()
        for run in (theirs, ours) if step % 2 else (ours, theirs):
            run.step(batch)
        told = f"loss {ours.losses[-1]:.3f}, gradient norm {ours.norms[-1]:.2f}"
        bar.set_postfix_str(told, refresh=False)
        if plain and step % (steps // 6) == 0:
            print(f"  step {step} of {steps}: {told}", file=sys.stderr, flush=True)
        if time.perf_counter() > deadline:
            break


def show_losses(theirs: Run, ours: Run) -> None:
    steps = list(range(1, len(ours.losses) + 1))
    apart, tick = len(steps) // 20 or 1, len(steps) // 6 or 1
    figure.clear().theme("simple").plot_size(height=18).title("loss at each step")
    figure.draw(figure.signal(steps, theirs.losses, marker="braille").lines(True))
    figure.draw(figure.signal(steps[::apart], ours.losses[::apart], marker="o"))
    figure.ruler("x").ticks([1, *steps[tick - 1 :: tick]])
    print(figure.build().string(colorless=not sys.stdout.isatty()))
    print(f"  line: torch.nn.utils.clip_grad_norm_    o: fastclip.clip_grad_norm_ (one step in {apart})\n")


def loss_differences(theirs: Run, ours: Run) -> list[float]:
    each = (torch.tensor(theirs.losses) - torch.tensor(ours.losses)).abs()
    return [each[:steps].max().item() for steps in TOLERANCES]


def show_table(theirs: Run, ours: Run) -> None:
    def row(label: str, tell: Callable[[Run], str]) -> None:
        print(f"  {label:<46}{tell(theirs):>13}{tell(ours):>13}")

    steps = len(ours.losses)
    print(f"  {'':<46}{'torch':>13}{'fastclip':>13}\n  {'-' * 72}")
    row("final loss (mean of the last 20 steps)", lambda run: f"{mean(run.losses[-20:]):.4f}")
    row("steps whose gradients were clipped", lambda run: f"{run.clipped} of {steps}")
    row("time of a whole step (median)", lambda run: f"{median(run.step_seconds) * 1e3:.1f} ms")
    row("time in clipping (median)", lambda run: f"{median(run.clip_seconds) * 1e3:.3f} ms")
    row("its share of a whole step", lambda r: f"{median(r.clip_seconds) / median(r.step_seconds):.2%}")
    row("time in clipping, all steps together", lambda run: f"{sum(run.clip_seconds) * 1e3:.1f} ms")
    medians, sums = (tell(theirs.clip_seconds) / tell(ours.clip_seconds) for tell in (median, sum))
    print(f"\n  Time in clipping, torch / fastclip: {medians:.2f} (median), {sums:.2f} (all steps).")
    for (first, limit), found in zip(TOLERANCES.items(), loss_differences(theirs, ours), strict=True):
        print(
            f"  Losses of the first {min(first, steps)} steps differ by {found:.1e} at most (limit {limit})."
        )


def nan_counts(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    counts = {name: int(tensor.isnan().sum()) for name, tensor in tensors}
    return {name: count for name, count in counts.items() if count}


def show_outcome(model: CharacterModel, batch: Batch) -> None:
    spoiled, count = len(nan_counts(model.named_parameters())), len(list(model.parameters()))
    print(f"    parameters that hold NaN: {spoiled} of {count}")
    print(f"    loss on the next batch: {model.loss(batch):.4f}\n")


def show_fastclip(model: CharacterModel, gradients: dict[str, Tensor]) -> list[str]:
    """What fastclip finds in the poisoned gradients. Returns what is wrong with that."""
    true = nan_counts(gradients.items())
    bits = {name: g.view(torch.int32) for name, g in gradients.items()}  # as NaN does not equal itself
    before = {name: value.clone() for name, value in bits.items()}
    stats = fastclip.clip_(model.named_parameters(), MAX_NORM, nonfinite="skip")
    told = {t.name: t.nan_count for t in stats.worst(len(gradients)) if t.nan_count}
    if told != true or not told or stats.found_inf != 1:
        return [f"fastclip found NaN in {told}, but it is in {true}"]
    changed = [name for name, now in bits.items() if not torch.equal(now, before[name])]
    print('  stats = fastclip.clip_(model.named_parameters(), max_norm, nonfinite="skip")')
    print(f"    total norm {stats.total_norm:.4f}; stats.worst() names {len(told)} of {len(before)} tensors:")
    for name, count in told.items():
        print(f"      {name:<24} NaN in {count:,} of {gradients[name].numel():,} elements")
    print(f"    gradients that changed: {', '.join(changed) or 'none, not a bit'}")
    print(f"    stats.found_inf is {stats.found_inf:.0f}, so optimizer.step() is left out")
    return [f"the gradient of {name} should be untouched, but changed" for name in changed]


def poison(run: Run, corpus: Corpus) -> list[str]:
    """A batch that is one passage short: a finite loss, NaN in gradients. Returns what went wrong."""
    run.optimizer.zero_grad()
    loss = run.model.loss(corpus.batch(missing=1))
    loss.backward()
    gradients = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    next_batch = corpus.batch()
    print(POISON.format(loss=loss.item()))
    failures = show_fastclip(run.model, gradients)
    show_outcome(run.model, next_batch)
    total_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), MAX_NORM)
    run.optimizer.step()
    spoiled = f"{len(nan_counts(gradients.items()))} of {len(gradients)} tensors"
    print("  torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) with the same gradients")
    print(f"    total norm {total_norm:.4f}; NaN is now in {spoiled}, and optimizer.step() uses it")
    show_outcome(run.model, next_batch)
    return failures


def monitored(corpus: Corpus, seed: int, steps: int) -> list[str]:
    """A training under the monitor, with one poisoned batch. Returns what went wrong."""
    torch.manual_seed(seed)
    model = CharacterModel(corpus.size, corpus.padding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-4, fused=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    poisoned = steps * 2 // 3
    print(MONITORED.format(steps=steps, max_norm=MAX_NORM, step=poisoned))
    logging.getLogger("fastclip.monitor").setLevel(logging.CRITICAL)  # the summary tells the same below
    monitor = fastclip.Monitor(model, optimizer, max_norm=MAX_NORM, scheduler=warmup)
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
    print(textwrap.indent(monitor.summary(), "  "))
    print("\n  monitor.diagnose()")
    diagnosis = monitor.diagnose()
    for line in str(diagnosis).splitlines():
        print(textwrap.fill(line, 100, initial_indent="  ", subsequent_indent=" " * 13))
    failures = [] if diagnosis.cause == "nonfinite_batch" else [f"the diagnosis is {diagnosis.cause}"]
    if monitor.handle.skipped_steps != 1 or nan_counts(model.named_parameters()):
        failures.append("the poisoned step should have been left out")
    return failures


def training_failures(theirs: Run, ours: Run) -> list[str]:
    if not theirs.clipped:
        return ["no gradients were clipped, so nothing was compared"]
    found = zip(TOLERANCES.items(), loss_differences(theirs, ours), strict=True)
    return [f"the losses differ by {d:.1e} within {n} steps" for (n, limit), d in found if not d <= limit]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--seed", type=int, default=0, help="for parameters and batches (default: 0)")
    threads = torch.get_num_threads()
    parser.add_argument("--threads", type=int, default=threads, help=f"of the CPU (default: {threads})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    corpus = Corpus(QUICK if options.quick else FULL, options.seed)
    clips = (torch.nn.utils.clip_grad_norm_, fastclip.clip_grad_norm_)
    theirs, ours = (Run(clip, corpus.size, corpus.padding, options.seed) for clip in clips)
    sizes = [p.numel() for p in ours.model.parameters()]
    told = (sum(sizes), len(sizes), len(corpus.text), MAX_NORM, corpus.size.steps, TIME_LIMIT)
    print(TRAINING.format(*told, options.threads))
    train(theirs, ours, corpus)
    show_losses(theirs, ours)
    show_table(theirs, ours)
    failures = training_failures(theirs, ours) + poison(ours, corpus)
    failures += monitored(corpus, options.seed, 60 if options.quick else 150)
    passed = "Passed: the two trainings agree, and the poisoned batch was caught and its NaN named."
    print("\n".join(f"FAILED: {failure}" for failure in failures) or passed)
    return 1 if failures else 0


if __name__ == "__main__":
    # Into a pipe Python may choose an encoding without the characters of the chart, and holds lines back.
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    sys.exit(main())
