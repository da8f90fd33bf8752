"""The mask_mod of a block mask, a function of scalar positions, computed for all scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def seen_by(
    mask_mod: Predicate, batch: int, heads: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    """bool (batch, heads, queries, keys), without a copy along axes that mask_mod does not read.

    A function of single scores that computes nothing else than elementwise operations and elements
    of tensors is called once, with positions that broadcast. torch.vmap computes others, in four
    times as many operations and all of the memory.
    """
    sizes = batch, heads, queries, keys
    found = _broadcast(mask_mod, sizes, device)
    if found is None:
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(mask_mod, *sizes, device=device)
    return found.expand(sizes)


class _NotElementwiseError(Exception):
    pass


def _broadcast(
    mask_mod: Predicate, sizes: tuple[int, int, int, int], device: torch.device
) -> Tensor | None:
    """None for a mask_mod that does more than ``_Elementwise`` knows."""
    count = torch.arange(max(sizes), device=device)
    positions = []
    for axis, size in enumerate(sizes):
        shape = [1, 1, 1, 1]
        shape[axis] = size
        positions.append(count[:size].view(shape))
    mode = _Elementwise(positions)
    try:
        with mode:
            found = mask_mod(*positions)
    except Exception:  # torch.vmap raises an error of the function itself too
        return None
    if not (mode.holds and isinstance(found, Tensor) and found.dtype == torch.bool):
        return None
    if mode.is_of_scores(found) or found.ndim == 0:
        return found
    return None


class _Elementwise(TorchFunctionMode):
    """Follows the tensors that have an element for each score: four axes, all from the positions.

    Under torch.vmap they are scalars. The same operations give the same elements if each one is
    elementwise, in which case other tensors must be scalars too, or takes elements of a tensor by
    an index for each axis. ``holds`` tells whether there were no others. Scalars of the caller get
    four axes, because torch promotes the dtypes of scalars beside tensors in another way.
    """

    def __init__(self, positions: list[Tensor]) -> None:
        super().__init__()
        self.of_scores, self.holds = list(positions), True

    def is_of_scores(self, x: object) -> bool:
        return any(x is known for known in self.of_scores)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name == "__getitem__":
            fits = self._takes_elements(*args)
        elif name in _ELEMENTWISE:
            args = tuple(map(self._with_axes, args))
            fits = not kwargs and all(map(self._is_operand, args))
        elif name in _NEW:
            found = function(*args, **(kwargs or {}))
            self.holds = self.holds and found.ndim == 0
            return found
        else:
            fits = function in _PROPERTIES
        if not fits:
            self.holds = False
            raise _NotElementwiseError(name)
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.of_scores.append(found)
        return found

    def _with_axes(self, x: object) -> object:
        return x.view(1, 1, 1, 1) if isinstance(x, Tensor) and x.ndim == 0 else x

    def _is_operand(self, x: object) -> bool:
        if isinstance(x, Tensor):
            return x.ndim == 4 and (x.numel() == 1 or self.is_of_scores(x))
        return isinstance(x, (bool, int, float, torch.dtype))

    def _takes_elements(self, of: object, index: object) -> bool:
        index = index if isinstance(index, tuple) else (index,)
        if not isinstance(of, Tensor) or self.is_of_scores(of) or len(index) != of.ndim:
            return False
        by_scores = False
        for x in index:
            if type(x) is int:
                continue
            if not isinstance(x, Tensor) or x.dtype not in _INTEGERS:
                return False
            by_scores = by_scores or self.is_of_scores(x)
            if x.ndim and not self.is_of_scores(x):
                return False
        return by_scores


_INTEGERS = (torch.int64, torch.int32)
# Names of functions and of methods, as torch gives them to a mode. None writes to its arguments.
_BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "add", "sub", "mul", "floordiv")
_BINARY += ("mod", "truediv", "rshift", "lshift")
_NAMED = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "div", "floor_divide", "abs")
_NAMED += ("neg", "remainder", "where", "minimum", "maximum", "clamp")
_NAMED += tuple(
    f"{kind}_{x}" for kind in ("logical", "bitwise") for x in ("and", "or", "xor", "not")
)
_NAMED += ("to", "bool", "int", "long", "float", "__invert__", "__neg__", "__abs__")
_ELEMENTWISE = frozenset((*_NAMED, *(f"__{r}{name}__" for r in ("", "r") for name in _BINARY)))
_NEW = frozenset(("new_ones", "new_zeros", "new_full", "new_tensor"))
_PROPERTIES = (Tensor.device.__get__, Tensor.dtype.__get__)
