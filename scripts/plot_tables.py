#!/usr/bin/env python3
"""Draws the tables of docs/guide.md as docs/img/*.svg: KL against bytes of KV cache, perplexity against bits per weight.

    python3 scripts/plot_tables.py

Python's standard library only. Run it after a table has changed.
"""

import math
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 46, 56


def table(page, first_column):
    """Rows of the Markdown table whose header begins with `first_column`, cells without markup."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column}"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([re.sub(r"[`,+%]", "", cell).strip() for cell in line.strip("|").split("|")])
    return rows


def ticks(low, high):
    """Round values within the range: every digit of a power of ten when it spans less than one, else 1, 2 and 5."""
    digits = range(1, 10) if high < 10 * low else (1, 2, 5)
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for mantissa in digits:
            value = mantissa * 10.0**exponent
            if low <= value <= high:
                yield value


def svg(points, title, x_label, y_label, x_range, y_range, note):
    """A scatter plot with logarithmic axes; `points` are (name, x, y, hollow)."""
    span = lambda value, low, high: math.log(value / low) / math.log(high / low)
    at_x = lambda value: LEFT + span(value, *x_range) * (WIDTH - LEFT - RIGHT)
    at_y = lambda value: HEIGHT - BOTTOM - span(value, *y_range) * (HEIGHT - TOP - BOTTOM)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold" fill="#1f2328">{title}</text>',
        f'<text x="{WIDTH - RIGHT}" y="24" text-anchor="end" fill="#656d76">{note}</text>',
    ]
    for value in ticks(*x_range):
        x = at_x(value)
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e4e7ea"/>')
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#656d76">{value:g}</text>')
    for value in ticks(*y_range):
        y = at_y(value)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e4e7ea"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#656d76">{value:g}</text>')
    centre = (TOP + HEIGHT - BOTTOM) / 2
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle" fill="#1f2328">{x_label}</text>')
    out.append(f'<text transform="translate(18 {centre}) rotate(-90)" text-anchor="middle" fill="#1f2328">{y_label}</text>')
    taken = []
    overlap = lambda a, b: a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    for _, x, y, _ in points:
        taken.append((at_x(x) - 5, at_y(y) - 5, at_x(x) + 5, at_y(y) + 5))
    for name, x, y, hollow in sorted(points, key=lambda point: -point[2]):
        cx, cy = at_x(x), at_y(y)
        fill = "#ffffff" if hollow else "#0969da"
        out.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4.5" fill="{fill}" stroke="#0969da" stroke-width="1.6"/>')
        width = 6.6 * len(name)
        places = [(cx + 8, cy + 4), (cx - 8 - width, cy + 4), (cx - width / 2, cy - 9), (cx - width / 2, cy + 19)]
        places += [(cx + 8, cy - 7), (cx + 8, cy + 15), (cx - 8 - width, cy - 7), (cx - 8 - width, cy + 15)]
        box = lambda place: (place[0], place[1] - 11, place[0] + width, place[1] + 3)
        fits = lambda place: place[0] > LEFT and place[0] + width < WIDTH and place[1] < HEIGHT - BOTTOM and place[1] > TOP
        place = next((p for p in places if fits(p) and not any(overlap(box(p), other) for other in taken)), places[0])
        taken.append(box(place))
        out.append(f'<text x="{place[0]:.1f}" y="{place[1]:.1f}" fill="#1f2328">{name}</text>')
    return "\n".join(out + ["</svg>", ""])


def main():
    guide = (ROOT / "docs/guide.md").read_text()
    formats = table(guide, "`--kv-dtype` | B per token")
    # With their exact windows these two read hardly any codes in so short a text.
    windowed = {"vq2", "k4v2", "bf16"}
    points = [
        (row[0].replace(" --kv-window off", " (no window)"), float(row[1]), float(row[2]), "window" in row[0])
        for row in formats
        if row[0] not in windowed
    ]
    (ROOT / "docs/img/kv_formats.svg").write_text(
        svg(
            points,
            "Divergence of each KV format",
            "bytes per token (bf16: 2048)",
            "mean KL from bf16, nats",
            (230, 1300),
            (1e-4, 4e-2),
            "demo model, demo texts, lower left is better",
        )
    )
    recipes = table(guide, "recipe | bits per weight")
    best = float(recipes[0][3])
    points = [(row[0], float(row[1]), 100 * (float(row[3]) / best - 1), False) for row in recipes[1:]]
    (ROOT / "docs/img/recipes.svg").write_text(
        svg(
            points,
            "Perplexity lost by each weight recipe",
            "bits per weight (bf16: 16)",
            "perplexity above bf16, %",
            (4, 9.2),
            (0.01, 10),
            "demo model, demo texts, lower left is better",
        )
    )


if __name__ == "__main__":
    main()
