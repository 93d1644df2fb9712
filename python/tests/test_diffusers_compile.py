"""diffusers' models with adze and torch.compile."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import adze  # noqa: E402
import diffusers_models  # noqa: E402
from device import default_device  # noqa: E402
from diffusers_seams import output  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")


def compiled_graphs(name, patched):
    """How many graphs compile_repeated_blocks makes for two blocks of each class."""
    model, inputs = diffusers_models.make(name, False)
    if name == "flux":
        for blocks in (model.transformer_blocks, model.single_transformer_blocks):
            blocks.append(type(blocks[0])(32, 2, 16))
    model.eval().requires_grad_(False)
    expected = output(model, inputs)
    if patched:
        adze.patch(model)
    torch._dynamo.reset()
    graphs = []
    model.compile_repeated_blocks(
        fullgraph=True, dynamic=name == "ltx", backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    with default_device(None):
        torch.testing.assert_close(output(model, inputs), expected)
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert any(target.startswith("adze.") for target in targets) == patched
    return len(graphs)


@pytest.mark.parametrize("name", ["ltx", "flux"])
def test_compile_repeated_blocks(name):
    """No graph breaks, and blocks share their graphs as they do without adze."""
    assert compiled_graphs(name, True) == compiled_graphs(name, False)


@pytest.mark.parametrize("name", ["wan", "qwen_image"])
def test_compile_has_no_graph_breaks(name):
    assert compiled_graphs(name, True)


@pytest.mark.parametrize("regional", [True, False])
def test_compiled_ltx_reads_each_angle_once(regional):
    """Its blocks through Inductor, and the whole model as Dynamo traces it."""
    from torch._inductor.compile_fx import compile_fx

    model, inputs = diffusers_models.make("ltx", False)
    expected, columns = output(model, inputs), []

    def backend(graph, example_inputs):
        for node in graph.graph.nodes:
            if "qk_norm_rope" in str(node.target):
                columns.extend(table.meta["example_value"].shape[-1] for table in node.args[4:6])
        return compile_fx(graph, example_inputs) if regional else graph.forward

    adze.patch(model)
    torch._dynamo.reset()
    compile_it = model.compile_repeated_blocks if regional else model.compile
    compile_it(fullgraph=True, backend=backend)
    with default_device(None):
        torch.testing.assert_close(output(model, inputs), expected)
    assert columns and set(columns) == {model.config.num_attention_heads * model.config.attention_head_dim // 2}
