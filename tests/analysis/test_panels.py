"""Panels show what they are given."""

import pytest

from looplm.analysis.panels import panels, paths


def test_a_panel_a_group_with_the_mean_of_the_seeds():
    seeds = [[(1.0, 0.2), (4.0, 0.6)], [(1.0, 0.4), (4.0, 1.0)]]
    figure = panels({"a": {"x": seeds, "y": seeds[:1]}, "b": {"x": seeds[:1]}, "c": {}}, "loops", "accuracy", marked=4)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["a", "b", "c"]
    first, second, marked = shown[0].lines
    assert list(first.get_ydata()) == pytest.approx([0.3, 0.8])
    assert list(second.get_ydata()) == pytest.approx([0.2, 0.6])
    assert list(marked.get_xdata()) == [4, 4]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["x", "y"]


def test_paths_end_at_their_crosses():
    figure = paths({"spiral": [(0.0, 0.0), (1.0, 2.0), (3.0, 1.0)], "still": [(0.5, 0.5), (0.5, 0.5)]})
    for axes, end in zip(figure.axes, [(3.0, 1.0), (0.5, 0.5)], strict=True):
        path, cross = axes.lines
        assert (path.get_xdata()[-1], path.get_ydata()[-1]) == end == (cross.get_xdata()[0], cross.get_ydata()[0])
