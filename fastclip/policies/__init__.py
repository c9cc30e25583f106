# SPDX-License-Identifier: BSD-3-Clause
"""Policies: rules that choose max_norm from the norms of the run, in place of a number.

Every function of fastclip that takes ``max_norm`` and clips also takes a policy and asks it for the limit
once a step. A policy reads numbers that are the same on every rank, so its limit is the same on every rank;
it lives on the device of the norms and never waits for it. One object serves one optimizer or model, since it
remembers the norms that it has seen. A fixed limit needs no policy: it is a number.
"""

from .adagc import AdaGC
from .base import Policy
from .spike_skip import SpikeSkip
from .trailing_percentile import TrailingPercentile
from .zclip import ZClip

__all__ = ["AdaGC", "Policy", "SpikeSkip", "TrailingPercentile", "ZClip"]
