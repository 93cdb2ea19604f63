"""Test which settings wrote a checkpoint, in run directories that are resumed again and again."""

import pytest

from coati_rl.checkpoint.settings_files import keep_settings, settings_file


@pytest.fixture
def resume(tmp_path):
    """(step, settings) -> the run goes on from there with these."""
    (tmp_path / "config.yaml").write_text("first")

    def run(step, settings):
        keep_settings(step, tmp_path / "discarded", run_dir=tmp_path)
        (tmp_path / "config.yaml").write_text(settings)

    return run


@pytest.fixture
def wrote(tmp_path):
    return lambda step: settings_file(tmp_path / "checkpoints" / f"step-{step}").read_text()


def test_a_checkpoint_was_written_by_the_settings_of_before_the_first_resumption_after_it(resume, wrote):
    assert wrote(2) == wrote(4) == "first"
    resume(4, "second")
    assert (wrote(2), wrote(4), wrote(6)) == ("first", "first", "second")
    resume(4, "third")  # the second was killed before its first checkpoint
    assert (wrote(2), wrote(4), wrote(6)) == ("first", "first", "third")
    resume(8, "fourth")
    assert (wrote(4), wrote(6), wrote(8), wrote(10)) == ("first", "third", "third", "fourth")


def test_a_checkpoint_whose_number_is_taken_again_has_the_settings_of_the_later_one(resume, wrote, tmp_path):
    resume(4, "second")
    resume(2, "third")
    assert (wrote(2), wrote(4)) == ("first", "third")
    assert (tmp_path / "discarded" / "config-step-4.yaml").read_text() == "first"


def test_without_a_run_directory_there_is_none(tmp_path):
    assert not settings_file(tmp_path / "none" / "checkpoints" / "step-2").exists()
