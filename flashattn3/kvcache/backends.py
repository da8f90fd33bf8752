"""The backends of cached calls, in the order in which automatic dispatch tries them."""

from ..backends.hopper.kvcache import BACKEND as HOPPER
from ..backends.reference.kvcache import BACKEND as REFERENCE
from ..backends.triton.kvcache import BACKEND as TRITON

CACHE_BACKENDS = (HOPPER, TRITON, REFERENCE)
