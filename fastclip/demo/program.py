# SPDX-License-Identifier: BSD-3-Clause
"""All parts of the demo in order, with a check of each."""

from __future__ import annotations

import torch

from .. import clip_grad_norm_
from .character_model import FULL, QUICK, Corpus
from .comparison import (
    MAX_NORM,
    TIME_LIMIT,
    TRAINING,
    TimedTraining,
    show_losses,
    show_table,
    train,
    training_failures,
)
from .monitored_training import show_next_commands, train_under_monitor
from .poisoning import poison


def demonstrate(quick: bool, seed: int, directory: str | None) -> list[str]:
    """Run and print all parts; return what went wrong.

    Args:
        quick: whether to use a smaller model and fewer steps.
        seed: seed of parameters and batches.
        directory: where the monitor's log and the incident are saved; None saves neither.

    Raises:
        OSError: the directory cannot be written.
    """
    corpus = Corpus(QUICK if quick else FULL, seed)
    clips = (torch.nn.utils.clip_grad_norm_, clip_grad_norm_)
    theirs, ours = (TimedTraining(clip, corpus.size, corpus.padding, seed) for clip in clips)
    sizes = [p.numel() for p in ours.model.parameters()]
    facts = (sum(sizes), len(sizes), len(corpus.text), MAX_NORM, corpus.size.steps, TIME_LIMIT)
    print(TRAINING.format(*facts, torch.get_num_threads()))
    train(theirs, ours, corpus)
    show_losses(theirs, ours)
    show_table(theirs, ours)
    failures = training_failures(theirs, ours) + poison(ours, corpus)
    failures += train_under_monitor(corpus, seed, 60 if quick else 150, directory)
    passed = "Passed: the two trainings agree, and the poisoned batch was caught and its NaN named."
    print("\n".join(f"FAILED: {failure}" for failure in failures) or passed)
    if directory is not None:
        missing = show_next_commands(directory, corpus.size)
        print("".join(f"FAILED: {failure}\n" for failure in missing), end="")
        failures += missing
    return failures
