"""Make site pages of what lies beside docs/: the README is the first page. A hook of mkdocs, named in mkdocs.yml."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_config(config: Any, **_: Any) -> Any:
    """List all pages of a folder where the navigation names its README."""
    docs = ROOT / "docs"
    for pages in (part for section in config.nav for part in section.values() if isinstance(part, list)):
        for entry in (page for page in pages if isinstance(page, dict)):
            for title, readme in entry.items():
                others = sorted(path for path in (docs / readme).parent.glob("*.md") if path.name != "README.md")
                entry[title] = [readme, *(path.relative_to(docs).as_posix() for path in others)]
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
