"""A sheet of views as one picture."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw, ImageFont

from vbm_ptm.report.view_sheet import SampleViews, ViewSheet, recall

_CELL, _GAP, _MARGIN, _LINE = 112, 8, 24, 20
_LEAST_WIDTH = 900
_MOST_PLANS = 6

_INK, _DIM, _RULE, _WEAK, _STRONG = "#1b1f24", "#59636e", "#d1d9e0", "#0072b2", "#b45309"


def png_picture(sheet: ViewSheet) -> bytes:
    """Return the picture as PNG: facts, views by class, and below them the recall plan of a few samples."""
    sample_width = (1 + max(len(sample.views) for sample in sheet.samples)) * (_CELL + _GAP) + _MARGIN
    rows = [own[first : first + 2] for own in sheet.by_class.values() for first in range(0, len(own), 2)]
    width = max(_LEAST_WIDTH, _MARGIN + max(map(len, rows)) * sample_width)
    planned = sheet.planned(_MOST_PLANS)
    fact_lines = [
        line
        for name, text in sheet.facts.items()
        for line in _wrapped(f"{name}: {text}", width - 2 * _MARGIN, font=_font(13))
    ]
    sample_height = _LINE + _CELL + _LINE + _GAP
    height = 2 * _MARGIN + 40 + _LINE * len(fact_lines) + sample_height * len(rows)
    height += 50 + 46 * len(planned)
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((_MARGIN, _MARGIN), "What the network sees", fill=_INK, font=_font(22))
    top = _MARGIN + 40
    for line in fact_lines:
        draw.text((_MARGIN, top), line, fill=_DIM, font=_font(13))
        top += _LINE
    for row in rows:
        top += _GAP
        for column, sample in enumerate(row):
            _draw_sample(picture, draw, sample, left=_MARGIN + column * sample_width, top=top)
        top += sample_height - _GAP
    top += _GAP
    title = f"When a sample comes back: {sheet.num_steps} steps in {sheet.epochs} epochs"
    draw.text((_MARGIN, top), title, fill=_INK, font=_font(16))
    top += 32
    for sample in planned:
        _draw_plan(draw, sheet, sample, top=top, width=width)
        top += 46
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _draw_sample(
    picture: Image.Image, draw: ImageDraw.ImageDraw, sample: SampleViews, *, left: int, top: int
) -> None:
    name = f"{sample.class_name} · {sample.name} · {sample.visits[0]}"
    width = (1 + len(sample.views)) * (_CELL + _GAP)
    draw.text((left, top), _cut(name, width, font=_font(13)), fill=_INK, font=_font(13))
    cells = [(sample.original, "stored", _RULE)]
    for number, view in enumerate(sample.views, start=1):
        colour = _STRONG if view.kind == "strong" else _WEAK
        cells.append((Image.fromarray(view.pixels), f"{number} · {view.kind}", colour))
    for column, (image, caption, colour) in enumerate(cells):
        edge, upper = left + column * (_CELL + _GAP), top + _LINE
        scale = (_CELL - 4) / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        how = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.LANCZOS
        shown = image.resize(size, how)
        place = edge + (_CELL - shown.width) // 2, upper + (_CELL - shown.height) // 2
        picture.paste(shown, place)
        draw.rectangle((edge, upper, edge + _CELL - 1, upper + _CELL - 1), outline=colour, width=2)
        draw.text((edge + 2, upper + _CELL + 2), caption, fill=_DIM, font=_font(12))


def _draw_plan(
    draw: ImageDraw.ImageDraw, sheet: ViewSheet, sample: SampleViews, *, top: int, width: int
) -> None:
    text = f"{sample.class_name} · {sample.name}: {recall(sample)}"
    draw.text((_MARGIN, top), _cut(text, width - 2 * _MARGIN, font=_font(12)), fill=_DIM, font=_font(12))
    left, right, base = _MARGIN + 6, width - _MARGIN - 6, top + 32
    for start in (*sheet.epoch_starts, sheet.num_steps):
        x = left + (right - left) * start / sheet.num_steps
        draw.line((x, base - 8, x, base), fill=_RULE)
    draw.line((left, base, right, base), fill=_RULE, width=2)
    for visit in sample.visits:
        x = left + (right - left) * (visit.task_step + 0.5) / sheet.num_steps
        draw.ellipse((x - 5, base - 5, x + 5, base + 5), fill=_WEAK)


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _cut(text: str, width: int, *, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """Return as much of a text as fits."""
    while text and font.getlength(text) > width:
        text = text[:-2].rstrip("… ") + "…"
    return text


def _wrapped(text: str, width: int, *, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> list[str]:
    """Return a text broken into lines that fit."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(f"    {word}")
    return lines
