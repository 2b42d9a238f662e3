"""The eight tasks and the pool for pre-training: what is drawn, and what the splits do not share.

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
    ALL_FACES,
    DRAWING_SIDE,
    MONO,
    SANS,
    SERIF,
    SIDE,
    STIX,
    Background,
    Jitter,
    add_background,
    draw_characters,
    has_glyph,
    import_extra,
    seeded_generator,
    uniform,
    warp,
)

SPLITS = ("train", "val", "test")
GREEK = "αβγδεζηθικλμνξοπρστυφχψω"
OPERATORS = "∀∃∇∂∈∏∑√∝∞∠∩∫≈≠≡≤⊂⊎⊕⊗⊞⊢⊥"
BRAILLE = "⠁⠃⠉⠙⠑⠋⠛⠓⠊⠚⠅⠇⠍⠝⠕⠏⠟⠗⠎⠞⠥⠧⠺⠭⠽⠵"  # a to z
DIRECTED = "ABDEFGJKPQRTUVY"  # none of them, turned, looks like another
COMPUTER_MODERN = ("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10")

# One face each of Sans, Mono and Serif, which every task has; STIX stays in training.
VAL_FACES = frozenset({"DejaVuSans", "DejaVuSansMono-BoldOblique", "DejaVuSerif-Italic", "cmss10"})
TEST_FACES = frozenset({"DejaVuSans-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif", "cmtt10"})

LabeledImages = tuple[Tensor, Tensor]
"""images, n x 27 x 27 in eight bits, and labels"""


@dataclass(frozen=True)
class GlyphTask:
    """A task: its classes, and how n samples of a split are drawn."""

    name: str
    classes: tuple[str, ...]
    draw: Callable[[str, int, torch.Generator], LabeledImages]

    def samples(self, split: str, n: int, seed: int) -> LabeledImages:
        """Draw n samples of a split, determined by the seed."""
        return self.draw(split, n, seeded_generator(seed, self.name, split))


def balanced_labels(n: int, classes: int, rng: torch.Generator) -> Tensor:
    """Return n labels in random order, all classes equally often."""
    return (torch.arange(n) % classes)[torch.randperm(n, generator=rng)]


def faces_of(split: str, faces: tuple[str, ...]) -> tuple[str, ...]:
    """Return the faces that a split draws from."""
    held = {"val": VAL_FACES, "test": TEST_FACES}
    if split in held:
        return tuple(face for face in faces if face in held[split])
    return tuple(face for face in faces if face not in VAL_FACES | TEST_FACES)


def sample_faces(drawings: Tensor, rows: Tensor, rng: torch.Generator) -> Tensor:
    """Take the characters `rows` of C x F x 48 x 48 drawings, each in a random face."""
    return drawings[rows, torch.randint(drawings.shape[1], (len(rows),), generator=rng)]


def greek(split: str, n: int, rng: torch.Generator) -> LabeledImages:
    """Draw Greek letters in front of stripes."""
    y = balanced_labels(n, len(GREEK), rng)
    ink = warp(sample_faces(draw_characters(GREEK, faces_of(split, ALL_FACES)), y, rng), rng, Jitter())
    behind = _grating(uniform(n, 0, math.pi, rng), rng)
    return add_background(torch.maximum(ink, 0.25 * behind), rng, Background()), y


def operators(split: str, n: int, rng: torch.Generator) -> LabeledImages:
    """Draw mathematical operators, dark on light and in noise."""
    y = balanced_labels(n, len(OPERATORS), rng)
    faces = faces_of(split, (*SANS, *MONO, *SERIF, *STIX[:2]))
    ink = warp(sample_faces(draw_characters(OPERATORS, faces), y, rng), rng, Jitter())
    return add_background(ink, rng, Background(noise=0.12, inverted=True)), y


def rotation(split: str, n: int, rng: torch.Generator) -> LabeledImages:
    """Draw letters turned by a multiple of 90 degrees."""
    y = balanced_labels(n, 4, rng)
    which = torch.randint(len(DIRECTED), (n,), generator=rng)
    ink = warp(sample_faces(draw_characters(DIRECTED, faces_of(split, ALL_FACES)), which, rng), rng, Jitter())
    turned = torch.stack([torch.rot90(image, int(turns)) for image, turns in zip(ink, y, strict=True)])
    return add_background(turned, rng, Background()), y


def braille(split: str, n: int, rng: torch.Generator) -> LabeledImages:
    """Draw Braille letters."""
    y = balanced_labels(n, len(BRAILLE), rng)
    drawings = draw_characters(BRAILLE, faces_of(split, (*SANS, *SERIF)))
    ink = warp(sample_faces(drawings, y, rng), rng, Jitter(10, (0.9, 1.2), 0.15, 0.08))
    return add_background(ink, rng, Background(texture=0.15)), y


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


def stripes(split: str, n: int, rng: torch.Generator) -> LabeledImages:
    """Draw faint gratings in one of eight directions."""
    y = balanced_labels(n, 8, rng)
    angle = (y * 22.5 + uniform(n, -7, 7, rng)) * math.pi / 180
    return add_background(_grating(angle, rng), rng, Background(contrast=(0.2, 0.45), noise=0.15)), y


def _hand(angle: Tensor, length: Tensor, width: Tensor, centre: tuple[Tensor, Tensor]) -> Tensor:
    """Draw a hand from each centre, clockwise from twelve: n x 27 x 27."""
    x, y = (axis - middle[:, None, None] for axis, middle in zip(_plane(), centre, strict=True))
    sin, cos = torch.sin(angle)[:, None, None], torch.cos(angle)[:, None, None]
    along = (x * sin + y * cos).clamp(min=0).minimum(length[:, None, None])
    distance = torch.hypot(x - along * sin, y - along * cos)
    return ((width[:, None, None] - distance) * SIDE / 2 + 0.5).clamp(0, 1)


def clock(split: str, n: int, rng: torch.Generator) -> LabeledImages:
    """Draw clocks whose short, thick hand points to the hour."""
    y = balanced_labels(n, 12, rng)
    centre = (uniform(n, -0.08, 0.08, rng), uniform(n, -0.08, 0.08, rng))
    hour = (y * 30 + uniform(n, -9, 9, rng)) * math.pi / 180
    minute = uniform(n, 0, 2 * math.pi, rng)
    ink = torch.maximum(
        _hand(hour, uniform(n, 0.45, 0.6, rng), uniform(n, 0.07, 0.1, rng), centre),
        _hand(minute, uniform(n, 0.65, 0.85, rng), uniform(n, 0.03, 0.06, rng), centre),
    )
    return add_background(ink, rng, Background(noise=0.1)), y


def addition(split: str, n: int, rng: torch.Generator) -> LabeledImages:
    """Draw two digits side by side, labelled by their sum."""
    y = balanced_labels(n, 9, rng)
    low, high = (y - 4).clamp(min=0), y.clamp(max=4)
    left = low + (torch.rand(n, generator=rng) * (high - low + 1)).long()
    drawings = draw_characters("01234", faces_of(split, (*ALL_FACES, *COMPUTER_MODERN)))
    jitter = replace(Jitter(), scale=(0.8, 0.95), shift=0.03)
    ink = torch.maximum(
        warp(sample_faces(drawings, left, rng), rng, jitter, (-0.45, 0.0)),
        warp(sample_faces(drawings, y - left, rng), rng, jitter, (0.45, 0.0)),
    )
    return add_background(ink, rng, Background()), y


DIGITS = [797, 300, 700]  # of scikit-learn's 1797 images


@cache
def _handwritten() -> LabeledImages:
    """Return scikit-learn's digits as drawings, in a fixed random order."""
    dataset = import_extra("sklearn.datasets", "scikit-learn").load_digits()
    small = torch.from_numpy(dataset.images).float()[:, None] / 16
    size = (DRAWING_SIDE - 12, DRAWING_SIDE - 12)
    large = functional.interpolate(small, size=size, mode="bicubic", align_corners=False).clamp(0, 1)
    order = torch.randperm(len(small), generator=seeded_generator("digits"))
    return functional.pad(large[:, 0], (6, 6, 6, 6))[order], torch.from_numpy(dataset.target).long()[order]


