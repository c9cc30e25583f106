# SPDX-License-Identifier: BSD-3-Clause
"""Help texts of the charts, by key: what is healthy, and what trouble looks like."""

from __future__ import annotations

from .series import WINDOW

CHART_HELP = {
    "loss": (
        "Falls fast, then slowly, with even noise. A jump that does not come back, or noise that widens, is "
        "trouble; look at the gradient norm a few steps before it."
    ),
    "losses": "The other losses that the training reported. One that runs away shows where to look.",
    "norm": (
        f"Before clipping. p50 and p95: the median and the 95th percentile of the last {WINDOW} steps. "
        "Healthy norms fall or stay level, with p95 below max_norm; a median that climbs for several steps "
        "precedes most explosions."
    ),
    "groups": "The norm of each separately clipped group, before clipping.",
    "clipping": (
        f"How many of the last {WINDOW} steps were clipped. Clipping is a seat belt, not a steering wheel: "
        "a few percent are usual; near 100 % the limit, and not the learning rate, sets the size of every "
        "step."
    ),
    "rate": (
        "By parameter group. A missing warm-up at the start, or a rise before an event, is a common cause."
    ),
    "scale": (
        "Doubles now and then and is halved when a gradient overflows. A downward staircase is a collapse: "
        "some gradient is not finite at any scale."
    ),
    "counts": ("Gradient elements that are NaN or Inf. Healthy: none, or single steps with a loss scaler."),
    "updates": (
        "How much a step changes a parameter, as a share of its norm. About 0.001 is usual, more at the "
        "start; with a median above 0.2 the learning rate is too high, below 0.00000001 nothing is learned."
    ),
    "weights": "Grows slowly and ever more slowly. A norm that grows without end calls for weight decay.",
    "time": "Level, apart from the first steps. A rank above the others makes all of them wait.",
    "seconds": "From the batch to the loss, by rank. A rank above the others makes all of them wait.",
    "throughput": "On the lowest rank. It falls where the training waits for batches.",
    "memory": "Level after the first steps. Memory that only grows will run out.",
    "gradients": (
        "Norms before clipping: those of the largest gradients in each step, those of all every hundred "
        "steps. Healthy rows keep their colour; a bright row dominates the norm, a dark one learns nothing."
    ),
    "ratios": (
        "How much a step changes each parameter, as a share of its norm. A single bright row is a part of "
        "the model whose learning rate is too high."
    ),
    "activations": (
        "Root mean square of each module's output; NaN and Inf are hatched. Healthy rows keep their colour; "
        "if rows brighten from one to the next, activations grow through the model."
    ),
}
