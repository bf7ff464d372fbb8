"""A run killed at moments of a seed ends with the bytes of one that was not."""

import pytest

from tests.kill_and_resume import kill_and_resume


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_killed_in_each_way_ends_as_one_never_killed(tmp_path):
    assert kill_and_resume(tmp_path, n_kills=3, seed=1) == 0