def digits(split: str, n: int, rng: torch.Generator) -> LabeledImages:
    """Draw handwritten digits: for training each image often, for val and test each at most once."""
    x, y = (torch.split(part, DIGITS)[SPLITS.index(split)] for part in _handwritten())
    which = torch.arange(n) % len(y) if split == "train" else torch.arange(len(y))
    which = which[torch.randperm(len(which), generator=rng)[:n]]
    return add_background(warp(x[which], rng, Jitter()), rng, Background()), y[which]


TASKS = (
    GlyphTask("digits", tuple("0123456789"), digits),
    GlyphTask("greek", tuple(GREEK), greek),
    GlyphTask("operators", tuple(OPERATORS), operators),
    GlyphTask("rotation", ("0", "90", "180", "270"), rotation),
    GlyphTask("braille", tuple("abcdefghijklmnopqrstuvwxyz"), braille),
    GlyphTask("stripes", tuple(f"{22.5 * i:g}" for i in range(8)), stripes),
    GlyphTask("clock", tuple(str(hour or 12) for hour in range(12)), clock),
    GlyphTask("sum", tuple(map(str, range(9))), addition),
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
LOOKALIKES = frozenset("аеорсухкмнтвбзпфэօոսզցհղռքֆՍՕԱՈՑיוסםףפחວⴰⵏⵔⵙⵝⵟⵣⵜⵎⵍⵊⵉⵓⵕⴹⴸⴷⴺⵠⴶⵛⴲᑌᑎᑭᑯᑲᒪᒍᐯᐱᐁᐃᑫᑕᐧᐝᐤᐢᐦᐡᐪ")
"""characters of the pool's scripts left out because they look like one of a task: by eye, and all whose drawing in
DejaVu Sans, cut to its ink and scaled, covers more than 0.67 of its union with a task's"""


@dataclass(frozen=True)
class Pool:
    """The characters for pre-training, each in the faces that have it."""

    drawings: Tensor
    """those of one character one after another"""
    starts: Tensor
    """the index of each character's first drawing"""
    counts: Tensor
    """the number of each character's drawings"""

    def batch(self, n: int, rng: torch.Generator) -> LabeledImages:
        """Draw n images, labelled by their characters."""
        y = torch.randint(len(self.counts), (n,), generator=rng)
        face = (torch.rand(n, generator=rng) * self.counts[y]).long()
        return add_background(warp(self.drawings[self.starts[y] + face], rng, Jitter()), rng, Background()), y


def draw_pool(size: int) -> Pool:
    """Draw the pool's first `size` characters."""
    drawings: list[Tensor] = []
    for character in POOL:
        faces = [face for face in POOL_FACES if character not in LOOKALIKES and has_glyph(face, character)]
        if faces and len(drawings) < size:
            drawings.append(draw_characters(character, faces)[0])
    counts = torch.tensor([len(each) for each in drawings])
    return Pool(torch.cat(drawings), counts.cumsum(0) - counts, counts)
