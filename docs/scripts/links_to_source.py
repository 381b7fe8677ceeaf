"""A hook of the documentation site: links out of docs/ name the file instead.

In a clone they lead to the source; the site does not hold it. One that leads nowhere is a warning, which the
site's strict mode makes an error.
"""

import logging
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.links_to_source")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    def name(link: re.Match[str]) -> str:
        text, target = link.groups()
        if not (DOCS / target).exists():
            LOG.warning("%s links to %s, which is not there", page.file.src_uri, target)
        return text

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", name, markdown)
