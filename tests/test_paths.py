import pytest

from rlcourse import paths


def test_an_install_without_the_data_says_what_to_do(tmp_path, monkeypatch):
    package = installed(tmp_path, monkeypatch)
    (package.parent / "data").mkdir(parents=True)  # somebody else's
    with pytest.raises(FileNotFoundError, match=r"clone the repository and install it with `pip install -e .`"):
        paths.data_folder()


def test_a_wheel_has_the_data_inside_the_package(tmp_path, monkeypatch):
    package = installed(tmp_path, monkeypatch)
    (package / "data" / "minigsm").mkdir(parents=True)
    assert paths.data_folder() == package / "data"


def installed(tmp_path, monkeypatch):
    """The package's folder in an install of a wheel."""
    package = tmp_path / "site-packages" / "rlcourse"
    monkeypatch.setattr(paths, "__file__", str(package / "paths.py"))
    return package
