"""Draws the schedules of docs/how-it-works.md as SVG, into docs/assets. A test compares.

python .ci/schedules.py

A figure has a line for each unit. A box is (line, begin, length, text, color); an arrow is a
barrier, (line and time of the arrival, line and time of the waiter, name).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
UNIT, LINE, LEFT, TOP, BOX = 46, 58, 130, 34, 30  # pixels
COLORS = {"load": "#b0bec5", "a": "#4c8bf5", "b": "#f59b4c", "soft": "#d5e3fc", "softb": "#fce6d2"}


class Figure(NamedTuple):
    title: str
    lines: list[str]
    boxes: list[tuple[int, float, float, str, str]]
    arrows: list[tuple[int, float, int, float, str]]


FORWARD = Figure(
    "Forward: the producer and one consumer (two stages of K and of V)",
    ["producer", "second warp", "tensor cores", "consumer"],
    [
        *[(0, 0.2 + 1.1 * i, 1, text, "load") for i, text in enumerate(("Q", "K3", "K2", "V3"))],
        (0, 5.0, 1, "K1", "load"),
        (0, 6.1, 1, "V2", "load"),
        (0, 11.3, 1, "K0", "load"),
        (0, 12.4, 1, "V1", "load"),
        (1, 4.7, 1.4, "zero fill V3", "load"),
        (2, 3.0, 1.6, "S3 = QK3", "a"),
        (2, 6.7, 1.6, "S2 = QK2", "a"),
        (2, 8.3, 1.6, "O += P3V3", "a"),
        (2, 11.4, 1.6, "S1 = QK1", "a"),
        (2, 13.0, 1.6, "O += P2V2", "a"),
        (3, 4.7, 1.9, "softmax 3, mask", "soft"),
        (3, 8.4, 2.6, "softmax 2", "soft"),
        (3, 13.1, 2.6, "softmax 1", "soft"),
    ],
    [
        (0, 2.3, 2, 3.0, "q_full, k_full[0]"),
        (0, 4.5, 1, 4.7, "v_unfilled_full"),
        (1, 6.1, 2, 8.3, "v_full[0]"),
        (3, 4.7, 0, 5.0, "k_empty[0]"),
        (3, 11.0, 0, 11.3, "k_empty[1], v_empty[0]"),
    ],
)


def steps(first: float, count: int, period: float, who: str, line: int) -> list:
    """Two GEMMs and a softmax of a consumer, again and again."""
    color, soft = ("a", "soft") if who == "A" else ("b", "softb")
    boxes = []
    for j in range(count):
        begin = first + j * period
        boxes += [(0, begin, 1.25, f"S{j + 1} {who}", color)]
        boxes += [(0, begin + 1.25, 1.25, f"P{j}V{j} {who}", color)]
        boxes += [(line, begin + 1.35, 3.2, f"softmax {j + 1}", soft)]
    return boxes


PING_PONG = Figure(
    "Forward: ping-pong of two consumers",
    ["tensor cores", "consumer A", "consumer B"],
    [*steps(0.2, 3, 5.0, "A", 1), *steps(2.7, 3, 5.0, "B", 2)],
    [
        (0, 1.45, 1, 1.55, "wait<1>: S1 A"),
        (0, 3.95, 2, 4.05, "wait<1>: S1 B"),
    ],
)

BACKWARD = Figure(
    "Backward, up to 128 columns: two consumer warpgroups, one step apart",
    ["producer", "warpgroup A", "warpgroup B", "dS in smem", "dQ writers"],
    [
        *[
            (0, 0.2 + 1.0 * i, 0.9, text, "load")
            for i, text in enumerate(("Q0", "K", "dO0", "V", "Q1", "dO1"))
        ],
        (1, 4.2, 1.5, "S, dP", "a"),
        (1, 5.7, 1.0, "P", "soft"),
        (1, 6.7, 1.0, "dV +=", "a"),
        (1, 7.7, 1.0, "dS", "soft"),
        (1, 8.7, 1.0, "dK +=", "a"),
        (1, 10.6, 1.5, "S, dP", "a"),
        (1, 12.1, 1.0, "P", "soft"),
        (1, 13.1, 1.3, "dQ0 = dSᵀK", "a"),
        (2, 5.4, 1.5, "S, dP", "b"),
        (2, 6.9, 1.0, "P", "softb"),
        (2, 7.9, 1.0, "dV +=", "b"),
        (2, 8.9, 1.0, "dS", "softb"),
        (2, 9.9, 1.0, "dK +=", "b"),
        (3, 8.7, 4.4, "dS of step 0, keys of A and of B", "load"),
        (4, 14.6, 1.5, "add dQ0", "load"),
    ],
    [
        (0, 2.1, 1, 4.2, "q_full, k_full"),
        (1, 8.7, 3, 8.9, "ds_full (A)"),
        (2, 9.9, 3, 10.2, "ds_full (B)"),
        (3, 13.1, 1, 13.3, "both have arrived"),
        (1, 14.4, 4, 14.6, "dq_full"),
    ],
)

FIGURES = {"forward": FORWARD, "ping-pong": PING_PONG, "backward": BACKWARD}


def svg(figure: Figure) -> str:
    end = max(begin + length for _, begin, length, _, _ in figure.boxes)
    width, height = LEFT + int(UNIT * (end + 0.6)), TOP + LINE * len(figure.lines) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#c62828"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(figure.title)}</text>',
    ]
    for i, name in enumerate(figure.lines):
        y = TOP + LINE * i + 14
        parts.append(f'<text x="8" y="{y + 20}">{escape(name)}</text>')
        bottom = y + BOX + 1
        parts.append(f'<path d="M{LEFT} {bottom}H{width - 8}" stroke="#ddd"/>')
    for line, begin, length, text, color in figure.boxes:
        x, y = LEFT + UNIT * begin, TOP + LINE * line + 14
        box = f'x="{x:.0f}" y="{y}" width="{UNIT * length:.0f}" height="{BOX}" rx="3"'
        parts.append(f'<rect {box} fill="{COLORS[color]}" stroke="#555"/>')
        size = min(12.0, 1.75 * UNIT * length / max(1, len(text)))
        middle = x + UNIT * length / 2
        label = f'x="{middle:.0f}" y="{y + 19}" text-anchor="middle" font-size="{size:.1f}"'
        parts.append(f"<text {label}>{escape(text)}</text>")
    for line, time, to, later, name in figure.arrows:
        down = to > line
        x, y = LEFT + UNIT * time, TOP + LINE * line + 14 + (BOX if down else 0)
        x2, y2 = LEFT + UNIT * later, TOP + LINE * to + 14 + (0 if down else BOX)
        path = f'd="M{x:.0f} {y}L{x2:.0f} {y2}"'
        parts.append(f'<path {path} stroke="#c62828" marker-end="url(#m)" fill="none"/>')
        place = f'x="{x + 7:.0f}" y="{y + 14 if down else y - 6}"'
        parts.append(f'<text {place} fill="#c62828" font-size="11">{escape(name)}</text>')
    time = f'x="{width - 8}" y="{height - 8}" text-anchor="end" fill="#777" font-size="11"'
    return "\n".join([*parts, f"<text {time}>time →</text>", "</svg>", ""])


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        (ASSETS / f"schedule-{name}.svg").write_text(svg(figure), encoding="utf-8")
