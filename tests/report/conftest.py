import matplotlib.pyplot as plt
import pytest


@pytest.fixture
def drawn(monkeypatch):
    """The figures, kept open."""
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    yield figures
    monkeypatch.undo()
    plt.close("all")
