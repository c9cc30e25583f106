# SPDX-License-Identifier: BSD-3-Clause
"""Small trainings that really fail, each for one reason, with a monitor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastclip
from fastclip.monitor import Monitor

SAMPLES = 32  # in a batch
LENGTH = 32  # of a passage of text


@dataclass
class Outcome:
    """The losses of a training, and its monitor."""

    losses: list[float]
    monitor: Monitor

    @property
    def exploded(self) -> int | None:
        """The first step whose loss shows it: not finite, or 1.3 times the median of all before."""
        for step, loss in enumerate(self.losses):
            before = sorted(self.losses[:step])
            if not math.isfinite(loss) or (before and loss > 1.3 * before[len(before) // 2]):
                return step
        return None

    def first(self, *kinds: str) -> int | None:
        """Return the step of the first warning or error, of some kinds or of any."""
        found = [e for e in self.monitor.events if e.severity != "info"]
        return next((e.step for e in found if not kinds or e.kind in kinds), None)


class Text:
    """Passages of Python's documentation topics, one number a character."""

    def __init__(self) -> None:
        text = "".join(topics[key] for key in sorted(topics))[:200_000]
        characters = sorted(set(text))
        numbers = {character: number for number, character in enumerate(characters)}
        self.numbers = torch.tensor([numbers[character] for character in text])
        self.symbols = len(characters)
        self.generator = torch.Generator().manual_seed(1)

    def batch(self, length: int = LENGTH) -> tuple[Tensor, Tensor, list[int]]:
        starts = torch.randint(len(self.numbers) - length, (SAMPLES, 1), generator=self.generator)
        rows = self.numbers[starts + torch.arange(length + 1)]
        return rows[:, :-1], rows[:, 1:], starts.flatten().tolist()


class Transformer(nn.Module):
    def __init__(self, symbols: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(symbols, width)
        self.position_embedding = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


class Recurrent(nn.Module):
    def __init__(self, symbols: int, width: int = 64) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(symbols, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.token_embedding(tokens))[0])


def language_model(kind: type[nn.Module], lr: float, steps: int, long_at: int | None = None) -> Outcome:
    """Train with AdamW on text; `long_at`: the step whose passages are eight times as long as the others."""
    torch.manual_seed(0)
    text = Text()
    model = kind(text.symbols)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    monitor = Monitor(model, optimizer, max_norm=1.0)
    losses = []
    for step in range(steps):
        tokens, targets, starts = text.batch(8 * LENGTH if step == long_at else LENGTH)
        monitor.batch(tokens, targets, sample_ids=starts)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        monitor.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, monitor)


def points(classes: int, steps: int, order: str = "mixed") -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Yield noisy points of each class; "sorted": the first half of the steps has half of the classes."""
    generator = torch.Generator().manual_seed(2)
    centres = 0.5 * torch.randn(classes, 16, generator=generator)
    for step in range(steps):
        labels = torch.randint(
            0, classes // 2 if order == "sorted" else classes, (SAMPLES,), generator=generator
        )
        if order == "sorted" and step >= steps // 2:
            labels += classes // 2
        inputs = centres[labels] + torch.randn(SAMPLES, 16, generator=generator)
        yield inputs, labels, list(range(step * SAMPLES, (step + 1) * SAMPLES))


def classifier(
    steps: int = 60,
    order: str = "mixed",
    nan_at: int | None = None,
    label_at: int | None = None,
    num_classes: int | None = 10,
) -> Outcome:
    """Train a small classifier of ten classes; one batch may hold NaN or a label out of range."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
    monitor = Monitor(model, optimizer, max_norm=5.0, num_classes=num_classes)
    losses = []
    for step, (inputs, labels, ids) in enumerate(points(10, steps, order)):
        if step == nan_at:
            inputs[5, 3] = math.nan
        if step == label_at:
            labels[7] = 99
        try:
            with monitor.batch(inputs, labels, sample_ids=ids):
                loss = F.cross_entropy(model(inputs), labels)
                monitor.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                warm_up.step()
                losses.append(loss.item())
        except IndexError:
            losses.append(math.nan)  # as the training ends here
            break
    return Outcome(losses, monitor)


def float16_regression(steps: int = 120, scaler_class: type = fastclip.GradScaler) -> Outcome:
    """Train on targets of 100,000, as of prices that are not normalised: float16 ends at 65,504."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=20)
    scaler = scaler_class("cpu")
    monitor = Monitor(model, optimizer, max_norm=1e9, scaler=scaler, scheduler=warm_up, activations="leaf")
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        inputs = torch.rand(SAMPLES, 8, generator=generator)
        prices = 1e5 * (1 + inputs.mean(1, keepdim=True))
        monitor.batch(inputs, prices)
        with torch.autocast("cpu", dtype=torch.float16):
            guess = model(inputs)
        loss = F.l1_loss(guess.float(), prices) / 1e5
        monitor.loss(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        try:
            scaler.update()
        except RuntimeError:  # fastclip's, at a scale of 0
            break
        optimizer.zero_grad()
        warm_up.step()
        losses.append(loss.item())
    return Outcome(losses, monitor)


def float16_square_root(steps: int = 40) -> Outcome:
    """Train on the length of a zero vector: its gradient is NaN at any scale, its loss healthy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    monitor = Monitor(model, optimizer, max_norm=1.0, scaler=scaler)
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        inputs = torch.randn(SAMPLES, 8, generator=generator)
        monitor.batch(inputs)
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(inputs)
        # Differences to itself, as a pairwise distance has on its diagonal.
        loss = outputs.float().square().mean() + (outputs - outputs).float().square().sum(1).sqrt().mean()
        monitor.loss(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, monitor)
