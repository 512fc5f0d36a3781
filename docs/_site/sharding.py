"""Draws docs/sharding.svg, how sharding works: ``python docs/_site/sharding.py`` writes it.

A column for each moment of a step, a row for each of two ranks; each of three blocks is a box with its parameters.
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "sharding.svg"
BLUE, LIGHT, GREEN, DARK = "#3949ab", "#c5cae9", "#2e7d32", "#212121"
BLOCKS = ("block 1", "block 2", "block 3")
# Of a moment: its title, the lines below, the index of the block whose full parameters exist, and whether gradients do.
MOMENTS = (
    ("at rest", ("each rank stores", "half of every block"), None, False),
    ("forward, block 2", ("all-gather: both ranks", "have both halves"), 1, False),
    ("backward, block 2", ("all-gather again,", "then reduce-scatter"), 1, True),
    ("optimizer step", ("each rank updates", "its own half"), None, False),
)
WIDTH, HEIGHT = 800, 388
COLUMN, LEFT, TOP = 184, 68, 92
CELL, CELL_HEIGHT, RANK = 50, 60, 84


def text(x: float, y: float, content: str, size: int = 15, **style: str) -> str:
    attributes = "".join(
        f' {name.replace("_", "-")}="{value}"' for name, value in style.items()
    )
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{attributes}>{content}</text>'


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}"/>'


def block(
    x: float, y: float, rank: int, is_full: bool, has_gradient: bool
) -> list[str]:
    """Draw a block on a rank: the half that it stores, and the other half while it is gathered."""
    half = CELL_HEIGHT / 2
    drawn = [
        f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL_HEIGHT}" fill="#fff" stroke="#9e9e9e"/>'
    ]
    if is_full:
        drawn.append(box(x + 1, y + 1 + half * (1 - rank), CELL - 2, half - 2, LIGHT))
    drawn.append(box(x + 1, y + 1 + half * rank, CELL - 2, half - 2, BLUE))
    if has_gradient:
        drawn.append(box(x + CELL - 13, y + 1 + half * rank, 12, half - 2, GREEN))
    return drawn


def picture() -> str:
    """Return the picture as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'fill="{DARK}" role="img" aria-label="Two ranks store half of every block; a block is whole only in use">',
        box(0, 0, WIDTH, HEIGHT, "#fff"),
    ]
    for rank in range(2):
        lines.append(
            text(8, TOP + RANK * rank + 36, f"rank {rank}", 15, font_weight="bold")
        )
    for column, (title, below, used, has_gradient) in enumerate(MOMENTS):
        x = LEFT + COLUMN * column
        lines.append(text(x, 28, title, 17, font_weight="bold"))
        lines += [
            text(x, 52 + 19 * number, line, 14) for number, line in enumerate(below)
        ]
        for rank in range(2):
            for index in range(len(BLOCKS)):
                # After its reduction each gradient is a shard; backward runs from the last block to the first.
                reduced = title == "optimizer step" or (has_gradient and index >= 1)
                at = x + (CELL + 5) * index, TOP + RANK * rank
                lines += block(*at, rank, index == used, reduced)
        for index, name in enumerate(BLOCKS):
            lines.append(
                text(
                    x + (CELL + 5) * index + 2, TOP + RANK + CELL_HEIGHT + 19, name, 13
                )
            )
    legend = (
        (BLUE, "parameters and optimizer states that the rank stores"),
        (LIGHT, "parameters gathered for compute, then freed"),
        (GREEN, "gradients, reduced over ranks"),
    )
    for number, (color, name) in enumerate(legend):
        y = HEIGHT - 78 + 26 * number
        lines += [box(LEFT, y, 20, 18, color), text(LEFT + 28, y + 14, name, 14)]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
