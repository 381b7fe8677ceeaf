"""A hook of the documentation site: links out of docs/ name the file instead.

In a clone they lead to the source; the site does not hold it.
"""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
