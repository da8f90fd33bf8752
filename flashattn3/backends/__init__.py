"""The backends, in the order in which automatic dispatch asks them."""

from .reference import BACKEND as REFERENCE
from .triton import BACKEND as TRITON

BACKENDS = (TRITON, REFERENCE)
