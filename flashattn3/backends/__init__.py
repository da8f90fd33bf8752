"""The backends, in the order in which automatic dispatch tries them."""

from .hopper.backend import BACKEND as HOPPER
from .reference.backend import BACKEND as REFERENCE
from .triton.backend import BACKEND as TRITON

BACKENDS = (HOPPER, TRITON, REFERENCE)
