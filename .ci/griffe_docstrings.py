"""Keeps, on the API page, the sentences of a docstring's Args that name no argument, such as "All
other arguments are those of flash_attn_func": they become a paragraph after the list."""

from __future__ import annotations

import re

import griffe

SECTION = re.compile(r"^(Args|Raises):$")
ITEM = re.compile(r"^    [\w.*]+(, [\w.*]+)*: ")


def rearranged(docstring: str) -> str:
    lines: list[str] = []
    sentences: list[str] = []
    section = None
    for line in [*docstring.splitlines(), ""]:
        if line and not line.startswith(" "):
            found = SECTION.match(line)
            section = found[1] if found else None
        elif section and line.startswith("    ") and line[4] != " " and not ITEM.match(line):
            if section == "Args" and (sentences or line[4].isupper()):
                sentences.append(line.strip())
                continue
            line = f"    {line}"  # the rest of the item before
        if not line and sentences:
            lines += ["", " ".join(sentences)]
            sentences = []
        lines.append(line)
    return "\n".join(lines)


class Sentences(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = rearranged(obj.docstring.value)
