"""`deftune eval run --endpoint` as a user calls it, against a server on the loopback."""

import json

import pytest
from chat_server import Server, completion

from deftune.cli import main


@pytest.fixture
def exam(tmp_path, monkeypatch):
    """A task of ten sums: What is N + 1?"""
    monkeypatch.chdir(tmp_path)
    rows = [{"q": f"What is {n} + 1?", "correct": str(n + 1)} for n in range(10)]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "exam.yaml").write_text(
        'name: exam\nversion: "1"\nkind: math\ndata: exam.jsonl\nfields: {question: q, gold: correct}\n'
    )
    return tmp_path


def number_in(body):
    return int(body["messages"][-1]["content"].split()[2])


def right(number, body):
    return 200, completion(f"\\boxed{{{number_in(body) + 1}}}")


def evaluate(server, *more, out="r"):
    return main(["eval", "run", "m", "--task-file", "exam.yaml", "--out", out, "--endpoint", server.url, *more])


def summary(out="r"):
    with open(f"{out}/summary.json") as file:
        return json.load(file)["rows"][0]


def test_an_item_that_is_too_long_is_an_error_and_the_run_goes_on(exam, capsys):
    def respond(number, body):
        long = number_in(body) in (3, 4)
        return (400, b"maximum context length is 9 tokens") if long else right(number, body)

    with Server(respond) as server:
        assert evaluate(server) == 0
        out = capsys.readouterr()
        said = (
            "exam T=0: 2 of 10 answers are errors and score 0: exam/3: HTTP 400 Bad Request: maximum context length is "
            "9 tokens (and 1 like it); the same command asks them again"
        )
        assert said in out.out and "2 errors" in out.out
        assert "maximum context length is 9 tokens; recorded as an error, the others are asked" in out.err
        assert summary()["score"] == 0.8 and summary()["errors"]["count"] == 2
        before = len(server.requests)
        assert evaluate(server) == 0  # the same command: only the errors are asked, and the result is the same
        assert len(server.requests) == before + 2 and summary()["score"] == 0.8
        assert said in capsys.readouterr().out
        assert main(["eval", "show", "r"]) == 0
        assert said in capsys.readouterr().out
    with Server(right) as server:  # a server with room for them
        assert evaluate(server) == 2
        assert "pass --change-endpoint to go on with the new one" in capsys.readouterr().err
        assert evaluate(server, "--change-endpoint") == 0
        assert len(server.requests) == 2 and summary()["score"] == 1.0 and summary()["errors"]["count"] == 0
        assert evaluate(server, "--change-endpoint") == 0  # nothing is left to ask
        assert len(server.requests) == 2


def test_answers_that_are_all_errors_are_exit_code_1(exam, capsys):
    said = {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]}
    with Server(lambda number, body: (200, said)) as server:
        assert evaluate(server) == 1
        out = capsys.readouterr().out
        assert "10 of 10 answers are errors and score 0: exam/" in out
        assert "finish_reason 'content_filter' (and 9 like it)" in out
        assert evaluate(server, "--json") == 1
        out = capsys.readouterr()
        assert json.loads(out.out)["rows"][0]["errors"]["count"] == 10 and "10 of 10 answers are errors" in out.err


def test_a_server_that_no_item_can_use_stops_with_a_hint(exam, capsys, monkeypatch):
    def respond(number, body):
        return (401, b"no key") if "Authorization" not in server.headers[number] else right(number, body)

    with Server(respond) as server:
        assert evaluate(server) == 2
        err = capsys.readouterr().err
        assert "HTTP 401 Unauthorized: no key; name the environment variable with the API key: --api-key-env" in err
        assert not (exam / "r").exists()
        monkeypatch.setenv("MY_KEY", "sk-secret")
        assert evaluate(server, "--api-key-env", "MY_KEY") == 0
    assert server.headers[-1]["Authorization"] == "Bearer sk-secret"
    assert not any("sk-secret" in path.read_text() for path in (exam / "r").iterdir())


def test_the_settings_have_the_server_without_its_password(exam, capsys):
    with Server(right) as server:
        url = server.url.replace("//", "//me:secret@")
        assert main(["eval", "run", "m", "--task-file", "exam.yaml", "--out", "r", "--endpoint", url]) == 0
    settings = json.loads((exam / "r" / "settings.json").read_text())
    assert settings["engine"] == {"name": "endpoint", "url": f"{server.url}/v1"}
    assert settings["data"]["exam"]["items"] == 10 and settings["data"]["exam"]["source"].endswith("exam.jsonl")
    out = capsys.readouterr()
    assert "secret" not in out.out + out.err
    assert not any("secret" in path.read_text() for path in (exam / "r").iterdir())


