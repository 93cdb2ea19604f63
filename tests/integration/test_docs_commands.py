"""Execute the commands of README.md and docs/, a page a case, and compare what they print with what the page says."""

from pathlib import Path

import check_docs
import pytest

PAGES = [page for page in check_docs.pages() if any(b.language == "console" for b in check_docs.blocks(page))]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_prints_what_its_page_says(page: Path) -> None:
    assert check_docs.check(page) == 0
