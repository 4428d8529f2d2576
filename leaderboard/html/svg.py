"""A matplotlib figure as a small SVG that lives inside a page: its text is text, its colours are the page's."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
# matplotlib wants real colours; these stand for CSS variables until the figure is a page's
_VARIABLES = (
    "ink", "muted", "grid", "panel", "band",
    "llm", "human", "composer", "expert", "compile", "eager", "library", "gemm",
)  # fmt: skip
COLOUR = {name: f"#0{n:02x}a57" for n, name in enumerate(_VARIABLES, 1)}
_NAME_OF = {colour: name for name, colour in COLOUR.items()}
STYLE = {
    "svg.fonttype": "none",
    "path.simplify": False,
    "font.size": 11,
    "axes.edgecolor": COLOUR["muted"],
    "axes.labelcolor": COLOUR["ink"],
    "axes.titlesize": 11,
    "axes.titlecolor": COLOUR["ink"],
    "axes.facecolor": COLOUR["panel"],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": COLOUR["grid"],
    "grid.linewidth": 0.7,
    "text.color": COLOUR["ink"],
    "xtick.color": COLOUR["muted"],
    "xtick.labelcolor": COLOUR["ink"],
    "ytick.color": COLOUR["muted"],
    "ytick.labelcolor": COLOUR["ink"],
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "axes.axisbelow": True,
}

ElementTree.register_namespace("", _SVG)


def figure(width: int, height: int) -> Figure:
    """An empty figure; sizes in CSS pixels. To be made and filled inside ``matplotlib.rc_context(STYLE)``."""
    return Figure(figsize=(width / 72, height / 72))


def inline(fig: Figure, name: str, title: str, description: str) -> Markup:
    """The figure as an ``<svg>`` element to put into a page.

    Args:
        name: unique on the page; ids are built from it.
        title, description: what a screen reader says instead of the drawing.
    """
    fig.canvas = FigureCanvasSVG(fig)
    raw = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # the same data make the same bytes
        fig.savefig(raw, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(raw.getvalue())
    _drop(root)
    used = set(re.findall(r"(?:#)([\w.-]+)", " ".join(v for e in root.iter() for v in e.attrib.values())))
    for element in list(root.iter()):
        _tidy(element, name, used)
    _share_styles(root)
    box = root.get("viewBox")
    root.attrib.clear()
    root.attrib |= {
        "viewBox": box, "role": "img", "aria-labelledby": f"{name}-title {name}-desc", "class": "plot",
        "style": f"--width: {box.split()[2]}px",
    }  # fmt: skip
    for n, (tag, text) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        child.text = text
        root.insert(n, child)
    text = ElementTree.tostring(root, encoding="unicode")
    return Markup(re.sub(r"\s*\n\s*", "\n", text.replace(f' xmlns="{_SVG}"', "", 1)))


def _drop(root: ElementTree.Element) -> None:
    """Metadata, and matplotlib's style rule for ``*``, which would hold for the whole page."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)


def _tidy(element: ElementTree.Element, name: str, used: set[str]) -> None:
    a = element.attrib
    if _LINK in a:
        a["href"] = a.pop(_LINK)
    if a.get("id") in used:
        a["id"] = f"{name}-{a['id']}"
    else:
        a.pop("id", None)
    for key in ("d", "x", "y", "width", "height", "transform", "points", "style"):
        if key in a:
            a[key] = re.sub(r"\d+\.\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), a[key])
            if key == "d":
                a[key] = re.sub(r"\s*([A-Za-z])\s*", r"\1", a[key].replace("\n", " "))
    if "rotate(0 " in a.get("transform", "") or "rotate(-0 " in a.get("transform", ""):
        del a["transform"]
    for key, value in list(a.items()):
        value = re.sub(r"(?<=#)(?=[mp][0-9a-f]{10}\b)", f"{name}-", value)
        value = re.sub(r"#0[0-9a-f]{2}a57\b", lambda m: f"var(--{_NAME_OF[m[0]]})", value)
        a[key] = re.sub(r"font(-family)?: [^;]*'DejaVu Sans'[^;]*;? ?", _font, value) if key == "style" else value


def _font(match: re.Match) -> str:
    """The page's font; the size is kept where the shorthand gives it."""
    size = re.search(r"([\d.]+px)", match[0])
    weight = "font-weight: bold; " if re.search(r"\b(bold|[6-9]00)\b", match[0]) else ""
    return f"{weight}font-size: {size[1]}; " if size else weight


def _share_styles(root: ElementTree.Element) -> None:
    """Markers of one series carry the same style each; say it once on their group."""
    for group in root.iter(f"{{{_SVG}}}g"):
        styles = {child.get("style") for child in group}
        if len(group) > 1 and len(styles) == 1 and None not in styles and not group.get("style"):
            group.set("style", styles.pop())
            for child in group:
                del child.attrib["style"]
