"""The backends, in the order in which automatic dispatch tries them."""

from ..call.selection import NAMES
from .hopper.backend import BACKEND as HOPPER
from .reference.backend import BACKEND as REFERENCE
from .triton.backend import BACKEND as TRITON

BACKENDS = tuple(sorted((HOPPER, REFERENCE, TRITON), key=lambda backend: NAMES.index(backend.name)))
