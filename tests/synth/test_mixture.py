"""The mixture, against lists made by hand; published totals are in the architecture plugins' suites."""

import pytest

from luce_core.contracts import Geometry
from luce_core.errors import UsageError
from luce_core.gguf import FORMATS
from luce_core.synth import QUANTS, formats_of, num_bytes, quants_of, sizes
from luce_core.synth.mixture import fitting, num_dims, wider_layer


def geometry(shapes, **more):
    return Geometry("some", {"general.architecture": "some"}, shapes, **more)


def blocks(count, **parts):
    return {f"blk.{n}.{name}.weight": shape for n in range(count) for name, shape in parts.items()}


def test_wider_layers_of_eight_and_of_thirty():
    """The first and last eighth, and of those between the third, sixth, ..."""
    assert [n for n in range(8) if wider_layer(n, 8)] == [0, 3, 6, 7]
    assert [n for n in range(30) if wider_layer(n, 30)] == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]


def test_every_role_of_a_dense_file():
    shapes = {
        "token_embd.weight": (500, 512),
        "output_norm.weight": (512,),
        "output.weight": (500, 512),
        "rope_freqs.weight": (32,),
        **blocks(
            8,
            attn_norm=(512,),
            attn_q=(512, 512),
            attn_v=(128, 512),
            attn_output=(512, 512),
            ffn_up=(1024, 512),
            ffn_down=(512, 1024),
        ),
        "blk.0.attn_q.bias": (512,),
    }
    found = formats_of(geometry(shapes), "q4_k_m")
    assert found["token_embd.weight"] == "Q4_K"
    assert found["output.weight"] == "Q6_K"
    assert {found[name] for name in shapes if "norm" in name or "bias" in name or "freqs" in name} == {"F32"}
    assert {found[name] for name in shapes if name.endswith(("attn_q.weight", "ffn_up.weight"))} == {"Q4_K"}
    for part in ("attn_v", "ffn_down"):
        wide = [n for n in range(8) if found[f"blk.{n}.{part}.weight"] == "Q6_K"]
        assert wide == [0, 3, 6, 7]
        assert {found[f"blk.{n}.{part}.weight"] for n in range(8)} == {"Q4_K", "Q6_K"}


def test_value_matrices_are_counted_and_down_matrices_numbered():
    """Of sixteen blocks every other has a value matrix: the rule sees eight of those."""
    shapes = {"token_embd.weight": (500, 512), **blocks(16, ffn_down=(512, 1024))}
    shapes |= {f"blk.{n}.attn_v.weight": (128, 512) for n in range(0, 16, 2)}
    found = formats_of(geometry(shapes), "q4_k_m")
    assert [n for n in range(0, 16, 2) if found[f"blk.{n}.attn_v.weight"] == "Q6_K"] == [0, 6, 12, 14]
    wide = [n for n in range(16) if found[f"blk.{n}.ffn_down.weight"] == "Q6_K"]
    assert wide == [0, 1, 4, 7, 10, 13, 14, 15]


def test_tables_are_heads_where_no_head_is():
    tables = {"token_embd.weight": (500, 512), "per_layer_token_embd.weight": (500, 512)}
    assert set(formats_of(geometry(tables), "q4_k_m").values()) == {"Q6_K"}
    headed = formats_of(geometry({**tables, "output.weight": (500, 512)}), "q4_k_m")
    assert headed["token_embd.weight"] == headed["per_layer_token_embd.weight"] == "Q4_K"


def test_routers_and_short_convolutions_stay_as_they_are():
    shapes = {
        "token_embd.weight": (500, 512),
        "blk.0.ffn_gate_inp.weight": (8, 512),
        "blk.0.ffn_gate_inp_shexp.weight": (1, 512),
        "blk.0.ssm_conv1d.weight": (64, 4),
        "blk.0.ssm_conv1d_q.weight": (1, 64, 1, 4),
        "blk.0.ssm_a": (32, 1),
    }
    for quant in QUANTS:
        found = formats_of(geometry(shapes), quant)
        assert {found[name] for name in shapes if name != "token_embd.weight"} == {"F32"}


@pytest.mark.parametrize(
    ("wanted", "row", "got"),
    [
        ("Q4_K", 512, "Q4_K"),
        ("Q4_K", 544, "Q5_0"),
        ("Q5_K", 544, "Q5_1"),
        ("Q6_K", 544, "Q8_0"),
        ("Q6_K", 100, "F16"),
        ("Q8_0", 100, "F16"),
        ("MXFP4", 544, "MXFP4"),
        ("BF16", 7, "BF16"),
        ("F32", 7, "F32"),
    ],
)
def test_rows_that_do_not_fill_blocks(wanted, row, got):
    assert fitting(wanted, row) == got


def test_experts_alone_are_mxfp4():
    shapes = {"token_embd.weight": (500, 512), **blocks(2, attn_k_b=(8, 128, 512), ffn_up_exps=(4, 64, 512))}
    found = formats_of(geometry(shapes), "mxfp4")
    assert found["blk.0.ffn_up_exps.weight"] == "MXFP4"
    assert found["blk.0.attn_k_b.weight"] == found["token_embd.weight"] == "Q8_0"


def test_what_a_geometry_says_comes_first():
    shapes = {"token_embd.weight": (500, 512), "blk.0.special.weight": (8, 512), "blk.0.ids.weight": (500, 2)}
    made = geometry(
        shapes,
        formats={"*.special.weight": "F32", "*.ids.weight": "I32"},
        native={"token_embd.weight": "BF16"},
    )
    for quant in quants_of(made):
        found = formats_of(made, quant)
        assert (found["blk.0.special.weight"], found["blk.0.ids.weight"]) == ("F32", "I32")
    assert formats_of(made, "native")["token_embd.weight"] == "BF16"


def test_leading_ones_are_no_dimensions():
    assert [num_dims(shape) for shape in [(1,), (7,), (1, 7), (7, 1), (1, 7, 1, 4)]] == [1, 1, 1, 2, 3]


def test_sizes_are_sums_of_blocks():
    made = geometry({"token_embd.weight": (500, 512), "output_norm.weight": (512,)})
    assert num_bytes(made, "q8_0") == 500 * 16 * 34 + 512 * 4
    assert num_bytes(made, "f16") == 500 * 512 * 2 + 512 * 4
    assert set(sizes(made)) == set(QUANTS)


def test_every_format_named_is_one_the_reader_knows():
    for quant in QUANTS.values():
        for name in (quant.default, quant.head, quant.wider, quant.stacks):
            assert FORMATS.by_name(name).name == name


@pytest.mark.parametrize("quant", ["q4", "native", "Q4_K_M"])
def test_an_unknown_quantization_lists_those_there_are(quant):
    with pytest.raises(UsageError, match=f"'{quant}' of 'some' is unknown. Choose one of f16, .*q4_k_m"):
        formats_of(geometry({"token_embd.weight": (500, 512)}), quant)
