"""``python -m build_support.release VERSION`` moves version, changelog and citation together.

It sets the version in flashattn3/__init__.py, gives the first heading of CHANGELOG.md that version
and today's date, and sets both in CITATION.cff. ``python -m build_support.release --check TAG``
exits with 1 and the reason if the three or the tag, v and the version, do not agree.
"""

from __future__ import annotations

import re
import sys
from datetime import date
from pathlib import Path

from .units import ROOT

VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc|\.post|\.dev)\d+)?")
UNRELEASED = "not released yet"
# Each place: the file, and its line with the version and, where it has one, the date.
PACKAGE = ("flashattn3/__init__.py", r'^__version__ = "(?P<version>.*)"$')
CHANGELOG = ("CHANGELOG.md", r"^## (?P<version>\S+) \((?P<date>.*)\)$")
CITATION = ("CITATION.cff", r"^version: (?P<version>.*)$")
CITATION_DATE = ("CITATION.cff", r'^date-released: "?(?P<date>[^"\n]*)"?$')


def written(place: tuple[str, str], root: Path = ROOT) -> re.Match | None:
    """The place's line as it is now."""
    name, line = place
    return re.search(line, (root / name).read_text(), re.MULTILINE)


def move(version: str, day: str, root: Path = ROOT) -> None:
    """Set the version and the date, as YYYY-MM-DD, in the three files."""
    if not VERSION.fullmatch(version):
        raise ValueError(f"the version must be like 1.2.3 or 1.2.3rc1, got {version!r}")
    heading = written(CHANGELOG, root)
    if heading is None or heading["date"] != UNRELEASED:
        raise ValueError(f"CHANGELOG.md must begin with a version that is {UNRELEASED}")
    _replace(root, PACKAGE, f'__version__ = "{version}"')
    _replace(root, CHANGELOG, f"## {version} ({day})")
    dated = f'date-released: "{day}"'
    if written(CITATION_DATE, root):
        _replace(root, CITATION_DATE, dated)
        _replace(root, CITATION, f"version: {version}")
    else:
        _replace(root, CITATION, f"version: {version}\n{dated}")


def disagreement(tag: str, root: Path = ROOT) -> str | None:
    """Why a tag does not fit the three files; None if it does."""
    wanted = tag.removeprefix("v")
    places = {name: written((name, line), root) for name, line in (PACKAGE, CHANGELOG, CITATION)}
    for name, found in places.items():
        if found is None or found["version"] != wanted:
            return f"{name} has version {found and found['version']}, and the tag is {tag}"
    day, cited = places["CHANGELOG.md"]["date"], written(CITATION_DATE, root)
    if cited is None or cited["date"] != day:
        return f"CHANGELOG.md has the date {day}, CITATION.cff {cited and cited['date']}"
    return None


def _replace(root: Path, place: tuple[str, str], text: str) -> None:
    name, line = place
    path = root / name
    changed, count = re.subn(line, lambda _: text, path.read_text(), count=1, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{name} has no line {line}")
    path.write_text(changed)


def main(arguments: list[str]) -> int | str:
    if len(arguments) == 2 and arguments[0] == "--check":
        return disagreement(arguments[1]) or 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        return "usage: python -m build_support.release VERSION | --check TAG"
    try:
        move(arguments[0], date.today().isoformat())
    except ValueError as error:
        return str(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
