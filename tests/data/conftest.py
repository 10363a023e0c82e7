import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep cached digests of the tests out of the user's cache."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp() / "home"))
