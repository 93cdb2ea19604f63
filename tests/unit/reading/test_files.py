"""Test where rows are read from: files, directories of them, saved datasets, and the hub's from a local cache."""

import json
import shutil

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading.files import read_rows


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


@pytest.fixture
def cached_hub(tmp_path, monkeypatch):
    """A cache with the dataset acme/sums, as `load_dataset` leaves it, and no hub."""
    import datasets

    (tmp_path / "sums").mkdir()
    for split in ("train", "test"):
        write(tmp_path / "sums" / f"{split}.jsonl", f"{split} 0", f"{split} 1")
    datasets.load_dataset(str(tmp_path / "sums"), cache_dir=str(tmp_path / "cache"))
    shutil.move(tmp_path / "cache" / "sums", tmp_path / "cache" / "acme___sums")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path / "cache")


def write(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def prompts_of(source, **options):
    return [row["prompt"] for _, row in read_rows(str(source), flag="-d", **options)]


def refusal(source):
    with pytest.raises(ConfigError) as caught:
        read_rows(str(source), flag="-d")
    return str(caught.value)


def test_a_directory_is_its_files_by_name_each_with_lines_of_its_own(folder):
    write(folder / "b.jsonl", "b1", "b2")
    write(folder / "a.jsonl", "a1")
    (folder / "c.csv").write_text("prompt\n1.50\n")
    (folder / "notes.txt").write_text("no rows")
    (folder / "deeper").mkdir()
    assert prompts_of(folder) == ["a1", "b1", "b2", "1.50"]
    assert [where for where, _ in read_rows(str(folder), flag="-d")][2:] == [
        f"-d {folder}/b.jsonl, line 2",
        f"-d {folder}/c.csv, row 1",
    ]


def test_a_saved_dataset_is_read_and_of_several_splits_the_training_rows(folder):
    from datasets import Dataset, DatasetDict

    parts = {name: Dataset.from_list([{"prompt": f"{name} {i}"} for i in range(2)]) for name in ("train", "test")}
    parts["test"].save_to_disk(folder / "one")
    DatasetDict(parts).save_to_disk(folder / "both")
    assert prompts_of(folder / "one") == ["test 0", "test 1"]
    assert prompts_of(folder / "both") == ["train 0", "train 1"]
    shutil.rmtree(folder / "both" / "train")
    assert "without a train split" in refusal(folder / "both")


def test_the_first_rows_are_read_if_a_number_is_given(folder):
    write(folder / "a.jsonl", "1", "2")
    write(folder / "b.jsonl", "3", "4").open("a").write("no JSON, and not reached")
    assert prompts_of(folder, max_rows=3) == ["1", "2", "3"]
    assert prompts_of(folder / "a.jsonl", max_rows=9) == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("acme/sums", ["train 0", "train 1"]),
        ("acme/sums:test", ["test 0", "test 1"]),
        ("acme/sums:default:test", ["test 0", "test 1"]),
        ("acme/sums:train[1:]", ["train 1"]),
    ],
)
def test_a_dataset_of_the_hub_is_read_by_split_and_subset(cached_hub, name, prompts):
    assert prompts_of(name) == prompts
    assert read_rows(name, flag="-d")[0][0] == f"-d {name}, row 1"


def test_what_the_hub_does_not_have_is_refused(cached_hub):
    assert refusal("acme/products").startswith(
        "-d acme/products: neither a file nor a dataset that the hub provides as acme/products, split train: "
    )
    assert "split exam" in refusal("acme/sums:exam")


def test_a_missing_file_is_not_looked_for_on_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for name in ("rows/none", "other/none.jsonl", "none", "./a/b", "a/b/c"):
        assert "no such file" in refusal(name)
