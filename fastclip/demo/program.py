# SPDX-License-Identifier: BSD-3-Clause
"""All parts of the demonstration, one after the other, and whether each came out as it should."""

from __future__ import annotations

import torch

from .. import clip_grad_norm_
from .character_model import FULL, QUICK, Corpus
from .comparison import (
    MAX_NORM,
    TIME_LIMIT,
    TRAINING,
    Run,
    show_losses,
    show_table,
    train,
    training_failures,
)
from .monitoring import monitored, tell_next
from .poisoning import poison


def demonstrate(quick: bool, seed: int, directory: str | None) -> list[str]:
    """Train, compare, poison, monitor; print it all. Returns what went wrong.

    Args:
        quick: a smaller model and fewer steps.
        seed: of parameters and batches.
        directory: for the monitor's log and the incident; None for neither.

    Raises:
        OSError: the directory cannot be written.
    """
    corpus = Corpus(QUICK if quick else FULL, seed)
    clips = (torch.nn.utils.clip_grad_norm_, clip_grad_norm_)
    theirs, ours = (Run(clip, corpus.size, corpus.padding, seed) for clip in clips)
    sizes = [p.numel() for p in ours.model.parameters()]
    told = (sum(sizes), len(sizes), len(corpus.text), MAX_NORM, corpus.size.steps, TIME_LIMIT)
    print(TRAINING.format(*told, torch.get_num_threads()))
    train(theirs, ours, corpus)
    show_losses(theirs, ours)
    show_table(theirs, ours)
    failures = training_failures(theirs, ours) + poison(ours, corpus)
    failures += monitored(corpus, seed, 60 if quick else 150, directory)
    passed = "Passed: the two trainings agree, and the poisoned batch was caught and its NaN named."
    print("\n".join(f"FAILED: {failure}" for failure in failures) or passed)
    if directory is not None:
        further = tell_next(directory, corpus.size)
        print("".join(f"FAILED: {failure}\n" for failure in further), end="")
        failures += further
    return failures
