"""Draws docs/images/axes.svg: the three axes of the family, and which optimizers are which choices.

python docs/scripts/draw_axes.py
"""

from pathlib import Path

WIDTH, HEIGHT = 860, 372
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, PALE, FRAME, ACCENT = "#1f2430", "#5b6472", "#c9ced6", "#882255"

COLUMNS = [
    (
        "direction",
        "d, state <- direction(g, state)",
        [
            ("adam", "m / (sqrt(v) + eps)"),
            ("muon", "polar factor of the momentum"),
            ("soap", "Adam in the gradients' eigenbasis"),
        ],
    ),
    (
        "ratio",
        "s from w and u = d + decay*w",
        [
            ("none", "s = 1"),
            ("one for a weight", "|w| / |u|, l2 or max"),
            ("rows and columns", "max of row, column, weight"),
        ],
    ),
    (
        "engine",
        "w <- w - lr * clamp(s*u)",
        [
            ("eager", "torch operations, in pieces"),
            ("fused", "Triton kernels (adam, muon)"),
            ("direct", "autograd, torch.compile"),
        ],
    ),
]
NAMED = [
    ("AdamW", "adam x none"),
    ("LAMB", "adam x one (l2)"),
    ("MERIT", "adam x rows and columns"),
    ("Muon", "muon x none"),
    ("SOAPMERIT", "soap x rows and columns"),
    ("MuonMERIT", "muon x rows and columns"),
]


def text(x: float, y: float, words: str, *, size: int = 13, fill: str = INK, weight: str = "400") -> str:
    """A line of text; its characters are escaped."""
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" font-weight="{weight}">{escaped}</text>'


def column(x: int, title: str, equation: str, choices: list[tuple[str, str]]) -> list[str]:
    """One axis: its name, its line of the update, and its choices."""
    parts = [
        f'<rect x="{x}" y="16" width="256" height="208" rx="8" fill="none" stroke="{FRAME}"/>',
        text(x + 16, 44, title, size=17, weight="600"),
        text(x + 16, 66, equation, size=12, fill=PALE),
    ]
    for i, (name, meaning) in enumerate(choices):
        y = 82 + 46 * i
        parts += [
            f'<rect x="{x + 12}" y="{y}" width="232" height="40" rx="6" fill="#f3f4f7"/>',
            text(x + 22, y + 17, name, weight="600"),
            text(x + 22, y + 33, meaning, size=11, fill=PALE),
        ]
    return parts


def picture() -> str:
    """The SVG."""
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for i, (title, equation, choices) in enumerate(COLUMNS):
        x = 16 + 286 * i
        parts += column(x, title, equation, choices)
        if i:
            parts.append(text(x - 20, 124, "x", size=18, fill=PALE))
    for i, (name, choice) in enumerate(NAMED):
        x, y = 16 + 286 * (i % 3), 262 + 54 * (i // 3)
        fill = ACCENT if name == "MuonMERIT" else INK
        parts.append(text(x + 16, y, name, weight="600", fill=fill))
        parts.append(text(x + 16, y + 18, choice, size=12, fill=PALE))
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    label = 'role="img" aria-label="Direction x ratio x engine"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" {label}>\n{body}\n</svg>\n'


if __name__ == "__main__":
    Path(__file__).parents[1].joinpath("images/axes.svg").write_text(picture())
