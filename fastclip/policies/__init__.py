# SPDX-License-Identifier: BSD-3-Clause
"""How max_norm is chosen from the norms of the run: what may stand in the place of a number.

Every function of fastclip that takes ``max_norm`` and clips takes a policy too, and asks it once a step for
the limit. A policy reads numbers that are the same on every rank, so it answers the same on every rank; it
lives on the device of the norms and never waits for it. One object serves one optimizer or model: it
remembers the norms that it has seen. A fixed limit needs no policy, it is a number.
"""

from .adagc import AdaGC
from .apply import PolicyResult, measure, require_policy, scale_
from .base import Policy
from .spike_skip import SpikeSkip
from .trailing_percentile import TrailingPercentile
from .zclip import ZClip

__all__ = [
    "AdaGC",
    "Policy",
    "PolicyResult",
    "SpikeSkip",
    "TrailingPercentile",
    "ZClip",
    "measure",
    "require_policy",
    "scale_",
]
