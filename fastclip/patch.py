# SPDX-License-Identifier: BSD-3-Clause
"""Replace torch's clipping by fastclip, for code that cannot be changed."""

from __future__ import annotations

from types import ModuleType, TracebackType

import torch.nn.utils
from torch.nn.utils import clip_grad

from .clip_grad import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

_PUBLIC = {
    "clip_grad_norm_": clip_grad_norm_,
    "clip_grad_value_": clip_grad_value_,
    "clip_grads_with_norm_": clip_grads_with_norm_,
    "get_total_norm": get_total_norm,
}
# torch's clip_grad_norm_ looks these up when it runs, so that replacing them also reaches code that has
# already imported it by name.
_PRIVATE = {
    "_get_total_norm": get_total_norm,
    "_clip_grads_with_norm_": clip_grads_with_norm_,
}
_REPLACEMENTS: dict[ModuleType, dict] = {
    torch.nn.utils: _PUBLIC,
    clip_grad: {**_PUBLIC, **_PRIVATE},
}


class patch_torch:
    """Replace the clipping functions of ``torch.nn.utils`` until :meth:`undo`, or inside a `with` block.

    This also reaches code that has already imported ``clip_grad_norm_`` from ``torch.nn.utils`` by name, but
    not code that has imported ``clip_grad_value_`` so. May be nested: each patch undoes its own changes.
    """

    def __init__(self) -> None:
        self._before = {
            module: {name: getattr(module, name) for name in names if hasattr(module, name)}
            for module, names in _REPLACEMENTS.items()
        }
        for module, names in self._before.items():
            for name in names:
                setattr(module, name, _REPLACEMENTS[module][name])

    def undo(self) -> None:
        """Restore the functions. A second call does nothing."""
        before, self._before = self._before, {}
        for module, names in before.items():
            for name, function in names.items():
                setattr(module, name, function)

    def __enter__(self) -> patch_torch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()
