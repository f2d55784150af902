"""Exported folders: loaded in a process that has neither ds_encdec nor deepspeed, and written whole or not at all."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCardData
from safetensors.torch import load_file
from saved_checkpoints import FORMED, config, random_state, save_checkpoint, tokenizer
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_relative_imports

from ds_encdec.base.types import CheckpointError, TrainingState
from ds_encdec.checkpoint.manifest import MANIFEST
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.stored_model import read_stored_model
from ds_encdec.evaluate.generation import fill_sentinels, generate_text
from ds_encdec.evaluate.models import is_ours
from ds_encdec.exports.hugging_face import (
    AUTO_MAP,
    ENCODER_AUTO_MAP,
    average_checkpoints,
    export_checkpoint,
    export_hf,
)
from ds_encdec.exports.model_card import model_card
from ds_encdec.exports.model_code import code_row
from ds_encdec.launch.run_folder import RunFolder, code_facts
from ds_encdec.model import modeling
from ds_encdec.model.configuration import Qwen3EncoderConfig, Qwen3Seq2SeqConfig
from ds_encdec.model.encoder import Qwen3EncoderModel
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.weights import random_weights
from ds_encdec.registry.objectives import CHAT, TEMPLATES
from ds_encdec.tokenizer.load import write_tokenizer

BLOCKED = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in BLOCKED_PACKAGES else self.finder.find_spec(name, *more)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def without(packages: Sequence[str], code: str, *arguments: Path, cwd: Path, site: str | None = None) -> str:
    """The last line that `code` prints in a fresh process in which `packages` cannot be imported.

    `site`: a folder whose packages go before installed ones.
    """
    first = "" if site is None else f"\nsys.path.insert(0, {site!r})\n"
    program = f"BLOCKED_PACKAGES = {packages!r}{BLOCKED}{first}{code}"
    run = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        | {"HF_HOME": str(cwd / "hf"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=cwd,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


def export(out: Path, model_config: Qwen3Seq2SeqConfig, **options: Any) -> None:
    defaults: dict[str, Any] = {"dtype": torch.float32, "card": "a card"}
    drawn = random_weights(model_config, seed=0)

    def weights(name: str, rows: slice = slice(None), /) -> torch.Tensor:
        return drawn(name, rows) + (0.5 if name.endswith(".bias") else 0.0)

    export_hf(weights, model_config, tokenizer(), out, **{**defaults, **options})


# Each with its own names: `folder` is given, `report` is what the test looks at.
GENERATION = """
import inspect, torch, transformers
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
prepare, handed = model.prepare_inputs_for_generation, set()
def prepare_inputs(*arguments, **kwargs):
    made = prepare(*arguments, **kwargs)
    handed.update(name for name, value in made.items() if value is not None)
    return made
model.prepare_inputs_for_generation = prepare_inputs
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("hello <extra_id_2> world", return_tensors="pt").input_ids
logits = model(input_ids=ids, decoder_input_ids=ids).logits
generated, greedy = (model.generate(input_ids=ids, max_new_tokens=6, num_beams=beams) for beams in (2, 1))
words_only = {"max_new_tokens": 6, "num_beams": 1, "suppress_tokens": [0, 1, *range(4, 24)]}
if transformers.__version__ < "5":
    write = pipeline("text2text-generation", folder, trust_remote_code=True)
    written = write("hello <extra_id_2> world", **words_only)[0]["generated_text"]
else:
    written = tokenizer.decode(model.generate(input_ids=ids, **words_only)[0], skip_special_tokens=True)
