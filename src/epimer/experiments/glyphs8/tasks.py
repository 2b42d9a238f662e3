"""The eight tasks and the pool for pre-training: what is drawn, and what each split keeps from the others.

| task | classes | what the splits do not share |
|---|---|---|
| digits | 10 handwritten digits (scikit-learn) | the handwritten image |
| greek | 24 Greek letters in front of stripes | faces |
| operators | 24 mathematical operators, dark on light, in noise | faces |
| rotation | an upper-case letter turned by 0, 90, 180, 270 degrees | faces |
| braille | 26 Braille letters | faces |
| stripes | 8 directions of a grating | the draw |
| clock | 12 hours, the minute hand only distracts | the draw |
| sum | the sum of two digits, each 0 to 4 | faces |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from epimer.experiments.glyphs8.render import (
    FAMILIES,
    MASTER,
    MONO,
    SANS,
    SERIF,
    SIDE,
    STIX,
    Jitter,
    Scene,
    generator,
    has,
    masters,
    needed,
    photograph,
    uniform,
    warp,
)

SPLITS = ("train", "val", "test")
GREEK = "αβγδεζηθικλμνξοπρστυφχψω"
OPERATORS = "∀∃∇∂∈∏∑√∝∞∠∩∫≈≠≡≤⊂⊎⊕⊗⊞⊢⊥"
BRAILLE = "⠁⠃⠉⠙⠑⠋⠛⠓⠊⠚⠅⠇⠍⠝⠕⠏⠟⠗⠎⠞⠥⠧⠺⠭⠽⠵"  # a to z
DIRECTED = "ABDEFGJKPQRTUVY"  # no turned one of them looks like another
COMPUTER_MODERN = ("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10")

# One face each of Sans, Mono and Serif, which every task has; STIX stays in training.
VAL_FACES = frozenset({"DejaVuSans", "DejaVuSansMono-BoldOblique", "DejaVuSerif-Italic", "cmss10"})
TEST_FACES = frozenset({"DejaVuSans-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif", "cmtt10"})

Drawn = tuple[Tensor, Tensor]
"""pictures, n x 27 x 27 in eight bits, and labels"""


@dataclass(frozen=True)
class Task:
    """A task: its classes, and how n samples of a split are drawn."""

    name: str
    classes: tuple[str, ...]
    draw: Callable[[str, int, torch.Generator], Drawn]

    def samples(self, split: str, n: int, seed: int) -> Drawn:
        """Draw a split; the same seed gives the same one."""
        return self.draw(split, n, generator(seed, self.name, split))


def labels(n: int, classes: int, rng: torch.Generator) -> Tensor:
    """Return n labels in random order, each class as often as the others."""
    return (torch.arange(n) % classes)[torch.randperm(n, generator=rng)]


def faces_of(split: str, faces: tuple[str, ...]) -> tuple[str, ...]:
    """Return the faces that a split draws from."""
    held = {"val": VAL_FACES, "test": TEST_FACES}
    if split in held:
        return tuple(face for face in faces if face in held[split])
    return tuple(face for face in faces if face not in VAL_FACES | TEST_FACES)


def pick(drawings: Tensor, rows: Tensor, rng: torch.Generator) -> Tensor:
    """Take from C x F x 48 x 48 masters the characters `rows`, each in a random face."""
    return drawings[rows, torch.randint(drawings.shape[1], (len(rows),), generator=rng)]


ALL_FACES = tuple(face for family in FAMILIES for face in family)


def greek(split: str, n: int, rng: torch.Generator) -> Drawn:
    """Tell Greek letters apart in front of stripes."""
    y = labels(n, len(GREEK), rng)
    ink = warp(pick(masters(GREEK, faces_of(split, ALL_FACES)), y, rng), rng, Jitter())
    behind = _grating(uniform(n, 0, math.pi, rng), rng)
    return photograph(torch.maximum(ink, 0.25 * behind), rng, Scene()), y


def operators(split: str, n: int, rng: torch.Generator) -> Drawn:
    """Tell mathematical operators apart, dark on light and in noise."""
    y = labels(n, len(OPERATORS), rng)
    faces = faces_of(split, (*SANS, *MONO, *SERIF, *STIX[:2]))
    ink = warp(pick(masters(OPERATORS, faces), y, rng), rng, Jitter())
    return photograph(ink, rng, Scene(noise=0.12, inverted=True)), y


def rotation(split: str, n: int, rng: torch.Generator) -> Drawn:
    """Tell how far a letter is turned."""
    y = labels(n, 4, rng)
    which = torch.randint(len(DIRECTED), (n,), generator=rng)
    ink = warp(pick(masters(DIRECTED, faces_of(split, ALL_FACES)), which, rng), rng, Jitter())
    turned = torch.stack([torch.rot90(picture, int(turns)) for picture, turns in zip(ink, y, strict=True)])
    return photograph(turned, rng, Scene()), y


def braille(split: str, n: int, rng: torch.Generator) -> Drawn:
    """Tell Braille letters apart."""
    y = labels(n, len(BRAILLE), rng)
    drawings = masters(BRAILLE, faces_of(split, (*SANS, *SERIF)))
    ink = warp(pick(drawings, y, rng), rng, Jitter(10, (0.9, 1.2), 0.15, 0.08))
    return photograph(ink, rng, Scene(texture=0.15)), y


def _plane() -> tuple[Tensor, Tensor]:
    """Return x and y of every pixel, from -1 to 1, y upwards."""
    line = (torch.arange(SIDE) + 0.5) * 2 / SIDE - 1
    y, x = torch.meshgrid(-line, line, indexing="ij")
    return x, y


def _grating(angle: Tensor, rng: torch.Generator) -> Tensor:
    """Draw waves that run at these angles: n x 27 x 27."""
    n, (x, y) = len(angle), _plane()
    waves, phase = (part[:, None, None] for part in (uniform(n, 2.0, 6.0, rng), uniform(n, 0, 2 * math.pi, rng)))
    along = torch.cos(angle)[:, None, None] * x + torch.sin(angle)[:, None, None] * y
    return 0.5 + 0.5 * torch.sin(along * math.pi * waves + phase)


def stripes(split: str, n: int, rng: torch.Generator) -> Drawn:
    """Tell the direction of a faint grating."""
    y = labels(n, 8, rng)
    angle = (y * 22.5 + uniform(n, -7, 7, rng)) * math.pi / 180
    return photograph(_grating(angle, rng), rng, Scene(contrast=(0.2, 0.45), noise=0.15)), y


def _hand(angle: Tensor, length: Tensor, width: Tensor, centre: tuple[Tensor, Tensor]) -> Tensor:
    """Draw a hand from each centre, clockwise from twelve: n x 27 x 27."""
    x, y = (axis - middle[:, None, None] for axis, middle in zip(_plane(), centre, strict=True))
    sin, cos = torch.sin(angle)[:, None, None], torch.cos(angle)[:, None, None]
    along = (x * sin + y * cos).clamp(min=0).minimum(length[:, None, None])
    distance = torch.hypot(x - along * sin, y - along * cos)
    return ((width[:, None, None] - distance) * SIDE / 2 + 0.5).clamp(0, 1)


def clock(split: str, n: int, rng: torch.Generator) -> Drawn:
    """Tell where the short, thick hand of a clock points."""
    y = labels(n, 12, rng)
    centre = (uniform(n, -0.08, 0.08, rng), uniform(n, -0.08, 0.08, rng))
    hour = (y * 30 + uniform(n, -9, 9, rng)) * math.pi / 180
    minute = uniform(n, 0, 2 * math.pi, rng)
    ink = torch.maximum(
        _hand(hour, uniform(n, 0.45, 0.6, rng), uniform(n, 0.07, 0.1, rng), centre),
        _hand(minute, uniform(n, 0.65, 0.85, rng), uniform(n, 0.03, 0.06, rng), centre),
    )
    return photograph(ink, rng, Scene(noise=0.1)), y


def addition(split: str, n: int, rng: torch.Generator) -> Drawn:
    """Tell the sum of two digits side by side."""
    y = labels(n, 9, rng)
    low, high = (y - 4).clamp(min=0), y.clamp(max=4)
    left = low + (torch.rand(n, generator=rng) * (high - low + 1)).long()
    drawings = masters("01234", faces_of(split, (*ALL_FACES, *COMPUTER_MODERN)))
    jitter = replace(Jitter(), scale=(0.8, 0.95), shift=0.03)
    ink = torch.maximum(
        warp(pick(drawings, left, rng), rng, jitter, (-0.45, 0.0)),
        warp(pick(drawings, y - left, rng), rng, jitter, (0.45, 0.0)),
    )
    return photograph(ink, rng, Scene()), y


DIGITS = [797, 300, 700]  # of scikit-learn's 1797 images


@cache
def _handwritten() -> Drawn:
    """Return scikit-learn's digits as masters, in an order that is always the same."""
    given = needed("sklearn.datasets", "scikit-learn").load_digits()
    small = torch.from_numpy(given.images).float()[:, None] / 16
    size = (MASTER - 12, MASTER - 12)
    large = functional.interpolate(small, size=size, mode="bicubic", align_corners=False).clamp(0, 1)
    order = torch.randperm(len(small), generator=generator("digits"))
    return functional.pad(large[:, 0], (6, 6, 6, 6))[order], torch.from_numpy(given.target).long()[order]


