"""Explorers: one picture for paper, the same on every machine; live ones redraw when a control moves, and in ipywidgets
7 as in 8. Bets: the result is hidden until one is placed, and where nobody can place one."""

import io
import sys
import warnings

import ipywidgets
import pytest
from IPython.display import Image
from matplotlib.figure import Figure
from matplotlib.image import imread

from rlcourse.course import widgets


def draw(ax, height=1.0, sign="plus", grid=False):
    ax.plot([0, 1], [0, height if sign == "plus" else -height], linewidth=5)
    ax.set_ylim(-3, 3)
    ax.grid(grid)


CONTROLS = {"height": (1.0, 0.0, 3.0, 0.5), "sign": ["plus", "minus"], "grid": False}
STATIC = [{"height": 1.0}, {"height": 2.0, "sign": "minus"}]


@pytest.fixture
def bets(monkeypatch):
    monkeypatch.setattr(widgets, "bets", {})


@pytest.fixture
def shown(monkeypatch):
    """What is displayed."""
    seen = []
    monkeypatch.setattr("IPython.display.display", seen.append)
    monkeypatch.delenv("RLCOURSE_STATIC", raising=False)
    return seen


def explore(shown):
    """The controls by name and the picture of a live explorer."""
    widgets.explorer(draw, static=STATIC, **CONTROLS)
    [box] = shown
    *found, picture = box.children
    return {widget.description: widget for widget in found}, picture


def test_static_pictures_stand_three_in_a_row_and_have_the_same_bytes_each_time():
    states = [{"height": 1.0 + i / 10} for i in range(4)]
    png = widgets.pictures(draw, states)
    height, width, _ = imread(io.BytesIO(png), format="png").shape
    assert (width, height) == (3 * 600, 2 * 408)  # 5 x 3.4 inches at 120 dots
    assert png == widgets.pictures(draw, states) and b"Software" not in png and b"matplotlib" not in png.lower()


@pytest.fixture(params=["a notebook that ships", "no ipywidgets"])
def static(request, shown, monkeypatch):
    if request.param == "no ipywidgets":
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
    else:
        monkeypatch.setenv("RLCOURSE_STATIC", "1")


def test_without_widgets_there_is_the_picture(static, shown):
    widgets.explorer(draw, static=STATIC, **CONTROLS)
    [image] = shown
    assert isinstance(image, Image) and image.data == widgets.pictures(draw, STATIC)


@pytest.mark.parametrize(("name", "value"), [("height", 2.5), ("sign", "minus"), ("grid", True)])
def test_moving_a_control_redraws_with_its_value_and_those_of_the_others(name, value, shown):
    controls, picture = explore(shown)
    start = {"height": 1.0, "sign": "plus", "grid": False}
    assert {name: widget.value for name, widget in controls.items()} == start
    assert picture.value == (before := widgets.pictures(draw, [start]))
    controls[name].value = value
    assert picture.value == widgets.pictures(draw, [start | {name: value}]) != before


# Every class and argument of ipywidgets that the explorers use, as ipywidgets 7.7 (Colab's) declares them.
IN_7_7 = {
    "Button": {"description", "disabled"},
    "Checkbox": {"value", "indent", "description", "style", "layout"},
    "Dropdown": {"options", "value", "description", "style", "layout"},
    "HTML": {"value"},
    "RadioButtons": {"options", "value"},
    "FloatSlider": {"value", "min", "max", "step", "continuous_update", "description", "style", "layout"},
    "Image": {"value", "format", "layout"},
    "IntSlider": {"value", "min", "max", "step", "continuous_update", "description", "style", "layout"},
    "Layout": {"width"},
    "VBox": set(),
}


def test_nothing_is_used_that_ipywidgets_7_lacks(bets, shown, monkeypatch):
    class Recorder:
        """ipywidgets, but a class takes no argument that 7.7 does not have."""

        def __getattr__(self, name):
            def make(*arguments, **options):
                assert options.keys() <= IN_7_7[name], (name, options)
                return getattr(ipywidgets, name)(*arguments, **options)

            return make

    monkeypatch.setitem(sys.modules, "ipywidgets", Recorder())
    controls, _ = explore(shown)
    kinds = {"height": ipywidgets.FloatSlider, "sign": ipywidgets.Dropdown, "grid": ipywidgets.Checkbox}
    assert {name: type(widget) for name, widget in controls.items()} == kinds
    assert not controls["height"].continuous_update  # one picture a move, not one a pixel
    for values, kind in (((0, 50, 5), ipywidgets.IntSlider), (["yes", "no"], ipywidgets.RadioButtons)):
        placed = widgets.bet(f"how {values}?", values)
        assert isinstance(shown[-1].children[1], kind)
        placed.result(3)


# Bets ------------------------------------------------------------------------------------------------------------


