"""`deftune eval run --engine vllm` with vLLM itself, on a CPU: `.ci/stacks vllm` builds the environment.

`test_vllm_engine.py` has the cases that need no vLLM, with a stand-in. Each evaluation is a process, because vLLM sets
environment variables for itself, and starts an engine, which takes half a minute: few tests, several questions each.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; .ci/stacks builds its environment"
)
VLLM = ("--engine", "vllm", "--gpu-memory-utilization", "0.1")  # of the machine's memory, where there is no GPU


@pytest.fixture
def folder(tmp_path, monkeypatch, tokenizer, make_model):
    """A folder to work in, with a task of eight questions and a model whose heads are wide enough for vLLM."""
    monkeypatch.chdir(tmp_path)
    model = make_model(tokenizer, hidden_size=128, intermediate_size=128)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(3, 300, 7)]
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    rows = [{"q": "".join(chr(97 + (n * k) % 26) for k in range(5 + 9 * n)), "correct": str(n + 1)} for n in range(8)]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "exam.yaml").write_text(
        'name: exam\nversion: "1"\nkind: math\ndata: exam.jsonl\nfields: {question: q, gold: correct}\n'
    )
    return tmp_path


def evaluate(out: str, *options: str, code: int = 0) -> str:
    """What `deftune eval run` prints to stderr."""
    command = ["eval", "run", "model", "--task-file", "exam.yaml", "--max-new-tokens", "12", "--out", out, *options]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-m", "deftune", *command], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr[-4000:]
    return done.stderr


def answers(folder, out: str) -> list[tuple]:
    records = map(json.loads, (folder / out / "samples.jsonl").read_text().splitlines())
    return sorted((r["id"], r["sample"], r["temperature"], r["text"], r["tokens"], r["finish"]) for r in records)


def test_greedy_answers_are_those_of_transformers(folder):
    evaluate("a")
    evaluate("b", *VLLM)
    said = answers(folder, "b")
    assert said == answers(folder, "a") and len(said) == 8
    assert {finish for *_, finish in said} == {"stop", "length"} and len({text for _, _, _, text, *_ in said}) > 4
    settings = json.loads((folder / "b" / "settings.json").read_text())
    assert settings["engine"].keys() == {"name", "version", "dtype"} and settings["engine"]["name"] == "vllm"


def test_sampled_answers_follow_their_seeds(folder):
    sampled = (*VLLM, "--temperature", "1", "--samples", "3", "--max-model-len", "200")
    evaluate("a", *sampled)
    evaluate("b", *sampled)
    evaluate("c", *sampled, "--seed", "1")
    assert answers(folder, "a") == answers(folder, "b") != answers(folder, "c")
    assert len({text for _, _, _, text, *_ in answers(folder, "a")}) > 12


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--max-model-len", "9999"), "vLLM cannot load model: "),
        (("--temperature", "0.005"), "temperature: vLLM would take 0.01 for 0.005; pass 0 for greedy"),
        (("--temperature", "3"), "vLLM cannot be asked so: temperature must be in [0, 2]"),
    ],
)
def test_refusals(folder, options, text):
    printed = evaluate("a", *VLLM, *options, code=2).splitlines()
    [line] = [line for line in printed if line.startswith("deftune: ")]  # vLLM's warnings may follow
    assert text in line
    assert not (folder / "a" / "summary.json").exists()
