"""A hook of the documentation site: a link that leads out of docs/ becomes the text of the link.

In a clone such a link leads to the source, which the site does not hold. A link that leads nowhere is a
warning, which the site's strict mode makes an error.
"""

import logging
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1].resolve()
LOG = logging.getLogger("mkdocs.hooks.links_to_source")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = (DOCS / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if path.is_relative_to(DOCS):
            return link[0]
        if not path.exists():
            LOG.warning("%s links to %s, which is not there", page.file.src_uri, target)
        return text

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", replace, markdown)
