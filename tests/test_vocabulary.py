"""The library uses the words of docs/glossary.md, and none that they replaced."""

from __future__ import annotations

import re
import subprocess

import pytest
from helpers import ROOT

# Words of the old vocabulary that the field does not use for anything else: none in the library,
# csrc and the build. Bench suites and the tests' cases keep "ragged" as a name. Words of the table
# that also have the field's meaning (row, group, product, chunk, reference, ...) cannot be matched.
REPLACED_WORDS = [
    "announce",
    "claim",
    "clear blocks",
    "facts",
    "give back",
    "grew",
    "heads inside",
    "in pairs",
    "ragged",
    "sender",
    "stretch",
    "tails",
    "tickets",
    "truth",
]


def test_the_library_uses_no_replaced_word():
    folders = ["csrc", "flashattn3", "build_support"]
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    pattern = re.compile(rf"\b(?:{'|'.join(REPLACED_WORDS)})\b", re.IGNORECASE)
    library = [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]
    assert len(library) > 150
    found = [
        f"{path}:{number}: {match[0]}"
        for path in library
        for number, line in enumerate((ROOT / path).read_text(errors="replace").split("\n"), 1)
        for match in pattern.finditer(line)
    ]
    assert not found, "\n".join(found)
