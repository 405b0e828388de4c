"""Figures hold what they were given."""

import pytest

from looplm.analysis.plots import heat_map, histogram, paths


def test_a_histogram_has_the_means_over_seeds_and_ends_at_the_last_filled_bar():
    seeds = [[(1.0, 0.5), (2.0, 0.5), (3.0, 0.0)], [(1.0, 0.0), (2.0, 1.0), (3.0, 0.0)]]
    (axes,) = histogram({"plain": seeds, "other": seeds[1:]}, "loops", "share").axes
    assert [bar.get_height() for bar in axes.patches] == [0.25, 0.75, 0.0, 0.0, 1.0, 0.0]
    assert [bar.get_x() + bar.get_width() / 2 for bar in axes.patches[:2]] == pytest.approx([0.775, 1.775])
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([1.75, 2.0])
    assert axes.get_xlim() == (0.0, 3.0)


def test_a_heat_map_has_a_row_a_name_and_a_floor():
    axes, _ = heat_map([[1.0, 0.1, 0.0], [0.5, 0.2, 0.1]], ["a", "$b"], "loop", "distance").axes
    (image,) = axes.images
    assert image.get_array().tolist() == [[1.0, 0.1, 1e-6], [0.5, 0.2, 0.1]]
    assert image.get_extent() == [0.5, 3.5, 1.5, -0.5]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "\\$b"]


def test_paths_are_drawn_side_by_side():
    figure = paths({"orbit": [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)], "slider": [(0.0, 0.0), (1.0, 1.0)]})
    assert [axes.get_title() for axes in figure.axes] == ["orbit", "slider"]
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[0, 0], [1, 0], [0, 1]]
