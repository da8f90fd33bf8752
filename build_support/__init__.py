"""Builds the Hopper kernels: what setup.py calls. The standard library alone, and no network.

toolchain.py finds the tools or says what is missing, units.py writes the generated sources,
ninja_file.py the build's rules, ptxas.py reads what the compiler said, backend.py is what pip
asks. ``python -m build_support`` builds in place, for development. same_machine_code.py compares
the kernels of two builds.
"""
