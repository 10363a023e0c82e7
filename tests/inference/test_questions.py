"""Questions: exact match and choices, tuning of the shipped recipes before and after, generation of many prompts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.core.errors import DataError
from dtrain.data.questions import read_questions
from dtrain.data.windows import row_example
from dtrain.inference.generate import ENDED, Generator, Sampling, generator
from dtrain.inference.questions import losses
from tests.conftest import Dtrain
from tests.inference.test_generate import DECODER
from tests.weights.test_load import saved_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    place, _ = saved_run(tmp_path_factory.mktemp("run"), {4: None}, DECODER, row_example(8, packed=False))
    return generator(place, [], print)


def greedy(model: Generator, prompts: list[list[int]], count: int, ends: Any = ()) -> list[list[int]]:
    return np.stack(list(model.continued(prompts, count, Sampling(temperature=0), ends)), 1).tolist()


@pytest.mark.slow
def test_prompts_of_different_lengths_are_continued_as_each_alone(model: Generator) -> None:
    prompts = [[1, 2], [3], [4, 5, 6, 7, 8, 9, 10], [11, 12, 13]]
    together = greedy(model, prompts, 9)
    assert together == [greedy(model, [prompt], 9)[0] for prompt in prompts]
    assert len(model.programs) == 1


def test_a_row_ends_with_its_end_token_and_the_others_continue(model: Generator) -> None:
    prompts = [[1, 2], [3], [4, 5, 6]]
    whole = greedy(model, prompts, 12)
    end = whole[0][3]
    for ends in (((end,),), ((end,), (whole[1][0], whole[1][1]))):
        rows = greedy(model, prompts, 12, ends)
        for row, (free, prompt) in enumerate(zip(whole, prompts, strict=True)):
            stops = [
                i
                for i in range(12)
                for one in ends
                if tuple((prompt + free)[: len(prompt) + i + 1][-len(one) :]) == one
            ]
            cut = min(stops) + 1 if stops else 12
            width = len(rows[row])
            assert rows[row] == [*free[:cut], *[ENDED] * 12][:width]
    assert len(greedy(model, prompts[:1], 12, ((end,),))[0]) == whole[0].index(end) + 1


def test_losses_of_continuations_are_those_of_the_logits(model: Generator) -> None:
    rows = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9, 10])]
    found = losses(model, rows)
    probability = []
    for prompt, more in rows:
        total = 0.0
        for number, token in enumerate(more):
            before = [*prompt, *more[:number]]
            total += losses(model, [(before, [token])])[0]
        probability.append(total)
    np.testing.assert_allclose(found, probability, rtol=1e-5)
    every = np.exp(-losses(model, [([1, 2], [token]) for token in range(32)]))
    assert every.sum() == pytest.approx(1, abs=1e-5)
    assert greedy(model, [[1, 2]], 1)[0][0] == int(every.argmax())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "a"}, "q.jsonl:1: has no prompt; it has 'answer'"),
        ({"prompt": "a"}, "answer is None, not text"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": "d"}, "answer is 'd', not one of the choices"),
        ({"prompt": "a", "choices": ["b"], "answer": 3}, "answer is 3, not one of the choices"),
        (None, "has no question"),
    ],
)
def test_questions_that_cannot_be_scored_are_refused(tmp_path: Path, record: Any, message: str) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps(record) + "\n" if record else "\n")
    with pytest.raises(DataError, match=message):
        read_questions((str(tmp_path / "q.jsonl"),))


def test_every_form_of_a_question_is_read(tmp_path: Path) -> None:
    forms = [
        {"prompt": "a", "answer": "b"},
        {"question": "a", "response": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "choices": ["x", "b"], "answer": 1},
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, forms)))
    read = read_questions((str(tmp_path / "q.jsonl"),))
    assert {(one.messages[-1]["content"], one.answer) for one in read} == {("a", "b")}
    assert [one.choices for one in read] == [(), (), (), ("x", "b")]


@pytest.mark.nightly
def test_a_tiny_model_learns_two_hundred_answers_in_full_and_with_adapters(dtrain: Dtrain, tmp_path: Path) -> None:
    dtrain("run", "chat-tiny", "data.cache=cache")
    dtrain("run", "decoder-tiny", "data.cache=cache", "steps=200")
    dtrain("run", "lora-tiny", "data.cache=cache")
    exact = {}
    questions = Path(__file__).parents[2] / "dtrain" / "data" / "sums.jsonl"
    for name in ("chat-tiny", "lora-tiny"):
        shown = dtrain(
            "evaluate", name, "--questions", questions, "--tokens", "6", "--against", "decoder-tiny", "--json"
        )
        values = json.loads(shown.stdout)
        exact[name] = values["metrics"]["exact_match"]
        assert values["against"]["metrics"]["exact_match"] < 0.05
        assert len(values["answers"]) == 200
        rows = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["eval/exact_match"] == exact[name]
        answers = (tmp_path / "runs" / name / "answers.jsonl").read_text().splitlines()
        assert json.loads(answers[0]).keys() == {"step", "prompt", "answer", "given"}
    assert exact["chat-tiny"] > 0.95
    assert exact["lora-tiny"] > exact["chat-tiny"] - 0.02
    asked = ["generate", "chat-tiny", "--chat", "--temperature", "0"]
    assert dtrain(*asked, "--prompt", "7 times 8").stdout == "56\n"
    (tmp_path / "prompts.txt").write_text("7 times 8\n2 plus 3\n")
    rows = [json.loads(line) for line in dtrain(*asked, "--prompts", "prompts.txt").stdout.splitlines()]
    assert rows == [{"prompt": "7 times 8", "text": "56"}, {"prompt": "2 plus 3", "text": "5"}]
    own = json.loads(dtrain("evaluate", "chat-tiny", "--json").stdout)  # the questions of the recipe
    assert own["metrics"]["exact_match"] == exact["chat-tiny"]
    (tmp_path / "choices.jsonl").write_text(json.dumps({"prompt": "7 times 8", "choices": ["54", "56"], "answer": 1}))
    chosen = json.loads(dtrain("evaluate", "chat-tiny", "--questions", "choices.jsonl", "--json").stdout)
    assert chosen["metrics"]["choice_accuracy"] == 1
    assert "--prompt and --prompts" in dtrain(*asked, "--prompt", "x", "--prompts", "prompts.txt", code=2).stderr
    assert "add --chat" in dtrain("generate", "chat-tiny", "--system", "x", code=2).stderr
    wrong = dtrain("check", "mlp-digits", f"evaluate.questions=[{questions}]", code=4).stderr
    assert "a model of kind mlp generates no text" in wrong
    wrong = dtrain("run", "mlp-digits", f"evaluate.questions=[{questions}]", code=2).stderr
    assert "a model of kind mlp generates no text" in wrong


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["{data: 1, fsdp: 2}", "{data: 1, tensor: 2}"])
def test_two_processes_answer_as_one_does(dtrain: Dtrain, tmp_path: Path, mesh: str) -> None:
    questions = [{"prompt": f"{i} plus 1", "answer": f"{i + 1}"} for i in range(3)]
    questions.append({"prompt": "7 times 8", "choices": ["54", "56"], "answer": 1})
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    asked = ["run", "chat-tiny", "epochs=null", "steps=4", "optimizer.schedule=constant", "data.cache=cache"]
    asked += ["evaluate={questions: [q.jsonl], tokens: 4}", "--devices", "2", f"mesh={mesh}"]
    answers = []
    for count in ("1", "2"):
        dtrain(*asked, "--processes", count, f"name=p{count}")
        answers.append((tmp_path / "runs" / f"p{count}" / "answers.jsonl").read_text())
    assert answers[0] == answers[1]
    assert len(answers[0].splitlines()) == 4
