"""``python -m build_support`` builds the libraries in the checkout, as an editable install does.

``python -m build_support forward_check`` builds a program of tests/device and prints its path:
forward_check, backward_check and decode_check run the kernels without torch, append_emulation,
decode_emulation, forward_emulation and widen_emulation run those of cached calls on the CPU,
unit_check tests the primitives, and libflashattn3_host.so is the operator library over a CUDA
runtime without a GPU.
"""

import sys

from .build import build
from .ninja_file import DEVICE_CHECKS
from .toolchain import BuildError
from .units import ROOT

targets = sys.argv[1:]
if not set(targets) <= set(DEVICE_CHECKS):
    sys.exit(f"usage: python -m build_support [{' | '.join(DEVICE_CHECKS)}]")
try:
    print(*build(ROOT / "flashattn3", targets), sep="\n")
except BuildError as error:
    sys.exit(str(error))
