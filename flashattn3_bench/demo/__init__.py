"""``flashattn3 demo``: trains a small GPT on real English twice, once with each attention.

Read in the order of the flow: ``command`` (options, what is printed) → ``text`` → ``model`` →
``training`` → ``figure``.
"""
