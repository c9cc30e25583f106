# SPDX-License-Identifier: BSD-3-Clause
"""The names of parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..optim.step_inputs import names_in


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the model's names, and places in the optimizer for parameters that the model does not have."""
    return names_in(optimizer) | {p: name for name, p in model.named_parameters(remove_duplicate=False)}


class ParameterNames:
    """Names by parameter, also of parameters that are added later."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._names: dict[Tensor, str] = {}

    def __getitem__(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            self._names = parameter_names(self._model, self._optimizer)
        return self._names.get(parameter, "a removed parameter")
