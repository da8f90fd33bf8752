"""Builds the Hopper kernels for setup.py, with the standard library alone and without network.

toolchain.py finds the tools or reports missing ones, units.py writes the generated sources,
ninja_file.py writes the build rules, ptxas.py reads the compiler's output, backend.py is pip's
build backend. ``python -m build_support`` builds in place, for development. same_machine_code.py
compares the kernels of two builds.

wheel.py writes the wheels: cuda12.py installs their compiler, the only thing here that pip fetches,
portable.py links their library, torch_versions.py tries them. hub.py writes the layout of the Hub,
release.py moves the version.
"""
