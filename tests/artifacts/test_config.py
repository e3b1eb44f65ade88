"""A config is right, or says where it is wrong and what would be right."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deftune.artifacts.config import STARTER, ConfigError, RunConfig, apply_override, load_config, render_yaml
from deftune.artifacts.keys import keys_of
from deftune.artifacts.other_keys import ADVICE, NAMES

LAUGHS = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))])
BASE = {"model": {"name": "org/model"}, "data": {"train": [{"path": "rows.jsonl"}]}}


def wrong(overrides=(), base=BASE):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides, json.loads(json.dumps(base)))
    return str(caught.value)


def test_the_defaults_are_the_papers():
    train = load_config(None, base=BASE).train
    assert (train.betas, train.schedule, train.warmup_ratio, train.clip, train.batch_size) == (
        (0.9, 0.95),
        "cosine",
        0.1,
        1.0,
        256,
    )
    assert (train.learning_rate, train.epochs) == (5e-5, 1)


EVALUATED = ["data.holdout=0.1", "train.eval_steps=5"]


@pytest.mark.parametrize(
    ("base", "overrides", "text"),
    [
        ({**BASE, "trian": {}}, [], "trian: unknown key. Did you mean 'train'? Known here: run, objective, model"),
        (BASE, ["train.learning_rat=1"], "train.learning_rat: unknown key. Did you mean 'learning_rate'?"),
        (BASE, ["data.train.0.fromat=a"], "data.train.0.fromat: unknown key. Did you mean 'format'?"),
        (BASE, ["model.lora.rank=8"], "model.lora.rank: unknown key. Known here: r, alpha, dropout, target_modules"),
        (BASE, ["objective=defft"], "objective: unknown objective 'defft'. Did you mean 'deft'?"),
        (BASE, ["objective=half-deft"], "; if it is your own, name its file: deftune --import FILE COMMAND ..."),
        (BASE, ["train.learning_rate=-1"], "train.learning_rate: Input should be greater than 0 (got -1)"),
        (BASE, ["train.learning_rate=.nan"], "train.learning_rate: Input should be a finite number"),
        (BASE, ["train.batch_size=6"], "train: batch_size 6 is no multiple of micro_batch_size 4"),
        (BASE, ["train.betas=[0.9, 1.0]"], "train.betas.1: Input should be less than 1 (got 1.0)"),
        (BASE, ["train.eval_steps=5"], "train.eval_steps: there is nothing to evaluate on"),
        (BASE, ["train.best=eval_nll"], "train.best: eval_nll is measured at evaluations; give train.eval_steps"),
        (
            BASE,
            [*EVALUATED, "train.best=loss"],
            "'loss' is not measured; one of none, eval_loss, eval_nll",
        ),
        (
            BASE,
            [*EVALUATED, "train.best=gsm8k"],
            "eval_nll, or add it to data.tasks",
        ),
        (BASE, ["data.tasks=[{name: gsm8k}]"], "data.tasks: say how often to ask them with train.eval_steps"),
        (BASE, [*EVALUATED, "data.tasks=[{name: a}, {name: a}]"], "data.tasks: a is given twice"),
        (
            BASE,
            ["train.attention=fast"],
            "train.attention: Input should be 'auto', 'varlen', 'flash'",
        ),
        (BASE, ["train.compile=layer"], "train.compile: Input should be 'auto', True, False or 'layers' (got 'layer')"),
        (
            BASE,
            ["train.gradient_checkpointing=maybe"],
            "train.gradient_checkpointing: Input should be True, False or 'auto'",
        ),
        (BASE, ["train.sparse=0"], "train.sparse: Input should be greater than 0"),
        (BASE, ["data.mask=answers"], "data.mask: Input should be 'assistant', 'completion' or 'all'"),
        (BASE, ["model.lora={target_modules: [q_proj, lm_head]}"], "an adapter on lm_head would be left out"),
        (BASE, ["model.lora.target_modules='*_proj'"], "neither a list of names nor a regular expression (nothing to"),
        (BASE, ["model.quantization=4bit"], "model.quantization: 4-bit weights cannot be trained; train adapters"),
        (BASE, ["model.quantization=8bit"], "model.quantization: Input should be '4bit' (got '8bit')"),
        (
            BASE,
            ["model.quantization=4bit", "model.lora.r=4", "train.fsdp=true"],
            "model.quantization: was not tested with train.fsdp; drop one",
        ),
        (
            BASE,
            ["train.optimizer=adam"],
            "train.optimizer: Input should be 'adamw', 'adamw_8bit', ",
        ),
        (BASE, ["train.optimizer=adafactor", "train.betas=[0.9, 0.99]"], "train: betas: adafactor has none"),
        (BASE, [*EVALUATED, "train.stop_after=2"], "train.stop_after: say what must improve with train.best"),
        (
            BASE,
            ["train.attention=math", "model.attention_implementation=eager"],
            "sdpa and does nothing with model.attention_implementation=eager",
        ),
        (BASE, ["train.optimizer=muon", "train.fsdp=true"], "train: optimizer: muon was not tested with fsdp"),
        (BASE, ["model.dtype=bfloat16"], "model.dtype: trained weights are float32, because bfloat16 rounds"),
        (
            BASE,
            ["model.dtype=bfloat16", "model.lora.r=4", "train.fsdp=true"],
            "model.dtype: train.fsdp was tested with float32 weights only; drop one",
        ),
        (BASE, ["data.train.0.generate=gsm_symbolic"], "give one of `path` and `generate`, not both"),
        (
            BASE,
            ["learning_rate=1e-4"],
            "learning_rate: unknown key. Did you mean 'train.learning_rate'? Known here: run,",
        ),
        (BASE, ["lerning_rate=1"], "lerning_rate: unknown key. Did you mean 'train.learning_rate'? Known here: run,"),
        (BASE, ["run="], "run: Input should be a valid string; it is empty"),
        (BASE, ["run=3"], "run: Input should be a valid string (got 3); write it in quotes"),
        (BASE, ["data.train=a.csv"], "valid list (got 'a.csv'); write a list of sources: [{path: a.csv}]"),
        (BASE, ["train.report_to=wandb"], "train.report_to: Input should be a valid list (got 'wandb'); write [wandb]"),
        (BASE, ["train.deepspeed=z3.json"], "train.deepspeed: unknown key. DeepSpeed is not supported, because its"),
        (BASE, ["deepspeed=z3.json"], "and shard over several GPUs with train.fsdp"),
        (BASE, ["per_device_train_batch_size=2"], "unknown key. Here it is train.micro_batch_size."),
        (BASE, ["train.gradient_accumulation_steps=2"], "unknown key. Write the rows of a whole step as train.batch"),
        (BASE, ["data.train[0].weight=-1"], "data.train.0.weight: Input should be greater than 0 (got -1)"),
        (BASE, ["train.max_length=9"], "train.max_length: unknown key. Did you mean 'data.max_length'? Known here:"),
        ({"data": {"train": [{"generate": "x"}]}}, [], "`generate` needs `limit`"),
        ({"data": {"train": []}}, [], "data.train: List should have at least 1 item"),
        ({}, [], "data: missing"),
        ({}, [], "model.name: missing; name a hub id, a folder, a .gguf file, or smollm2"),
        ({**BASE, "model": {}}, [], "model.name: missing; name a hub id, a folder, a .gguf file, or smollm2"),
        (BASE, ["data.holdout=0.1", "data.eval=[{path: a}]"], "data: give `eval` or `holdout`, not both"),
        (BASE, ["train"], "--set train: write it as a.b=value"),
        (BASE, ["train.seed=[1"], "--set train.seed=[1: the value is not YAML"),
        (BASE, ["train={seed: 1, seed: 2}"], "--set train={seed: 1, seed: 2}: duplicate key 'seed', first on line 1"),
        (BASE, ["train.seed=2020-13-45"], "--set train.seed=2020-13-45: the value is not YAML"),
        (BASE, ["data.train.3.path=x"], "3 is no place in a list of 1"),
        (BASE, ["objective.name=deft", "objective.name.x=1"], "objective.name is a value and has no keys"),
    ],
)
def test_what_is_wrong_is_named(base, overrides, text):
    assert text in wrong(overrides, base)


def test_every_mistake_is_listed_at_once():
    lines = wrong(["train.clipp=1", "objective=x", "data.mask=y"]).splitlines()
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("run: [1", r"run.yaml:1: not YAML"),
        ("- 1\n", "run.yaml: a config is a mapping with the keys run, objective"),
        ("a: !!python/object/apply:os.system ['touch pwned']", r"run.yaml:1: not YAML"),
        ("\x00", "run.yaml: not YAML"),
        ("train:\n  seed: 1\n  clip: 1\n  seed: 2\n", "run.yaml:4: duplicate key 'seed', first on line 2"),
        ("run: a\ndata: {}\n'run': b\n", "run.yaml:3: duplicate key 'run', first on line 1"),
        ("data: {train: [{path: a, path: b}]}", "run.yaml:1: duplicate key 'path', first on line 1"),
        ("run: " + "[" * 10_000, "run.yaml: not YAML (RecursionError)"),
        ("run: &a [*a]", "run.yaml:1: an alias contains itself"),
        (LAUGHS, "run.yaml:1: its aliases make more than 100,000 values"),
        ("run: 2020-13-45", "run.yaml: not YAML (ValueError)"),
    ],
)
def test_files_that_are_no_config(tmp_path, content, text):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert text in str(caught.value)


def test_aliases_and_merged_keys_are_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: m}\ndata: {train: [&a {path: a, limit: 3}, {<<: *a, path: b}]}\n")
    sources = load_config(path).data.train
    assert [(source.path, source.limit) for source in sources] == [("a", 3), ("b", 3)]


def test_a_long_override_is_not_shown_whole():
    message = wrong(["train.seed=" + "[" * 100_000])
    assert message == f"--set train.seed={'[' * 189}...: the value is not YAML"


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="no such file or run; `deftune init` writes a config"):
        load_config(tmp_path / "none.yaml")


def test_a_number_that_yaml_takes_for_text():
    assert load_config(None, ["train.learning_rate=5e-6"], json.loads(json.dumps(BASE))).train.learning_rate == 5e-6


@given(
    st.fixed_dictionaries(
        {
            "learning_rate": st.floats(1e-8, 1.0),
            "clip": st.floats(0, 10),
            "seed": st.integers(0, 2**31),
            "micro_batch_size": st.sampled_from([1, 2, 4]),
            "schedule": st.sampled_from(["cosine", "linear", "constant"]),
            "report_to": st.lists(st.sampled_from(["tensorboard", "trackio", "wandb"]), max_size=2),
        }
    ),
    st.sampled_from(["deft", "alpha(0.3)", "deft | eos(nll) | mean_one"]),
)
def test_a_config_survives_its_own_yaml(tmp_path_factory, train, objective):
    config = RunConfig.model_validate({**BASE, "train": train, "objective": objective})
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(render_yaml(config))
    assert load_config(path) == config


@given(st.text(max_size=40))
def test_no_override_raises_anything_else(text):
    content = json.loads(json.dumps(BASE))
    try:
        apply_override(content, text)
    except ConfigError:
        pass


def test_the_schema_knows_every_key():
    schema = RunConfig.model_json_schema()
    properties = schema["properties"]
    assert set(properties) == {"run", "objective", "model", "data", "train"}
    json.dumps(schema)


def test_starter(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(STARTER)
    config = load_config(path)
    assert (config.model.name, config.objective, config.data.train[0].generate) == ("smollm2", "deft", "gsm_symbolic")
    train = config.train
    assert (train.batch_size, train.micro_batch_size, config.data.max_length, train.max_steps) == (8, 4, 384, 40)
    kept = config.data.train[0].limit * (1 - config.data.holdout)
    assert kept >= train.batch_size * train.max_steps  # less than an epoch


def test_every_key_of_other_stacks_leads_to_a_key():
    ours = {key.path.replace("[]", "") for key in keys_of(RunConfig)}
    for name, here in NAMES.items():
        assert re.split("[:,]", here)[0] in ours, name
    names = {path.rpartition(".")[2] for path in ours}
    assert not names & (NAMES.keys() | ADVICE.keys()), "a key of ours needs no translation"


def test_the_page_for_users_of_other_stacks_has_no_key_without_advice():
    """The table of docs/coming_from.md: what a user copies from an old config is answered with our key."""
    page = (Path(__file__).parents[2] / "docs/coming_from.md").read_text()
    rows = [line.split("|")[3:6] for line in page.split("## Keys")[1].split("\n\n")[2].splitlines()[2:]]
    keys = set(re.findall(r"`([a-z_0-9]+)[:`]", " ".join(cell for row in rows for cell in row)))
    ours = {key.path.rpartition(".")[2] for key in keys_of(RunConfig)}
    kept_names = {"model", "model_init_kwargs"}  # a section of ours, and an argument of Python
    assert len(keys) > 50
    assert sorted(keys - ours - kept_names - NAMES.keys() - ADVICE.keys()) == []