def test_options_reach_the_server(exam):
    with Server(right) as server:
        options = ["--concurrency", "1", "--timeout", "30", "--retries", "0", "--extra-body", '{"top_k": 7}']
        assert evaluate(server, *options) == 0
    assert {request["top_k"] for request in server.requests} == {7}
    assert json.loads((exam / "r" / "settings.json").read_text())["engine"]["extra_body"] == {"top_k": 7}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--endpoint", "localhost:8000"], "--endpoint: write http://host:port or https://host, got 'localhost:8000'"),
        (["--endpoint", ""], "--endpoint: write http://host:port or https://host, got ''"),
        (["--endpoint", "ftp://me:secret@host"], "got 'ftp://***@host'"),
        (["--endpoint", "http://h", "--timeout", "0"], "--timeout: a number of seconds above 0; got 0"),
        (["--endpoint", "http://h", "--retries", "-1"], "--retries: a number from 0; got -1"),
        (["--endpoint", "http://h", "--concurrency", "0"], "--concurrency: a number from 1; got 0"),
        (["--endpoint", "http://h", "--api-key-env", "NO_SUCH"], "--api-key-env: the environment has no NO_SUCH"),
        (["--endpoint", "http://a:b@h", "--api-key-env", "PATH"], "--api-key-env: the URL has a name and password"),
        (["--endpoint", "http://h", "--extra-body", "top_k=1"], "--extra-body: write a JSON object, such as"),
        (["--endpoint", "http://h", "--extra-body", '{"n": 2}'], "--extra-body: 'n' is set by deftune itself"),
        (["--timeout", "3"], "--timeout: is for --endpoint URL; leave it out"),
        (["--change-endpoint"], "--change-endpoint: is for an endpoint; leave it out"),
    ],
)
def test_options_that_cannot_be(options, text, exam, capsys):
    assert main(["eval", "run", "m", "--task-file", "exam.yaml", "--out", "r", *options]) == 2
    err = capsys.readouterr().err
    assert text in err and len(err.splitlines()) == 1 and "secret" not in err and not (exam / "r").exists()


def test_rows_in_another_order_are_not_graded_as_these(exam, capsys):
    path = exam / "exam.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    with Server(right) as server:
        assert evaluate(server) == 0 and summary()["score"] == 1.0
        path.write_text("".join(reversed(rows)))
        assert evaluate(server) == 2
        assert "r: 10 of 10 questions of exam are not those that were answered" in capsys.readouterr().err
        assert summary()["score"] == 1.0
        assert evaluate(server, out="other") == 0
    assert main(["eval", "compare", "r", "other"]) == 2
    err = capsys.readouterr().err
    assert "r and other: 10 of 10 questions of exam differ in prompt or gold" in err and len(err.splitlines()) == 1


def test_a_server_that_ends_while_errors_are_retried_leaves_the_summary(exam, capsys):
    with Server(lambda number, body: (400, b"no") if number_in(body) == 3 else right(number, body)) as server:
        assert evaluate(server) == 0
    capsys.readouterr()
    assert evaluate(server, "--retries", "0") == 1  # it is gone
    out = capsys.readouterr()
    assert "no connection" in out.err and "the other answers stay errors" in out.err and "90.00" in out.out


def test_an_output_that_cannot_be_written_is_found_before_the_model_is_loaded(exam, capsys, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("deftune.evaluation.engines.load", refuse)
    (exam / "file").touch()
    assert main(["eval", "run", "smollm2", "--task-file", "exam.yaml", "--out", "file/r"]) == 2
    assert "file/r: Not a directory" in capsys.readouterr().err
    rows = exam / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    assert main(["eval", "heldout", "smollm2", "--data", str(rows), "--out", "file/r"]) == 2
    assert "file/r: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("{oops}", "exam.jsonl:3: not JSON"),
        (
            "[1]",
            "exam.jsonl:3: not an object (a list); fix the file; a benchmark with rows left out is another benchmark",
        ),
    ],
)
def test_a_benchmark_row_that_cannot_be_read_is_not_to_be_skipped(row, text, exam, capsys):
    lines = (exam / "exam.jsonl").read_text().splitlines()
    (exam / "exam.jsonl").write_text("\n".join([*lines[:2], row, *lines[3:]]) + "\n")
    assert main(["eval", "run", "m", "--task-file", "exam.yaml", "--endpoint", "http://127.0.0.1:9", "--out", "r"]) == 2
    err = capsys.readouterr().err
    assert text in err and "a benchmark with rows left out is another benchmark" in err and len(err.splitlines()) == 1
    assert "--skip-bad-rows" not in err and "messages" not in err