def digits(split: str, n: int, rng: torch.Generator) -> Drawn:
    """Tell handwritten digits apart: for training each image often, for val and test each at most once."""
    x, y = (torch.split(part, DIGITS)[SPLITS.index(split)] for part in _handwritten())
    which = torch.arange(n) % len(y) if split == "train" else torch.arange(len(y))
    which = which[torch.randperm(len(which), generator=rng)[:n]]
    return photograph(warp(x[which], rng, Jitter()), rng, Scene()), y[which]


TASKS = (
    Task("digits", tuple("0123456789"), digits),
    Task("greek", tuple(GREEK), greek),
    Task("operators", tuple(OPERATORS), operators),
    Task("rotation", ("0", "90", "180", "270"), rotation),
    Task("braille", tuple("abcdefghijklmnopqrstuvwxyz"), braille),
    Task("stripes", tuple(f"{22.5 * i:g}" for i in range(8)), stripes),
    Task("clock", tuple(str(hour or 12) for hour in range(12)), clock),
    Task("sum", tuple(map(str, range(9))), addition),
)

POOL_FACES = (*SANS, *SERIF)
POOL = "".join(
    chr(code)
    for first, last in (
        (0x0430, 0x044F),  # Cyrillic
        (0x0531, 0x0556),  # Armenian, upper case
        (0x0561, 0x0586),  # Armenian, lower case
        (0x10D0, 0x10F0),  # Georgian
        (0x05D0, 0x05EA),  # Hebrew
        (0x2D30, 0x2D65),  # Tifinagh
        (0x0E81, 0x0EAE),  # Lao
        (0x1401, 0x14C0),  # Canadian syllabics
    )
    for code in range(first, last + 1)
)
TWINS = frozenset("аеорсухкмнтвбзпфэօոսզցհղռքֆՍՕԱՈՑיוסםףפחວⴰⵏⵔⵙⵝⵟⵣⵜⵎⵍⵊⵉⵓⵕⴹⴸⴷⴺⵠⴶⵛⴲᑌᑎᑭᑯᑲᒪᒍᐯᐱᐁᐃᑫᑕᐧᐝᐤᐢᐦᐡᐪ")
"""characters of the pool's scripts left out because they look like one of a task: by eye, and all whose drawing in
DejaVu Sans, cut to its ink and scaled, covers more than 0.67 of its union with a task's"""


@dataclass(frozen=True)
class Pool:
    """The characters for pre-training, each in the faces that have it."""

    drawings: Tensor
    """masters, those of one character in a row"""
    starts: Tensor
    """each character's first master"""
    counts: Tensor
    """in how many faces it is"""

    def batch(self, n: int, rng: torch.Generator) -> Drawn:
        """Draw n pictures, and which character each shows."""
        y = torch.randint(len(self.counts), (n,), generator=rng)
        face = (torch.rand(n, generator=rng) * self.counts[y]).long()
        return photograph(warp(self.drawings[self.starts[y] + face], rng, Jitter()), rng, Scene()), y


def pool(most: int) -> Pool:
    """Draw the pool's first `most` characters."""
    found: list[Tensor] = []
    for character in POOL:
        faces = [face for face in POOL_FACES if character not in TWINS and has(face, character)]
        if faces and len(found) < most:
            found.append(masters(character, faces)[0])
    counts = torch.tensor([len(each) for each in found])
    return Pool(torch.cat(found), counts.cumsum(0) - counts, counts)