report = {
    "ids": ids.tolist(), "logits": logits.double().tolist(), "generated": generated.tolist(), "greedy": greedy.tolist(),
    "dtype": str(model.dtype), "tied": model.lm_head.weight is model.shared.weight,
    "eos": model.generation_config.eos_token_id,
    "module": type(model).__module__.partition(".")[0], "version": transformers.__version__,
    "written": written, "handed": sorted(handed), "names": list(inspect.signature(model.forward).parameters),
}
"""
OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "biased": {
        "qk_norm": "none",
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "unrotated_layers": {"encoder": [1], "decoder": [0]},
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        "max_position_embeddings": 8,
    },
    "normed behind": {
        "qk_norm": "all",
        "norm_position": "after",
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1e4,
        },
    },
}
ENCODERS = FORMED | {"raw": OTHER_LAYERS["normed behind"]}
GENERATING = ("tied", "untied", "renormed", *OTHER_LAYERS)
EMBEDDINGS = """
from transformers import pipeline
report = {
    "pipeline": pipeline("feature-extraction", folder, trust_remote_code=True)(texts[0]),
    "model": type(model).__name__, "module": type(model).__module__.partition(".")[0],
    "parameters": [name for name, _ in model.named_parameters()],
    "ids": inputs["input_ids"].tolist(), "mask": inputs["attention_mask"].tolist(),
    "states": states.double().tolist(), "embeddings": embeddings.double().tolist(),
}
"""
SENTENCES = """
report = {
    "embeddings": embeddings.tolist(), "similarity": model.similarity(embeddings, embeddings).tolist(),
    "longest": model.max_seq_length, "cut": model.encode("world " * 5000).tolist(),
}
"""
TEXTS = ["hello world hello", "world"]


def card_code(folder: Path, number: int = 0) -> str:
    """Python code in a folder's model card, in which the folder is the caller's."""
    code = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[number]
    assert 'folder = "."' in code
    return re.sub(r"texts = .*", f"texts = {TEXTS!r}", code.replace('folder = "."', ""))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exports")
    export(root / "tied", config(tie_word_embeddings=True))
    export(root / "untied", config(tie_word_embeddings=False, **FORMED["final"]), max_shard_bytes=20_000)
    export(root / "renormed", config(**FORMED["renormed"]))
    for name, changes in OTHER_LAYERS.items():
        export(root / name, config(initializer_range=0.2, **changes))
    for form, changes in ENCODERS.items():
        checkpoint = save_checkpoint(root / f"of {form}", 7, random_state(config(**changes), seed=3), config(**changes))
        for kind in ("whole", "encoder"):
            export_checkpoint(checkpoint, root / f"{kind}-{form}", dtype=torch.float32, encoder_only=kind == "encoder")
    return root


@pytest.fixture(scope="module")
def fresh(root: Path) -> dict[str, Any]:
    return reports(root)


def reports(root: Path, site: str | None = None) -> dict[str, Any]:
    programs = {
        **dict.fromkeys(GENERATING, GENERATION),
        "whole-aligned": card_code(root / "whole-aligned") + "report = None",
        **{f"encoder-{form}": card_code(root / f"encoder-{form}", 1) + EMBEDDINGS for form in ENCODERS},
    }
    if site is None:
        programs["encoder-aligned sentences"] = card_code(root / "encoder-aligned") + SENTENCES
    run_all = (
        f"import json\nreports = {{}}\nfor name, program in {programs!r}.items():\n"
        f"    scope = {{'folder': f'{root}/' + name.removesuffix(' sentences')}}\n"
        "    exec(program, scope)\n    reports[name] = scope['report']\nprint(json.dumps(reports))"
    )
    found: dict[str, Any] = json.loads(without(["ds_encdec", "deepspeed"], run_all, cwd=root, site=site))
    return found


def _assert_known(report: dict[str, Any]) -> None:
    handed = set(report["handed"])
    assert handed & {"cache", "past_key_values"}
    assert handed - {*report["names"]} <= {"cache_position"}


@pytest.mark.parametrize("name", GENERATING)
def test_loads_and_generates_without_ds_encdec(root: Path, fresh: dict[str, Any], name: str) -> None:
    out, report, tied = root / name, fresh[name], name != "untied"
    assert report["ids"] == [[2, 6, 3]]
    assert report["tied"] == tied
    assert len(report["written"].split()) == 6
    _assert_known(report)
    assert (report["eos"], report["dtype"]) == (1, "torch.float32")
    assert report["module"] == "transformers_modules"
    ours = Qwen3ForSeq2SeqLM.from_pretrained(out).eval()
    ids = torch.tensor(report["ids"])
    torch.testing.assert_close(torch.tensor(report["logits"]), ours(input_ids=ids, decoder_input_ids=ids).logits)
    for found, beams in (("generated", 2), ("greedy", 1)):
        assert report[found] == ours.generate(ids, max_new_tokens=6, num_beams=beams).tolist()
    assert len(list(out.glob("*.safetensors"))) == (1 if tied else 11)


@pytest.mark.parametrize("auto_map", [AUTO_MAP, ENCODER_AUTO_MAP])
def test_the_modules_that_are_loaded_import_all_others_themselves(auto_map: dict[str, str]) -> None:
    for named in auto_map.values():
        known, new = set[str](), {named.partition(".")[0]}
        while new:
            known |= new
            imports = {name: set(get_relative_imports(Path(modeling.__file__).with_name(f"{name}.py"))) for name in new}
            new = set().union(*imports.values()) - known
        first = named.partition(".")[0]
        assert known - {first} == set(get_relative_imports(Path(modeling.__file__).with_name(f"{first}.py")))


OTHER_TRANSFORMERS = "DS_ENCDEC_OTHER_TRANSFORMERS"
"""Names a folder with another version of transformers and what that needs (docs/serving.md)."""


def test_another_version_of_transformers_gives_the_same(root: Path, fresh: dict[str, Any]) -> None:
    site = os.environ.get(OTHER_TRANSFORMERS) or pytest.skip(f"{OTHER_TRANSFORMERS} names no folder with one")
    found = reports(root, site)
    for name in GENERATING:
        assert found[name].pop("version") != fresh[name].pop("version")
        _assert_known(found[name])
        found[name]["handed"] = fresh[name]["handed"]
    assert found == {name: fresh[name] for name in found}


def test_tokenizer_files_hold_what_any_transformers_reads(tmp_path: Path) -> None:
    made = tokenizer()
    made.extra_special_tokens = ["<extra_id_0>"]
    write_tokenizer(made, tmp_path)
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert fields.pop("model_max_length") > 1e6
    assert fields == {
        "additional_special_tokens": ["<extra_id_0>"],
        "eos_token": "<eos>",
        "model_input_names": ["input_ids", "attention_mask"],
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("hello <extra_id_2>", return_tensors=None).data == made("hello <extra_id_2>").data
    assert again.extra_special_tokens == ["<extra_id_0>"]


EXPORT = """
from ds_encdec.exports.hugging_face import export_checkpoint
for checkpoint, out in zip(sys.argv[1::2], sys.argv[2::2]):
    export_checkpoint(checkpoint, out)
