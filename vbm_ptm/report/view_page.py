"""A sheet of views as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import io
from html import escape

import numpy as np
from PIL import Image

from vbm_ptm.report.view_sheet import Pixels, SampleViews, ViewSheet, recall

# Images up to this side are stored without loss; larger ones as JPEG, a tenth of the bytes.
_LOSSLESS_SIDE = 128
_ORIGINAL_SIDE = 256
_MOST_PLANS = 6

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #59636e; --paper: #ffffff; --line: #d1d9e0;
  --weak: #0072b2; --strong: #b45309; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9198a1; --paper: #0d1117; --line: #3d444d;
  --weak: #56b4e9; --strong: #e69f00; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 74rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: .9rem; font-weight: 500; margin: .8rem 0 .3rem; }
p, dd, figcaption, h3 { color: var(--dim); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; }
dt { font-weight: 600; } dd { margin: 0; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 34rem), 1fr)); gap: 0 1.5rem; }
.views { display: flex; flex-wrap: wrap; gap: .5rem; }
figure { margin: 0; width: 6.5rem; font-size: .8rem; text-align: center; }
figure img { display: block; width: 100%; height: 6.5rem; object-fit: contain; border-radius: 3px;
  border: 2px solid var(--line); image-rendering: auto; }
figure.small img { image-rendering: pixelated; }
figure.weak img { border-color: var(--weak); } figure.strong img { border: 2px dashed var(--strong); }
.plan { margin: .9rem 0; font-size: .9rem; }
.track { position: relative; height: 1.5rem; margin: .25rem .6rem; border-bottom: 2px solid var(--line); }
.track i { position: absolute; top: .6rem; bottom: 0; border-left: 1px solid var(--line); }
.track b { position: absolute; top: .8rem; width: 1.2rem; height: 1.2rem; margin-left: -.6rem; border-radius: 50%;
  background: var(--weak); border: 3px solid var(--paper); }
.ends { display: flex; justify-content: space-between; font-size: .8rem; color: var(--dim); }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
  .views { gap: .4rem; } figure { width: calc(20% - .35rem); } figure img { height: auto; aspect-ratio: 1; } }
@media print { body { max-width: none; } .sample { break-inside: avoid; } }
"""


def html_page(sheet: ViewSheet) -> str:
    """Return the page: facts, the views of all samples by class, and the recall plan of a few of them."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in sheet.facts.items())
    parts = [
        "<h1>What the network sees</h1>",
        "<p>Views as training draws them, with the seeds of the run, before normalisation: for each class, the samples "
        "that come first. Every visit to a sample draws new views.</p>",
        f"<dl>{facts}</dl>",
    ]
    for class_name, samples in sheet.by_class.items():
        shown = "".join(map(_sample, samples))
        parts.append(f'<section><h2>{escape(class_name)}</h2><div class="samples">{shown}</div></section>')
    parts.append(_plans(sheet))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>What the network sees</title>'
        f"<style>{_STYLE}</style></head><body><main>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _plans(sheet: ViewSheet) -> str:
    planned = sheet.planned(_MOST_PLANS)
    ticks = "".join(
        f'<i style="left:{100 * start / sheet.num_steps:.3f}%"></i>' for start in sheet.epoch_starts[1:]
    )
    lines = [
        "<section><h2>When a sample comes back</h2><p>Each line is the task from its first step to its last; fine "
        f"lines separate its {sheet.epochs} epoch{'s' * (sheet.epochs != 1)}, a dot is a step with the sample.</p>"
    ]
    for sample in planned:
        dots = "".join(
            f'<b style="left:{100 * (visit.task_step + 0.5) / sheet.num_steps:.3f}%" title="{visit}"></b>'
            for visit in sample.visits
        )
        text = f"{escape(sample.class_name)} · {escape(sample.name)}: {recall(sample)}"
        lines.append(
            f'<div class="plan">{text}<div class="track" role="img" aria-label="{text}">{ticks}{dots}</div></div>'
        )
    ends = f'<div class="ends"><span>step 1</span><span>step {sheet.num_steps}</span></div>'
    return "".join(lines) + f"{ends}</section>"


def _sample(sample: SampleViews) -> str:
    first = sample.visits[0]
    original = sample.original.copy()
    original.thumbnail((_ORIGINAL_SIDE, _ORIGINAL_SIDE))
    about = f"{sample.class_name}, {sample.name}"
    figures = [_figure(np.asarray(original), "stored", "", f"{about}: the image as it is stored")]
    for number, view in enumerate(sample.views, start=1):
        figures.append(
            _figure(
                view.pixels,
                f"{view.kind}" if len(sample.views) == 1 else f"{number} · {view.kind}",
                view.kind,
                f"{about}: view {number} of {len(sample.views)}, {view.kind}, {first}",
            )
        )
    heading = f"<h3>{escape(sample.name)} · {first}</h3>"
    return f'<div class="sample">{heading}<div class="views">{"".join(figures)}</div></div>'


def _figure(pixels: Pixels, caption: str, kind: str, description: str) -> str:
    size = "small" if max(pixels.shape[:2]) < 64 else ""
    return (
        f'<figure class="{kind} {size}"><img src="{_data_uri(pixels)}" alt="{escape(description)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _data_uri(pixels: Pixels) -> str:
    is_small = max(pixels.shape[:2]) <= _LOSSLESS_SIDE
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG" if is_small else "JPEG", quality=90, optimize=True)
    return f"data:image/{'png' if is_small else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
