"""Render HTML pages from templates: each is one file that needs no other and no network."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markupsafe import Markup


def render(template: str, **values: Any) -> str:
    """Render a template of the lab, named by its path there, for example "results/old_page.html".

    Templates extend report/base.html, which shows ``title``, ``facts``, ``summary`` and ``warnings`` and
    passes ``data`` to the script that draws the charts; without ``data`` there is no script. Templates can
    use ``text(name)``, the content of a file; ``library()``, the chart library; and the filter ``code``,
    for text in backquotes.
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


def _code(text: str) -> Markup:
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(text))))


@functools.cache
def _library() -> str:
    """The chart library for the browser, with closing script tags escaped."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    return bundle.replace("</script", "<\\/script")
