"""MkDocs hooks for the documentation site, in addition to rendering docs/.

Pages link to files of the repository as on GitHub (`../../examples/digits.py`). Each linked file becomes a page of the
site, as do the files that it links to. Drawings are inlined into their page, so that they follow its palette.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pictures.svg import CLASS, DARK, LIGHT, variables

ROOT = Path(__file__).parents[1]
DOCS = PurePosixPath("docs")
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)(?P<path>[^)#\s]+)")
TABLE_ROW = re.compile(r"^\|.*", re.M)
CODE = re.compile(r"`[^`]+`")
IMAGE = re.compile(r'<img [^>]*src="(?:\.\./)*images/(?P<name>[\w-]+\.svg)"[^>]*>')
IMAGES = ROOT / "docs" / "images"
PALETTES = "stylesheets/palettes.css"
LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml", ".toml": "toml"}

repository_files: dict[str, PurePosixPath] = {}
"""Files of the repository outside docs/, by their path in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    repository_files.clear()
    files.append(File.generated(config, PALETTES, content=palettes()))
    pages = [DOCS / file.src_uri for file in files.documentation_pages()]
    in_docs = {file.src_uri for file in files}
    named = [uri for uri in uris_of(config.nav) if uri not in in_docs]
    pages += [add_file(files, config, PurePosixPath(uri.replace(".ipynb.md", ".ipynb"))) for uri in named]
    while pages:
        page = pages.pop()
        for target in links_of(page):
            if target.parts[0] != "docs" and site_uri(target) not in repository_files and (ROOT / target).is_file():
                pages.append(add_file(files, config, target))
    return files


def uris_of(nav: object) -> Iterator[str]:
    """Pages in the navigation."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for item in nav if isinstance(nav, list) else nav.values():
            yield from uris_of(item)


def add_file(files: Files, config: MkDocsConfig, path: PurePosixPath) -> PurePosixPath:
    uri = site_uri(path)
    repository_files[uri] = path
    if uri.endswith(".md"):
        file = File.generated(config, uri, content=page_of(path), inclusion=InclusionLevel.NOT_IN_NAV)
    else:
        file = File.generated(config, uri, abs_src_path=str(ROOT / path))
    files.append(file)
    return path


def links_of(page: PurePosixPath) -> Iterator[PurePosixPath]:
    """Files that a page links to, relative to the repository."""
    if page.suffix in (".md", ".ipynb"):
        for match in LINK.finditer(page_of(page)):
            yield normal(page.parent / match["path"])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to repository files to their paths in the site."""
    uri = page.file.src_uri
    path = repository_files.get(uri, DOCS / uri)
    if path.suffix not in (".md", ".ipynb"):
        return markdown

    # In tables, GitHub requires pipes in code to be escaped, but MkDocs shows the backslash.
    markdown = TABLE_ROW.sub(lambda row: CODE.sub(lambda code: code.group().replace(r"\|", "|"), row.group()), markdown)

    def moved(match: re.Match[str]) -> str:
        target = normal(path.parent / match["path"])
        if not (ROOT / target).is_file():
            return match.group()  # MkDocs reports it as broken
        return os.path.relpath(site_uri(target), PurePosixPath(uri).parent)

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inline drawings (`scripts/pictures`) into the page."""

    def inlined(match: re.Match[str]) -> str:
        drawing = (IMAGES / match["name"]).read_text()
        return drawing[drawing.index("<svg") :] if f'class="{CLASS}"' in drawing else match.group()

    return IMAGE.sub(inlined, html)


def palettes() -> str:
    """Colors of drawings for each palette of the site."""
    return "\n".join(
        f'[data-md-color-scheme="{scheme}"] .{CLASS} {{ {variables(colors)} }}'
        for scheme, colors in (("default", LIGHT), ("slate", DARK))
    )


def site_uri(path: PurePosixPath) -> str:
    """Path of a repository file in the sources of the site."""
    if path.parts[0] == "docs":
        return str(path.relative_to(DOCS))
    if path.suffix in (".md", ".png", ".svg"):
        return str(path)
    return f"{path}.md"


def page_of(path: PurePosixPath) -> str:
    text = (ROOT / path).read_text()
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return "\n\n".join(map(page_of_cell, json.loads(text)["cells"]))
    return f"# {path.name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def page_of_cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    return f"```python\n{text}\n```" if cell["cell_type"] == "code" else text


def normal(path: PurePosixPath) -> PurePosixPath:
    return PurePosixPath(os.path.normpath(path))
