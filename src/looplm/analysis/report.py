"""A self-contained HTML page: text, tables, inline figures and text coloured by depth."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 16px; color: #1a1a1a; background: #fff;
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p { max-width: 46rem; }
.figures { display: grid; gap: 24px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
figure { margin: 0; max-width: 640px; }
figure svg { width: 100%; height: auto; } figcaption { font-size: .9rem; color: #444; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.sample { max-width: 60rem; font: 15px/1.9 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; }
.sample span { border-radius: 3px; padding: 1px 0; }
.prompt { color: #666; }
.key span { display: inline-block; margin-right: 8px; padding: 1px 8px; border-radius: 3px; font-size: .9rem; }
"""
# Light to dark with depth; the text on each stays readable.
_DEPTH = (("#e3f0fa", "#111"), ("#a9d0ec", "#111"), ("#5aa2d6", "#111"), ("#1f5f94", "#fff"), ("#0d2f4d", "#fff"))


@dataclass
class Report:
    """Collects parts in reading order; `html()` is the page."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """A section's title."""
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Plain text."""
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def figures(self, svgs_and_captions: Sequence[tuple[str, str]]) -> None:
        """Figures side by side where there is room."""
        items = (
            f"<figure>{svg}<figcaption>{html.escape(text)}</figcaption></figure>" for svg, text in svgs_and_captions
        )
        self.parts.append(f'<div class="figures">{"".join(items)}</div>')

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of ready-made cells."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        self.parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def depth_key(self, loops: int) -> None:
        """What the colours of `depth_text` mean."""
        items = "".join(f'<span style="{_shade(loop)}">loop {loop}</span>' for loop in range(1, loops + 1))
        self.parts.append(f'<p class="key">{items}</p>')

    def depth_text(self, prompt: str, pieces: Sequence[tuple[str, int]]) -> None:
        """A prompt, then pieces of text each shaded by its loop."""
        shaded = "".join(
            f'<span style="{_shade(loop)}" title="loop {loop}">{html.escape(piece)}</span>' for piece, loop in pieces
        )
        self.parts.append(f'<p class="sample"><span class="prompt">{html.escape(prompt)}</span>{shaded}</p>')

    def html(self) -> str:
        """The whole page."""
        title = html.escape(self.title)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>\n"
            + "\n".join(self.parts)
            + "\n</body></html>\n"
        )


def _shade(loop: int) -> str:
    background, text = _DEPTH[min(loop, len(_DEPTH)) - 1]
    return f"background:{background};color:{text}"
