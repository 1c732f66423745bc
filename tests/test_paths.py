import pytest

from rlcourse import paths


def test_the_data_folder_is_the_repositorys():
    assert (paths.data_folder() / "minigsm" / "train.jsonl").is_file()
    assert (paths.data_folder().parent / "pyproject.toml").is_file()


def test_an_install_without_the_data_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "site-packages" / "rlcourse" / "paths.py"))
    with pytest.raises(FileNotFoundError, match=r"clone the repository and install it with `pip install -e .`"):
        paths.data_folder()
