"""Colours for light and dark, told apart by people who see few of them; a figure alone takes the light ones."""

from __future__ import annotations

import re

STEPS = 12  # of the sequential ramp
SIDES = 11  # of the diverging one

COLOURS = {
    "paper": ("#ffffff", "#14181d"), "ground": ("#f6f7f9", "#0e1115"), "ink": ("#1a2027", "#e8ecf0"),
    "soft": ("#5a6672", "#9da8b4"), "rule": ("#d8dee4", "#333c46"), "faint": ("#eaeef1", "#222930"),
    "accent": ("#0b63a5", "#63b3f0"), "good": ("#00795a", "#45c79c"), "warn": ("#b04a00", "#f2a15f"),
    "c0": ("#0b63a5", "#63b3f0"), "c1": ("#d1600a", "#f59a52"), "c2": ("#008f6b", "#45c79c"),
    "c3": ("#a6468f", "#da8fc9"), "c4": ("#8a6d00", "#d9bd4f"), "c5": ("#3f9fd8", "#2f7fc0"),
    "c6": ("#6b7480", "#a2acb7"), "c7": ("#c2364b", "#f07f8e"),
}  # fmt: skip
"""name -> the colour in light and in dark"""
RAMP = {
    "light": ("#f3f7fa", "#d3e4f0", "#a3c9e2", "#6aa7d1", "#3681b8", "#14598f", "#083663"),
    "dark": ("#1b222a", "#1e3a54", "#235b86", "#2f80b6", "#5aa6d6", "#97cbec", "#dcf0fc"),
}
SPLIT = {
    "light": ("#a34a00", "#d87b22", "#f2b777", "#f8e3cd", "#f4f5f6", "#cfe2f0", "#8fbfe0", "#3d8cc4", "#0d558f"),
    "dark": ("#ffc48a", "#e8954a", "#ad632a", "#5a3d28", "#20262d", "#244463", "#2d6fa6", "#5aa9e0", "#a9d7f9"),
}
VARIABLE = re.compile(r'"var\(--([a-z0-9]+)\)"')  # the whole of an attribute: text has no quotes that are not escaped
TIP = re.compile(r'<(\w+) data-tip="([^"]*)"([^>]*)/>')
FOR_SCRIPTS = re.compile(r' data-(?:map|level)="[^"]*"')


def variables(theme: str) -> dict[str, str]:
    """Return every colour of a theme by the name that charts use: `var(--name)`."""
    plain = {name: pair[theme == "dark"] for name, pair in COLOURS.items()}
    ramp = {f"q{i}": _mixed(RAMP[theme], i / (STEPS - 1)) for i in range(STEPS)}
    split = {f"d{i}": _mixed(SPLIT[theme], i / (SIDES - 1)) for i in range(SIDES)}
    inks = {f"{name}ink": _ink(fill) for name, fill in (ramp | split).items()}
    return {**plain, **ramp, **split, **inks}


def contrast(one: str, two: str) -> float:
    """Return how well one colour is read on another, from 1 to 21, as WCAG has it."""
    low, high = sorted((_luminance(one), _luminance(two)))
    return (high + 0.05) / (low + 0.05)


def _ink(fill: str) -> str:
    """Return black or white, whichever is read better: one of them always is."""
    return "#000000" if contrast("#000000", fill) > contrast("#ffffff", fill) else "#ffffff"


def _luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _mixed(stops: tuple[str, ...], share: float) -> str:
    """Return the colour at a share of the way along some stops."""
    at = share * (len(stops) - 1)
    i = min(int(at), len(stops) - 2)
    one, two = (tuple(int(stop[j : j + 2], 16) for j in (1, 3, 5)) for stop in stops[i : i + 2])
    return "#" + "".join(f"{round(a + (at - i) * (b - a)):02x}" for a, b in zip(one, two, strict=True))


def css() -> str:
    """Return the style rules that set the colours: the reader's preference, their choice on the page, and paper."""
    light, dark = (";".join(f"--{k}:{v}" for k, v in variables(theme).items()) for theme in ("light", "dark"))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}}}\n"
    )


def standalone(svg: str) -> str:
    """Return a chart as a file of its own: light colours instead of variables, values as titles instead of data."""
    light = variables("light")
    svg = TIP.sub(r"<\1\3><title>\2</title></\1>", FOR_SCRIPTS.sub("", svg))
    return VARIABLE.sub(lambda match: f'"{light[match[1]]}"' if match[1] in light else match[0], svg)


def colour(i: int) -> str:
    """Return the colour of the i-th thing."""
    return f"var(--c{i % 8})"


def shade(share: float) -> tuple[str, str]:
    """Return a fill of the sequential ramp for a share from 0 to 1, and the ink that reads well on it."""
    i = min(STEPS - 1, int(min(1.0, max(0.0, share)) * STEPS))
    return f"var(--q{i})", f"var(--q{i}ink)"


def side(share: float) -> tuple[str, str]:
    """Return a fill of the diverging ramp for a share from -1 to 1, and the ink that reads well on it."""
    half = SIDES // 2
    i = half + round(min(1.0, max(-1.0, share)) * half)
    return f"var(--d{i})", f"var(--d{i}ink)"
