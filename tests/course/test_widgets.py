"""Explorers: one picture for paper, the same on every machine; live ones redraw when a control moves, and in ipywidgets
7 as in 8. Bets: kept until the result, and sensible where nobody can place one."""

import io
import sys

import ipywidgets
import pytest
from IPython.display import Image
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
    controls, _ = explore(shown)
    kinds = {"height": ipywidgets.FloatSlider, "sign": ipywidgets.Dropdown, "grid": ipywidgets.Checkbox}
    assert {name: type(widget) for name, widget in controls.items()} == kinds
    assert not controls["height"].continuous_update  # one picture a move, not one a pixel
    for values, kind in (((25, 0, 50, 5), ipywidgets.IntSlider), (["yes", "no"], ipywidgets.RadioButtons)):
        widgets.bet(f"how {values}?", values)
        assert isinstance(shown[-1].children[1], kind)


# Bets ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bets(monkeypatch):
    monkeypatch.setattr(widgets, "bets", {})


def text(shown) -> str:
    return shown[-1].data


def test_a_bet_is_kept_and_stands_on_the_result(bets, shown):
    placed = widgets.bet("How many points?", (25, 0, 50, 5), unit="points")
    question, slider = shown[0].children
    assert "How many points?" in question.value and slider.value == 25 and str(placed) == "a common bet: 25 points"
    slider.value = 40
    placed.result(8.26)
    assert "your bet: 40 points" in text(shown) and "the result: 8.26 points" in text(shown)
    placed = widgets.bet("What happens?", ["nothing", "it falls"])
    menu = shown[-1].children[1]
    assert menu.value is None and placed.value == "nothing" and not placed.placed
    menu.value = "it falls"
    placed.result("it falls")
    assert "your bet: it falls ✔" in text(shown)
    placed.result("nothing")
    assert "your bet: it falls ✘" in text(shown)


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
    placed.result(8)
    assert "a common bet: 25 points<br>the result: 8 points" in text(shown)
    monkeypatch.delenv("RLCOURSE_STATIC")
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert widgets.bet("And now?", ["a", "b"]).value == "a" and "And now?" in text(shown)
