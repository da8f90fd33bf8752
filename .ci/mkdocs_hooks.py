"""Takes into the site what the pages link to outside of docs, so that one link serves the site and
the repository: README.md, csrc/README.md, results, programs. A link to nothing stays, and fails
mkdocs build --strict."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
INSIDE, OUTSIDE = "docs/", "repository/"  # a folder of the repository, and one of the site


def in_repository(page: str) -> str:
    """The path in the repository of a file of the site."""
    return page.removeprefix(OUTSIDE) if page.startswith(OUTSIDE) else INSIDE + page


def in_site(path: str) -> str:
    return path.removeprefix(INSIDE) if path.startswith(INSIDE) else OUTSIDE + path


def targets(page: str, text: str):
    """The match of each link of a page, and the file of the repository that it names."""
    for match in LINK.finditer(text):
        folder = posixpath.dirname(in_repository(page))
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if "://" not in match[2] and not target.startswith("..") and (ROOT / target).is_file():
            yield match, target


def on_files(files: Files, config) -> Files:
    """Add each file that is linked to, and those that it links to in turn."""
    pages = [file.src_uri for file in files.documentation_pages()]
    while pages:
        page = pages.pop()
        for _, target in targets(page, (ROOT / in_repository(page)).read_text("utf-8")):
            uri = in_site(target)
            if files.get_file_from_path(uri) is None:
                path = str(ROOT / target)
                files.append(File.generated(config, uri, abs_src_path=path))
                if uri.endswith(".md"):
                    pages.append(uri)
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Rewrite the links between docs and the files outside of it."""
    uri, parts, end = page.file.src_uri, [], 0
    for match, target in targets(uri, markdown):
        relative = posixpath.relpath(in_site(target), posixpath.dirname(uri) or ".")
        parts += [markdown[end : match.start()], match[1], relative, match[3]]
        end = match.end()
    return "".join([*parts, markdown[end:]])
