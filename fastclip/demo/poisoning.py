# SPDX-License-Identifier: BSD-3-Clause
"""A batch with a healthy loss and NaN gradients: what fastclip reports, and what torch's clipping does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .. import clip_
from .character_model import Batch, CharacterModel, Corpus
from .comparison import MAX_NORM, TimedTraining

POISON = """
2. One poisoned batch, made on purpose
  The text ended one passage early, so padding fills the batch. The loss ignores
  padding and looks healthy: {loss:.4f}. But the model also gets the mean word
  length of the text before each passage, and before padding there is no text:
  0 characters / 0 spaces = NaN. The backward pass multiplies it by the gradient
  of the padding, which is 0, and 0 * NaN = NaN.
"""


def nan_counts(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the number of NaN of each tensor that has any, by name."""
    counts = {name: int(tensor.isnan().sum()) for name, tensor in tensors}
    return {name: count for name, count in counts.items() if count}


def show_outcome(model: CharacterModel, batch: Batch) -> None:
    """Print how many parameters hold NaN, and the loss on the next batch."""
    affected, count = len(nan_counts(model.named_parameters())), len(list(model.parameters()))
    print(f"    parameters that hold NaN: {affected} of {count}")
    print(f"    loss on the next batch: {model.loss(batch):.4f}\n")


def show_fastclip(model: CharacterModel, gradients: dict[str, Tensor]) -> list[str]:
    """Print what fastclip reports about the poisoned gradients; return what is wrong with it."""
    true = nan_counts(gradients.items())
    bits = {name: g.view(torch.int32) for name, g in gradients.items()}  # NaN does not equal itself
    before = {name: value.clone() for name, value in bits.items()}
    stats = clip_(model.named_parameters(), MAX_NORM, nonfinite="skip")
    reported = {t.name: t.nan_count for t in stats.worst(len(gradients)) if t.nan_count}
    if reported != true or not reported or stats.found_inf != 1:
        return [f"fastclip found NaN in {reported}, but it is in {true}"]
    changed = [name for name, now in bits.items() if not torch.equal(now, before[name])]
    print('  stats = fastclip.clip_(model.named_parameters(), max_norm, nonfinite="skip")')
    named = f"{len(reported)} of {len(before)} tensors"
    print(f"    total norm {stats.total_norm:.4f}; stats.worst() names {named}:")
    for name, count in reported.items():
        print(f"      {name:<24} NaN in {count:,} of {gradients[name].numel():,} elements")
    print(f"    gradients that changed: {', '.join(changed) or 'none, not a bit'}")
    print(f"    stats.found_inf is {stats.found_inf:.0f}, so optimizer.step() is skipped")
    return [f"the gradient of {name} should be untouched, but changed" for name in changed]


def poison(training: TimedTraining, corpus: Corpus) -> list[str]:
    """Backpropagate a batch that is one passage short, then clip it twice; return what went wrong."""
    training.optimizer.zero_grad()
    loss = training.model.loss(corpus.batch(missing=1))
    loss.backward()
    gradients = {name: p.grad for name, p in training.model.named_parameters() if p.grad is not None}
    next_batch = corpus.batch()
    print(POISON.format(loss=loss.item()))
    failures = show_fastclip(training.model, gradients)
    show_outcome(training.model, next_batch)
    total_norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), MAX_NORM)
    training.optimizer.step()
    affected = f"{len(nan_counts(gradients.items()))} of {len(gradients)} tensors"
    print("  torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) with the same gradients")
    print(f"    total norm {total_norm:.4f}; NaN is now in {affected}, and optimizer.step() uses it")
    show_outcome(training.model, next_batch)
    return failures
