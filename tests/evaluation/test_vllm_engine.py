"""`deftune eval run --engine vllm`, against `vllm_stand_in`; `test_vllm.py` runs vLLM itself."""

import json
import sys

import pytest
import vllm_stand_in as vllm

import tiny
from deftune.artifacts.models import resolve_model
from deftune.artifacts.results import load_result
from deftune.cli import main
from deftune.evaluation import vllm_engine
from deftune.evaluation.chance import derive_key
from deftune.evaluation.engines import Transformers
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.sampler import Prompt, SamplerError
from deftune.evaluation.vllm_engine import VllmSampler

ENDS = list(range(3, 300, 7))  # the generation config's: answers end at unequal lengths


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # trl sets it if it is imported while vllm is there
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(vllm.LLM, "made", [])
    monkeypatch.setattr(vllm.LLM, "calls_left", float("inf"))
    return vllm


@pytest.fixture(scope="module")
def source(tmp_path_factory, tokenizer, make_model):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = make_model(tokenizer)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ENDS]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch, source):
    """A folder to work in, with a task of eight questions and the tiny model."""
    monkeypatch.chdir(tmp_path)
    rows = [{"q": "".join(chr(97 + (n * k) % 26) for k in range(5 + 9 * n)), "correct": str(n + 1)} for n in range(8)]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "exam.yaml").write_text(
        'name: exam\nversion: "1"\nkind: math\ndata: exam.jsonl\nfields: {question: q, gold: correct}\n'
    )
    (tmp_path / "model").symlink_to(source)
    return tmp_path


def evaluate(model: str, out: str, *options: str) -> int:
    return main(["eval", "run", model, "--task-file", "exam.yaml", "--max-new-tokens", "12", "--out", out, *options])


