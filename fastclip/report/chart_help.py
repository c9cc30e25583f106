# SPDX-License-Identifier: BSD-3-Clause
"""How to read each chart, by its key: what is healthy, and what trouble looks like."""

from __future__ import annotations

from .series import WINDOW

READINGS = {
    "loss": (
        "Falls fast, then slowly, with an even noise. A jump that does not come back, or a noise that "
        "widens, is trouble; look at the gradient norm a few steps before it."
    ),
    "losses": "The further losses that the training has told, by name. One that runs away names the part.",
    "norm": (
        f"Before clipping. p50 and p95: the median and the 95th percentile of the last {WINDOW} steps. "
        "Healthy norms fall or stay level, with p95 below max_norm; a median that climbs for several steps "
        "comes before most explosions."
    ),
    "groups": "The norm of each group that is clipped by itself, before clipping.",
    "clipping": (
        f"How many of the last {WINDOW} steps were clipped. Clipping is a seat belt, not a steering wheel: "
        "a few percent are usual; near 100 % the limit, and not the learning rate, sets the size of every "
        "step."
    ),
    "rate": (
        "One for each parameter group. No warm-up at the start, or a rise before an event, is a usual cause."
    ),
    "scale": (
        "Doubles now and then and is halved when a gradient overflows. A staircase downwards is a collapse: "
        "some gradient is not finite at any scale."
    ),
    "counts": (
        "Elements of the gradients that are NaN or Inf. Healthy: none, or single steps under a loss scaler."
    ),
    "updates": (
        "What a step changes a parameter by, as a share of its norm. About 0.001 is usual, more at the "
        "start; with a median above 0.2 the learning rate is too high, below 0.00000001 nothing is learned."
    ),
    "weights": "Grows slowly and ever slower. One that grows without end asks for weight decay.",
    "time": "Level, apart from the first steps. One rank above the others makes all of them wait.",
    "seconds": "From the batch to the loss, by rank. One above the others makes all of them wait.",
    "throughput": "Of the lowest rank. It falls where batches are waited for.",
    "memory": "Level after the first steps. One that only grows ends in a full memory.",
    "gradients": (
        "Before clipping: in each step of the largest gradients, and every hundred steps of all. Healthy "
        "rows keep their colour; a bright row is where the norm comes from, a dark one learns nothing."
    ),
    "ratios": (
        "What a step changes each parameter by, as a share of its norm. One bright row is a part of the "
        "model whose learning rate is too high for it."
    ),
    "activations": (
        "Root mean square of what each module gives out; its NaN and Inf are marked. Healthy rows keep "
        "their colour; one that brightens from row to row grows through the model."
    ),
}
