"""A hook of the documentation site: a short name in code, such as `--out`, is not broken at its hyphens."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r"<code>([^<>\s]{1,30})</code>", r'<code class="name">\1</code>', html)