def answers(folder, out: str) -> list[dict]:
    """What was answered, without its order."""
    lines = (folder / out / "samples.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda r: (r["id"], r["temperature"], r["sample"]))


def check_greedy(folder, model: str, *options: str, number: int = 8) -> list[dict]:
    """The two engines say the same; what they said."""
    assert evaluate(model, "a", *options) == 0
    assert evaluate(model, "b", "--engine", "vllm", *options) == 0
    assert len(vllm.LLM.made) == 1
    assert answers(folder, "a") == answers(folder, "b") and len(answers(folder, "b")) == number
    return answers(folder, "b")


@pytest.mark.parametrize("options", [[], ["--template", "plain"]], ids=["own template", "plain"])
def test_greedy_answers_are_those_of_transformers(folder, stand_in, options, capsys):
    said = check_greedy(folder, "model", *options)
    assert {r["finish"] for r in said} == {"stop", "length"} and len({r["text"] for r in said}) > 4
    settings = json.loads((folder / "b" / "settings.json").read_text())
    assert settings["engine"] == {"name": "vllm", "version": "0.0.stand-in", "dtype": "float32"}
    assert json.loads((folder / "a" / "settings.json").read_text())["engine"]["name"] == "transformers"
    assert main(["eval", "show", "b"]) == 0 and main(["eval", "compare", "a", "b"]) == 0
    assert "exam" in capsys.readouterr().out


@pytest.mark.parametrize("gpu, dtype", [(True, "bfloat16"), (False, "float32")])
def test_the_dtype_of_transformers_is_recorded(gpu, dtype, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert Transformers().describe()["dtype"] == dtype


def test_prompts_are_our_tokens_and_seeds_are_those_of_the_answer(folder, stand_in):
    sampled = ["--engine", "vllm", "--temperature", "0.7", "--top-p", "0.9", "--samples", "3", "--seed", "5"]
    assert evaluate("model", "a", *sampled) == 0
    [engine] = vllm.LLM.made
    sampler = TransformersSampler(*load_result("model"))
    questions = [json.loads(line) for line in (folder / "a" / "graded.jsonl").read_text().splitlines()]
    expected = []
    for record in questions:
        ids = sampler.encode(Prompt(record["id"], record["prompt"]))
        expected.append((ids, derive_key(5, record["id"], record["sample"]) >> 33))
    assert sorted((ids, params.seed) for ids, params in engine.asked) == sorted(expected)
    assert len({seed for _, seed in expected}) == len(expected) == 8 * 3
    [params] = {(p.temperature, p.top_p, p.max_tokens, tuple(p.stop_token_ids)) for _, p in engine.asked}
    assert params == (0.7, 0.9, 12, tuple(sorted(sampler.encoder.end_ids.values())))


def test_a_stopped_evaluation_goes_on(folder, stand_in, monkeypatch, capsys):
    sampled = ["--engine", "vllm", "--temperature", "1", "--samples", "2", "--gpu-memory-utilization"]
    assert evaluate("model", "whole", *sampled, "0.9") == 0
    monkeypatch.setattr(vllm_engine, "AT_ONCE", 5)
    vllm.LLM.calls_left = 2
    capsys.readouterr()
    assert evaluate("model", "r", *sampled, "0.9") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "vLLM stopped: EngineCore encountered an issue" in line
    assert "10 answers were finished before; the same command goes on from there" in line
    assert len(answers(folder, "r")) == 10
    vllm.LLM.calls_left = 9
    assert evaluate("model", "r", *sampled, "0.5") == 0  # less memory: the same answers
    assert answers(folder, "r") == answers(folder, "whole")
    last = vllm.LLM.made[-1]
    assert last.options["gpu_memory_utilization"] == 0.5 and len(last.asked) == 6  # what was answered is not asked


def test_another_engine_is_another_evaluation(folder, stand_in, monkeypatch, capsys):
    assert evaluate("model", "a") == 0
    assert evaluate("model", "a", "--engine", "vllm") == 2
    assert "holds another evaluation (engine.name: transformers -> vllm" in capsys.readouterr().err
    assert evaluate("model", "b", "--engine", "vllm", "--max-model-len", "200") == 0
    assert evaluate("model", "b") == 2
    assert "(engine.name: vllm -> transformers" in capsys.readouterr().err
    changed = {("--max-model-len", "201"): "max_model_len: 200 -> 201", ("--dtype", "float16"): "dtype: float32 ->"}
    for options, text in changed.items():
        assert evaluate("model", "b", "--engine", "vllm", *options) == 2
        assert text in capsys.readouterr().err
    monkeypatch.setattr(vllm, "__version__", "0.1.newer")
    assert evaluate("model", "b", "--engine", "vllm", "--max-model-len", "200") == 0


@pytest.mark.parametrize("endpoint", [False, True])
def test_results_from_before_engines_were_recorded_go_on(folder, stand_in, endpoint, capsys):
    assert evaluate("model", "a") == 0
    path = folder / "a" / "settings.json"
    settings = json.loads(path.read_text())
    del settings["engine"]
    if endpoint:
        settings["encoding"] = {}
    path.write_text(json.dumps(settings))
    asked = ["--endpoint", "http://localhost:9"]  # nobody is there, and nothing is left to ask
    capsys.readouterr()
    assert evaluate("model", "a", *(asked if endpoint else [])) == 0
    assert main(["eval", "show", "a"]) == 0
    assert evaluate("model", "a", *([] if endpoint else asked)) == 2
    before, now = ("endpoint", "transformers") if endpoint else ("transformers", "endpoint")
    assert f"engine.name: {before} -> {now}" in capsys.readouterr().err
    assert evaluate("model", "a", "--engine", "vllm") == 2


@pytest.mark.parametrize("how", ["absent", "folder"])
def test_without_vllm_nothing_else_is_looked_at(tmp_path, monkeypatch, capsys, how):
    if how == "absent":
        monkeypatch.setitem(sys.modules, "vllm", None)
    else:  # such as its git clone: Python takes any folder for a module
        (tmp_path / "path" / "vllm").mkdir(parents=True)
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
        monkeypatch.syspath_prepend(tmp_path / "path")
    wrong = ["--suite", "no-suite", "--data", "nowhere", "--like", "nowhere"]
    assert main(["eval", "run", "no-model", *wrong, "--engine", "vllm"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "deftune: --engine vllm: vllm is not installed, and no extra of deftune brings it; pip install vllm"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--engine", "vllm", "--batch-size", "4"], "--batch-size: is for --engine transformers; leave it out"),
        (["--engine", "vllm", "--endpoint", "http://localhost:9"], "--engine: an endpoint generates the answers"),
        (["--engine", "transformers", "--endpoint", "http://localhost:9"], "--engine: an endpoint generates"),
        (["--endpoint", "http://localhost:9", "--batch-size", "4"], "--batch-size: is for --engine transformers"),
        (["--dtype", "float16"], "--dtype: is for --engine vllm"),
        (["--engine", "vllm", "--timeout", "9"], "--timeout: is for --endpoint URL"),
        (["--engine", "vllm", "--max-model-len", "0"], "--max-model-len: at least 1, got 0"),
        (["--engine", "vllm", "--gpu-memory-utilization", "90"], "--gpu-memory-utilization: a share above 0"),
        (["--engine", "vllm", "--max-model-len", "9999"], "vLLM cannot load model: User-specified"),
        (["--engine", "vllm", "--temperature", "0.005"], "temperature: vLLM would take 0.01 for 0.005"),
        (["--engine", "vllm", "--temperature", "3"], "vLLM cannot be asked so: temperature must be in [0, 2]"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(folder, stand_in, options, text, capsys):
    assert evaluate("model", "a", *options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert text in line
    assert not (folder / "a" / "summary.json").exists()


@pytest.fixture
def trained(folder):
    """Trains a run; ``trained(more)`` is its folder."""

    def train(more: str = "") -> str:
        rows = [
            {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
            for n in range(12)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "run.yaml").write_text(
            f"run: runs/a\nmodel: {{name: model{more}}}\n"
            "data: {train: [{path: rows.jsonl}], template: plain, max_length: 64}\n"
            "train: {batch_size: 6, micro_batch_size: 6, learning_rate: 0.02, epochs: 3, save_steps: 3}\n"
        )
        assert main(["train", "run.yaml"]) == 0
        return "runs/a"

    return train


def test_a_run_is_asked_as_it_was_trained(folder, stand_in, trained):
    run = trained()
    tuned = check_greedy(folder, run)
    assert evaluate("model", "base", "--like", run) == 0
    assert answers(folder, "base") != tuned


def test_a_lora_run_is_merged_first_and_nothing_is_left_of_that(folder, stand_in, trained, monkeypatch, capsys):
    run = trained(", lora: {r: 4, alpha: 16}")
    (folder / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "temporary"))
    capsys.readouterr()
    tuned = check_greedy(folder, run)
    assert f"adding the adapter of {run} into its model's weights" in capsys.readouterr().err
    assert not list((folder / "temporary").iterdir())
    assert evaluate("model", "base", "--like", run) == 0
    assert answers(folder, "base") != tuned
    assert evaluate(f"{run}:3", "middle", "--engine", "vllm") == 0  # a checkpoint
    assert answers(folder, "middle") != tuned
    assert json.loads((folder / "middle" / "settings.json").read_text())["encoding"]["template"] == "plain"


@pytest.mark.slow
def test_a_packaged_model(folder, stand_in):
    try:
        resolve_model("smollm2")
    except ValueError as error:
        pytest.skip(f"SmolLM2 is not here: {error}")
    check_greedy(folder, "smollm2", "--limit", "2", number=2)


def ask(sampler, asked: list[Prompt], **settings):
    return sorted(sampler.sample(asked, **{"max_new_tokens": 12, **settings}), key=lambda o: (o.id, o.sample))


def test_what_has_no_room_is_said_as_in_process(source, stand_in):
    """Of the others as many tokens are made as there is room for."""
    model, tokenizer = load_result(str(source))
    model.generation_config.eos_token_id = None
    asked = [Prompt(f"q/{n}", "x" * n) for n in (10, 200, 224, 226, 300)]
    local = ask(TransformersSampler(model, tokenizer), asked, max_new_tokens=40)
    engine = vllm.LLM(str(source), dtype="float32")
    engine.ends = set()
    assert ask(VllmSampler(engine, tokenizer), asked, max_new_tokens=40) == local
    assert [o.finish for o in local].count("error") in (1, 2)
    assert len({o.tokens for o in local}) > 2
    with pytest.raises(ValueError, match="dtype: options of an engine that is made already"):
        VllmSampler(engine, tokenizer, dtype="float32")


def test_how_answers_end(source, stand_in, monkeypatch):
    tokenizer = tiny.make_tokenizer()
    sampler = VllmSampler(str(source), tokenizer, dtype="float32")
    asked = [Prompt("q", "Hi")]
    for reason, said in {"stop": [40], "length": [40, 41], "abort": [40, 41]}.items():
        made = vllm.CompletionOutput("", [40, 41], reason)
        monkeypatch.setattr(sampler.engine, "_complete", lambda prompt, params, made=made: made)
        [output] = ask(sampler, asked)
        assert (output.text, output.tokens) == (tokenizer.decode(said), 2)
        error = ("error", "vLLM ended it with 'abort'")
        assert (output.finish, output.note) == (error if reason == "abort" else (reason, ""))
    vllm.LLM.calls_left = 0
    with pytest.raises(SamplerError, match="0 answers were finished before"):
        ask(sampler, asked)


def test_a_vllm_that_cannot_be_imported_says_why(tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm.py").write_text("import a_part_that_is_missing")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["eval", "run", "m", "--suite", "math", "--engine", "vllm"]) == 2
    assert "vllm is installed and cannot be imported: No module named 'a_part" in capsys.readouterr().err
