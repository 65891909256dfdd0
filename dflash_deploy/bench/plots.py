"""Plots as inline SVG: no script, no font and no file from elsewhere. Colours are those of Okabe and Ito, which differ
for colour-blind readers too; every series is named beside its mark as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 16, 44


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least ``top``."""
    if top <= 0 or not math.isfinite(top):
        return [0.0, 1.0]
    raw = top / count
    scale = 10 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= raw * 0.999)
    return [step * at for at in range(math.ceil(top / step - 1e-9) + 1)]


class _Canvas:
    def __init__(self, title: str, across: str, up: str, high: float) -> None:
        self.marks = ticks(high)
        self.parts = [
            f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
        ]
        for mark in self.marks:
            y = self.y(mark)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(LEFT - 6, y + 4, f"{mark:g}", "end")
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, across, "middle")
        self.parts.append(
            f'<text class="axis" transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(up)}</text>'
        )

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / self.marks[-1])

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def legend(self, names: Sequence[str], *, pairs: bool = False) -> None:
        for at, name in enumerate(names):
            y = TOP + 8 + 20 * at
            colour = COLOURS[(at // 2 if pairs else at) % len(COLOURS)]
            high = 4 if pairs and at % 2 else 12
            self.parts.append(
                f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 3 - high / 2}" width="12" height="{high}" fill="{colour}"/>'
            )
            self.text(WIDTH - RIGHT + 32, y + 2, name[:16])

    def done(self) -> str:
        return "".join([*self.parts, "</svg>"])


def lines(
    title: str,
    across: str,
    up: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    marks: bool,
    pairs: bool = False,
) -> str:
    """A line per series of (x, y) points; x is spread evenly over its distinct values when ``marks``, else to scale.

    Args:
        pairs: two series after each other share a colour, the second is dashed.
    """
    xs = sorted({x for points in series.values() for x, _ in points}) or [0.0]
    canvas = _Canvas(title, across, up, max((y for points in series.values() for _, y in points), default=0.0))
    width = WIDTH - LEFT - RIGHT
    span = (xs[-1] - xs[0]) or 1.0

    def place(x: float) -> float:
        if marks:
            return LEFT + width * (xs.index(x) + 0.5) / len(xs)
        return LEFT + width * (x - xs[0]) / span

    for x in xs if marks else ticks(xs[-1]):
        if marks or xs[0] <= x <= xs[-1]:
            canvas.text(place(x), HEIGHT - BOTTOM + 18, f"{x:g}", "middle")
    for at, (name, points) in enumerate(series.items()):
        colour = COLOURS[(at // 2 if pairs else at) % len(COLOURS)]
        dash = ' stroke-dasharray="6 4"' if pairs and at % 2 else ""
        path = " ".join(f"{place(x):.1f},{canvas.y(y):.1f}" for x, y in sorted(points))
        canvas.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for x, y in points if marks else ():
            canvas.parts.append(
                f'<circle cx="{place(x):.1f}" cy="{canvas.y(y):.1f}" r="4" fill="{colour}">'
                f"<title>{escape(name)}: {x:g}, {y:.3g}</title></circle>"
            )
    canvas.legend(list(series), pairs=pairs)
    return canvas.done()


def bars(title: str, across: str, up: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """Bars side by side: per group one of each series. A series may be shorter than the groups."""
    canvas = _Canvas(title, across, up, max((v for values in series.values() for v in values), default=0.0))
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    each = slot * 0.8 / max(1, len(series))
    every = math.ceil(len(groups) / 24)
    for number, group in enumerate(groups):
        if number % every == 0:
            canvas.text(LEFT + slot * (number + 0.5), HEIGHT - BOTTOM + 18, group, "middle")
    base = canvas.y(0)
    for at, (name, values) in enumerate(series.items()):
        for number, value in enumerate(values[: len(groups)]):
            x, y = LEFT + slot * number + slot * 0.1 + each * at, canvas.y(value)
            canvas.parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(1.0, each - 1):.1f}" height="{base - y:.1f}" '
                f'fill="{COLOURS[at % len(COLOURS)]}"><title>{escape(name)}, {escape(groups[number])}: {value:.3g}'
                "</title></rect>"
            )
    canvas.legend(list(series))
    return canvas.done()


def spans(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """Each row a bar made of named stretches in seconds, from 0."""
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    longest = max((sum(s for _, s in parts) for _, parts in rows), default=0.0)
    marks = ticks(longest)
    height = TOP + 26 * len(rows) + 44
    width = WIDTH - LEFT - RIGHT - 100
    out = [
        f'<svg role="img" viewBox="0 0 {WIDTH} {max(height, TOP + 20 * len(names) + 12)}" aria-label="{escape(title)}">'
    ]
    out.append(f"<title>{escape(title)}</title>")
    for mark in marks:
        x = LEFT + 80 + width * mark / marks[-1]
        bottom = TOP + 26 * len(rows)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{mark:g} s</text>')
    for number, (label, parts) in enumerate(rows):
        x, y = float(LEFT + 80), TOP + 26 * number + 4
        out.append(f'<text x="{LEFT + 74}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        for name, seconds in parts:
            wide = width * seconds / marks[-1]
            colour = COLOURS[names.index(name) % len(COLOURS)]
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.5):.1f}" height="18" fill="{colour}">'
                f"<title>{escape(name)}: {seconds:.1f} s</title></rect>"
            )
            x += wide
    for at, name in enumerate(names):
        y = TOP + 8 + 20 * at
        out.append(
            f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 9}" width="12" height="12" fill="{COLOURS[at % len(COLOURS)]}"/>'
        )
        out.append(f'<text x="{WIDTH - RIGHT + 32}" y="{y + 2}">{escape(name)}</text>')
    return "".join([*out, "</svg>"])
