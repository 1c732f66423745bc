"""Explorers: one picture for paper, the same on every machine; live ones redraw when a control moves, and in ipywidgets
7 as in 8."""

import ast
import io
import sys
from pathlib import Path

import ipywidgets
import numpy as np
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


def explore(shown, **controls):
    """The controls by name and the picture of a live explorer."""
    widgets.explorer(draw, static=STATIC, **(controls or CONTROLS))
    [box] = shown
    *found, picture = box.children
    return {widget.description: widget for widget in found}, picture


def pixels(png: bytes) -> np.ndarray:
    return imread(io.BytesIO(png), format="png")


def test_the_static_picture_has_the_same_bytes_each_time():
    first = widgets.pictures(draw, STATIC)
    assert first == widgets.pictures(draw, STATIC) and first.startswith(b"\x89PNG")
    assert b"Software" not in first and b"matplotlib" not in first.lower()
    assert first != widgets.pictures(draw, STATIC[:1])


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 3, 2), (7, 3, 3)])
def test_pictures_stand_three_in_a_row(count, columns, rows):
    height, width, _ = pixels(widgets.pictures(draw, [{"height": 1.0 + i / 10} for i in range(count)])).shape
    assert (width, height) == (columns * 450, rows * 306)  # 5 x 3.4 inches at 90 dots


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


def test_notebooks_that_ship_show_the_picture_and_no_widget(shown, monkeypatch):
    monkeypatch.setenv("RLCOURSE_STATIC", "1")
    widgets.explorer(draw, static=STATIC, **CONTROLS)
    [image] = shown
    assert isinstance(image, Image) and image.data == widgets.pictures(draw, STATIC)


def test_without_ipywidgets_there_is_the_picture(shown, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    widgets.explorer(draw, static=STATIC, **CONTROLS)
    assert shown[0].data == widgets.pictures(draw, STATIC)


def test_a_live_explorer_starts_with_the_start_values(shown):
    controls, picture = explore(shown)
    assert {name: widget.value for name, widget in controls.items()} == {"height": 1.0, "sign": "plus", "grid": False}
    assert picture.value == widgets.pictures(draw, [{"height": 1.0, "sign": "plus", "grid": False}])


@pytest.mark.parametrize(("name", "value"), [("height", 2.5), ("sign", "minus"), ("grid", True)])
def test_moving_a_control_redraws_with_its_value_and_those_of_the_others(name, value, shown):
    controls, picture = explore(shown)
    before = picture.value
    controls[name].value = value
    expected = {"height": 1.0, "sign": "plus", "grid": False} | {name: value}
    assert picture.value == widgets.pictures(draw, [expected])
    assert (pixels(before) != pixels(picture.value)).any()


def test_integers_give_a_slider_of_integers_and_one_float_a_slider_of_floats():
    whole = widgets.control(ipywidgets, "group_size", (8, 2, 64, 2))
    assert isinstance(whole, ipywidgets.IntSlider) and (whole.min, whole.max, whole.step, whole.value) == (2, 64, 2, 8)
    assert whole.description == "group size" and isinstance(whole.value, int)
    broken = widgets.control(ipywidgets, "clip", (1, 0, 2, 0.1))
    assert isinstance(broken, ipywidgets.FloatSlider) and broken.step == 0.1
    assert not whole.continuous_update and not broken.continuous_update  # one picture a move, not one a pixel


def test_true_and_false_are_a_box_and_a_list_is_a_menu_that_starts_with_its_first():
    box = widgets.control(ipywidgets, "std", True)
    assert isinstance(box, ipywidgets.Checkbox) and box.value is True
    menu = widgets.control(ipywidgets, "how", ["constant", "token_mean"])
    assert isinstance(menu, ipywidgets.Dropdown) and menu.value == "constant"
    assert menu.options == ("constant", "token_mean")


# Every class and argument of ipywidgets that the explorers use, as ipywidgets 7.7 (Colab's) declares them.
IN_7_7 = {
    "Checkbox": {"value", "indent", "description", "style", "layout"},
    "Dropdown": {"options", "value", "description", "style", "layout"},
    "FloatSlider": {"value", "min", "max", "step", "continuous_update", "description", "style", "layout"},
    "Image": {"value", "format", "layout"},
    "IntSlider": {"value", "min", "max", "step", "continuous_update", "description", "style", "layout"},
    "Layout": {"width"},
    "VBox": set(),
}


def test_nothing_is_used_that_ipywidgets_7_lacks(shown, monkeypatch):
    tree = ast.parse(Path(widgets.__file__).read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ipywidgets"
    }
    assert used <= IN_7_7.keys()

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
    shown.clear()
    explore(shown)
