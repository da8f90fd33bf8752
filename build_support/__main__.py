"""``python -m build_support``: the libraries into the checkout, as an editable install has them."""

import sys

from .build import build
from .toolchain import BuildError
from .units import ROOT

try:
    print(*build(ROOT / "flashattn3"), sep="\n")
except BuildError as error:
    sys.exit(str(error))
