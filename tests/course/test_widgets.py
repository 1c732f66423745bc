"""Explorers: one picture for paper, the same on every machine; live ones redraw when a control moves, and in ipywidgets
7 as in 8. Bets: kept until the result, and sensible where nobody can place one."""

import io
import sys

import ipywidgets
import numpy as np
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
def shown(monkeypatch):
    """What is displayed."""
    seen = []
    monkeypatch.setattr("IPython.display.display", seen.append)
    monkeypatch.delenv("RLCOURSE_STATIC", raising=False)
    return seen


def explore(shown, **controls):
    """The controls by name and the picture of a live explorer."""
    widgets.explorer(draw, static=STATIC, **(controls or CONTROLS))
    [box] = shown
    *found, picture = box.children
    return {widget.description: widget for widget in found}, picture


def pixels(png: bytes) -> np.ndarray:
    return imread(io.BytesIO(png), format="png")


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (3, 3, 1), (4, 3, 2)])
def test_static_pictures_stand_three_in_a_row_and_have_the_same_bytes_each_time(count, columns, rows):
    states = [{"height": 1.0 + i / 10} for i in range(count)]
    png = widgets.pictures(draw, states)
    height, width, _ = pixels(png).shape
    assert (width, height) == (columns * 600, rows * 408)  # 5 x 3.4 inches at 120 dots
    assert png == widgets.pictures(draw, states) and b"Software" not in png and b"matplotlib" not in png.lower()


def test_each_of_several_pictures_says_its_values_unless_it_has_a_title():
    titles = []

    def keep(ax, **values):
        titles.append(ax)
        if values.get("sign"):
            ax.set_title("mine")

    widgets.pictures(keep, [{"step_size": 1, "n": 2}, {"sign": "plus"}])
    assert [ax.get_title() for ax in titles] == ["step size 1, n 2", "mine"]
    widgets.pictures(keep, [{"height": 1}])
    assert titles[-1].get_title() == ""


@pytest.mark.parametrize("why", ["a notebook that ships", "no ipywidgets"])
def test_without_widgets_there_is_the_picture(why, shown, monkeypatch):
    if why == "no ipywidgets":
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
    else:
        monkeypatch.setenv("RLCOURSE_STATIC", "1")
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


def test_the_kind_of_a_control_follows_from_its_values():
    whole = widgets.control(ipywidgets, "group_size", (8, 2, 64, 2))
    assert isinstance(whole, ipywidgets.IntSlider) and (whole.min, whole.max, whole.step, whole.value) == (2, 64, 2, 8)
    broken = widgets.control(ipywidgets, "clip", (1, 0, 2, 0.1))
    assert isinstance(broken, ipywidgets.FloatSlider) and broken.step == 0.1 and whole.description == "group size"
    assert not whole.continuous_update and not broken.continuous_update  # one picture a move, not one a pixel
    box = widgets.control(ipywidgets, "std", True)
    assert isinstance(box, ipywidgets.Checkbox) and box.value is True
    menu = widgets.control(ipywidgets, "how", ["constant", "token_mean"])
    assert isinstance(menu, ipywidgets.Dropdown) and menu.value == "constant"
    assert menu.options == ("constant", "token_mean")


# Every class and argument of ipywidgets that the explorers use, as ipywidgets 7.7 (Colab's) declares them.
IN_7_7 = {
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


def test_nothing_is_used_that_ipywidgets_7_lacks(shown, monkeypatch):
    class Recorder:
        """ipywidgets, but a class takes no argument that 7.7 does not have."""

        def __getattr__(self, name):
            def make(*arguments, **options):
                assert options.keys() <= IN_7_7[name], (name, options)
                return getattr(ipywidgets, name)(*arguments, **options)

            return make

    monkeypatch.setitem(sys.modules, "ipywidgets", Recorder())
    controls, _ = explore(shown, height=(1, 0, 3, 1), grid=True, sign=["plus", "minus"])
    assert isinstance(controls["height"], ipywidgets.IntSlider)
    for values in ((25, 0, 50, 5), (0.5, 0.0, 1.0, 0.1), ["yes", "no"]):
        widgets.bet(f"how {values}?", values)
    shown.clear()
    explore(shown)


# Bets ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bets(monkeypatch):
    monkeypatch.setattr(widgets, "bets", {})


def text(shown) -> str:
    return shown[-1].data


def test_a_bet_is_kept_and_stands_on_the_result_and_in_the_figure(bets, shown):
    placed = widgets.bet("How many points?", (25, 0, 50, 5), unit="points")
    question, slider = shown[0].children
    assert "How many points?" in question.value and slider.value == 25 and str(placed) == "a common bet: 25 points"
    slider.value = 40
    placed.result(8.26)
    assert "your bet: 40 points" in text(shown) and "the result: 8.26 points" in text(shown)
    ax = Figure().subplots()
    placed.line(ax)
    assert ax.lines[0].get_label() == "your bet: 40 points" and list(ax.lines[0].get_ydata()) == [40, 40]
    placed.line(ax, vertical=True)
    assert list(ax.lines[1].get_xdata()) == [40, 40]


def test_a_choice_is_open_until_it_is_made_and_right_or_wrong_in_the_end(bets, shown):
    placed = widgets.bet("What happens?", ["nothing", "it falls"])
    menu = shown[0].children[1]
    assert menu.value is None and placed.value == "nothing" and not placed.placed
    menu.value = "it falls"
    placed.result("it falls")
    assert "your bet: it falls ✔" in text(shown)
    placed.result("nothing")
    assert "your bet: it falls ✘" in text(shown) and "the result: nothing" in text(shown)


def test_a_cell_that_runs_again_finds_the_bet_that_was_placed(bets, shown):
    widgets.bet("How many?", (25, 0, 50, 5))
    widgets.bet("Which?", ["a", "b"])
    shown[0].children[1].value, shown[1].children[1].value = 40, "b"
    assert widgets.bet("How many?", (25, 0, 50, 5)).value == 40 and shown[2].children[1].value == 40
    assert widgets.bet("Which?", ["a", "b"]).value == "b" and shown[3].children[1].value == "b"


def test_where_nobody_can_bet_the_question_is_text_and_the_usual_bet_stands(bets, shown, monkeypatch):
    monkeypatch.setenv("RLCOURSE_STATIC", "1")
    placed = widgets.bet("How many points?", (25, 0, 50, 5), unit="points")
    assert "Place your bet.** How many points?" in text(shown) and "a common bet: 25 points" in text(shown)
    widgets.bet("What happens?", ["nothing", "it falls"])
    assert "> - nothing\n> - it falls" in text(shown) and "a common bet: nothing" in text(shown)
    placed.result(8)
    assert "a common bet: 25 points<br>the result: 8 points" in text(shown)
    monkeypatch.delenv("RLCOURSE_STATIC")
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert widgets.bet("And now?", ["a", "b"]).value == "a" and "And now?" in text(shown)
