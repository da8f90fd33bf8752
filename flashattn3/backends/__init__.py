"""The backends, in the order in which automatic dispatch asks them."""

from .hopper import BACKEND as HOPPER
from .reference import BACKEND as REFERENCE
from .triton import BACKEND as TRITON

BACKENDS = (HOPPER, TRITON, REFERENCE)
