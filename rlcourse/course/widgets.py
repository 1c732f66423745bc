"""What a reader moves in a lesson: explorers, figures with sliders (small multiples for readers without a kernel), and
bets, predictions that are kept until the result is there."""

import io
import os
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlcourse.course.figures import DPI
from rlcourse.measure.plots import PURPLE

SIZE = (5.0, 3.4)  # inches of one picture


def explorer(draw: Callable, static: list[dict[str, Any]], **controls) -> None:
    """Show `draw(axes, **values)` with a control for each value, or one picture for each entry of `static`.

    static: dictionaries of values whose pictures tell the story on paper. controls: by name, (start, low, high, step)
    for a slider, a list of choices for a menu (the first is the start), or True or False for a check box. The pictures
    stand alone under RLCOURSE_STATIC=1 (the notebooks that ship) and where ipywidgets is missing. Works with
    ipywidgets 7 and 8.
    """
    from IPython.display import Image, display

    ipywidgets = live_widgets()
    if ipywidgets is None:
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


def live_widgets():
    """The module ipywidgets, or None where widgets show nothing: under RLCOURSE_STATIC=1, or where it is missing."""
    if os.environ.get("RLCOURSE_STATIC") == "1":
        return None
    try:
        import ipywidgets
    except ImportError:
        return None
    return ipywidgets


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
    figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})  # no version: the same bytes everywhere
    return png.getvalue()


class Bet:
    """A reader's prediction. value: a number, or one of the choices; the usual one until the reader has placed it."""

    def __init__(self, question: str, usual: float | str, unit: str):
        self.question, self.value, self.unit, self.placed = question, usual, unit, False

    def place(self, value: float | str) -> None:
        self.value, self.placed = value, True

    def __str__(self) -> str:
        return f"{'your bet' if self.placed else 'a common bet'}: {in_words(self.value, self.unit)}"

    def result(self, found: float | str) -> None:
        """Show the bet beside what came out: a number to the digits of the bet's unit, or one of the choices."""
        from IPython.display import Markdown, display

        mark = "" if isinstance(found, float | int) else " ✔" if found == self.value else " ✘"
        display(Markdown(f"> **{self.question}**<br>{self}{mark}<br>the result: {in_words(found, self.unit)}"))

    def line(self, ax: Axes, vertical: bool = False) -> None:
        """Draw a bet on a number into a figure, as a line with its label."""
        (ax.axvline if vertical else ax.axhline)(self.value, color=PURPLE, linestyle=":", linewidth=2, label=str(self))


def in_words(value: float | str, unit: str) -> str:
    """'12.3 points' or the choice itself: numbers to three digits."""
    return f"{value:.3g} {unit}".rstrip() if isinstance(value, float | int) else value


bets: dict[str, Bet] = {}  # by question: a cell that runs again finds the bet that was placed


def bet(question: str, values: tuple | list[str], unit: str = "") -> Bet:
    """Ask for a prediction before a run and return it.

    values: (start, low, high, step) of a slider, or choices. The usual bet, which stands until the reader places one,
    is the start or the first choice. Without ipywidgets and under RLCOURSE_STATIC=1 (the notebooks that ship) the
    question is text and the usual bet stands.
    """
    from IPython.display import Markdown, display

    placed = bets.setdefault(question, Bet(question, values[0], unit))
    ipywidgets = live_widgets()
    if ipywidgets is None:
        choices = "" if isinstance(values, tuple) else "".join(f"\n> - {choice}" for choice in values) + "\n>\n> "
        display(Markdown(f"> **Place your bet.** {question}{choices or '<br>'}({placed})"))
        return placed
    if isinstance(values, tuple):
        widget = control(ipywidgets, unit or "bet", (placed.value, *values[1:]))
    else:
        widget = ipywidgets.RadioButtons(options=values, value=placed.value if placed.placed else None)
    widget.observe(lambda change: placed.place(change["new"]), names="value")
    display(ipywidgets.VBox([ipywidgets.HTML(f"<b>Place your bet.</b> {question}"), widget]))
    return placed
