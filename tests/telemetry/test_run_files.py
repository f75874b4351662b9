from trl_qarl.telemetry.run_files import HISTOGRAM_EDGES


def test_edges_of_histograms_separate_the_bounds_of_the_paper():
    assert sorted(HISTOGRAM_EDGES) == HISTOGRAM_EDGES and len(set(HISTOGRAM_EDGES)) == 50
    bins = {sum(edge <= bound for edge in HISTOGRAM_EDGES) for bound in (1 - 3e-4, 1.0, 1 + 3e-4, 1 + 7e-4, 0.5, 2.0)}
    assert len(bins) == 6
