"""The tables of the reference are those that the code makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import reference_tables

PAGES = list(reference_tables.pages())


def test_every_table_is_on_a_page() -> None:
    found = [match["name"] for page in PAGES for match in reference_tables.TABLE.finditer(page.read_text())]
    assert sorted(found) == sorted(reference_tables.TABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_table_says_what_the_code_says(page: Path) -> None:
    text = page.read_text()
    assert reference_tables.rewritten(text) == text, "run `python scripts/reference_tables.py`"
