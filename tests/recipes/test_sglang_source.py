"""SGLang's loader rules against its released source: it is read, not run, for it does not run on a CPU.

pytest -m engine tests/recipes/test_sglang_source.py          downloads the wheel without its dependencies
"""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from draftsmith.recipes.engine_rules.engine_key_names import EAGLE3_OFF
from draftsmith.recipes.engine_rules.loader_rules import LOADER_RULES, SGLANG, SHIFTED_ONLY_FROM_1

pytestmark = pytest.mark.engine
MODELS = "sglang/srt/models/"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a module of models -> its text, of the version that the rules name."""
    folder = tmp_path_factory.mktemp("wheel")
    package = SGLANG.lower().replace(" ", "==")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", str(folder)]
    subprocess.run([*command, package], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if re.fullmatch(MODELS + r"\w+\.py", name)]
        return {Path(name).stem: wheel.read(name).decode() for name in names}


def names_in(text: str) -> set[str]:
    """Attributes, and strings such as the ones given to getattr, of a module."""
    nodes = list(ast.walk(ast.parse(text)))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return attributes | {string.lstrip(".") for string in strings}


@pytest.mark.parametrize(("kind", "module"), [("eagle", "llama_eagle"), ("eagle3", "llama_eagle3")])
def test_names_of_the_rules(kind: str, module: str, sources: dict[str, str]) -> None:
    """The class is there, and all parts of the tensors' names; so are the keys that have no default in transformers."""
    rules, known = LOADER_RULES["sglang", kind], names_in(sources[module]) | names_in(sources["llama"])
    assert f"class {rules.architecture}(" in sources[module]
    parts = {part for name in rules.tensors for part in name.split(".")} - {"0", "weight", "bias"}
    assert parts <= known
    if kind == "eagle3":
        keys = {"target_hidden_size", "draft_vocab_size", "num_aux_hidden_states", "eagle_config"}
        flags = {*EAGLE3_OFF, "norm_before_fc", "fc_norm", "norm_output", "input_norm"} - {
            "sliding_window",
            "layer_types",
        }
        assert keys | flags | {"tie_word_embeddings", "hidden_act"} <= names_in(sources[module])
        assert keys <= rules.required.keys()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("llama", "self.model.layers_to_capture = [val + 1 for val in layer_ids]"),  # its ids are one lower
        ("llama", "self.model.layers_to_capture = [2, num_layers // 2, num_layers - 3]"),
        ("llama", "if i in self.layers_to_capture"),  # before layer i: never behind the last one
        ("llama_eagle3", "if hidden_states.shape[-1] != embeds.shape[-1]:"),  # else no fc: two layers or more
        ("llama_eagle3", '"norm_before_fc", getattr(config, "norm_before_fc", False)'),  # eagle_config's comes first
        ("llama_eagle3", "aux = hidden_states_to_logits if self.norm_output else hidden_states_to_aux"),
        ("llama_eagle3", "residual = hidden_states"),  # un-normed, whatever norm_before_residual says
        ("llama_eagle3", "if self.config.tie_word_embeddings:"),
        ("llama_eagle", "self.fc = torch.nn.Linear(config.hidden_size * 2, config.hidden_size)"),  # with a bias
        ("llama_eagle", "del self.input_layernorm"),
        ("llama_eagle", 'if "lm_head" not in name:'),
    ],
)
def test_lines_that_the_rules_stand_on(module: str, line: str, sources: dict[str, str]) -> None:
    assert line in sources[module]


def test_families_with_another_count(sources: dict[str, str]) -> None:
    """Those that shift nested ids only from 1 on are the ones that the rules name, and no others."""
    modules = {name for name, text in sources.items() if "layer_ids[0] == 1" in text}
    assert modules == {"deepseek_v2", "glm4_moe_lite"}  # DeepSeek V3 is of V2's module
    assert modules <= set(SHIFTED_ONLY_FROM_1)
    assert "DeepseekV3ForCausalLM" in sources["deepseek_v2"]
    assert not [name for name in sources if "medusa" in name]
