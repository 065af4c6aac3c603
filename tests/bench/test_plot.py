import pytest

from luce_core.bench.plot import draw, load_matplotlib, need_plot
from luce_core.bench.render import Panel, Series
from luce_core.errors import UsageError

PANELS = [
    Panel("Prompts", "depth", "tokens/s", (Series("pp", (0, 1024), (9.0, 5.0), (8.0, 4.0), (10.0, 7.0)),)),
    Panel("Answers", "depth", "tokens/s", (Series("tg", (0,), (3.0,)),)),
]


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.png"
    draw(load_matplotlib(), PANELS, "what it was measured on", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["no/folder.png", "picture.xyz"])
def test_a_file_that_cannot_be_written(tmp_path, name):
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match=r"--plot .* cannot be written"):
        draw(load_matplotlib(), PANELS, "", tmp_path / name)


def test_without_matplotlib_the_error_names_the_extra():
    def missing():
        raise ImportError("No module named 'matplotlib'")

    with pytest.raises(UsageError, match=r"--plot needs matplotlib .*pip install 'luce-core\[plot\]'"):
        need_plot(missing)
