"""The summary of a sweep: the slowest calls relative to their peers, and how many miss the targets. Needs no
torch."""

import math
import statistics

RATIO = 0.98  # of the best peer's time; less is a loss
LARGE, SHARE, SHARE_OFF = 64 << 20, 0.85, 0.70  # bytes; of the copy ceiling, with rows aligned to 16 bytes and not
WORST = 10


def worst(rows):
    """Wrong calls first, then those that lose most to a peer."""
    return sorted(rows, key=lambda row: (row["error"] <= 1, row.get("ratio", math.inf)))[:WORST]


def summary(rows, drawn):
    """Losses to the best peer, and large calls below their target share of the ceiling."""
    timed = [row for row in rows if "ratio" in row]
    ratios = sorted(row["ratio"] for row in timed)
    large = [row for row in rows if "share" in row and row["bytes"] >= LARGE and not row.get("computes")]
    aligned, off = [r for r in large if r["aligned"]], [r for r in large if not r["aligned"]]
    return {
        "drawn": drawn,
        "timed": len(timed),
        "wrong": sum(not row["error"] <= 1 for row in rows),
        "min": ratios[0] if ratios else None,
        "median": statistics.median(ratios) if ratios else None,
        "losses": sum(ratio < RATIO for ratio in ratios),
        "large": len(aligned),
        "large_below": sum(row["share"] < SHARE for row in aligned),
        "large_off": len(off),
        "large_off_below": sum(row["share"] < SHARE_OFF for row in off),
    }


def summary_text(found):
    """The summary in words."""
    spread = (
        "" if found["min"] is None else f"; best peer / adze: least {found['min']:.2f}, median {found['median']:.2f}"
    )
    return (
        f"{found['timed']} of {found['drawn']} calls timed, {found['wrong']} wrong{spread}; {found['losses']} below "
        f"{RATIO}. Of calls of {LARGE >> 20} MB or more {found['large_below']} of {found['large']} are below "
        f"{100 * SHARE:.0f} % of a copy, of those with rows not aligned to 16 bytes {found['large_off_below']} of "
        f"{found['large_off']} below {100 * SHARE_OFF:.0f} %."
    )
