"""``flashattn3 bench``: gate first, then time; what it measures and how is in docs/benchmarks.md.

Read in the order of the flow: ``command`` (options) → ``suites`` (which cells) → ``runner`` (one
cell: ``inputs`` → ``providers`` → ``gate`` → ``timing``) → ``report`` (lines, table) → ``figure``.
Only the command line imports this package; attention itself never does.
"""
