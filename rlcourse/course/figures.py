"""How the course's figures look, in one place: `start`, the first cell of every notebook, applies it. Colours are those
of `rlcourse.measure.plots`, which colour-blind readers can tell apart."""

DPI = 120

STYLE = {
    "figure.dpi": DPI, "savefig.dpi": DPI, "figure.figsize": (6.5, 3.4), "font.size": 10, "axes.titlesize": 11,
    "axes.labelsize": 10, "legend.fontsize": 9, "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 4,
    "axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.25,
}  # fmt: skip


def use_style() -> None:
    """Make `STYLE` the default of every figure drawn from now on."""
    import matplotlib  # not before a notebook starts: `rlcourse.course` is imported where nothing is drawn

    matplotlib.rcParams.update(STYLE)
