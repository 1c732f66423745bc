"""Explorers: a figure with sliders where a kernel runs, small multiples of the same figure for readers without one."""

import io
import os
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

SIZE = (5.0, 3.4)  # inches of one picture


def explorer(draw: Callable, static: list[dict[str, Any]], **controls) -> None:
    """Show `draw(axes, **values)` with a control for each value, or one picture for each entry of `static`.

    static: dictionaries of values whose pictures tell the story on paper. controls: by name, (start, low, high, step)
    for a slider, a list of choices for a menu (the first is the start), or True or False for a check box. The pictures
    stand alone under RLCOURSE_STATIC=1 (the notebooks that ship) and where ipywidgets is missing. Works with
    ipywidgets 7 and 8.
    """
    from IPython.display import Image, display

    if os.environ.get("RLCOURSE_STATIC") == "1":
        display(Image(pictures(draw, static)))
        return
    try:
        import ipywidgets
    except ImportError:
        display(Image(pictures(draw, static)))
        return
    widgets = {name: control(ipywidgets, name, values) for name, values in controls.items()}
    picture = ipywidgets.Image(value=b"", format="png", layout=ipywidgets.Layout(width="560px"))

    def redraw(_=None) -> None:
        picture.value = pictures(draw, [{name: widget.value for name, widget in widgets.items()}])

    for widget in widgets.values():
        widget.observe(redraw, names="value")
    redraw()
    display(ipywidgets.VBox([*widgets.values(), picture]))


def control(ipywidgets, name: str, values):
    """The widget for one value: see `explorer`."""
    wide = {"description": name.replace("_", " "), "style": {"description_width": "120px"}}
    if isinstance(values, bool):
        return ipywidgets.Checkbox(value=values, indent=False, description=wide["description"])
    if isinstance(values, list):
        return ipywidgets.Dropdown(options=values, value=values[0], **wide)
    start, low, high, step = values
    kind = ipywidgets.IntSlider if all(isinstance(v, int) for v in values) else ipywidgets.FloatSlider
    return kind(value=start, min=low, max=high, step=step, continuous_update=False, **wide)


def pictures(draw: Callable, static: list[dict[str, Any]]) -> bytes:
    """One PNG with a picture for each dictionary of values, side by side, three in a row at most."""
    columns = min(3, len(static))
    rows = -(-len(static) // columns)
    figure = Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, values in zip(axes, static, strict=False):
        draw(ax, **values)
        if len(static) > 1 and not ax.get_title():
            ax.set_title(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items()), fontsize=11)
    for ax in axes[len(static) :]:
        ax.remove()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=90, metadata={"Software": None})  # no version: the same bytes everywhere
    return png.getvalue()
