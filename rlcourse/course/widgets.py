"""What a reader moves in a lesson: explorers, figures with sliders (small multiples for readers without a kernel), and
bets, predictions that the reader places before seeing the result."""

import html
import io
import os
import re
from collections.abc import Callable
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlcourse.course.figures import DPI
from rlcourse.measure.plots import PURPLE

SIZE = (5.0, 3.4)  # inches of one picture


def explorer(draw: Callable, static: list[dict[str, Any]], **controls) -> None:
    """Show `draw(axes, **values)` with a control for each value, or one picture for each dictionary of values in
    `static`, under RLCOURSE_STATIC=1 (the notebooks that ship) and where ipywidgets is missing.

    controls: by name, (start, low, high, step) for a slider, a list of choices for a menu, or True or False for a check
    box.
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
    """The module ipywidgets, or None where widgets show nothing."""
    if os.environ.get("RLCOURSE_STATIC") == "1":
        return None
    try:
        import ipywidgets
    except ImportError:
        return None
    return ipywidgets


def control(ipywidgets, name: str, values):
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
    """A reader's prediction. value: a number, or one of the choices; None until the reader has placed it."""

    def __init__(self, question: str, unit: str):
        self.question, self.unit, self.value = question, unit, None
        self.waiting: list[Callable[[], None]] = []  # results to open once the bet is placed

    def place(self, value: float | str) -> None:
        self.value = value
        while self.waiting:
            self.waiting.pop()()

    def __str__(self) -> str:
        return "" if self.value is None else f"your bet: {in_words(self.value, self.unit)}"

    def result(self, found: float | str | list[float]) -> None:
        """Show what came out, and score the bet. found: a number, the numbers of several runs, or one of the choices.
        In a live notebook the result opens when the bet is placed or the reader asks for it; elsewhere it is in a
        closed <details>."""
        from IPython.display import HTML, display

        ipywidgets, question = live_widgets(), as_html(self.question)
        if ipywidgets is None:
            summary = f"<summary>The result of the bet: {question}</summary>"
            display(HTML(f"<details>{summary}{self.scored(found)}</details>"))
        elif self.value is not None:
            display(HTML(f"<b>{question}</b><br>{self.scored(found)}"))
        else:
            line = ipywidgets.HTML(f"You haven't bet yet: {question} Press “place” above, or see the result now.")
            button = ipywidgets.Button(description="show the result")
            box = ipywidgets.VBox([line, button])

            def show(_=None) -> None:
                box.children = [ipywidgets.HTML(f"<b>{question}</b><br>{self.scored(found)}")]

            button.on_click(show)
            self.waiting.append(show)
            display(box)

    def scored(self, found: float | str | list[float]) -> str:
        """As HTML, below the bet and how far it was off, if there is one."""
        runs = found if isinstance(found, list) else [found]
        if isinstance(runs[0], str):
            words, score = runs[0], "✔" if runs[0] == self.value else "✘"
        else:
            low, high = min(runs), max(runs)
            words = in_words(fmean(runs), self.unit)
            if len(runs) > 1:
                words += f", the mean of {len(runs)} runs from {low:.3g} to {high:.3g}"
            miss = 0 if self.value is None else max(low - self.value, self.value - high, 0)
            hit = f"inside the {len(runs)} runs' range" if len(runs) > 1 else "exactly right"
            score = f"– off by {in_words(miss, self.unit)}" if miss else f"– {hit}"
        bet_and_score = "" if self.value is None else as_html(f"{self} {score}") + "<br>"
        return f"{bet_and_score}the result: {as_html(words)}"

    def line(self, ax: Axes) -> None:
        """Draw a bet on a number into a figure, as a line with its label; nothing before it is placed."""
        if self.value is None:
            ax.plot([], [], linestyle="none", label=" ")  # invisible: legends that list the bet's line still work
        else:
            ax.axhline(self.value, color=PURPLE, linestyle=":", linewidth=2, label=str(self))


def in_words(value: float | str, unit: str) -> str:
    """'12.3 points' or the choice itself: numbers to three digits."""
    return f"{value:.3g} {unit}".rstrip() if isinstance(value, float | int) else value


def as_html(text: str) -> str:
    """A line of Markdown as HTML; of its markup only code in backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


bets: dict[str, Bet] = {}  # by question: a cell that runs again finds the bet that was placed


def bet(question: str, values: tuple | list[str], unit: str = "") -> Bet:
    """Ask for a prediction before a run and return it. values: (low, high, step) of a slider, or choices. A bet can be
    placed once, and only after the reader has moved the slider or chosen. Where there are no widgets the question is
    text."""
    from IPython.display import Markdown, display

    placed = bets.setdefault(question, Bet(question, unit))
    ipywidgets = live_widgets()
    if ipywidgets is None:
        display(Markdown(f"> **Place your bet.** {question}{range_of(values, unit)}"))
        return placed
    if isinstance(values, tuple):
        low, high, step = values
        middle = low + step * round((high - low) / step / 2)  # any other start would hint at the answer
        widget = control(ipywidgets, unit or "bet", (middle if placed.value is None else placed.value, *values))
    else:
        widget = ipywidgets.RadioButtons(options=values, value=placed.value)
    button = ipywidgets.Button(description="place", disabled=True)
    widget.observe(lambda _: setattr(button, "disabled", False), names="value")

    def place(_=None) -> None:
        placed.place(widget.value)
        widget.disabled = button.disabled = True

    button.on_click(place)
    widget.disabled = placed.value is not None
    display(ipywidgets.VBox([ipywidgets.HTML(f"<b>Place your bet.</b> {as_html(question)}"), widget, button]))
    return placed


def range_of(values: tuple | list[str], unit: str) -> str:
    if isinstance(values, tuple):
        return f"<br>(from {values[0]:,} to {values[1]:,} {unit}".rstrip() + ")"
    return "".join(f"\n> - {choice}" for choice in values)
