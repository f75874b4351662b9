import pytest

from testing_utils.recorded_runs import report, write_grid


@pytest.fixture(scope="session")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="session")
def grid_page(grid, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert report(path, grid) == 0
    return path
