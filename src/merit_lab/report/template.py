"""HTML pages from templates: each is one file that needs no other and no network."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markupsafe import Markup


def render(template: str, **values: Any) -> str:
    """A page from a template of the lab, named by its place there, as "report/page.html".

    Templates extend report/base.html, which shows ``title``, ``facts``, ``summary`` and ``warnings`` and
    hands ``data`` to the script that draws the charts; without ``data`` there is none. They are given
    ``text(name)``, a file as it is; ``library()``, the chart library; and the filter ``code``, for words in
    backquotes.
    """
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("merit_lab", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.globals["text"] = lambda name: Markup(loader.get_source(environment, name)[0])
    environment.globals["library"] = lambda: Markup(_library())
    environment.filters["code"] = _code
    return environment.get_template(template).render(**values)


def _code(words: str) -> Markup:
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(words))))


@functools.cache
def _library() -> str:
    """The chart library that draws in the browser; only what would end its element early is changed."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    return bundle.replace("</script", "<\\/script")
