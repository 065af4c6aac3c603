"""The kit's picture encoder keeps the contract of encoders."""

from luce_core.testing.dense.model import write_dense_model
from luce_core.testing.encoder_contract import EncoderContract, Pair
from luce_core.testing.pictures import write_picture_model
from luce_core.testing.plugin import PluginContract

HOOKS = "luce_core.testing.pictures.hooks"


class TestPictures(EncoderContract):
    hooks = HOOKS
    more_hooks = ("luce_core.testing.dense.hooks",)

    def make_files(self, folder):
        text = write_dense_model(folder / "text.gguf")
        return Pair(text, write_picture_model(folder / "pictures.gguf"))

    def make_wrong(self, folder):
        return write_picture_model(folder / "wrong.gguf", width=64)


class TestPlugin(PluginContract):
    hooks = HOOKS
