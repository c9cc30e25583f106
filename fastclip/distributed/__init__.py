# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of which other processes hold parts, in the place of a list of tensors."""

from .process_groups import ProcessGroups, require_process_group
from .sharded import ShardedGradients, shard_gradients

__all__ = ["ProcessGroups", "ShardedGradients", "require_process_group", "shard_gradients"]
