"""Make site pages of what lies beside docs/: the README is the first page. A hook of mkdocs, named in mkdocs.yml."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_config(config: Any, **_: Any) -> Any:
    """List all decisions under their heading of the navigation."""
    decisions = sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/decisions/0*.md"))
    for pages in (part for section in config.nav for part in section.values() if isinstance(part, list)):
        for entry in (page for page in pages if isinstance(page, dict) and "Decisions" in page):
            entry["Decisions"] = [entry["Decisions"], *decisions]
    return config


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages, with links as seen from docs/."""
    from mkdocs.structure.files import File

    for source, target in PAGES.items():
        if (ROOT / source).is_file():
            text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
            for other, page in PAGES.items():
                text = text.replace(f"]({other}", f"]({page}")
            files.append(File.generated(config, target, content=text))
    return files
