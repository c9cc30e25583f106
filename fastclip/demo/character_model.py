# SPDX-License-Identifier: BSD-3-Clause
"""The demo's language model and its text: the characters of Python's documentation topics."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PREFIX = 256  # characters before a passage, from which its features are computed
Batch = tuple[Tensor, Tensor, Tensor]  # tokens and targets [batch, context], features [batch, 4]


class Size(NamedTuple):
    """The size of the training: of the model, its batches and the number of steps."""

    steps: int
    layers: int
    width: int
    context: int  # characters per passage
    batch: int  # passages per step


FULL = Size(steps=600, layers=6, width=128, context=64, batch=8)
QUICK = Size(steps=60, layers=2, width=64, context=32, batch=8)


class Corpus:
    """Batches of text with one token per character; the token after the last character is padding."""

    def __init__(self, size: Size, seed: int) -> None:
        self.size, self.generator = size, torch.Generator().manual_seed(seed)
        text = "\n".join(topics.values())
        characters = sorted(set(text))
        numbers = {character: number for number, character in enumerate(characters)}
        self.padding = len(characters)
        self.text = torch.tensor([numbers[character] for character in text])
        kinds = [[c.isupper(), c.isdigit(), c == "\n", c.isspace(), not c.isspace()] for c in characters]
        self.kinds = torch.tensor([*kinds, [False] * 5], dtype=torch.float32)

    def batch(self, missing: int = 0) -> Batch:
        """Return random passages; the rows of missing passages are padding."""
        passages, end = self.size.batch - missing, len(self.text) - self.size.context
        starts = torch.randint(PREFIX, end, (passages, 1), generator=self.generator)
        rows = self.text[starts + torch.arange(-PREFIX, self.size.context + 1)]
        rows = F.pad(rows, (0, 0, 0, missing), value=self.padding)
        capitals, digits, lines, spaces, visible = self.kinds[rows[:, :PREFIX]].sum(1).unbind(1)
        word_length = visible / spaces
        features = torch.stack([capitals / PREFIX, digits / PREFIX, lines / PREFIX, word_length / 10], 1)
        return rows[:, PREFIX:-1], rows[:, PREFIX + 1 :], features


class Block(nn.Module):
    """A transformer block with causal attention and layer norms before its two parts."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.width // 32
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class CharacterModel(nn.Module):
    """A causal transformer over characters; features of the preceding text are added before its head."""

    def __init__(self, size: Size, padding: int) -> None:
        super().__init__()
        self.padding, symbols = padding, padding + 1
        self.token_embedding = nn.Embedding(symbols, size.width)
        self.position_embedding = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.final_norm = nn.LayerNorm(size.width)
        self.prefix_features = nn.Linear(4, size.width, bias=False)
        self.head = nn.Linear(size.width, symbols)
        for matrix in (parameter for parameter in self.parameters() if parameter.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight
        x = self.final_norm(self.blocks(x))
        return self.head(x + self.prefix_features(features).unsqueeze(1))

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross entropy over the tokens that are not padding."""
        tokens, targets, features = batch
        present = targets != self.padding
        return F.cross_entropy(self(tokens, features)[present], targets[present])