def ask(shown, values, unit="") -> tuple:
    """A live bet, its control, and a function that presses its button."""
    placed = widgets.bet(f"How many of `{values}`?", values, unit)
    _, control, button = shown[-1].children
    return placed, control, button.click


def said(shown) -> str:
    """The text of what was displayed last, whatever displays it."""
    last = shown[-1]
    parts = last.children if isinstance(last, ipywidgets.VBox) else [last]
    return " ".join(getattr(p, "data", "") or getattr(p, "value", "") or getattr(p, "description", "") for p in parts)


def test_a_bet_counts_once_its_button_is_pressed_and_then_stands(bets, shown):
    placed, slider, press = ask(shown, (0, 50, 5), "points")
    slider.value = 40
    assert placed.value is None  # moving a control places nothing
    press()
    assert placed.value == 40 and slider.disabled
    again, slider, _ = ask(shown, (0, 50, 5), "points")  # the cell is run again
    assert again is placed and slider.value == 40 and slider.disabled
    placed, menu, press = ask(shown, ["a", "b"])
    menu.value = "b"
    press()
    assert placed.value == "b" and ask(shown, ["a", "b"])[1].value == "b"


@pytest.mark.parametrize(
    ("values", "start", "move"),
    [((0, 50, 5), 25, 40), ((1, 30, 1), 15, 16), ((0.2, 2, 0.05), 1.1, 1.15), (["a", "b"], None, "a")],
)
def test_nothing_hints_at_an_answer_or_can_be_placed_before_the_reader_moves(values, start, move, bets, shown):
    placed, control, _ = ask(shown, values)
    button = shown[-1].children[2]
    assert control.value == (start if start is None else pytest.approx(start)) and button.disabled  # the middle
    control.value = move
    assert not button.disabled and not control.disabled and placed.value is None
    again, *_ = ask(shown, values)  # run again, nothing placed
    assert again is placed and shown[-1].children[2].disabled


@pytest.mark.parametrize("way", ["the bet is placed later", "the reader doesn't want to bet"])
def test_a_result_is_hidden_until_the_bet_is_placed_or_the_reader_goes_on(way, bets, shown):
    placed, slider, press = ask(shown, (0, 50, 5), "points")
    slider.value = 40
    placed.result(8.26)
    assert "You haven't bet yet" in said(shown) and "8.26" not in said(shown)
    press() if way == "the bet is placed later" else shown[-1].children[1].click()
    assert "the result: 8.26 points" in said(shown)
    assert ("your bet: 40 points" in said(shown)) == (way == "the bet is placed later")


@pytest.mark.parametrize(
    ("bet_on", "found", "score"),
    [
        (40, 8.26, "your bet: 40 points – off by 31.7 points"),
        (8, [7, 8.5, 9.5], "your bet: 8 points – inside the 3 runs' range"),
        (5, [7, 8.5, 9.5], "your bet: 5 points – off by 2 points"),
        (10, [7, 8.5, 9.5], "your bet: 10 points – off by 0.5 points"),
        (8, 8, "your bet: 8 points – exactly right"),
        ("it falls", "it falls", "your bet: it falls ✔"),
        ("it falls", "nothing", "your bet: it falls ✘"),
    ],
)
def test_a_bet_is_scored_against_the_result_or_the_range_of_the_runs(bet_on, found, score, bets, shown):
    placed = widgets.bet("What?", ["nothing", "it falls"] if isinstance(bet_on, str) else (0, 50, 1), "points")
    placed.place(bet_on)
    placed.result(found)
    assert score in said(shown)
    if isinstance(found, list):
        assert "the result: 8.33 points, the mean of 3 runs from 7 to 9.5" in said(shown)


def test_where_nobody_can_bet_the_question_has_no_answer_and_the_result_is_closed(static, bets, shown):
    placed = widgets.bet("How many with `a < b`?", (0, 50, 5), unit="points")
    assert said(shown) == "> **Place your bet.** How many with `a < b`?<br>(from 0 to 50 points)"
    placed.result([8, 9])
    summary, result = said(shown).split("</summary>")
    assert summary == "<details><summary>The result of the bet: How many with <code>a &lt; b</code>?"
    assert result == "the result: 8.5 points, the mean of 2 runs from 8 to 9</details>"
    widgets.bet("And now?", ["a", "b"])
    assert said(shown) == "> **Place your bet.** And now?\n> - a\n> - b"


def test_a_figure_has_the_bets_line_only_once_it_is_placed(bets, shown):
    placed = widgets.bet("How many?", (0, 50, 5), "points")
    before, after = Figure().subplots(), Figure().subplots()
    placed.line(before)
    placed.place(30)
    placed.line(after)
    with warnings.catch_warnings(action="error"):  # matplotlib's, of a legend with nothing in it
        before.legend()
    assert [len(line.get_xdata()) for line in before.lines] == [0]
    assert list(after.lines[0].get_ydata()) == [30, 30] and after.lines[0].get_label() == "your bet: 30 points"
