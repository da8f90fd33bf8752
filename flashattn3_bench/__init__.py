"""``flashattn3 bench``: gate first, then time; what it measures and how is in docs/benchmarks.md.

Read in the order of the flow: ``command`` (options) → ``suites`` (which cells) → ``runner`` (one
cell: ``inputs`` → ``providers`` → ``gate`` → ``timing``) → ``report`` (lines, table) → ``figure``.
``demo`` is ``flashattn3 demo``; ``checking`` has what tests use too: cases, the fp64 reference and
the tolerance rule. Of flashattn3 only ``cli.py`` looks for this package.
"""
