"""Find dead links, files from elsewhere, and words that the search lacks: ``python tools/check_site.py docs/site``."""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}
"""Tags, and the attribute that names a file that the browser loads with the page."""

WORDS = ("GatherLayer", "SimCLR", "AMP", "validation", "local_loss", "all_gather", "no_sync", "torchrun")
"""What people search for."""


class Page(HTMLParser):
    """The anchors, links and loaded files of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attributes}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        if LOADED.get(tag, "") in named and named.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(named[LOADED[tag]])


def problems(site: Path) -> list[str]:
    """Return a line for each dead link, dead anchor, badly formed address, and file that is loaded from elsewhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute, for a server
            continue
        here = path.relative_to(site)
        for link in [*page.links, *page.loaded]:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                elsewhere, on_web = link in page.loaded, target.scheme in ("http", "https")
                if elsewhere or any(x in link for x in " …") or (on_web and "." not in target.netloc):
                    found.append(f"{here}: {'loads' if elsewhere else 'bad address'} {link}")
                continue
            file = (path.parent / unquote(target.path)).resolve() if target.path else path.resolve()
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                found.append(f"{here}: no file for {link}")
            elif target.fragment and file.suffix == ".html":
                of_target = next((x for other, x in pages.items() if other.resolve() == file), None)
                if of_target is not None and unquote(target.fragment) not in of_target.anchors | {"__top"}:
                    found.append(f"{here}: no anchor for {link}")
    return found


def words_not_found(site: Path) -> list[str]:
    """Return the words of :data:`WORDS` that no entry of the search has."""
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    text = " ".join(f"{entry['title']} {entry['text']}" for entry in entries)
    return [f"search: no entry has {word}" for word in WORDS if word not in text]


if __name__ == "__main__":
    lines, words = problems(Path(sys.argv[1])), words_not_found(Path(sys.argv[1]))
    print(*lines, *words, f"{len(lines)} dead links, {len(words)} words not found", sep="\n")
    sys.exit(bool(lines + words))