print("done")
"""


def test_a_checkpoint_is_exported_without_deepspeed(tmp_path: Path) -> None:
    state, outs = random_state(config(), seed=3), [tmp_path / "dcp", tmp_path / "deepspeed"]
    checkpoints = [save_checkpoint(tmp_path / f"of {out.name}", 7, state, config(), engine=out.name) for out in outs]
    arguments = [path for pair in zip(checkpoints, outs, strict=True) for path in pair]
    assert without(["deepspeed"], EXPORT, *arguments, cwd=tmp_path) == "done"
    for out in outs:
        exported = load_file(out / "model.safetensors")
        assert exported.keys() == state["weight"].keys()
        assert all(torch.equal(exported[name], full) for name, full in state["weight"].items())
        assert "checkpoint `step-00000007`" in (out / "README.md").read_text()
        assert (out / "generation_config.json").exists()


def test_code_that_was_changed_after_the_export_is_refused_and_named(tmp_path: Path) -> None:
    out, checkpoint = tmp_path / "out", save_checkpoint(tmp_path, 7, random_state(config(), seed=3), config())
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    assert {name: manifest[name] for name in ("code", "commit")} == code_facts()
    export_checkpoint(checkpoint, out)
    card = (out / "README.md").read_text()
    assert f"SHA-256 `{manifest['code']}`; the files here are of that code |" in card
    check = ["sha256sum", "-c", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=out).returncode == 0
    assert is_ours(out)
    (out / "modeling.py").open("a").write("# changed")
    for load in (lambda: is_ours(out), lambda: read_stored_model(out / "config.json")):
        with pytest.raises(CheckpointError, match=r"modeling\.py: its SHA-256 is not the one in config\.json"):
            load()
    assert subprocess.run(check, cwd=out, capture_output=True).stdout == b"modeling.py: FAILED\n"
    (out / "modeling.py").unlink()  # as in a download of what a run needs
    assert is_ours(out)
    assert "of other code, which exported it" in code_row({"code": "another", "commit": None})


@torch.no_grad()
@pytest.mark.parametrize("form", ENCODERS)
def test_the_encoder_alone_is_an_embedding_model_that_its_card_shows_how_to_use(
    root: Path, fresh: dict[str, Any], form: str
) -> None:
    """Its states are those that the last decoder layer reads."""
    report, folder = fresh[f"encoder-{form}"], root / f"encoder-{form}"
    assert {name.partition(".")[0] for name in load_file(folder / "model.safetensors")} == {"shared", "encoder"}
    for name in ("generation_config.json", "modeling.py", "loss.py"):
        assert not (folder / name).exists()
    assert report["model"] == "Qwen3EncoderModel"
    assert report["module"] == "transformers_modules"
    whole = Qwen3ForSeq2SeqLM.from_pretrained(root / f"whole-{form}").eval()
    encoder = whole.get_encoder()
    names = [name for name, _ in encoder.named_parameters() if name != "encoder.norm.weight"]
    assert report["parameters"] == [*names, *(["encoder.norm.weight"] if form != "raw" else [])]
    ids, mask = torch.tensor(report["ids"]), torch.tensor(report["mask"])
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    states, last = encoder(ids, mask).last_hidden_state, whole.decoder.layers[-1]
    states = last.input_layernorm(states) if last.norms_encoder else states
    assert torch.equal(torch.tensor(report["states"]), states)
    torch.testing.assert_close(torch.tensor(report["pipeline"]), states[:1])
    means = torch.stack([states[0].mean(0), states[1, 0]])
    torch.testing.assert_close(torch.tensor(report["embeddings"]), means / means.norm(dim=1, keepdim=True))


def test_sentence_transformers_gives_the_same_embeddings(root: Path, fresh: dict[str, Any]) -> None:
    report, expected = fresh["encoder-aligned sentences"], torch.tensor(fresh["encoder-aligned"]["embeddings"])
    torch.testing.assert_close(torch.tensor(report["embeddings"]), expected)
    torch.testing.assert_close(torch.tensor(report["similarity"]), expected @ expected.T)
    assert [round(row[index], 5) for index, row in enumerate(report["similarity"])] == [1.0, 1.0]
    assert report["longest"] == FullConfig().data.max_encoder_length < 5000
    model = Qwen3EncoderModel.from_pretrained(root / "encoder-aligned").eval()
    mean = model(torch.full((1, report["longest"]), 3)).last_hidden_state[0].mean(0)
    torch.testing.assert_close(torch.tensor(report["cut"]), mean / mean.norm(), rtol=1e-3, atol=1e-4)


def test_a_failure_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    def failing(name: str) -> torch.Tensor:
        if name.startswith("decoder"):
            raise OSError("disk on fire")
        return random_weights(config(), 0)(name)

    with pytest.raises(CheckpointError, match="disk on fire"):
        export_hf(failing, config(), None, tmp_path / "out", dtype=torch.float32, card="")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.tmp").mkdir()  # as a kill leaves it
    export(tmp_path / "out", config())
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("value", "dtype"), [(torch.nan, torch.float32), (1e30, torch.float16)])
def test_weights_that_are_not_finite_as_they_are_written_are_no_export(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    state = random_state(config(), seed=0)
    state["weight"]["shared.weight"][1] = value
    paths = [save_checkpoint(tmp_path / "run" / "checkpoints", step, state, config()) for step in (1, 2)]
    with pytest.raises(CheckpointError, match=rf"^shared\.weight is not written: .* for {dtype}"):
        export_checkpoint(paths[0], tmp_path / "out", dtype=dtype)
    with pytest.raises(CheckpointError, match=r"^shared\.weight is not written"):
        average_checkpoints(RunFolder(str(tmp_path / "run")), tmp_path / "out", last=2, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


LOCAL = {"model_name_or_path": "./a/b"}
MIXTURE = [
    {"dataset_name": "someone/it's: #1", "weight": 2},
    {"dataset_name": "text", "data_files": "a", "weight": 1},
]
FINE_TUNING = {
    "objective": "sft",
    "dataset_name": "a/b",
    "eval_dataset_name": "c/d",
    "input_template": 'Say "{it}" {{|}}:\n',
}


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        pytest.param({}, {"cross_attention": "aligned", "encoder_positions": "prefix"}, id="pre-trained"),
        pytest.param({"model": LOCAL, "data": {"mixture": MIXTURE}}, None, id="encoder of a mixture"),
        pytest.param({"data": FINE_TUNING}, {}, id="fine-tuned"),
        pytest.param({"data": {"objective": "dpo", "dataset_name": "a/b"}}, {}, id="preferred"),
    ],
)
def test_the_card_has_the_runs_facts(
    settings: dict[str, Any], form: dict[str, str] | None, golden: Callable[[object], None]
) -> None:
    state = TrainingState(global_step=1200, total_tokens_seen=11_000_000, target_tokens_seen=6_000_000)
    config = FullConfig.model_validate(settings)
    made: Qwen3Seq2SeqConfig = Qwen3EncoderConfig() if form is None else Qwen3Seq2SeqConfig(**form)
    card = model_card(config, made, state, "checkpoint `step-00001200`", code_facts())
    assert yaml.safe_load(card.split("---\n")[1])["tags"][-1] == config.data.objective
    card = re.sub("[0-9a-f]{40}(-dirty)?(?=`)|[0-9a-f]{64}", "HASH", card.replace("`unknown`", "`HASH`"))
    golden(re.sub(r"\(written under [^)]*\)", "(written under VERSIONS)", card))


def test_a_card_says_what_the_card_of_a_local_base_says(tmp_path: Path) -> None:
    base = ModelCardData(license="other", license_name="ours", language=["en", "de"], base_model="Qwen/Qwen3-0.6B")
    (tmp_path / "README.md").write_text(f"---\n{base.to_yaml()}\n---\n")
    config = FullConfig.model_validate({"model": {"model_name_or_path": str(tmp_path)}})
    header = yaml.safe_load(
        model_card(config, Qwen3Seq2SeqConfig(), TrainingState(global_step=1), "x", code_facts()).split("---\n")[1]
    )
    assert {name: header[name] for name in ("language", "license", "license_name", "base_model")} == base.to_dict()


def generate(folder: Path, text: str, *, raw: bool = False, stream: bool = False, **settings: Any) -> str | None:
    return generate_text(folder, text, GenerationSettings(**settings), raw=raw, stream=stream)


def test_generate_text_answers_every_sentinel_in_place(tmp_path: Path) -> None:
    export(tmp_path / "out", config())
    text = "hello <extra_id_0> world"
    filled = generate(tmp_path / "out", text, max_new_tokens=4)
    assert filled is not None
    assert filled.startswith("hello ")
    assert generate(tmp_path / "out", text, max_new_tokens=4) == filled
    sampled = {generate(tmp_path / "out", "hello", max_new_tokens=8, temperature=2.0, seed=s) for s in range(3)}
    assert len(sampled) > 1


def test_a_model_of_conversations_is_given_and_shown_its_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, marks = tmp_path / "out", "{% for one in messages %}{{ one.content }} <extra_id_0>{% endfor %}"
    export(out, config())
    (out / "chat_template.jinja").write_text(marks + "{{ ' world' if add_generation_prompt }}")
    written = {text: generate(out, text, raw=True, max_new_tokens=4) for text in ("hello", "hello <extra_id_0> world")}
    trained = FullConfig.model_validate({"data": {"objective": "sft"}})
    note = "The text is the user's turn in the model's chat template (--raw: it is all).\n"
    for forms, read in (([CHAT, TEMPLATES], "hello"), ([CHAT], "hello <extra_id_0> world")):
        card = model_card(trained, Qwen3Seq2SeqConfig(), TrainingState(global_step=1), "x", code_facts(), forms=forms)
        (out / "README.md").write_text(card)
        assert generate(out, "hello", max_new_tokens=4) == written[read]
        assert capsys.readouterr().err == note * (forms == [CHAT])


def test_a_stream_shows_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(tmp_path / "out", config(vocab_size=8))
    settings = {"max_new_tokens": 12, "temperature": 3.0, "top_k": 20, "seed": 4}
    for raw in (True, False):
        written = generate(tmp_path / "out", "hello", raw=raw, **settings)
        assert capsys.readouterr().out == ""
        assert generate(tmp_path / "out", "hello", raw=raw, stream=True, **settings) is None
        shown = capsys.readouterr().out.rstrip()
        # A continuation for a reader has no sentinels.
        assert (shown if raw else re.sub(r"<extra_id_\d+>", "", shown).rstrip()) == written


def test_sentinels_are_replaced_by_their_spans() -> None:
    target = "<extra_id_0> quick brown<extra_id_1> lazy "
    assert fill_sentinels("The<extra_id_0> fox, the<extra_id_1> dog", target) == "The quick brown fox, the lazy  dog"
    assert fill_sentinels("a <extra_id_0> b <extra_id_1>", "<extra_id_0>X") == "a X b <extra_id_1>"
